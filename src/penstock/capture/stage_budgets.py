"""What a stage keeps less, and takes longer, if torch.compile's partitioner has a budget of memory for it.

    measured_budgets(layers, info, setting, [(0, 6), (6, 12)])     # {"0:6": [[0.5, 65536, 0.2], [0.0, 131072, 0.9]], ...}

Each row is a budget, the bytes that a microbatch holds less with it, and what its backward takes longer, in forwards. The layers
of the stage are compiled together, by AOTAutograd without a compiler behind it: what is kept is decided before one is asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.capture.layer_costs import kept_random_state, on_device, signature
from penstock.capture.one_layer import LayerSetting, address_of, clock, moved, seeds
from penstock.capture.pipe_info import PipeInfo
from penstock.capture.stage_module import StageModule
from penstock.errors import NotCompiled
from penstock.stage.compiled import SplitBackend
from penstock.stage.cut_graph import accumulate_graphs, collecting
from penstock.stage.engine import run_engine

BUDGETS = (0.5, 0.0)
Values = dict[str, Any]


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
    known: dict[Any, list[list[float]]] = {}
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


def _outputs(layer: StageModule, values: Values) -> Values:
    """What the next layers get: leaves that say whether a gradient is wanted."""
    made = layer.run([values[wire.name] for wire in layer.inputs])
    return {
        wire.name: value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for wire, value in zip(layer.outputs, made, strict=False)
    }


def _rows(layers: Sequence[StageModule], values: Values, setting: LayerSetting) -> list[list[float]]:
    made = {wire.name for layer in layers for wire in layer.outputs}
    names = [*dict.fromkeys(w.name for layer in layers for w in layer.inputs if w.name not in made)]
    inputs = tuple(values[name] for name in names)

    def run(given: tuple[Any, ...]) -> tuple[Any, ...]:
        now = dict(zip(names, given, strict=True))
        results: tuple[Any, ...] = ()
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
    run: Callable[[tuple[Any, ...]], Any], inputs: tuple[Any, ...], state: Sequence[Tensor], setting: LayerSetting,
    budget: float | None,
) -> _Compiled | None:  # fmt: skip
    """None if torch.compile does not make one graph of it."""
    backend = SplitBackend("aot_eager", memory_budget=budget)

    def call(*given: Any) -> Any:
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


def _timed(call: Callable[..., Any], inputs: tuple[Any, ...], setting: LayerSetting) -> tuple[float, float]:
    start = clock(setting.device)
    roots, grads = seeds(call(*inputs))
    middle = clock(setting.device)
    with collecting() as work:
        if roots:
            run_engine(tuple(roots), tuple(grads))
    accumulate_graphs(work)
    return middle - start, clock(setting.device) - middle
