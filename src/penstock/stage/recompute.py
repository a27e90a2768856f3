"""A forward that is run twice: the first time (F) for its output alone, the second time (R) for its backward.

    repeats = Repeats(module, num_microbatches=8, device=device)
    output = repeats.first(0, call, (x,), {})                    # call((x,), {}) without a graph, nothing saved
    ...
    output = repeats.again(0, lambda: module(x))                 # the same numbers, with a graph

The second run gets the random numbers and the buffers of the first, and leaves both as it found them, so the training is
the same to the bit and a batch norm counts each microbatch once. Forward hooks that only look on are not called a second
time; one that returned something the first time is, since what it returned is part of the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import StageError
from penstock.nest import map_tensors, tensors_in

Modes = tuple[bool, ...]


def modes_of(module: nn.Module) -> Modes:
    """Whether each part trains: what a forward does to its buffers goes by that, and a part may differ from the whole.

    >>> modes_of(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1).eval()))
    (True, True, False)
    """
    return tuple(part.training for part in module.modules())


@dataclass(frozen=True)
class _First:
    """What the first run of a microbatch leaves for the second."""

    random: RandomState | None
    buffers: list[tuple[Tensor, Tensor]]  # those that it changed, and what they held before
    acting: frozenset[int]  # forward hooks that returned something
    gave: list[str]  # its output's tensors, as they are named in an error


class Repeats:
    """The forwards of one stage that are run twice."""

    def __init__(self, module: nn.Module, num_microbatches: int, *, device: torch.device, keyed: bool = False) -> None:
        self.module = module
        self.keyed = keyed  # random numbers are set from outside, for each microbatch
        self.kept: list[_First | None] = [None] * num_microbatches
        self.changing: dict[Modes, list[Tensor]] = {}  # by the modes of a forward that has run: the buffers it changes
        self.spoils: bool | None = None  # whether a forward changes its input in place, once one has run
        self.devices = accelerators(device, (*module.parameters(), *module.buffers()))

    def first(self, microbatch: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """F: the output, as tensors without a graph that require a gradient where those of the module do.

        A forward that changes its input in place is given a copy, since the second run starts from the same input. (An input
        that requires a gradient cannot be changed in place.)
        """
        if self.spoils is not False:
            args, kwargs = map_tensors(
                lambda tensor: tensor if tensor.requires_grad else tensor.clone(), (args, kwargs)
            )
        given = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs))]
        random = None if self.keyed else RandomState(self.devices)
        modes = modes_of(self.module)  # a batch norm changes its statistics in one of its modes only
        known = self.changing.get(modes)
        watched = self.module.buffers() if known is None else known
        before = [(buffer, buffer.detach().clone()) for buffer in watched]
        with _noting_hooks(self.module) as acting:
            output = run(args, kwargs)
        self.spoils = any(tensor._version != version and not tensor.requires_grad for tensor, version in given)
        if known is None:  # asked once: on a device the host waits for the answer
            before = [(buffer, old) for buffer, old in before if not torch.equal(buffer, old)]
            self.changing[modes] = [buffer for buffer, _ in before]
        gave = [_name(tensor) for tensor in tensors_in(output)]
        self.kept[microbatch] = _First(random, before, frozenset(acting), gave)
        return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), output)

    def again(self, microbatch: int, run: Callable[[], Any]) -> Any:
        """R: the output with its graph."""
        first, self.kept[microbatch] = self.kept[microbatch], None
        if first is None:
            raise StageError(f"microbatch {microbatch} is to be recomputed, but no forward of it has run")
        with ExitStack() as stack:
            if first.random is not None:
                stack.enter_context(first.random.once_more())
            stack.enter_context(_as_before(first.buffers))
            stack.enter_context(_acting_hooks(self.module, first.acting))
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


def _name(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def accelerators(device: torch.device, tensors: Iterable[Tensor]) -> set[torch.device]:
    """The devices whose random state a forward may draw from: the stage's, whether or not it has tensors, and its tensors'.

    >>> accelerators(torch.device("cpu"), [torch.ones(1), torch.ones(1, device="meta")])
    set()
    """
    return {one for one in (device, *(tensor.device for tensor in tensors)) if one.type not in ("cpu", "meta")}


class RandomState:
    """The random state of the host and of some devices, as it was when this was made."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.host = torch.get_rng_state()
        self.devices = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def set(self) -> None:
        torch.set_rng_state(self.host)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)

    @contextmanager
    def once_more(self) -> Iterator[None]:
        """Inside, random numbers are drawn from here on; outside, nothing has moved."""
        now = RandomState(device for device, _ in self.devices)
        self.set()
        try:
            yield
        finally:
            now.set()


@contextmanager
def _as_before(buffers: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, the buffers hold what they held; outside, what they hold now.

    They are written past autograd's count of changes: graphs of other microbatches may refer to them, and what those read
    is not what changes here (a batch norm's running statistics).
    """
    now = [buffer.detach().clone() for buffer, _ in buffers]
    for buffer, old in buffers:
        buffer.data.copy_(old)
    try:
        yield
    finally:
        for (buffer, _), new in zip(buffers, now, strict=True):
            buffer.data.copy_(new)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def _hooks_of(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """The tables of forward hooks that are not empty. Those inside a compiled part belong to its graph, and stay out."""
    found: list[dict[int, Callable[..., Any]]] = []
    parts = [module]
    while parts:
        part = parts.pop()
        found += [table for name in _HOOKS if (table := getattr(part, name))]
        if not hasattr(part, "_orig_mod") and part._compiled_call_impl is None:
            parts += part.children()
    return found


@contextmanager
def _noting_hooks(module: nn.Module) -> Iterator[set[int]]:
    """Inside, hooks run as ever, and those that return something are noted by the number of their handle."""
    acting: set[int] = set()

    def noting(number: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            if result is not None:
                acting.add(number)
            return result

        return note

    tables = [
        (table, dict(table), {key: noting(key, hook) for key, hook in table.items()}) for table in _hooks_of(module)
    ]
    for table, _, notes in tables:
        table.update(notes)
    try:
        yield acting
    finally:
        for table, hooks, notes in tables:
            for key, note in notes.items():
                if table.get(key) is note:  # else it has removed itself
                    table[key] = hooks[key]


@contextmanager
def _acting_hooks(module: nn.Module, acting: frozenset[int]) -> Iterator[None]:
    """Inside, only these hooks are there."""
    tables = [(table, dict(table)) for table in _hooks_of(module)]
    for table, hooks in tables:
        for key in hooks:
            if key not in acting:
                del table[key]
    try:
        yield
    finally:
        for table, hooks in tables:
            table.clear()
            table.update(hooks)
