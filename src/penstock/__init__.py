"""penstock: pipeline parallelism for PyTorch that is planned, proved, measured and shown.

Names are resolved when they are first used, so that `import penstock` and the planning half load no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    name: module
    for module, names in {
        "penstock.errors": (
            "PenstockError PlanError ParseError IncompleteError OrderError DeadlockError UnknownNameError SplitError "
            "MergeError CaptureError BalanceError StageError ShapeError RunError PeerFailed ReplicaFailed RanksDisagree "
            "StepTimeout TransportError OutOfMemory DeviceFailed UnevenCut MissingPackage NotCompiled NotDeferred OverLimit "
            "LabelsNotCounted UnverifiedSplit"
        ),
        "penstock.plan": "Action Op Overlap Placement Plan StageGraph check",
        "penstock.schedules": "get_schedule all_schedules",
        "penstock.lower": "Early Ahead JustInTime divide recompute offload",
        "penstock.simulate": "Costs Timeline",
        "penstock.batch": (
            "TensorChunkSpec Replicate CustomReducer Microbatches sum_reducer merge_chunks split_args_kwargs_into_chunks"
        ),
        "penstock.comm": "LocalWorld",
        "penstock.stage.pipeline_stage": "PipelineStage",
        "penstock.stage.chunked_loss": "chunked_loss",
        "penstock.stage.recompute": "recomputing",
        "penstock.capture": (
            "pipeline Pipe PipeInfo PipeSequential SplitPoint pipe_split annotate_split_points PipeSplitWrapper LossWrapper "
            "TrivialLossWrapper MultiUseParameterConfig build_stage split_modules tie materialise profile"
        ),
        "penstock.run": (
            "Schedule PipelineScheduleSingle PipelineScheduleMulti ScheduleForwardOnly ScheduleGPipe Schedule1F1B "
            "ScheduleLoopedBFS ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleZBVZeroBubble "
            "ScheduleDualPipeV ScheduleZBH1 ScheduleZBH2 ScheduleVHalf ScheduleVMin ScheduleVZB ActionContext "
            "microbatch_rng"
        ),
        "penstock.balance": "Profile",
        "penstock.front": "Pipeline Result Checkpoint load shard_parameters",
    }.items()
    for name in names.split()
}
_ROOMS = ("balance", "batch", "compat", "plan", "schedules", "search", "show", "simulate", "train")

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"penstock.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
