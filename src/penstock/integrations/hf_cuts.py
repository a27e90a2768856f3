"""Where a transformers model says that it can be cut: `base_model_pp_plan` of its config.

The plan lists the children of the base model in the order in which they run; the one that is a list has the layers. They
are spread over the stages by the size of their matrices, and what stands before and after them counts too.
"""

from __future__ import annotations

from torch import nn

from penstock.balance import LayerCost, Profile, balance
from penstock.capture import SplitPoint


def cuts_of_plan(model: nn.Module, num_stages: int) -> dict[str, SplitPoint] | None:
    """`split_spec` for this number of stages; None if the config has no plan, or too few layers.

    cuts_of_plan(llama, 2)  # {"model.layers.2": SplitPoint.BEGINNING}
    """
    units = _units(model)
    if units is None or len(units) < num_stages:
        return None
    costs = [LayerCost(name, forward=float(weight)) for name, weight in units]
    names = balance(Profile(tuple(costs)), num_stages).names
    return dict.fromkeys(names, SplitPoint.BEGINNING)


def _units(model: nn.Module) -> list[tuple[str, int]] | None:
    """The layers, each with the size of its matrices; the first has what comes before, the last what comes after."""
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None)
    held = ((path, part) for path, part in model.named_modules() if plan and all(hasattr(part, name) for name in plan))
    prefix, base = next(held, ("", None))
    if not plan or base is None:
        return None
    layers = next((name for name in plan if isinstance(getattr(base, name), nn.ModuleList)), None)
    if layers is None or not len(getattr(base, layers)):
        return None
    path = f"{prefix}.{layers}".strip(".")
    units = [(f"{path}.{index}", _work(layer)) for index, layer in enumerate(getattr(base, layers))]
    inside = sum(weight for _, weight in units)
    name, last = units[-1]
    units[-1] = name, last + max(_work(model) - inside, 0)  # the head
    return units


def _work(module: nn.Module) -> int:
    """Numbers in matrices that are multiplied; looking up a row of an embedding is no work, unless a head shares it."""
    used: dict[int, nn.Parameter] = {}
    for part in module.modules():
        if not isinstance(part, nn.Embedding):
            used |= {id(p): p for p in part.parameters(recurse=False)}
    return sum(p.numel() for p in used.values())
