"""After a rank ran out of memory: what the step had changed is put back, and a plan that holds less is found.

undo = Undo(modules, device)
attempted(attempt, undo, pipe, again=False)    # a step; if it fails, gradients, buffers and random state are as before it
attempted(attempt, undo, pipe, again=True)     # the same, and the batch is done again under a plan that holds less
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.errors import HoldsLess, OutOfMemory, PeerFailed, ReplicaFailed
from penstock.lower import recompute
from penstock.nest import Value
from penstock.plan import Plan
from penstock.plan.actions import OP, stage_of
from penstock.plan.ops import Op
from penstock.stage.buffers import Before, Buffers, RandomState, accelerators, modes_of

if TYPE_CHECKING:
    from penstock.front.pipeline import Pipeline

_UNDONE = (OutOfMemory, PeerFailed, ReplicaFailed)  # after these the devices still answer
_OTHERWISE = -1  # in place of the rank that ran out of memory: a step failed for another reason


def attempted(attempt: Callable[[], Value], undo: Undo, pipe: Pipeline, *, again: bool) -> Value:
    """A step. What it has changed is put back if a rank, of this or of another replica, could not do it.

    With `again` it is done once more, under a plan that holds less, as long as a rank runs out of memory in it. Replicas then
    ask one another after every step, whatever became of it: those of a rank that ran out of memory have failed too, but do not
    know why, and all must take the same plan.
    """
    asks = again and pipe.num_replicas > 1
    while True:
        undo.take()
        value: Value = None
        error: Exception | None = None
        try:
            value = attempt()
        except Exception as raised:
            if isinstance(raised, _UNDONE):
                undo.put_back()
            if not asks and not (again and isinstance(raised, OutOfMemory)):
                raise
            error = raised
        mine = None if error is None else error.rank if isinstance(error, OutOfMemory) else _OTHERWISE
        found = pipe.gather("whether all replicas had the memory for a step", mine) if asks else [mine]
        if all(one is None for one in found):
            undo.forget()
            return value
        undo.put_back()  # if it has not been: another replica could not do its part
        short = [rank for rank in found if rank not in (None, _OTHERWISE)]
        plan = less(pipe.plan, min(short)) if short else None
        if plan is None:
            raise error or ReplicaFailed(
                "another data-parallel replica failed at the end of this step; its error tells why"
            )
        told = str(error) if mine in short else f"rank {min(short)} of another replica ran out of memory"
        error = None
        gc.collect()  # an error and the frames that it went through may hold one another, and all that was saved in them
        pipe.run_plan(plan)
        if pipe.is_first:
            stages = sorted({stage_of(code) for codes in plan.codes for code in codes if code & OP == Op.R})
            text = f"{told}\nFrom now on stages {stages} are recomputed, and this batch is done again"
            warnings.warn(text, HoldsLess, stacklevel=4)


class Undo:
    """Puts gradients, buffers and random state of this rank back to what they were before a step.

    Gradients that were there are copied, to the memory of the host; those that were not cost nothing. Of the buffers those are
    copied that a step was seen to change; all of them in the first step, and when a part of a module has changed its mode.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self.modules = modules
        self.parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
        self.buffers = Buffers(modules, _aside)
        self.devices = accelerators(device, (*self.parameters, *(b for module in modules for b in module.buffers())))
        self.taken: tuple[list[Tensor | None], Before, RandomState] | None = None  # gradients, buffers, random state

    def take(self) -> None:
        """Before a step."""
        grads = [None if p.grad is None else _aside(p.grad) for p in self.parameters]
        before = self.buffers.look(tuple(mode for module in self.modules for mode in modes_of(module)))
        self.taken = grads, before, RandomState(self.devices)

    @torch.no_grad()
    def put_back(self) -> None:
        """After a step that failed; a second time it does nothing."""
        if self.taken is None:
            return
        (grads, before, random), self.taken = self.taken, None
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if grad is None:
                parameter.grad = None
            elif parameter.grad is None or grad.layout is not torch.strided:
                parameter.grad = grad.to(parameter.device)
            else:
                parameter.grad.copy_(grad)
        before.put_back()
        random.set()

    def forget(self) -> None:
        """After a step, so that copies are held no longer than that."""
        if self.taken is not None:
            self.buffers.learn(self.taken[1])
        self.taken = None


def _aside(tensor: Tensor) -> Tensor:
    """A copy: in the memory of the host, without a wait; of what is spread over ranks beside it."""
    value = tensor.detach()
    if value.device.type == "cpu" or hasattr(value, "_local_tensor") or value.layout is not torch.strided:
        return value.clone()
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)


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
