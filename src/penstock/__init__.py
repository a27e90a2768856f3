"""penstock: pipeline parallelism for PyTorch that is planned, proved, measured and shown.

Names are resolved when they are first used, so that `import penstock` and the planning half load no torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    name: module
    for module, names in {
        "penstock.plan": "Action Op Placement Plan check",
        "penstock.schedules": "get_schedule all_schedules",
        "penstock.lower": "recompute offload",
        "penstock.simulate": "Costs Timeline",
        "penstock.batch": (
            "TensorChunkSpec Replicate CustomReducer Microbatches sum_reducer merge_chunks "
            "split_args_kwargs_into_chunks"
        ),
        "penstock.comm": "LocalWorld",
        "penstock.stage.pipeline_stage": "PipelineStage",
        "penstock.stage.chunked_loss": "chunked_loss",
        "penstock.backward.recompute": "recomputing",
        "penstock.capture": (
            "pipeline Pipe PipeInfo PipeSequential SplitPoint pipe_split annotate_split_points "
            "MultiUseParameterConfig build_stage split_modules tie profile"
        ),
        "penstock.run": (
            "Schedule PipelineScheduleSingle PipelineScheduleMulti ScheduleForwardOnly ScheduleGPipe Schedule1F1B "
            "ScheduleLoopedBFS ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleZBVZeroBubble "
            "ScheduleDualPipeV ScheduleZBH1 ScheduleZBH2 ScheduleVHalf ScheduleVMin ScheduleVZB microbatch_rng"
        ),
        "penstock.balance": "Profile",
        "penstock.front": "Pipeline Result Checkpoint load shard_parameters",
    }.items()
    for name in names.split()
}
_PACKAGES = (
    "balance",
    "batch",
    "capture",
    "comm",
    "compat",
    "errors",
    "lower",
    "plan",
    "run",
    "schedules",
    "search",
    "show",
    "simulate",
    "train",
)
_MOVED = {
    name: module
    for module, names in {
        "penstock.errors": (
            "PenstockError PlanError ParseError IncompleteError OrderError DeadlockError UnknownNameError "
            "SplitError MergeError CaptureError BalanceError StageError ShapeError RunError PeerFailed "
            "ReplicaFailed RanksDisagree StepTimeout TransportError OutOfMemory DeviceFailed UnevenCut "
            "MissingPackage NotCompiled NotDeferred OverLimit LabelsNotCounted UnverifiedSplit"
        ),
        "penstock.lower": "Early Ahead JustInTime divide",
        "penstock.plan": "StageGraph Overlap",
        "penstock.run": "ActionContext",
        "penstock.capture": "materialise LossWrapper TrivialLossWrapper PipeSplitWrapper",
    }.items()
    for name in names.split()
}

if TYPE_CHECKING:  # the same names for editors and type checkers; tests/package/test_typing.py compares the two
    from penstock import balance as balance
    from penstock import batch as batch
    from penstock import capture as capture
    from penstock import comm as comm
    from penstock import compat as compat
    from penstock import errors as errors
    from penstock import lower as lower
    from penstock import plan as plan
    from penstock import run as run
    from penstock import schedules as schedules
    from penstock import search as search
    from penstock import show as show
    from penstock import simulate as simulate
    from penstock import train as train
    from penstock.backward.recompute import recomputing as recomputing
    from penstock.balance import Profile as Profile
    from penstock.batch import CustomReducer as CustomReducer
    from penstock.batch import Microbatches as Microbatches
    from penstock.batch import Replicate as Replicate
    from penstock.batch import TensorChunkSpec as TensorChunkSpec
    from penstock.batch import merge_chunks as merge_chunks
    from penstock.batch import split_args_kwargs_into_chunks as split_args_kwargs_into_chunks
    from penstock.batch import sum_reducer as sum_reducer
    from penstock.capture import MultiUseParameterConfig as MultiUseParameterConfig
    from penstock.capture import Pipe as Pipe
    from penstock.capture import PipeInfo as PipeInfo
    from penstock.capture import PipeSequential as PipeSequential
    from penstock.capture import SplitPoint as SplitPoint
    from penstock.capture import annotate_split_points as annotate_split_points
    from penstock.capture import build_stage as build_stage
    from penstock.capture import pipe_split as pipe_split
    from penstock.capture import pipeline as pipeline
    from penstock.capture import profile as profile
    from penstock.capture import split_modules as split_modules
    from penstock.capture import tie as tie
    from penstock.comm import LocalWorld as LocalWorld
    from penstock.front import Checkpoint as Checkpoint
    from penstock.front import Pipeline as Pipeline
    from penstock.front import Result as Result
    from penstock.front import load as load
    from penstock.front import shard_parameters as shard_parameters
    from penstock.lower import offload as offload
    from penstock.lower import recompute as recompute
    from penstock.plan import Action as Action
    from penstock.plan import Op as Op
    from penstock.plan import Placement as Placement
    from penstock.plan import Plan as Plan
    from penstock.plan import check as check
    from penstock.run import PipelineScheduleMulti as PipelineScheduleMulti
    from penstock.run import PipelineScheduleSingle as PipelineScheduleSingle
    from penstock.run import Schedule as Schedule
    from penstock.run import Schedule1F1B as Schedule1F1B
    from penstock.run import ScheduleDualPipeV as ScheduleDualPipeV
    from penstock.run import ScheduleForwardOnly as ScheduleForwardOnly
    from penstock.run import ScheduleGPipe as ScheduleGPipe
    from penstock.run import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
    from penstock.run import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
    from penstock.run import ScheduleLoopedBFS as ScheduleLoopedBFS
    from penstock.run import ScheduleVHalf as ScheduleVHalf
    from penstock.run import ScheduleVMin as ScheduleVMin
    from penstock.run import ScheduleVZB as ScheduleVZB
    from penstock.run import ScheduleZBH1 as ScheduleZBH1
    from penstock.run import ScheduleZBH2 as ScheduleZBH2
    from penstock.run import ScheduleZBVZeroBubble as ScheduleZBVZeroBubble
    from penstock.run import microbatch_rng as microbatch_rng
    from penstock.schedules import all_schedules as all_schedules
    from penstock.schedules import get_schedule as get_schedule
    from penstock.simulate import Costs as Costs
    from penstock.simulate import Timeline as Timeline
    from penstock.stage.chunked_loss import chunked_loss as chunked_loss
    from penstock.stage.pipeline_stage import PipelineStage as PipelineStage
else:
    __all__ = ["__version__", *_HOME]  # noqa: PLE0604

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return importlib.import_module(f"penstock.{name}")
        if name in _MOVED:
            warnings.warn(f"use {_MOVED[name]}.{name} instead of penstock.{name}", DeprecationWarning, stacklevel=2)
            return getattr(importlib.import_module(_MOVED[name]), name)
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_PACKAGES})
