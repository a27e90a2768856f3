"""What the pieces of a cut model cost: each is run alone, on a copy of its tensors. Pieces that are alike are run once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from penstock.balance import LayerCost, Profile
from penstock.capture.cuts import numbered
from penstock.capture.info import PipeInfo
from penstock.capture.layer import Layer, Setting, Times, is_state, moved
from penstock.capture.load import has_no_data, materialise
from penstock.capture.module import StageModule
from penstock.capture.wires import Wire


def measure(
    stages: Sequence[StageModule],
    info: PipeInfo,
    *,
    setting: Setting,
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
        parameters = {id(p): p for p in stage.parameters()}
        rows.append(
            LayerCost(
                names[k],
                times.forward,
                times.backward_input,
                times.backward_weight,
                activation_to_input=times.held_to_input,
                activation_to_weight=times.held_to_weight,
                parameter_bytes=sum(p.nbytes for i, p in parameters.items() if i not in taken),
                output_bytes=sum(values.sizes.get(wire.name, 0) for wire in stage.outputs),
                shared=frozenset(taken[i] for i in parameters if i in taken),
            )
        )
        full.append(times.backward)
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
            **metadata,
        },
    )


class _Values:
    """What layers hand on, kept as long as a later one reads it."""

    def __init__(self, info: PipeInfo, setting: Setting) -> None:
        self.info = info
        self.now = {
            name: moved(value, setting.device) for name, value in info.inputs.bind(setting.args, setting.kwargs).items()
        }
        self.sizes: dict[str, int] = {}
        self.last = {wire.name: max(wire.stages) for outputs in info.stage_outputs for wire in outputs if wire.stages}

    def of(self, wires: Sequence[Wire]) -> list[Any]:
        return [self.now[wire.name] for wire in wires]

    def add(self, wires: Sequence[Wire], made: Sequence[Any], layer: int) -> None:
        for wire, value in zip(wires, made, strict=False):
            self.now[wire.name] = value
            self.sizes[wire.name] = value.nbytes if isinstance(value, Tensor) else 0
        for name, last in self.last.items():
            if last <= layer:
                self.now.pop(name, None)

    def crossing(self) -> tuple[int, ...]:
        """Bytes over each cut between two layers."""
        wires = [wire for outputs in self.info.stage_outputs for wire in outputs if wire.stages]
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
        if node.op == "get_attr" and is_state(stage, str(node.target)):
            state = _state(stage, str(node.target))
            rows.append(("state", tuple(state.shape), state.dtype, state.requires_grad))
        else:
            rows.append((node.op, "" if node.op == "placeholder" else str(node.target), str(arguments)))
    wires = tuple((wire.shape, wire.dtype, wire.source is None) for wire in stage.inputs)
    return stage.is_last, wires, tuple(rows)


def _state(stage: StageModule, name: str) -> Tensor:
    owner: Any = stage
    for part in name.split("."):
        owner = getattr(owner, part)
    assert isinstance(owner, Tensor)
    return owner


def layer_names(stages: Sequence[StageModule]) -> list[str]:
    """A name for each stage of a model that is cut in layers: the module in which it begins."""
    return numbered([[node.meta.get("path", "") for node in _calls(stage.graph)] for stage in stages])


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


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
