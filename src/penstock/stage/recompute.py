"""A forward that is run twice: the first time (F) for its output alone, the second time (R) for its backward.

    repeats = Repeats(module, num_microbatches=8, device=device)
    output = repeats.first(0, call, ((x,), {}))                  # call((x,), {}), of which nothing is kept
    ...
    output = repeats.again(0, lambda: module(x))                 # the same numbers, with a graph

The second run gets the random numbers and the buffers of the first, and leaves both as it found them, so the training is
the same to the bit and a batch norm counts each microbatch once. Forward hooks that only look on are not called a second
time (`stage/repeated_hooks.py`).

What the graph of the first run would save is let go at once. Where that graph can stay, the second run fills it again, and ends
when that is done (`stage/refill.py`); otherwise the second run makes a graph of its own.

A forward may change what those before it left alone: its input in every tenth call, or a buffer too large to be copied for
that. There is nothing to run it again from. So of such a microbatch the first run is kept, and R has nothing to do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from penstock.errors import StageError
from penstock.nest import Value, map_tensors, tensors_in
from penstock.stage.buffers import Before, Buffers, InPlace, Modes, RandomState, Tables, accelerators, attributes_of
from penstock.stage.refill import EXPECTED, DropSaved, Refill, Trial, is_plain, name, roots
from penstock.stage.repeated_hooks import RepeatedHooks

_thread = threading.local()
_OF_MODULES = frozenset(vars(nn.Module()))  # tables that every module has: parameters, hooks and the like


def recomputing() -> bool:
    """Whether what is running now is a second run.

    def loss_fn(output, target):
        loss = mse_loss(output, target)
        if not penstock.recomputing():
            losses.append(loss.item())
        return loss
    """
    return getattr(_thread, "again", False)


@contextmanager
def second_run() -> Iterator[None]:
    """Inside, what runs is told that it runs again."""
    before, _thread.again = recomputing(), True
    try:
        yield
    finally:
        _thread.again = before


class AtOnce:
    """A run that may show that it has to be done again, in another way, as if it had not been.

        attempt = AtOnce([module, loss], (args, kwargs))
        output = run(*attempt.given)
        with attempt.second():
            output = run(args, kwargs)

    Beside random numbers and buffers, what modules keep in attributes goes back to what it was, and so do inputs that were
    changed in place. Those that have a history of their own are copies, made for that: the first run gets others. All hooks are
    called in both: what the second run computes may go by what a hook has left.
    """

    def __init__(self, modules: Sequence[nn.Module], given: tuple[tuple[Value, ...], dict[str, Value]]) -> None:
        parts = [part for module in modules for part in module.modules()]
        own = [part for part in parts if not _is_of_torch(part)]
        tensors = list(tensors_in(given))
        made = any(not one.is_leaf for one in tensors)
        self.given = map_tensors(lambda one: one if one.is_leaf else one.clone(), given) if made else given
        self.attributes = attributes_of(own, leave=_OF_MODULES)
        self.changed = InPlace(tensors, own)
        self.buffers = Buffers(modules).look(())
        devices = accelerators(torch.device("cpu"), [*tensors, *(one.buffer for one in self.buffers.seen)])
        self.random = RandomState(devices)

    @contextmanager
    def second(self) -> Iterator[None]:
        self.random.set()
        self.attributes.put_back()
        self.changed.put_back()
        self.buffers.put_back()
        with second_run():
            yield


@dataclass(frozen=True)
class _First:
    """What the first run of a microbatch leaves for the second."""

    random: RandomState | None
    buffers: Before
    acting: frozenset[int]  # forward hooks that take part
    gave: list[str]  # its output's tensors, as they are named in an error
    output: Value = None  # with its graph, if that stays
    refill: Refill | None = None  # what that graph lacks; None: nothing, there is no second run


class Repeats:
    """The forwards of one stage that are run twice."""

    def __init__(
        self, module: nn.Module, num_microbatches: int, *, device: torch.device, keyed: bool = False, stops: bool = True
    ) -> None:
        self.module = module
        self.keyed = keyed  # random numbers are set from outside, for each microbatch
        self.stops = stops  # whether a forward may be left before its end: nobody around it waits for that
        self.kept: list[_First | None] = [None] * num_microbatches
        self.parts: list[nn.Module] = []
        self.drop = DropSaved()
        self.begin(None)
        self.spoils: bool | None = None  # whether a forward changes its input in place, once one has run
        self.devices = accelerators(device, (*module.parameters(), *module.buffers()))

    def begin(self, loss: object) -> None:
        """Before a step. The loss is run again with the last stage; if it is a module, its buffers and hooks count too."""
        modules = [self.module, loss] if isinstance(loss, nn.Module) else [self.module]
        parts = [part for module in modules for part in module.modules()]
        if parts != self.parts:
            self.parts, self.buffers, self.hooks = parts, Buffers(modules), RepeatedHooks(modules)
            # What modules have set on themselves: a forward that changes it might give something else the next time. Those
            # of torch's own change nothing but buffers.
            self.own = [vars(part) for part in parts if not type(part).__module__.startswith("torch.nn.modules.")]
        self.drop.begin()

    def first(
        self,
        microbatch: int,
        run: Callable[..., Value],
        given: tuple[tuple[object, ...], dict[str, object]],
        *,
        whole: bool = False,
        loss: Callable[[], Tensor | None] = lambda: None,
    ) -> Value:
        """F: the output, as tensors without a graph that require a gradient where those of the module do.

        A forward that changes its input in place is given a copy, since the second run starts from the same input. (An input
        that requires a gradient cannot be changed in place.) Its graph is `whole` if others than autograd hold what it saves.
        `loss` gives what the backward starts from besides the output.
        """
        random = RandomState(self.devices)
        # A batch norm changes its statistics in one of its modes only.
        before = self.buffers.look(tuple([part.training for part in self.parts]))
        # If there is a buffer of which there is no copy, this run may be all there is.
        whole = whole or self.drop.may(before.modes) is False or any(one.value is None for one in before.seen)
        copied = self.spoils is not False or not whole
        used = _copies(given) if copied else given
        versions = [(tensor, tensor._version) for tensor in tensors_in(used) if not tensor.requires_grad]
        own = Tables(self.own)
        saves: Refill | None = None
        with self.hooks.noting(lambda: 0 if saves is None else len(saves.places)) as noted:
            try:
                with nullcontext() if whole else self.drop.around(before.modes) as saves:
                    output = run(*used)
            except RuntimeError as error:
                if whole or not self.drop.is_refused(before.modes, error):
                    raise
                random.set()
                before.put_back()
                saves = None
                output = run(*_copies(given))
        if isinstance(saves, Trial):
            saves.look((output, loss()))
        if own.changed():
            self.drop.forbid_refill(before.modes)
        spoiled = any(tensor._version != version for tensor, version in versions)
        self.spoils = bool(self.spoils) or spoiled
        keep = (spoiled and not copied) or bool(before.lost())
        self.buffers.learn(before)
        gave = [name(tensor) for tensor in tensors_in(output)]
        first = _First(None if self.keyed else random, before, frozenset(noted.acting), gave, output if keep else None)
        if not keep and type(saves) is Refill and self.may_stop(before.modes) and noted.same and is_plain(output):
            first = replace(first, output=roots(output), refill=saves)
        self.kept[microbatch] = first
        return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), output)

    def may_stop(self, modes: Modes) -> bool:
        """Whether a forward in these modes may be left when nothing more is saved. A hook may want to be called at its end."""
        return (
            self.stops
            and modes in self.drop.refilled
            and not of_all_modules._global_forward_hooks_always_called
            and not any(part._forward_hooks_always_called for part in self.parts)
        )

    def stays(self, microbatch: int) -> bool:
        """Whether the graph of the first run stays, and with it whatever waits for its backward."""
        first = self.kept[microbatch]
        return first is not None and (first.output is not None or first.refill is not None)

    def again(self, microbatch: int, run: Callable[[], Value]) -> Value:
        """R: the output with its graph."""
        first, self.kept[microbatch] = self.kept[microbatch], None
        if first is None:
            raise StageError(f"microbatch {microbatch} is to be recomputed, but no forward of it has run")
        if first.output is not None and first.refill is None:
            return first.output
        if lost := first.buffers.lost():
            raise StageError(
                f"microbatch {microbatch} is to be recomputed, but {', '.join(lost)} has changed since, which forwards had left "
                "alone until then: a buffer that is large and changes now and then. Leave the stage out of recompute"
            )
        with ExitStack() as stack:
            stack.enter_context(second_run())
            if first.random is not None:
                stack.callback(RandomState(self.devices).set)
                first.random.set()
            stack.callback(first.buffers.again().put_back)
            first.buffers.put_back()
            stack.enter_context(self.hooks.only(first.acting))
            if first.refill is not None:
                # A forward that is left in the middle may have set on its modules what it wanted to set back.
                stack.callback(Tables(self.own).put_back)
                first.refill.fill(run)
                return first.output
            output = run()
        gives = [name(tensor) for tensor in tensors_in(output)]
        if gives != first.gave:
            raise StageError(
                f"microbatch {microbatch}: the forward gave {', '.join(first.gave)}, and when it was run again "
                f"{', '.join(gives)}; {EXPECTED}"
            )
        return output

    def left_over(self) -> list[int]:
        return [microbatch for microbatch, first in enumerate(self.kept) if first is not None]

    def clear(self) -> None:
        self.kept[:] = [None] * len(self.kept)


def _is_of_torch(part: nn.Module) -> bool:
    """Whether all of its class is torch's. (`fully_shard` makes classes that derive from the user's.)"""
    return all(kind.__module__.startswith(("torch.", "builtins")) for kind in type(part).__mro__)


def _copies(given: Value) -> Value:
    return map_tensors(lambda tensor: tensor if tensor.requires_grad else _copy(tensor), given)


def _copy(tensor: Tensor) -> Tensor:
    """With the same strides, by which operators choose their way."""
    made = tensor.clone()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return made
    if made.stride() == tensor.stride():
        return made
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())
