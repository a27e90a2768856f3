"""One layer of a model, run alone as a stage runs it: forward, input pass, weight pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.backward.offload_targets import THRESHOLD
from penstock.balance import LayerCost
from penstock.capture.stage_module import StageModule
from penstock.nest import Value, map_tensors, tensors_in
from penstock.stage.backward import Deferral, backward_input, backward_weight, run_backward_full, run_deferred
from penstock.stage.held import Held


@dataclass(frozen=True)
class LayerSetting:
    """How layers are run: with what, where, how often.

    LayerSetting((x,), {}, torch.device("cpu"), repeats=3)
    """

    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    device: torch.device
    loss_fn: Callable[..., Tensor] | None = None
    target: Value = None
    repeats: int = 5
    enough: float = 1.0  # seconds: a layer that took longer than this is not run again


class Measured(NamedTuple):
    """What one layer costs for one microbatch, in seconds and bytes."""

    cost: LayerCost  # without a name, and without what can be read off the layer
    backward: float  # in one piece
    inputs: tuple[bool, ...]  # which of them its graph keeps
    outputs: tuple[bool, ...]


class Layer:
    """One layer, run alone."""

    def __init__(
        self, module: StageModule, inputs: Sequence[Value], setting: LayerSetting, loss_index: int | None
    ) -> None:
        self.module = module
        self.inputs = [as_leaf(value) for value in inputs]
        self.setting = setting
        self.loss_index = loss_index
        self.last: tuple[Value, ...] = ()
        self.deferral = Deferral(module)
        self.casts = torch.is_autocast_cache_enabled() and torch.is_autocast_enabled(setting.device.type)

    def call(self, *values: Value) -> tuple[Value, ...]:
        """What the backward starts from."""
        if self.casts:  # autocast keeps casts of leaves; inside a stage no layer is given one
            values = tuple(v.view_as(v) if isinstance(v, Tensor) and v.requires_grad else v for v in values)
        results = self.last = self.module.run(values)
        if not self.module.is_last:
            return results
        loss_fn, target = self.setting.loss_fn, self.setting.target
        if self.loss_index is not None and loss_fn is None:
            return ([value for value in results if isinstance(value, Tensor)][self.loss_index],)
        if loss_fn is not None and target is not None:
            return (loss_fn(self.module.model_output(values, results), moved(target, self.setting.device)),)
        return results

    def measure(self) -> Measured:
        self._times()
        rows, start = [self._times()], clock(self.setting.device)
        while len(rows) < self.setting.repeats and clock(self.setting.device) - start <= self.setting.enough:
            rows.append(self._times())
        forward, first, second, full = (statistics.median(column) for column in zip(*rows, strict=True))
        kept = saved_by(lambda: self.call(*self.inputs))
        seen = [
            [isinstance(v, Tensor) and address_of(v) in kept for v in values] for values in (self.inputs, self.last)
        ]
        state = (*self.module.parameters(), *self.module.buffers())
        users = tensors_in((self.inputs, self.setting.target))  # what the user gave for the loss is the user's
        others = {address_of(tensor) for tensor in (*state, *users)}
        # What the next forward keeps too is kept for all of them: casts of parameters, by autocast.
        again = saved_by(lambda: self.call(*self.inputs)).keys() if self.casts else set()
        casts = kept.keys() & again - others
        sizes = {place: tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in others}
        own = [size for place, size in sizes.items() if place not in casts]
        small = sum(size for size in own if size < THRESHOLD)
        cast_bytes = sum(sizes[place] for place in casts)
        del kept
        cost = LayerCost("", forward, first, second, sum(own), *self._bytes(), small, cast_bytes)
        return Measured(cost, full, *map(tuple, seen))

    def outputs(self) -> tuple[Value, ...]:
        """What the next layers get: leaves that say whether a gradient is wanted, and hold nothing of this layer."""
        self.call(*self.inputs)
        results, self.last = self.last, ()
        return tuple(map(as_leaf, results))

    def _passes(self, inputs: Callable[[], tuple[Value, ...]]) -> Iterator[None]:
        """One microbatch with a split backward, then one with a backward in one piece, as a stage runs them.

        Pauses before and after each of five passes: forward, input pass, weight pass; forward, backward.
        """
        given = inputs()
        yield
        results, pending = run_deferred(self.deferral, self.call, given, {})
        yield
        roots, grads = seeds(results)
        yield
        backward_input(roots, grads, pending, inputs=[v for v in given if isinstance(v, Tensor)])
        yield
        self.last, roots, grads, results, given = (), [], [], (), ()
        yield
        backward_weight(pending)
        yield
        given = inputs()
        yield
        results = self.call(*given)
        yield
        roots, grads = seeds(results)
        yield
        run_backward_full(roots, grads)
        yield

    def _times(self) -> tuple[float, float, float, float]:
        """Seconds of the forward, of both passes of a split backward, and of a full one."""
        at = [clock(self.setting.device) for _ in self._passes(self._forget)]
        self._forget()
        return at[1] - at[0], at[3] - at[2], at[5] - at[4], at[9] - at[8]

    def _bytes(self) -> tuple[int, int, int, int, int]:
        """What the passes of one microbatch hold: between the two of a split backward, and at the most in a forward, in a full
        backward and in these two. What a layer is given belongs to the layer that made it."""
        self.last = ()
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)  # gradients have their memory before the first microbatch
        now, most = [], []
        with Held() as held:
            for _ in self._passes(
                lambda: tuple(as_leaf(v.clone()) if isinstance(v, Tensor) else v for v in self.inputs)
            ):
                now.append(held.now)
                most.append(held.most)
                held.most = held.now
        self._forget()
        return now[4], most[7] - now[6], most[9] - now[8], most[3] - now[2], most[5] - now[4]

    def _forget(self) -> tuple[Value, ...]:
        """Let go of results and gradients, so that the inputs, which come back, are as they were."""
        self.last = ()
        for tensor in (*self.module.parameters(), *(v for v in self.inputs if isinstance(v, Tensor))):
            tensor.grad = None
        return tuple(self.inputs)


def saved_by(call: Callable[[], object]) -> dict[int, Tensor]:
    """What the graph of a forward keeps, by its address."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[address_of(tensor)] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return kept


def as_leaf(value: Value) -> Value:
    """A tensor without its history, which still says whether a gradient is wanted; other values as they are."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def clock(device: torch.device) -> float:
    """The time in seconds, when the device has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def address_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def seeds(results: Sequence[object]) -> tuple[list[Tensor], list[Tensor]]:
    roots = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
    return roots, [torch.ones_like(value) for value in roots]


def moved(value: Value, device: torch.device) -> Value:
    return map_tensors(lambda tensor: tensor.to(device), value)
