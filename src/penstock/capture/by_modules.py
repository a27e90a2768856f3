"""Stages without a trace: a model's submodules, called in order.

    stages = split_modules(model, ["embed", "layers.0", "layers.1", "head"], 2, example=(x,))
    stages[1](stages[0](x))

For models that cannot be exported. Each submodule gets what the one before it returned (a tuple as several arguments).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

import torch
from torch import Tensor, nn

from penstock.balance import LayerCost, Profile, balance
from penstock.capture.export import has_no_data
from penstock.capture.marks import pipe_split, submodule
from penstock.capture.stage_state import owner_of
from penstock.checks import check_types
from penstock.errors import CaptureError, UnverifiedSplit
from penstock.nest import Value, map_tensors, tensors_in
from penstock.stage.buffers import remember
from penstock.stage.digest import model_digest

Call = Callable[..., Value]  # (submodule, *what the one before returned) -> what the next one gets


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` whose every entry is a stage.

    PipeSequential(embed, first_half, second_half, head)  # four stages
    """

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """The same modules, with a mark between each two of them."""
        return PipeSequential(*sequential_instance)

    def forward(self, input: Value) -> Value:  # noqa: A002  # the name that nn.Sequential gives it
        value = input
        for i, module in enumerate(self):
            if i:
                pipe_split()
            value = module(value)
        return value


class ListStage(nn.Module):
    """Some submodules of a model, called in order; parameters keep their names in the model.

    first, last = penstock.split_modules(model, ["embed", "layers.0", "layers.1", "head"], 2)
    """

    ties: tuple[Tie, ...] = ()
    cut_from: str = ""  # the whole model in a few words, which ranks compare before their first step

    def __init__(self, modules: Mapping[str, nn.Module], calls: Mapping[str, Call]) -> None:
        check_types("ListStage", CaptureError, modules=(modules, Mapping[str, nn.Module]), calls=(calls, Mapping))
        super().__init__()
        self.order = tuple(modules)
        self.calls = {name: call for name, call in calls.items() if name in modules}
        for name, module in modules.items():
            owner, leaf = owner_of(self, name, make=True)
            owner._modules[leaf] = module

    def forward(self, *values: Value) -> Value:
        given: Value = values
        for name in self.order:
            module = self.get_submodule(name)
            args = given if isinstance(given, tuple) else (given,)
            call = self.calls.get(name)
            given = module(*args) if call is None else call(module, *args)
        return given


def split_modules(
    model: nn.Module,
    names: Sequence[str],
    num_stages: int,
    *,
    calls: Mapping[str, Call] | None = None,
    example: tuple[Value, ...] | None = None,
) -> list[ListStage]:
    """Make stages from submodules that are called in the given order, about equal in parameters.

        stages = split_modules(model, ["embed", "layers.0", "layers.1", "head"], 2, example=(tokens,))

    With `example`, the arguments of one call of the model, the stages are run after one another and compared with the model: a
    forward that does more than call these submodules in order (a residual of its own, say) is refused. Without it a warning
    (`penstock.errors.UnverifiedSplit`) says that nobody has looked.

    `calls` says how a submodule is called where that is not ``module(*previous)``:
    ``{"layers.0": lambda layer, x: layer(x)[0]}``; a key may be a pattern, ``"layers.*"``. The model is not changed,
    and its parameters are not copied.
    """
    check_types("split_modules", CaptureError, model=(model, nn.Module), names=(names, Sequence[str]))
    check_types("split_modules", CaptureError, num_stages=(num_stages, int), calls=(calls, Mapping | None))
    if len(set(names)) != len(names):
        raise CaptureError(f"a submodule is named twice in {list(names)}")
    if not 1 <= num_stages <= len(names):
        raise CaptureError(f"{len(names)} submodules cannot make {num_stages} stages; name at least {num_stages}")
    parts = {name: submodule(model, name) for name in names}
    held = {id(p) for module in parts.values() for p in module.parameters()}
    if lost := [name for name, p in model.named_parameters() if id(p) not in held]:
        raise CaptureError(
            f"no named submodule holds {', '.join(lost[:6])}{' ...' if len(lost) > 6 else ''}; every parameter must be "
            "in a stage: name its submodule too"
        )
    weights = [sum(p.numel() for p in module.parameters()) for module in parts.values()]
    bounds = [0, *even_cuts(weights, num_stages), len(names)]
    ways = _by_name(calls or {}, names)
    stages = [ListStage({name: parts[name] for name in names[start:end]}, ways) for start, end in pairwise(bounds)]
    ties, digest = find_ties(stages), model_digest(stages)
    for stage in stages:
        stage.ties, stage.cut_from = ties, digest
        stage.training = model.training
    _verify(model, stages, example, sure=_is_chain(model, names) and not ways)
    return stages


def _is_chain(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether the model is nothing but its children in this order; or a container, which has no forward to differ from."""
    if type(model).forward is nn.Module.forward:
        return True
    return type(model).forward is nn.Sequential.forward and [name for name, _ in model.named_children()] == list(names)


def _verify(model: nn.Module, stages: Sequence[nn.Module], example: tuple[Value, ...] | None, *, sure: bool) -> None:
    if example is not None and not isinstance(example, tuple):
        raise CaptureError(
            f"example is a {type(example).__name__}; expected a tuple of the model's arguments: example=(x,)"
        )
    if example is None or any(map(has_no_data, (*model.parameters(), *model.buffers(), *tensors_in(example)))):
        if not sure:
            warnings.warn(
                f"stages of {type(model).__name__}'s submodules were not compared with the model: if its forward does more than "
                "call them in this order, they train another one. Write split_modules(..., example=(x,)), with values",
                UnverifiedSplit,
                stacklevel=4,
            )
        return
    if wrong := difference(model, stages, example, {}):
        raise CaptureError(
            f"the submodules of {type(model).__name__}, called in this order, are not the model: {wrong}. Its forward does more "
            "than call them; name larger submodules that contain all of it, or say with calls= how each one is called"
        )


def difference(
    model: nn.Module, stages: Sequence[nn.Module], args: Sequence[Value], kwargs: Mapping[str, Value]
) -> str:
    """How the outputs of stages that are run after one another differ from those of the model, or "".

    Arguments by name go to the first stage by their position. Buffers and random numbers are afterwards what they were.
    """
    rewind = remember(model, tensors_in((args, kwargs)))

    def run(function: Callable[..., Value]) -> list[Tensor]:
        own_args, own_kwargs = map_tensors(Tensor.clone, (tuple(args), dict(kwargs)))
        try:
            with torch.no_grad():
                return list(tensors_in(function(*own_args, **own_kwargs)))
        finally:
            rewind()

    def chain(*values: Value, **named: Value) -> Value:
        given: Value = (*values, *(value for value in named.values() if isinstance(value, Tensor)))
        for stage in stages:
            given = stage(*(given if isinstance(given, tuple) else (given,)))
        return given

    want = run(model)
    try:
        torch.testing.assert_close(run(chain), want, equal_nan=True)
    except AssertionError as error:
        text = " ".join(str(error).split())
        return f"with the example their outputs differ ({text})"
    except Exception as error:  # noqa: BLE001  whatever a submodule raises that is given what the one before it returned
        return f"with the example they raise {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def even_cuts(weights: Sequence[float], num_stages: int) -> list[int]:
    """Where to cut a list into non-empty parts so that the heaviest is lightest."""
    layers = tuple(LayerCost(str(place), forward=weight) for place, weight in enumerate(weights))
    return list(balance(Profile(layers), num_stages).boundaries)


def _by_name(calls: Mapping[str, Call], names: Sequence[str]) -> dict[str, Call]:
    found: dict[str, Call] = {}
    for pattern, call in calls.items():
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise CaptureError(f"calls names {pattern!r}, which is none of the submodules {list(names)}")
        found |= dict.fromkeys(hits, call)
    return found


@dataclass(frozen=True)
class Tie:
    """One logical parameter: the first holder owns it, all are kept equal and their gradients are summed.

    tie((0, "embed.weight"), (3, "head.weight"))
    """

    holders: tuple[tuple[int, str], ...]  # (stage, name in that stage)


def tie(holders: Iterable[tuple[int, str]]) -> Tie:
    """Say that parameters of several stages are one: ``tie([(0, "embed.weight"), (3, "head.weight")])``."""
    try:
        found = tuple(sorted((int(stage), str(name)) for stage, name in holders))
    except (TypeError, ValueError):
        check_types("tie", CaptureError, holders=(holders, Iterable[tuple[int, str]]))
        raise
    if len({stage for stage, _ in found}) < 2:
        raise CaptureError(
            f"tie takes parameters of at least two stages, got {list(found)}; write [(0, 'a.weight'), (3, 'b.weight')]"
        )
    return Tie(found)


def find_ties(stages: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Parameters that several stages of one process hold as one object.

    find_ties([first, middle, last])
    """
    check_types("find_ties", CaptureError, stages=(stages, Sequence[nn.Module]))
    holders: dict[int, list[tuple[int, str]]] = {}
    for k, stage in enumerate(stages):
        for name, value in stage.named_parameters():
            holders.setdefault(id(value), []).append((k, name))
    return tuple(Tie(tuple(found)) for found in holders.values() if len(found) > 1)
