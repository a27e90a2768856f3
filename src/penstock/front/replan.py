"""After a rank ran out of memory: what the step had changed is put back, and a plan that holds less is found.

before = Before(stages)
...                                        # a step that raises OutOfMemory on every rank
before.put_back()
plan = less(plan, error.rank)              # None: there is nothing left to recompute
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import HoldsLess, OutOfMemory
from penstock.lower import recompute
from penstock.plan import Plan
from penstock.plan.actions import OP, stage_of
from penstock.plan.ops import Op
from penstock.stage.recompute import RandomState


class Replannable(Protocol):
    """A pipeline, as far as it matters here."""

    @property
    def plan(self) -> Plan: ...

    @property
    def is_first(self) -> bool: ...

    def run_plan(self, plan: Plan) -> None: ...


def until_it_fits(attempt: Callable[[], Any], modules: Sequence[nn.Module], pipe: Replannable) -> Any:
    """A step that is done again, under a plan that holds less, as long as a rank runs out of memory in it."""
    while True:
        before = Before(modules)
        try:
            return attempt()
        except OutOfMemory as error:
            before.put_back()
            plan = less(pipe.plan, error.rank)
            if plan is None:
                raise
            told = str(error)
        pipe.run_plan(plan)
        if pipe.is_first:
            stages = sorted({stage_of(code) for codes in plan.codes for code in codes if code & OP == Op.R})
            text = f"{told}\nFrom now on stages {stages} are recomputed, and this batch is done again"
            warnings.warn(text, HoldsLess, stacklevel=4)


class Before:
    """Gradients, buffers and random state of this rank as they were before a step.

    Gradients that were there are copied, to the memory of the host; those that were not cost nothing.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        parameters = {id(p): p for module in modules for p in module.parameters()}
        buffers = {id(b): b for module in modules for b in module.buffers()}
        self.grads = [(p, None if p.grad is None else _aside(p.grad)) for p in parameters.values()]
        self.buffers = [(b, _aside(b)) for b in buffers.values()]
        devices = {t.device for t in (*parameters.values(), *buffers.values()) if t.device.type not in ("cpu", "meta")}
        self.random = RandomState(devices)

    def put_back(self) -> None:
        for parameter, grad in self.grads:
            if grad is None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.copy_(grad)
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        self.random.set()


def _aside(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    return value.clone() if value.device.type == "cpu" or hasattr(value, "_local_tensor") else value.cpu()


def less(plan: Plan, rank: int) -> Plan | None:
    """The plan in which the stages of a rank are recomputed; or, if they are, all stages; or None.

    >>> from penstock.schedules import get_schedule
    >>> plan = less(get_schedule("gpipe")(2, 2), 0)
    >>> print(*plan.lines(), sep="\\n")
    rank 0: 0F0 0F1 0R0 0B0 0R1 0B1
    rank 1: 1F0 1F1 1B0 1B1
    >>> print(less(less(plan, 0), 0))
    None
    """
    everything = recompute(plan)  # what holds less already stays as it is
    if everything == plan:
        return None
    here = [codes if other == rank else plan.codes[other] for other, codes in enumerate(everything.codes)]
    found = plan.with_codes(here)
    return everything if found == plan else found
