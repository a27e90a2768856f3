"""What the layers of a model cost: each is run alone, with what those before it have made."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from penstock.balance import LayerCost, Profile
from penstock.capture.cut_places import numbered
from penstock.capture.load_state import has_no_data, materialise
from penstock.capture.one_layer import Bytes, Layer, LayerSetting, Times, address_of, moved
from penstock.capture.pipe_info import PipeInfo
from penstock.capture.stage_module import StageModule
from penstock.capture.wires import Wire
from penstock.errors import CaptureError
from penstock.misfits import takes
from penstock.nest import Value


def measure(
    stages: Sequence[StageModule],
    info: PipeInfo,
    *,
    setting: LayerSetting,
    advance: Callable[[str], None],
    metadata: Mapping[str, object],
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
        layer = Layer(on_device(stage, setting.device), values.of(stage.inputs), setting, info.loss_index)
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
                cast_bytes=times.size.cast_bytes,
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

    def of(self, wires: Sequence[Wire]) -> list[Value]:
        return [self.now[wire.name] for wire in wires]

    def add(self, wires: Sequence[Wire], made: Sequence[Value], layer: int) -> None:
        known = {address_of(value): name for name, value in self.now.items() if isinstance(value, Tensor)}
        for wire, value in zip(wires, made, strict=False):
            base = known.get(address_of(value)) if isinstance(value, Tensor) else None
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


def _state(module: StageModule, name: str) -> Tensor | None:
    """The parameter or buffer of that name; None for what is none."""
    owner: Any = module
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner if isinstance(owner, Tensor) else None


@takes(CaptureError)
def layer_names(stages: Sequence[StageModule]) -> list[str]:
    """A name for each stage of a model that is cut in layers: the module in which it begins.

    layer_names(capture_layers(model, (x,))[0])  # ["embed", "layers.0", ...]
    """
    return numbered(
        [[n.meta.get("path", "") for n in stage.graph.nodes if n.op == "call_function"] for stage in stages]
    )


def on_device(stage: StageModule, device: torch.device) -> StageModule:
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
