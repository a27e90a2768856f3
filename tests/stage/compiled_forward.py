"""The forward of a stage with compiled parts, of which the backward is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.backward.compile_stage import CompiledStage
from penstock.stage.backward import Deferral, Pending, run_deferred


def run_compiled(
    deferral: Deferral, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Pending]:
    """As a step does it from its second one on."""
    with CompiledStage(module, deferral).running(split=True):  # type: ignore[arg-type]
        return run_deferred(deferral, module, args, kwargs)
