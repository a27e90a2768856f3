"""One layer of a model, run alone as a stage runs it: forward, input pass, weight pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from penstock.capture.module import StageModule
from penstock.stage.backward import Deferral, backward_input, backward_weight, run_deferred
from penstock.stage.engine import run_engine


@dataclass(frozen=True)
class Setting:
    """How layers are run: with what, how often, where."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., Tensor] | None
    target: Any
    repeats: int
    device: torch.device
    enough: float = 1.0  # seconds: a layer that took longer than this is not run again


@dataclass(frozen=True)
class Times:
    """Of one layer, for one microbatch: seconds and bytes."""

    forward: float
    backward_input: float
    backward_weight: float
    backward: float
    held_to_input: int
    held_to_weight: int


class Layer:
    """One layer, run alone."""

    def __init__(self, module: StageModule, inputs: Sequence[Any], setting: Setting, loss_index: int | None) -> None:
        self.module = module
        self.inputs = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in inputs]
        self.setting = setting
        self.loss_index = loss_index
        self.last: tuple[Any, ...] = ()
        self.deferral = Deferral(module)

    def call(self, *values: Any) -> tuple[Any, ...]:
        """What the backward starts from."""
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
        self._split()
        rows = []
        start = self._now()
        for _ in range(self.setting.repeats):
            rows.append((*self._split(), self._full()))
            if self._now() - start > self.setting.enough:
                break
        forward, first, second, full = (statistics.median(column) for column in zip(*rows, strict=True))
        return Times(forward, first, second, full, *self._held())

    def outputs(self) -> tuple[Any, ...]:
        """What the next layers get: leaves that say whether a gradient is wanted, and hold nothing of this layer."""
        self.call(*self.inputs)
        results, self.last = self.last, ()
        return tuple(
            value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for value in results
        )

    def _split(self) -> tuple[float, float, float]:
        start = self._now()
        results, pending = run_deferred(self.deferral, self.call, tuple(self.inputs), {})
        middle = self._now()
        roots, grads = _seeds(results)
        before = self._now()
        backward_input(roots, grads, pending, inputs=[v for v in self.inputs if isinstance(v, Tensor)])
        after = self._now()
        backward_weight(pending)
        end = self._now()
        self._forget()
        return middle - start, after - before, end - after

    def _full(self) -> float:
        roots, grads = _seeds(self.call(*self.inputs))
        start = self._now()
        if roots:
            run_engine(tuple(roots), tuple(grads))
        end = self._now()
        self._forget()
        return end - start

    def _forget(self) -> None:
        self.last = ()
        for tensor in (*self.module.parameters(), *(v for v in self.inputs if isinstance(v, Tensor))):
            tensor.grad = None

    def _now(self) -> float:
        if self.setting.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _held(self) -> tuple[int, int]:
        """Bytes kept for the backward: to the input pass, and of these what the weight pass needs."""
        owned = {t.untyped_storage().data_ptr() for t in (*self.module.parameters(), *self.module.buffers())}
        taken = {v.untyped_storage().data_ptr() for v in self.inputs if isinstance(v, Tensor)}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            results = self.call(*self.inputs)
        if not self.module.is_last:
            for value in results:
                if isinstance(value, Tensor):
                    keep(value)
        held = sum(size for address, size in kept.items() if address not in owned | taken)
        self.last = ()
        return held, min(held, _deferred_bytes(self.module, self.inputs))


def _deferred_bytes(module: StageModule, inputs: Sequence[Any]) -> int:
    """Rows in and gradients out of every linear layer, which wait for the weight pass."""
    sizes = []

    class Count(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            if node.op == "call_function" and "linear" in str(node.target) and isinstance(result, Tensor):
                rows = self.map_nodes_to_values(node.args[0], node)
                sizes.append(result.nbytes + (rows.nbytes if isinstance(rows, Tensor) else 0))
            return result

    graph = module.graph
    if any(node.op == "get_attr" and not is_state(module, str(node.target)) for node in graph.nodes):
        return 0  # regions with bodies of their own: not looked into
    with torch.no_grad():
        Count(module, graph=graph).run(*inputs)
    return sum(sizes)


def is_state(module: StageModule, name: str) -> bool:
    owner: Any = module
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return isinstance(owner, Tensor)


def _seeds(results: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    roots = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
    return roots, [torch.ones_like(value) for value in roots]


def moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
