"""One layer of a model, run alone as a stage runs it: forward, input pass, weight pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.capture.stage_module import StageModule
from penstock.nest import Value, tensors_in
from penstock.stage.backward import Deferral, backward_input, backward_weight, run_deferred
from penstock.stage.elsewhere import THRESHOLD
from penstock.stage.engine import run_engine
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


class Bytes(NamedTuple):
    """What one layer holds for one microbatch; the names are those of `LayerCost`."""

    activation_to_input: int
    activation_to_weight: int
    forward_peak: int
    backward_peak: int
    input_peak: int
    weight_peak: int
    unmoved: int
    cast_bytes: int
    inputs: tuple[bool, ...]  # which of them its graph keeps
    outputs: tuple[bool, ...]


class Times(NamedTuple):
    """What one layer takes for one microbatch, in seconds, and what it holds."""

    forward: float
    backward_input: float
    backward_weight: float
    backward: float
    size: Bytes


class Layer:
    """One layer, run alone."""

    def __init__(
        self, module: StageModule, inputs: Sequence[Value], setting: LayerSetting, loss_index: int | None
    ) -> None:
        self.module = module
        self.inputs = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in inputs]
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
            return (loss_fn(self.module.build_output(results), moved(target, self.setting.device)),)
        return results

    def measure(self) -> Times:
        self._run()
        rows = []
        start = clock(self.setting.device)
        for _ in range(self.setting.repeats):
            rows.append(self._run())
            if clock(self.setting.device) - start > self.setting.enough:
                break
        forward, first, second, full = (statistics.median(column) for column in zip(*rows, strict=True))
        return Times(forward, first, second, full, self._bytes())

    def outputs(self) -> tuple[Value, ...]:
        """What the next layers get: leaves that say whether a gradient is wanted, and hold nothing of this layer."""
        self.call(*self.inputs)
        results, self.last = self.last, ()
        return tuple(
            value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for value in results
        )

    def _run(self) -> tuple[float, float, float, float]:
        """Seconds of the forward, of both passes of a split backward, and of a full one."""
        start = clock(self.setting.device)
        results, pending = run_deferred(self.deferral, self.call, tuple(self.inputs), {})
        middle = clock(self.setting.device)
        roots, grads = seeds(results)
        before = clock(self.setting.device)
        backward_input(roots, grads, pending, inputs=[v for v in self.inputs if isinstance(v, Tensor)])
        after = clock(self.setting.device)
        backward_weight(pending)
        end = clock(self.setting.device)
        self._forget()
        roots, grads = seeds(self.call(*self.inputs))
        again = clock(self.setting.device)
        if roots:
            run_engine(tuple(roots), tuple(grads))
        full = clock(self.setting.device) - again
        self._forget()
        return middle - start, after - before, end - after, full

    def _forget(self) -> None:
        self.last = ()
        for tensor in (*self.module.parameters(), *(v for v in self.inputs if isinstance(v, Tensor))):
            tensor.grad = None

    def _bytes(self) -> Bytes:
        """What one microbatch holds, counted as a stage runs. What a layer is given belongs to the layer that made it."""
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)  # gradients have their memory before the first microbatch
        saved = _Saved(self)
        with Held() as held:
            given = self._fresh()
            taken = held.now
            results = self.call(*given)
            forward_peak = held.most - taken
            roots, grads = seeds(results)
            made = held.most = held.now
            if roots:
                run_engine(tuple(roots), tuple(grads))
            backward_peak = held.most - made
            self.last, roots, grads, results, given = (), [], [], (), self._fresh()
            results, pending = run_deferred(self.deferral, self.call, given, {})
            roots, grads = seeds(results)
            made = held.most = held.now
            backward_input(roots, grads, pending, inputs=[v for v in given if isinstance(v, Tensor)])
            input_peak = held.most - made
            self.last, roots, grads, results, given = (), [], [], (), ()
            waiting = held.most = held.now
            backward_weight(pending)
            weight_peak = held.most - waiting
        self._forget()
        peaks = forward_peak, backward_peak, input_peak, weight_peak
        return Bytes(saved.size, waiting, *peaks, saved.small, saved.casts, saved.inputs, saved.outputs)

    def _fresh(self) -> tuple[object, ...]:
        """The inputs in memory of their own."""
        return tuple(
            v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in self.inputs
        )


class _Saved:
    """What the graph of one forward keeps: bytes of its own, and which of its inputs and outputs."""

    def __init__(self, layer: Layer) -> None:
        kept = _saved(layer)
        self.inputs = tuple(isinstance(v, Tensor) and address_of(v) in kept for v in layer.inputs)
        self.outputs = tuple(isinstance(v, Tensor) and address_of(v) in kept for v in layer.last)
        state = (*layer.module.parameters(), *layer.module.buffers())
        users = tensors_in((layer.inputs, layer.setting.target))  # what the user gave for the loss is the user's
        others = {address_of(tensor) for tensor in (*state, *users)}
        # What the next forward keeps too is kept for all of them: casts of parameters, by autocast.
        casts = kept.keys() & _saved(layer).keys() - others if layer.casts else set()
        self.casts = sum(kept[place].untyped_storage().nbytes() for place in casts)
        sizes = [t.untyped_storage().nbytes() for place, t in kept.items() if place not in others | casts]
        self.size = sum(sizes)
        self.small = sum(size for size in sizes if size < THRESHOLD)
        layer.last = ()


def _saved(layer: Layer) -> dict[int, Tensor]:
    """What a forward saves, by its address."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[address_of(tensor)] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer.call(*layer.inputs)
    return kept


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


def moved(value: object, device: torch.device) -> Value:
    return value.to(device) if isinstance(value, Tensor) else value
