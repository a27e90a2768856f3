"""A model into stages, in one line: trace, place, cut, stage, pipe, cost.

    trace    model_values (what it takes and returns, opened), arguments (what the model is called with), marks (what the trace
             must notice), export (a copy without data, and that as one graph, or why there is none)
    place    flat (the graph as a list with marks), place (which stage computes which node)
    cut      wires (what travels), cutter (one graph for each stage), stage_graph (a graph that can be run and saved),
             retrace (the same again in the other mode, or for other sizes)
    stage    stage_module (a stage as a module), stage_state (which parameters it holds), load_state (their values)
    pipe     pipe (the stages, each as one for a schedule, and what everybody may know), by_modules (stages without a trace)
    cost     graph_work (how much work a graph is), cost_cuts (where a model can be cut, and best), one_layer (run alone),
             layer_costs (what all of them cost), capture_model (all of this: the functions `pipeline` and `profile`)

A file uses those before it, and nobody outside needs more than this door.
"""

from __future__ import annotations

from penstock.capture.by_modules import ListStage, PipeSequential, Tie, find_ties, split_modules, tie
from penstock.capture.capture_model import capture_layers, pipeline, profile
from penstock.capture.cost_cuts import cuts_at, warn_if_uneven
from penstock.capture.layer_costs import layer_names, profile_layers
from penstock.capture.load_state import LoadReport, load, materialise
from penstock.capture.marks import PipeSplitWrapper, SplitPoint, annotate_split_points, pipe_split
from penstock.capture.one_layer import LayerSetting
from penstock.capture.pipe import (
    CapturedStage,
    LossWrapper,
    MultiUseParameterConfig,
    Pipe,
    PipeInfo,
    TrivialLossWrapper,
    build_stage,
)
from penstock.capture.stage_module import StageModule
from penstock.capture.stage_state import Shared
from penstock.capture.wires import Wire

__all__ = [
    "CapturedStage",
    "LayerSetting",
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
    "capture_layers",
    "cuts_at",
    "find_ties",
    "layer_names",
    "load",
    "materialise",
    "pipe_split",
    "pipeline",
    "profile",
    "profile_layers",
    "split_modules",
    "tie",
    "warn_if_uneven",
]
