"""What the layers of a model cost: each is run alone, with what those before it have made.

    measured_budgets(layers, info, setting, [(0, 6), (6, 12)])     # {"0:6": [[0.5, 65536, 0.2], [0.0, 131072, 0.9]], ...}

A stage that torch.compile compiles keeps less, and takes longer, if the partitioner has a budget of memory for it. Each row is
a budget, the bytes that a microbatch holds less with it, and what its backward takes longer, in forwards. The layers of the
stage are compiled together, by AOTAutograd without a compiler behind it: what is kept is decided before one is asked.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx

from penstock.balance import LayerCost, Profile
from penstock.capture.cut_places import numbered
from penstock.capture.load_state import has_no_data, materialise
from penstock.capture.one_layer import Bytes, Layer, LayerSetting, Times, address_of, clock, moved, seeds
from penstock.capture.pipe import PipeInfo
from penstock.capture.stage_module import StageModule
from penstock.capture.wires import Wire
from penstock.errors import CaptureError, NotCompiled
from penstock.misfits import takes
from penstock.nest import Value
from penstock.stage.compiled import SplitBackend
from penstock.stage.cut_graph import accumulate_graphs, collecting
from penstock.stage.engine import run_engine


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
    known: dict[object, Times] = {}
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
        values.keep(stage, times.size, k)
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
            "crossing_unsaved": list(values.unsaved()),
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
        self.kept: dict[
            str, int
        ] = {}  # values that a layer's graph keeps, and the first such; they count for their maker
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

    def keep(self, stage: StageModule, size: Bytes, layer: int) -> None:
        """Note what the graph of a layer keeps of its inputs and outputs."""
        for wire, kept in zip(stage.outputs, size.outputs, strict=False):
            if kept:
                self.kept.setdefault(self.root[wire.name], layer)
        for wire, kept in zip(stage.inputs, size.inputs, strict=False):
            root = self.root.get(wire.name, wire.name)
            if kept and root not in self.kept and root in self.source:  # what the user gave is the user's
                self.kept[root] = layer
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

    def unsaved(self) -> tuple[int, ...]:
        """Bytes over each cut that the layer before it makes and that no layer up to there keeps."""
        wires = [
            (cut, wire) for cut, outputs in enumerate(self.info.stage_outputs, 1) for wire in outputs if wire.stages
        ]
        sizes = [0] * self.info.num_stages
        for cut, wire in wires:
            root = self.root[wire.name]
            if self.source.get(root) == cut - 1 and self.kept.get(root, cut) >= cut:
                sizes[cut - 1] += self.sizes[wire.name]
        return tuple(sizes[:-1])


def signature(stage: StageModule) -> object:
    """Equal for layers that do the same with tensors of the same sizes."""
    numbers: dict[fx.Node, int] = {}
    rows: list[tuple[object, ...]] = []
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
    owner: object = module
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


BUDGETS = (0.5, 0.0)
ByName = dict[str, object]


class _Compiled(NamedTuple):
    """A stage compiled with some budget: bytes that its graph keeps, and the shortest times of its passes."""

    kept: int
    forward: float
    backward: float


def measured_budgets(
    layers: Sequence[StageModule], info: PipeInfo, setting: LayerSetting, bounds: Sequence[tuple[int, int]]
) -> dict[str, list[list[float]]]:
    """By the first layer of a stage and the one after its last: a row for each budget. Equal stages are measured once."""
    found: dict[str, list[list[float]]] = {}
    known: dict[object, list[list[float]]] = {}
    with kept_random_state(setting.device):
        values = {name: moved(v, setting.device) for name, v in info.inputs.bind(setting.args, setting.kwargs).items()}
        for k, layer in enumerate(layers):
            for start, stop in bounds:
                if start == k:
                    key = tuple(map(signature, layers[start:stop]))
                    if key not in known:
                        known[key] = _rows(
                            [on_device(one, setting.device) for one in layers[start:stop]], values, setting
                        )
                    found[f"{start}:{stop}"] = known[key]
            if k < max(stop for _, stop in bounds):
                values |= _outputs(on_device(layer, setting.device), values)
    return found


def _outputs(layer: StageModule, values: ByName) -> ByName:
    """What the next layers get: leaves that say whether a gradient is wanted."""
    made = layer.run([values[wire.name] for wire in layer.inputs])
    return {
        wire.name: value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for wire, value in zip(layer.outputs, made, strict=False)
    }


def _rows(layers: Sequence[StageModule], values: ByName, setting: LayerSetting) -> list[list[float]]:
    made = {wire.name for layer in layers for wire in layer.outputs}
    names = [*dict.fromkeys(w.name for layer in layers for w in layer.inputs if w.name not in made)]
    inputs = tuple(values[name] for name in names)

    def run(given: tuple[object, ...]) -> tuple[object, ...]:
        now = dict(zip(names, given, strict=True))
        results: tuple[object, ...] = ()
        for layer in layers:
            results = layer.run([now[wire.name] for wire in layer.inputs])
            now.update(zip([wire.name for wire in layer.outputs], results, strict=False))
        return results

    state = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
    whole = _compiled(run, inputs, state, setting, None)
    rows: list[list[float]] = []
    for budget in BUDGETS if whole is not None and whole.forward > 0 else ():
        found = _compiled(run, inputs, state, setting, budget)
        if whole is not None and found is not None and found.kept < whole.kept:
            rows.append([budget, whole.kept - found.kept, max(found.backward - whole.backward, 0.0) / whole.forward])
    return rows


def _compiled(
    run: Callable[[tuple[object, ...]], object], inputs: tuple[object, ...], state: Sequence[Tensor], setting: LayerSetting,
    budget: float | None,
) -> _Compiled | None:  # fmt: skip
    """None if torch.compile does not make one graph of it."""
    backend = SplitBackend("aot_eager", memory_budget=budget)

    def call(*given: object) -> object:
        return run(given)

    call.__code__ = call.__code__.replace(co_name="call_stage")  # torch.compile keeps only so many versions of one code
    compiled = torch.compile(call, backend=backend)
    given = {address_of(tensor) for tensor in (*state, *inputs) if isinstance(tensor, Tensor)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if address_of(tensor) not in given:
            kept[address_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    try:
        with warnings.catch_warnings(action="ignore", category=NotCompiled):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                compiled(*inputs)
            passes = [_timed(compiled, inputs, setting) for _ in range(setting.repeats)]
    except Exception:  # noqa: BLE001  what cannot be compiled so is not given a budget
        return None
    finally:
        for tensor in (*state, *(v for v in inputs if isinstance(v, Tensor))):
            tensor.grad = None
    if len(backend.joints) != 1 or backend.told:
        return None
    return _Compiled(sum(kept.values()), *(min(column) for column in zip(*passes, strict=True)))


def _timed(call: Callable[..., Value], inputs: tuple[Value, ...], setting: LayerSetting) -> tuple[float, float]:
    start = clock(setting.device)
    roots, grads = seeds(call(*inputs))
    middle = clock(setting.device)
    with collecting() as work:
        if roots:
            run_engine(tuple(roots), tuple(grads))
    accumulate_graphs(work)
    return middle - start, clock(setting.device) - middle
