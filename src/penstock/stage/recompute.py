"""A forward that is run twice: the first time (F) for its output alone, the second time (R) for its backward.

    repeats = Repeats(module, num_microbatches=8, device=device)
    output = repeats.first(0, call, (x,), {})                    # call((x,), {}) without a graph, nothing saved
    ...
    output = repeats.again(0, lambda: module(x))                 # the same numbers, with a graph

The second run gets the random numbers and the buffers of the first, and leaves both as it found them, so the training is
the same to the bit and a batch norm counts each microbatch once. Forward hooks that only look on are not called a second
time (`stage/repeated_hooks.py`).

A forward may change what those before it left alone: its input in every tenth call, or a buffer too large to be copied for
that. There is nothing to run it again from. So of such a microbatch the first run is kept, and R has nothing to do.
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
from penstock.stage.buffers import Before, Buffers, modes_of
from penstock.stage.repeated_hooks import noting, only


@dataclass(frozen=True)
class _First:
    """What the first run of a microbatch leaves for the second."""

    random: RandomState | None
    buffers: Before
    acting: frozenset[int]  # forward hooks that take part
    gave: list[str]  # its output's tensors, as they are named in an error
    output: Any = None  # with its graph, if it cannot be run again


class Repeats:
    """The forwards of one stage that are run twice."""

    def __init__(self, module: nn.Module, num_microbatches: int, *, device: torch.device, keyed: bool = False) -> None:
        self.module = module
        self.keyed = keyed  # random numbers are set from outside, for each microbatch
        self.kept: list[_First | None] = [None] * num_microbatches
        self.modules: tuple[nn.Module, ...] = (module,)
        self.buffers = Buffers(self.modules)
        self.spoils: bool | None = None  # whether a forward changes its input in place, once one has run
        self.devices = accelerators(device, (*module.parameters(), *module.buffers()))

    def take_in(self, loss: object) -> None:
        """The loss is run again with the last stage. If it is a module, its buffers and hooks are treated like the stage's."""
        modules = (self.module, loss) if isinstance(loss, nn.Module) else (self.module,)
        if modules != self.modules:
            self.modules, self.buffers = modules, Buffers(modules)

    def first(self, microbatch: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """F: the output, as tensors without a graph that require a gradient where those of the module do.

        A forward that changes its input in place is given a copy, since the second run starts from the same input. (An input
        that requires a gradient cannot be changed in place.)
        """
        copied = self.spoils is not False
        if copied:
            args, kwargs = map_tensors(
                lambda tensor: tensor if tensor.requires_grad else tensor.clone(), (args, kwargs)
            )
        given = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs))]
        random = None if self.keyed else RandomState(self.devices)
        # A batch norm changes its statistics in one of its modes only.
        before = self.buffers.look(tuple(mode for module in self.modules for mode in modes_of(module)))
        with noting(self.modules) as acting:
            output = run(args, kwargs)
        spoiled = any(tensor._version != version and not tensor.requires_grad for tensor, version in given)
        self.spoils = bool(self.spoils) or spoiled
        keep = (spoiled and not copied) or bool(before.lost())
        self.buffers.learn(before)
        gave = [_name(tensor) for tensor in tensors_in(output)]
        self.kept[microbatch] = _First(random, before, frozenset(acting), gave, output if keep else None)
        return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), output)

    def keeps(self, microbatch: int) -> bool:
        """Whether the first run is all there is: its graph is there already, and so is whatever waits for its backward."""
        first = self.kept[microbatch]
        return first is not None and first.output is not None

    def again(self, microbatch: int, run: Callable[[], Any]) -> Any:
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
            stack.enter_context(only(self.modules, first.acting))
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
