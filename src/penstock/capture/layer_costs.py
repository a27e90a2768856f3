"""One layer of a model, run alone as a stage runs it: forward, input pass, weight pass."""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from penstock.balance import LayerCost, Profile
from penstock.capture.cut_places import numbered
from penstock.capture.load_state import has_no_data, materialise
from penstock.capture.pipe_info import PipeInfo
from penstock.capture.stage_module import StageModule
from penstock.capture.wires import Wire
from penstock.nest import tensors_in
from penstock.stage.backward import Deferral, backward_input, backward_weight, run_deferred
from penstock.stage.engine import run_engine
from penstock.stage.held import Held
from penstock.stage.offload import THRESHOLD


@dataclass(frozen=True)
class LayerSetting:
    """How layers are run: with what, how often, where."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., Tensor] | None
    target: Any
    repeats: int
    device: torch.device
    enough: float = 1.0  # seconds: a layer that took longer than this is not run again


class Bytes(NamedTuple):
    """Of one layer, for one microbatch; as in `LayerCost`."""

    activation_to_input: int
    activation_to_weight: int
    forward_peak: int
    backward_peak: int
    input_peak: int
    weight_peak: int
    unmoved: int
    inputs: tuple[bool, ...]  # which of them its graph keeps
    outputs: tuple[bool, ...]


class Times(NamedTuple):
    """Of one layer, for one microbatch: seconds, and bytes."""

    forward: float
    backward_input: float
    backward_weight: float
    backward: float
    size: Bytes


class Layer:
    """One layer, run alone."""

    def __init__(
        self, module: StageModule, inputs: Sequence[Any], setting: LayerSetting, loss_index: int | None
    ) -> None:
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
        self._run()
        rows = []
        start = self._now()
        for _ in range(self.setting.repeats):
            rows.append(self._run())
            if self._now() - start > self.setting.enough:
                break
        forward, first, second, full = (statistics.median(column) for column in zip(*rows, strict=True))
        return Times(forward, first, second, full, self._bytes())

    def outputs(self) -> tuple[Any, ...]:
        """What the next layers get: leaves that say whether a gradient is wanted, and hold nothing of this layer."""
        self.call(*self.inputs)
        results, self.last = self.last, ()
        return tuple(
            value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
            for value in results
        )

    def _run(self) -> tuple[float, float, float, float]:
        """Seconds of the forward, of both passes of a split backward, and of a full one."""
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
        roots, grads = _seeds(self.call(*self.inputs))
        again = self._now()
        if roots:
            run_engine(tuple(roots), tuple(grads))
        full = self._now() - again
        self._forget()
        return middle - start, after - before, end - after, full

    def _forget(self) -> None:
        self.last = ()
        for tensor in (*self.module.parameters(), *(v for v in self.inputs if isinstance(v, Tensor))):
            tensor.grad = None

    def _now(self) -> float:
        if self.setting.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

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
            roots, grads = _seeds(results)
            made = held.most = held.now
            if roots:
                run_engine(tuple(roots), tuple(grads))
            backward_peak = held.most - made
            self.last, roots, grads, results, given = (), [], [], (), self._fresh()
            results, pending = run_deferred(self.deferral, self.call, given, {})
            roots, grads = _seeds(results)
            made = held.most = held.now
            backward_input(roots, grads, pending, inputs=[v for v in given if isinstance(v, Tensor)])
            input_peak = held.most - made
            self.last, roots, grads, results, given = (), [], [], (), ()
            waiting = held.most = held.now
            backward_weight(pending)
            weight_peak = held.most - waiting
        self._forget()
        peaks = forward_peak, backward_peak, input_peak, weight_peak
        return Bytes(saved.size, waiting, *peaks, saved.small, saved.inputs, saved.outputs)

    def _fresh(self) -> tuple[Any, ...]:
        """The inputs in memory of their own."""
        return tuple(
            v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in self.inputs
        )


class _Saved:
    """What the graph of one forward keeps: bytes of its own, and which of its inputs and outputs."""

    def __init__(self, layer: Layer) -> None:
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[_address(tensor)] = tensor.detach()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer.call(*layer.inputs)
        self.inputs = tuple(isinstance(v, Tensor) and _address(v) in kept for v in layer.inputs)
        self.outputs = tuple(isinstance(v, Tensor) and _address(v) in kept for v in layer.last)
        state = (*layer.module.parameters(), *layer.module.buffers())
        given = tensors_in((layer.inputs, layer.setting.target))  # what the user gave for the loss is the user's
        others = {_address(tensor) for tensor in (*state, *given)}
        sizes = [tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in others]
        self.size = sum(sizes)
        self.small = sum(size for size in sizes if size < THRESHOLD)
        layer.last = ()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _state(module: StageModule, name: str) -> Tensor | None:
    """The parameter or buffer of that name; None for what is none."""
    owner: Any = module
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner if isinstance(owner, Tensor) else None


def _seeds(results: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    roots = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
    return roots, [torch.ones_like(value) for value in roots]


def moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def measure(
    stages: Sequence[StageModule],
    info: PipeInfo,
    *,
    setting: LayerSetting,
    advance: Callable[[str], None],
    metadata: Mapping[str, Any],
) -> Profile:
    """The costs of the stages, each as one layer; `advance` is told the name of each before it is run."""
    shared = {
        name: stages[entry.owner].get_parameter(entry.name) for name, entry in info.shared.items() if entry.is_parameter
    }
    taken = {id(value): name for name, value in shared.items()}
    names = layer_names(stages)
    values = _Values(info, setting)
    known: dict[Any, Times] = {}
    rows: list[LayerCost] = []
    full: list[float] = []
    for k, stage in enumerate(stages):
        advance(names[k])
        layer = Layer(_on_device(stage, setting.device), values.of(stage.inputs), setting, info.loss_index)
        key = signature(stage)
        if key not in known:
            known[key] = layer.measure()
        times = known[key]
        values.add(stage.outputs, layer.outputs(), k)
        values.keep(stage, times.size)
        parameters = {id(p): p for p in stage.parameters()}
        rows.append(
            LayerCost(
                names[k],
                times.forward,
                times.backward_input,
                times.backward_weight,
                activation_to_input=times.size.activation_to_input,
                activation_to_weight=times.size.activation_to_weight,
                forward_peak=times.size.forward_peak,
                backward_peak=times.size.backward_peak,
                input_peak=times.size.input_peak,
                weight_peak=times.size.weight_peak,
                unmoved=times.size.unmoved,
                parameter_bytes=sum(p.nbytes for i, p in parameters.items() if i not in taken),
                output_bytes=sum(values.sizes.get(wire.name, 0) for wire in stage.outputs),
                shared=frozenset(taken[i] for i in parameters if i in taken),
            )
        )
        full.append(times.backward)
    rows = [replace(row, activation_to_input=row.activation_to_input + values.later[k]) for k, row in enumerate(rows)]
    return Profile(
        tuple(rows),
        shared_parameters={name: value.nbytes for name, value in shared.items()},
        crossing_bytes=values.crossing(),
        metadata={
            "unit": "s",
            "device": str(setting.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "backward": full,
            "crossing_kept": list(values.crossing(kept=True)),
            **metadata,
        },
    )


class _Values:
    """What layers hand on, kept as long as a later one reads it."""

    def __init__(self, info: PipeInfo, setting: LayerSetting) -> None:
        self.info = info
        self.now = {
            name: moved(value, setting.device) for name, value in info.inputs.bind(setting.args, setting.kwargs).items()
        }
        self.sizes: dict[str, int] = {}
        self.root: dict[str, str] = {}  # of a value that is a view of another one: that one
        self.source: dict[str, int] = {}
        self.kept: set[str] = set()  # values that some layer's graph keeps: they count for the layer that made them
        self.later: defaultdict[int, int] = defaultdict(int)  # by layer: bytes of its outputs that a later one keeps
        self.last = {wire.name: max(wire.stages) for outputs in info.stage_outputs for wire in outputs if wire.stages}

    def of(self, wires: Sequence[Wire]) -> list[Any]:
        return [self.now[wire.name] for wire in wires]

    def add(self, wires: Sequence[Wire], made: Sequence[Any], layer: int) -> None:
        known = {_address(value): name for name, value in self.now.items() if isinstance(value, Tensor)}
        for wire, value in zip(wires, made, strict=False):
            base = known.get(_address(value)) if isinstance(value, Tensor) else None
            self.root[wire.name] = wire.name if base is None else self.root.get(base, base)
            self.now[wire.name] = value
            self.source[wire.name] = layer
            self.sizes[wire.name] = value.nbytes if isinstance(value, Tensor) else 0
        for name, last in self.last.items():
            if last <= layer:
                self.now.pop(name, None)

    def keep(self, stage: StageModule, size: Bytes) -> None:
        """Note what the graph of a layer keeps of its inputs and outputs."""
        self.kept |= {self.root[w.name] for w, kept in zip(stage.outputs, size.outputs, strict=False) if kept}
        for wire, kept in zip(stage.inputs, size.inputs, strict=False):
            root = self.root.get(wire.name, wire.name)
            if kept and root not in self.kept and root in self.source:  # what the user gave is the user's
                self.kept.add(root)
                self.later[self.source[root]] += self.sizes[root]

    def crossing(self, *, kept: bool = False) -> tuple[int, ...]:
        """Bytes over each cut between two layers; or of those what is held as activations anyway."""
        wires = [wire for outputs in self.info.stage_outputs for wire in outputs if wire.stages]
        if kept:
            wires = [wire for wire in wires if self.root[wire.name] in self.kept]
        return tuple(
            sum(self.sizes[w.name] for w in wires if w.source is not None and w.source < cut <= max(w.stages))
            for cut in range(1, self.info.num_stages)
        )


def signature(stage: StageModule) -> Any:
    """Equal for layers that do the same with tensors of the same sizes."""
    numbers: dict[fx.Node, int] = {}
    rows: list[tuple[Any, ...]] = []
    for node in stage.graph.nodes:
        numbers[node] = len(numbers)
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        state = _state(stage, str(node.target)) if node.op == "get_attr" else None
        if state is not None:
            rows.append(("state", tuple(state.shape), state.dtype, state.requires_grad))
        else:
            rows.append((node.op, "" if node.op == "placeholder" else str(node.target), str(arguments)))
    wires = tuple((wire.shape, wire.dtype, wire.source is None) for wire in stage.inputs)
    return stage.is_last, wires, tuple(rows)


def layer_names(stages: Sequence[StageModule]) -> list[str]:
    """A name for each stage of a model that is cut in layers: the module in which it begins.

    layer_names(capture_layers(model, (x,))[0])  # ["embed", "layers.0", ...]
    """
    return numbered(
        [[n.meta.get("path", "") for n in stage.graph.nodes if n.op == "call_function"] for stage in stages]
    )


def _on_device(stage: StageModule, device: torch.device) -> StageModule:
    """A copy that may be run and differentiated; one without data gets some."""
    made = copy.deepcopy(stage)
    if any(map(has_no_data, (*made.parameters(), *made.buffers()))):
        materialise(made, None, device=device, fill=_something)
    return made.to(device)


def _something(name: str, tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.normal_(0.0, 0.02) if tensor.is_floating_point() else tensor.zero_()


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Gradients on; random numbers that are drawn here are not missing afterwards."""
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type),
        torch.enable_grad(),
    ):
        yield
