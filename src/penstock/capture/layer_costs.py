"""Measure what the layers of a model cost: each is run alone, with what those before it have made."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, fx

from penstock.balance import Profile
from penstock.capture.cost_cuts import numbered
from penstock.capture.export import has_no_data
from penstock.capture.load_state import materialise
from penstock.capture.one_layer import Layer, LayerSetting, Measured, address_of, moved
from penstock.capture.pipe import Pipe, PipeInfo
from penstock.capture.stage_module import StageModule
from penstock.checks import check_types
from penstock.errors import CaptureError
from penstock.nest import Value


def profile_layers(
    layers: Pipe, where: Sequence[tuple[int, str]] | None, setting: LayerSetting, *, progress: bool | None = None
) -> Profile:
    """Measure the stages of a captured model, each as one layer. `where` they were cut is kept beside the costs.

    profile_layers(*capture_layers(model, (x,), {}, num_stages=8), LayerSetting((x,), {}, torch.device("cpu")))
    """
    check_types("profile_layers", CaptureError, layers=(layers, Pipe), setting=(setting, LayerSetting))
    info, stages = layers.info(), [layers.get_stage_module(k) for k in range(layers.num_stages)]
    shared = {n: stages[one.owner].get_parameter(one.name) for n, one in info.shared.items() if one.is_parameter}
    taken = {id(value): name for name, value in shared.items()}
    known: dict[object, Measured] = {}
    found: list[Measured] = []
    names = layer_names(stages)
    with kept_random_state(setting.device), _bar(progress, layers.num_stages) as advance:
        values = _Values(info, setting)
        for k, stage in enumerate(stages):
            advance(names[k])
            inputs = [values.now[wire.name] for wire in stage.inputs]
            layer = Layer(on_device(stage, setting.device), inputs, setting, info.loss_index)
            key = signature(stage)
            known[key] = known[key] if key in known else layer.measure()
            found.append(known[key])
            values.add(stage, layer.outputs(), found[k])
    rows = (
        replace(
            one.cost,
            name=names[k],
            activation_to_input=one.cost.activation_to_input + values.later[k],
            parameter_bytes=sum(p.nbytes for p in stage.parameters() if id(p) not in taken),
            output_bytes=sum(values.sizes.get(wire.name, 0) for wire in stage.outputs),
            shared=frozenset(taken[id(p)] for p in stage.parameters() if id(p) in taken),
        )
        for k, (stage, one) in enumerate(zip(stages, found, strict=True))
    )
    over = values.over_cuts()
    return Profile(
        tuple(rows),
        shared_parameters={name: value.nbytes for name, value in shared.items()},
        crossing_bytes=tuple(row[0] for row in over),
        metadata={
            "unit": "s",
            "device": str(setting.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "backward": [one.backward for one in found],
            "crossing_kept": [row[1] for row in over],
            "crossing_unsaved": [row[2] for row in over],
            "places": None if where is None else [list(place) for place in where],
        },
    )


class _Values:
    """What layers hand on, kept as long as a later one reads it."""

    def __init__(self, info: PipeInfo, setting: LayerSetting) -> None:
        self.now: dict[str, Value] = moved(info.inputs.bind(setting.args, setting.kwargs), setting.device)
        self.sizes: dict[str, int] = {}
        self.root: dict[str, str] = {}  # of a value that is a view of another one: that one
        self.source: dict[str, int] = {}
        # Values that the graph of a layer keeps, and the first such layer; they count for the layer that made them.
        self.kept: dict[str, int] = {}
        self.later: defaultdict[int, int] = defaultdict(int)  # by layer: bytes of its outputs that a later one keeps
        # Of each value that a later layer reads: the last one that does.
        self.last = {wire.name: max(wire.stages) for outputs in info.stage_outputs for wire in outputs if wire.stages}
        self.num_layers = info.num_stages

    def add(self, stage: StageModule, made: Sequence[Value], found: Measured) -> None:
        """Note what a layer made, and what its graph keeps of its inputs and outputs."""
        layer = stage.stage_index
        known = {address_of(value): name for name, value in self.now.items() if isinstance(value, Tensor)}
        for wire, value, kept in zip(stage.outputs, made, found.outputs, strict=False):
            base = known.get(address_of(value)) if isinstance(value, Tensor) else None
            self.root[wire.name] = wire.name if base is None else self.root.get(base, base)
            self.now[wire.name] = value
            self.source[wire.name] = layer
            self.sizes[wire.name] = value.nbytes if isinstance(value, Tensor) else 0
            if kept:
                self.kept.setdefault(self.root[wire.name], layer)
        for name, last in self.last.items():
            if last <= layer:
                self.now.pop(name, None)
        for wire, kept in zip(stage.inputs, found.inputs, strict=False):
            root = self.root.get(wire.name, wire.name)
            if kept and root not in self.kept and root in self.source:  # what the user gave is the user's
                self.kept[root] = layer
                self.later[self.source[root]] += self.sizes[root]

    def over_cuts(self) -> list[list[int]]:
        """For each cut between two layers: the bytes that cross it; those of them that are held as activations anyway; and those
        that the layer before it makes and no layer up to there keeps."""
        rows = []
        for cut in range(1, self.num_layers):
            names = [name for name in self.last if self.source[name] < cut <= self.last[name]]
            kept = [name for name in names if self.root[name] in self.kept]
            new = [name for name in names if cut - 1 == self.source[name] == self.source.get(self.root[name])]
            unsaved = [name for name in new if self.kept.get(self.root[name], cut) >= cut]
            rows.append([sum(self.sizes[name] for name in some) for some in (names, kept, unsaved)])
        return rows


def signature(stage: StageModule) -> object:
    """Equal for layers that do the same with tensors of the same sizes."""
    numbers: dict[fx.Node, int] = {}
    rows: list[tuple[object, ...]] = []
    for node in stage.graph.nodes:
        numbers[node] = len(numbers)
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        state = stage.tensor_named(str(node.target)) if node.op == "get_attr" else None
        does = node.op, "" if node.op == "placeholder" else str(node.target), str(arguments)
        rows.append(does if state is None else ("state", tuple(state.shape), state.dtype, state.requires_grad))
    wires = tuple((wire.shape, wire.dtype, wire.source is None) for wire in stage.inputs)
    return stage.is_last, wires, tuple(rows)


def layer_names(stages: Sequence[StageModule]) -> list[str]:
    """A name for each stage of a model that is cut in layers: the module in which it begins.

    layer_names(capture_layers(model, (x,))[0])  # ["embed", "layers.0", ...]
    """
    check_types("layer_names", CaptureError, stages=(stages, Sequence[StageModule]))
    nodes = [[node for node in stage.graph.nodes if node.op == "call_function"] for stage in stages]
    return numbered([[node.meta.get("path", "") for node in one] for one in nodes])


def on_device(stage: StageModule, device: torch.device) -> StageModule:
    """A copy that may be run and differentiated; one without data gets some."""
    made = copy.deepcopy(stage)
    if any(map(has_no_data, (*made.parameters(), *made.buffers()))):
        materialise(made, device=device, fill=lambda _, t: t.normal_(0.0, 0.02) if t.is_floating_point() else t.zero_())
    return made.to(device)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Gradients on; random numbers that are drawn here are not missing afterwards."""
    devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
    with torch.random.fork_rng(devices, device_type=kind), torch.enable_grad():
        yield


@contextmanager
def _bar(wanted: bool | None, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal; nothing anywhere else."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("profiling"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True, force_terminal=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)
