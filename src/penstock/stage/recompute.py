"""A forward that is run twice: the first time (F) for its output alone, the second time (R) for its backward.

    repeats = Repeats(module, num_microbatches=8, device=device)
    output = repeats.first(0, call, (x,), {})                    # call((x,), {}), of which nothing is kept
    ...
    output = repeats.again(0, lambda: module(x))                 # the same numbers, with a graph

The second run gets the random numbers and the buffers of the first, and leaves both as it found them, so the training is
the same to the bit and a batch norm counts each microbatch once. Forward hooks that only look on are not called a second
time (`stage/repeated_hooks.py`).

What the graph of the first run would save is let go at once (`stage/drop_saved.py`).

A forward may change what those before it left alone: its input in every tenth call, or a buffer too large to be copied for
that. There is nothing to run it again from. So of such a microbatch the first run is kept, and R has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import StageError
from penstock.nest import Value, map_tensors, tensors_in
from penstock.stage.buffers import Before, Buffers
from penstock.stage.drop_saved import DropSaved
from penstock.stage.random_state import RandomState, accelerators
from penstock.stage.repeated_hooks import RepeatedHooks


@dataclass(frozen=True)
class _First:
    """What the first run of a microbatch leaves for the second."""

    random: RandomState | None
    buffers: Before
    acting: frozenset[int]  # forward hooks that take part
    gave: list[str]  # its output's tensors, as they are named in an error
    output: Value = None  # with its graph, if it cannot be run again


class Repeats:
    """The forwards of one stage that are run twice."""

    def __init__(
        self,
        module: nn.Module,
        num_microbatches: int,
        *,
        device: torch.device,
        keyed: bool = False,
    ) -> None:
        self.module = module
        self.keyed = keyed  # random numbers are set from outside, for each microbatch
        self.kept: list[_First | None] = [None] * num_microbatches
        self.parts: list[nn.Module] = []
        self.begin(None)
        self.spoils: bool | None = None  # whether a forward changes its input in place, once one has run
        self.devices = accelerators(device, (*module.parameters(), *module.buffers()))
        self.drop = DropSaved()

    def begin(self, loss: object) -> None:
        """Before a step. The loss is run again with the last stage; if it is a module, its buffers and hooks count too."""
        modules = [self.module, loss] if isinstance(loss, nn.Module) else [self.module]
        parts = [part for module in modules for part in module.modules()]
        if parts != self.parts:
            self.parts, self.buffers, self.hooks = parts, Buffers(modules), RepeatedHooks(modules)

    def first(
        self,
        microbatch: int,
        run: Callable[..., Value],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        whole: bool = False,
    ) -> Value:
        """F: the output, as tensors without a graph that require a gradient where those of the module do.

        A forward that changes its input in place is given a copy, since the second run starts from the same input. (An input
        that requires a gradient cannot be changed in place.) Its graph is `whole` if others than autograd hold what it saves.
        """
        random = RandomState(self.devices)
        # A batch norm changes its statistics in one of its modes only.
        before = self.buffers.look(tuple([part.training for part in self.parts]))
        # If there is a buffer of which there is no copy, this run may be all there is.
        whole = whole or self.drop.may(before.modes) is False or any(one.value is None for one in before.seen)
        copied = self.spoils is not False or not whole
        given = _copies(args, kwargs) if copied else (args, kwargs)
        versions = [(tensor, tensor._version) for tensor in tensors_in(given) if not tensor.requires_grad]
        with self.hooks.noting() as acting:
            try:
                with nullcontext() if whole else self.drop.around(before.modes):
                    output = run(*given)
            except RuntimeError as error:
                if whole or not self.drop.is_refused(before.modes, error):
                    raise
                random.set()
                before.put_back()
                output = run(*_copies(args, kwargs))
        spoiled = any(tensor._version != version for tensor, version in versions)
        self.spoils = bool(self.spoils) or spoiled
        keep = (spoiled and not copied) or bool(before.lost())
        self.buffers.learn(before)
        gave = [_name(tensor) for tensor in tensors_in(output)]
        self.kept[microbatch] = _First(
            None if self.keyed else random, before, frozenset(acting), gave, output if keep else None
        )
        return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), output)

    def keeps(self, microbatch: int) -> bool:
        """Whether the first run is all there is: its graph is there already, and so is whatever waits for its backward."""
        first = self.kept[microbatch]
        return first is not None and first.output is not None

    def again(self, microbatch: int, run: Callable[[], Value]) -> Value:
        """R: the output with its graph."""
        first, self.kept[microbatch] = self.kept[microbatch], None
        if first is None:
            raise StageError(f"microbatch {microbatch} is to be recomputed, but no forward of it has run")
        if first.output is not None:
            return first.output
        if lost := first.buffers.lost():
            raise StageError(
                f"microbatch {microbatch} is to be recomputed, but {', '.join(lost)} has changed since, which forwards had left "
                "alone until then: a buffer that is large and changes now and then. Leave the stage out of recompute"
            )
        with ExitStack() as stack:
            if first.random is not None:
                stack.enter_context(first.random.once_more())
            stack.enter_context(first.buffers.once_more())
            stack.enter_context(self.hooks.only(first.acting))
            output = run()
        gives = [_name(tensor) for tensor in tensors_in(output)]
        if gives != first.gave:
            raise StageError(
                f"microbatch {microbatch}: the forward gave {', '.join(first.gave)}, and when it was run again "
                f"{', '.join(gives)}; expected the same. What it depends on besides its input (a counter, the time, global "
                "state) must not change in between; or leave the stage out of recompute"
            )
        return output

    def left_over(self) -> list[int]:
        return [microbatch for microbatch, first in enumerate(self.kept) if first is not None]

    def clear(self) -> None:
        self.kept[:] = [None] * len(self.kept)


def _copies(args: Value, kwargs: Value) -> Value:
    return map_tensors(lambda tensor: tensor if tensor.requires_grad else tensor.clone(), (args, kwargs))


def _name(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
