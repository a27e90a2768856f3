"""A model into stages: export, marks, cut, parameters."""

from __future__ import annotations

from penstock.capture.build import build_stage
from penstock.capture.info import PipeInfo, Shared
from penstock.capture.load import LoadReport, load, materialise
from penstock.capture.loss import LossWrapper, TrivialLossWrapper
from penstock.capture.marks import PipeSplitWrapper, SplitPoint, annotate_split_points, pipe_split
from penstock.capture.module import StageModule
from penstock.capture.modules import ListStage, PipeSequential, split_modules
from penstock.capture.pipe import MultiUseParameterConfig, Pipe
from penstock.capture.pipeline import pipeline
from penstock.capture.ties import Tie, find_ties, tie
from penstock.capture.wires import Wire

__all__ = [
    "ListStage",
    "LoadReport",
    "LossWrapper",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "PipeSplitWrapper",
    "Shared",
    "SplitPoint",
    "StageModule",
    "Tie",
    "TrivialLossWrapper",
    "Wire",
    "annotate_split_points",
    "build_stage",
    "find_ties",
    "load",
    "materialise",
    "pipe_split",
    "pipeline",
    "split_modules",
    "tie",
]
