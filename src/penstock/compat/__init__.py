"""`torch.distributed.pipelining` under its own module and private names, over penstock.

    import penstock.compat
    penstock.compat.install()
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe      # penstock's

or, without a change to the program::

    python -m penstock.compat program.py --its --arguments
    torchrun --nproc-per-node 2 -m penstock.compat program.py --its --arguments

Names are resolved when they are first used: importing this package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from penstock.compat._alias import install, uninstall

_HOME = {
    name: module
    for module, names in {
        "_IR": "Pipe SplitPoint pipe_split pipeline",
        "schedules": (
            "Schedule1F1B ScheduleDualPipeV ScheduleGPipe ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble "
            "ScheduleLoopedBFS ScheduleZBVZeroBubble _ScheduleForwardOnly"
        ),
        "stage": "PipelineStage build_stage",
    }.items()
    for name in names.split()
}
_MODULES = (
    *("_IR", "_backward", "_debug", "_schedule_visualizer", "_unflatten", "_utils"),
    *("microbatch", "schedules", "stage"),
)

__all__ = [*(name for name in _HOME if name[0] != "_"), "install", "uninstall"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"penstock.compat.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'penstock.compat' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"penstock.compat.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
