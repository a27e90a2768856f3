"""A model into stages: export, marks, cut, parameters."""

from __future__ import annotations

from penstock.capture.build import build_stage
from penstock.capture.info import PipeInfo, Shared
from penstock.capture.marks import PipeSplitWrapper, SplitPoint, annotate_split_points, pipe_split
from penstock.capture.module import StageModule
from penstock.capture.pipe import MultiUseParameterConfig, Pipe
from penstock.capture.pipeline import pipeline
from penstock.capture.wires import Wire

__all__ = [
    "MultiUseParameterConfig",
    "Pipe",
    "PipeInfo",
    "PipeSplitWrapper",
    "Shared",
    "SplitPoint",
    "StageModule",
    "Wire",
    "annotate_split_points",
    "build_stage",
    "pipe_split",
    "pipeline",
]
