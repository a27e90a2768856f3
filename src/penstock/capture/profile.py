"""What each layer of a model costs, measured.

    profile = penstock.profile(model, (tokens,))
    profile.save("profile.json")
    print(penstock.balance.balance(profile, 4))

A layer here is what lies between two places where the model can be cut with little crossing. Each is run alone, on a
copy of its tensors: forward, then the input pass and the weight pass of its backward, as a stage runs them. Layers that
are alike are measured once.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from penstock.balance import LayerCost, Profile
from penstock.capture.cuts import cut_places
from penstock.capture.flat import Flat
from penstock.capture.load import materialise
from penstock.capture.module import StageModule
from penstock.capture.pipe import Pipe
from penstock.capture.pipeline import pipeline
from penstock.errors import CaptureError
from penstock.stage.backward import Deferral, backward_input, backward_weight, run_deferred
from penstock.stage.engine import run_engine

ENOUGH = 1.0  # seconds: a layer that is slower than this is not measured again


def profile(
    model: torch.nn.Module,
    example: tuple[Any, ...] = (),
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    num_stages: int = 8,
    repeats: int = 5,
    device: torch.device | str | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Profile:
    """Measure the layers of a model.

        profile = penstock.profile(model, (tokens,), loss_fn=loss, target=labels)

    `example` is one microbatch. With `loss_fn` and `target` the loss counts as a part of the last layer. `num_stages`
    is the largest number of stages that the profile must be good for: the model is looked at in finer pieces if need be.
    Times are medians of `repeats` runs after a warm-up, in seconds. A bar shows the progress on a terminal (`progress`:
    always or never). The model, its gradients and the random state stay as they are. `options` go to the capture.
    """
    if repeats < 1:
        raise CaptureError(f"repeats={repeats}; expected at least 1")
    layers, where = capture_layers(model, example, example_kwargs, num_stages=num_stages, **options)
    return profile_layers(
        layers,
        where,
        args=example,
        kwargs=dict(example_kwargs or {}),
        loss_fn=loss_fn,
        target=target,
        repeats=repeats,
        device=torch.device(device) if device is not None else _device_of(model),
        progress=progress,
    )


def profile_layers(
    layers: Pipe,
    where: Sequence[tuple[int, str]] | None,
    *,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    repeats: int = 5,
    device: torch.device,
    progress: bool | None = None,
) -> Profile:
    """Measure the stages of a captured model, each as one layer. `where` they were cut is kept beside the costs."""
    setting = _Setting(args, dict(kwargs), loss_fn, target, repeats, device)
    with _kept_random_state(device), _bar(progress, layers.num_stages) as advance:
        return _measure(layers, where, setting, advance)


def capture_layers(
    model: torch.nn.Module,
    example: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None,
    *,
    num_stages: int,
    **options: Any,
) -> tuple[Pipe, tuple[tuple[int, str], ...]]:
    """The model cut at every good place, and the places: (position, name of the operator there)."""
    found: list[tuple[int, str]] = []

    def everywhere(flat: Flat, _: int) -> list[int]:
        chosen = cut_places(flat, num_stages)
        found[:] = [(place, flat.nodes[place].name) for place in chosen]
        return chosen

    pipe = pipeline(model, example, example_kwargs, num_stages=num_stages, choose_cuts=everywhere, **options)
    return pipe, tuple(found)


def cuts_at(where: Sequence[tuple[int, str]]) -> Callable[[Flat, int], list[int]]:
    """For `pipeline`: cut at these places, found on another rank in the same model."""

    def choose(flat: Flat, _: int) -> list[int]:
        for place, name in where:
            here = flat.nodes[place].name if place < len(flat.nodes) else "nothing"
            if here != name:
                raise CaptureError(
                    f"this rank's model has {here} as operator {place}, rank 0's has {name}: the models differ; "
                    "build the same model on every rank"
                )
        return [place for place, _ in where]

    return choose


@dataclass(frozen=True)
class _Setting:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., Tensor] | None
    target: Any
    repeats: int
    device: torch.device


@dataclass(frozen=True)
class _Times:
    forward: float
    backward_input: float
    backward_weight: float
    backward: float
    held_to_input: int
    held_to_weight: int


def _measure(
    pipe: Pipe, where: Sequence[tuple[int, str]] | None, setting: _Setting, advance: Callable[[str], None]
) -> Profile:
    info = pipe.info()
    shared = {
        name: pipe.get_stage_module(entry.owner).get_parameter(entry.name)
        for name, entry in info.shared.items()
        if entry.is_parameter
    }
    taken = {id(value): name for name, value in shared.items()}
    given = info.inputs.bind(setting.args, setting.kwargs)
    values: dict[str, Any] = {name: _moved(value, setting.device) for name, value in given.items()}
    names = layer_names([pipe.get_stage_module(k) for k in range(pipe.num_stages)])
    known: dict[Any, _Times] = {}
    rows: list[LayerCost] = []
    full: list[float] = []
    for k in range(pipe.num_stages):
        stage = pipe.get_stage_module(k)
        advance(names[k])
        own = _on_device(stage, setting.device)
        inputs = [values[wire.name] for wire in stage.inputs]
        layer = _Layer(own, inputs, setting, info.loss_index)
        key = signature(stage)
        if key not in known:
            known[key] = layer.measure()
        times = known[key]
        values |= zip([wire.name for wire in stage.outputs], layer.outputs(), strict=False)
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
                output_bytes=sum(_bytes(values.get(wire.name)) for wire in stage.outputs),
                shared=frozenset(taken[i] for i in parameters if i in taken),
            )
        )
        full.append(times.backward)
    wires = [wire for outputs in info.stage_outputs for wire in outputs if wire.stages]
    crossing = tuple(
        sum(_bytes(values.get(w.name)) for w in wires if w.source is not None and w.source < cut <= max(w.stages))
        for cut in range(1, pipe.num_stages)
    )
    return Profile(
        tuple(rows),
        shared_parameters={name: value.nbytes for name, value in shared.items()},
        crossing_bytes=crossing,
        metadata={
            "unit": "s",
            "device": str(setting.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "backward": full,
            "places": None if where is None else [list(place) for place in where],
        },
    )


class _Layer:
    """One layer, run alone."""

    def __init__(self, module: StageModule, inputs: Sequence[Any], setting: _Setting, loss_index: int | None) -> None:
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
            return (loss_fn(self.module.build_output(results), _moved(target, self.setting.device)),)
        return results

    def measure(self) -> _Times:
        self._split()
        rows = []
        for _ in range(self.setting.repeats):
            rows.append((*self._split(), self._full()))
            if sum(rows[-1]) > ENOUGH:
                break
        forward, first, second, full = (statistics.median(column) for column in zip(*rows, strict=True))
        return _Times(forward, first, second, full, *self._held())

    def outputs(self) -> tuple[Any, ...]:
        """What the next layers get, with what requires grad said on each."""
        self.call(*self.inputs)
        results, self.last = self.last, ()
        return results

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
    if any(node.op == "get_attr" and not _is_state(module, str(node.target)) for node in graph.nodes):
        return 0  # regions with bodies of their own: not looked into
    with torch.no_grad():
        Count(module, graph=graph).run(*inputs)
    return sum(sizes)


def _is_state(module: StageModule, name: str) -> bool:
    owner: Any = module
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return isinstance(owner, Tensor)


def signature(stage: StageModule) -> Any:
    """Equal for layers that do the same with tensors of the same sizes."""
    numbers: dict[fx.Node, int] = {}
    rows: list[tuple[Any, ...]] = []
    for node in stage.graph.nodes:
        numbers[node] = len(numbers)
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        if node.op == "get_attr" and _is_state(stage, str(node.target)):
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
    """A name for each layer: the module in which it begins; the same one again gets a number."""
    found: list[str] = []
    for stage in stages:
        paths = [node.meta.get("path", "") for node in stage.graph.nodes if node.op == "call_function"]
        name = next((path for path in paths if path), "input" if not found else "output")
        again = sum(other == name or other.startswith(f"{name} #") for other in found)
        found.append(f"{name} #{again + 1}" if again else name)
    return found


def _seeds(results: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    roots = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
    return roots, [torch.ones_like(value) for value in roots]


def _on_device(stage: StageModule, device: torch.device) -> StageModule:
    """A copy that may be run and differentiated; one without data gets some."""
    made = copy.deepcopy(stage)
    if any(t.is_meta for t in (*made.parameters(), *made.buffers())):
        materialise(made, None, device=device, fill=_something)
    return made.to(device)


def _something(name: str, tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.normal_(0.0, 0.02) if tensor.is_floating_point() else tensor.zero_()


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


@contextmanager
def _kept_random_state(device: torch.device) -> Iterator[None]:
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type),
        torch.enable_grad(),
    ):
        yield


@contextmanager
def _bar(wanted: bool | None, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal; nothing anywhere else."""
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal if wanted is None else wanted):
        with nullcontext():
            yield lambda name: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("profiling"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)
