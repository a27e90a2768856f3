"""Recompute (activation checkpointing of a whole stage): F keeps the input alone, and R runs the forward again for its graph.

The second run gets the random numbers, buffers and attributes of the first and leaves them as they are, so the training is the
same to the bit and a batch norm counts each microbatch once. Both runs are complete: forward hooks are called in each of them,
and `recomputing()` tells which one it is.

If a forward changes its input, or a buffer of which there is no copy, in a way that no forward of the first step did, there is
nothing to run it again from. The graph of its first run is kept then: it holds more than planned.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.backward.engine_protocol import Args, BackwardEngine, Kwargs, MicrobatchPass, Output, Run, Wrapped
from penstock.backward.module_state import ModuleState, Snapshot
from penstock.errors import StageError
from penstock.nest import Value, map_tensors, tensors_in

_thread = threading.local()
_EXPECTED = (
    "expected the same twice. Make what it computes depend on its input, parameters, buffers and attributes alone, or leave the "
    "stage out of recompute"
)


def recomputing() -> bool:
    """Return True while a stage runs its forward for the second time.

    def loss_fn(output, target):
        loss = mse_loss(output, target)
        if not penstock.recomputing():
            losses.append(loss.item())
        return loss
    """
    return getattr(_thread, "again", False)


@contextmanager
def second_run() -> Iterator[None]:
    """Inside, `recomputing()` is True."""
    before, _thread.again = recomputing(), True
    try:
        yield
    finally:
        _thread.again = before


class Recomputed:
    """An engine whose forwards are run twice."""

    def __init__(self, inner: BackwardEngine, state: ModuleState, *, stage: int) -> None:
        self.inner = inner
        self.state = state
        self.stage = stage
        self.changes: bool | None = None  # whether a forward has changed its input in place; None before the first one
        self.steps = 0  # that have begun

    def begin_step(self, loss: object) -> None:
        self.state.begin_step(loss)
        self.inner.begin_step(loss)
        self.steps += 1

    def end_step(self) -> None:
        self.inner.end_step()

    def forward(self, run: Run, args: Args, kwargs: Kwargs) -> tuple[MicrobatchPass, Output]:
        state = self.state
        before = state.snapshot()
        copied = self.changes is not False
        given = _copies((args, kwargs)) if copied else (args, kwargs)
        versions = [(tensor, tensor._version) for tensor in tensors_in(given) if not tensor.requires_grad]
        inner, output = self.inner.forward(run, *given)
        changed = any(tensor._version != version for tensor, version in versions)
        lost = state.learn(before)
        self.changes = bool(self.changes) or changed
        if lost or (changed and not copied):
            return Wrapped(inner), output
        marks = _marks(output) if self.steps == 1 else ()
        found = RecomputedPass(self, run, before, [_kind(tensor) for tensor in _tensors(output)], marks)
        messages = [([_detached(tensor) for tensor in tensors], spec) for tensors, spec in output.messages]
        return found, Output(output.kept, (), messages)


class RecomputedPass(Wrapped):
    """A microbatch that has no graph until R."""

    def __init__(
        self, engine: Recomputed, run: Run, before: Snapshot, kinds: list[str], marks: Sequence[Tensor]
    ) -> None:
        self.engine = engine
        self.run = run
        self.before: Snapshot | None = before
        self.kinds = kinds
        self.marks = marks  # in the first step: of the output

    def recompute(self, args: Args, kwargs: Kwargs) -> None:
        engine, before = self.engine, self.before
        if before is None:
            raise StageError(f"stage {engine.stage} is to be recomputed twice for one microbatch")
        self.before = None
        if lost := before.buffers.lost():
            raise StageError(
                f"stage {engine.stage} is to be recomputed, but {', '.join(lost)} has changed since, which forwards had left "
                "alone until then: a buffer that is large and changes now and then. Leave the stage out of recompute"
            )
        given = _copies((args, kwargs)) if engine.changes else (args, kwargs)
        with engine.state.replayed(before), second_run():
            self.inner, output = engine.inner.forward(self.run, *given)
        kinds = [_kind(tensor) for tensor in _tensors(output)]
        if kinds != self.kinds:
            raise StageError(
                f"the forward of stage {engine.stage} gave {', '.join(self.kinds)}, and when it was run again "
                f"{', '.join(kinds)}; {_EXPECTED}"
            )
        if self.marks and not all(map(_alike, self.marks, _marks(output))):
            raise StageError(
                f"the forward of stage {engine.stage} gave other numbers when it was run again for a backward; {_EXPECTED}"
            )


def _tensors(output: Output) -> list[Tensor]:
    return list(output.roots)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


@torch.no_grad()
def _marks(output: Output) -> list[Tensor]:
    """Return the sum of each dense tensor, by which other numbers are found without keeping the tensors."""
    dense = [t for t in _tensors(output) if type(t) is Tensor and t.layout is torch.strided and not t.is_complex()]
    return [tensor.sum(dtype=torch.float64) for tensor in dense if tensor.device.type == "cpu"]


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _copies(given: Value) -> Value:
    return map_tensors(lambda tensor: tensor if tensor.requires_grad else _copy(tensor), given)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, by which operators choose their kernels."""
    made = tensor.clone()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return made
    if made.stride() == tensor.stride():
        return made
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())
