"""Which sizes may change after the capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim

from penstock.capture.inputs import InputTable
from penstock.capture.trace import Dims
from penstock.capture.tree import Constant, Container, Leaf, Plain
from penstock.errors import CaptureError


def batch_dims(leaves: Sequence[torch.Tensor]) -> Dims:
    """The first dimension of every tensor that has the size of the batch there."""
    batch = next((leaf.shape[0] for leaf in leaves if leaf.ndim), None)
    if batch is None or batch < 2:
        return tuple(None for _ in leaves)
    return tuple({0: Dim.AUTO} if leaf.ndim and leaf.shape[0] == batch else None for leaf in leaves)


def why_static(leaves: Sequence[torch.Tensor]) -> str:
    """Why the batch size of this example cannot be kept open, if so."""
    batch = next((leaf.shape[0] for leaf in leaves if leaf.ndim), None)
    return (
        "the example has a batch of 1; capture with an example of at least 2 to keep the batch size open"
        if batch == 1
        else ""
    )


def given_dims(table: InputTable, leaves: Sequence[torch.Tensor], spec: Mapping[str, Any]) -> Dims:
    """What the user said, leaf by leaf: by argument, or by the name of a leaf."""
    found: list[Any] = [None] * len(leaves)
    known = {p.name for p in table.parameters} | set(table.names)
    for name, value in spec.items():
        if name not in known:
            raise CaptureError(f"dynamic_shapes names {name!r}; the arguments are {', '.join(table.names)}")
        if name in table.names:
            found[table.names.index(name)] = _normal(value, leaves[table.names.index(name)], name)
    for parameter in table.parameters:
        if parameter.name in spec and parameter.name not in table.names:
            _walk(parameter.recipe, spec[parameter.name], parameter.leaves, leaves, found)
    return tuple(found)


def _walk(recipe: Any, spec: Any, places: Sequence[int], leaves: Sequence[torch.Tensor], found: list[Any]) -> None:
    if spec is None or isinstance(recipe, Constant):
        return
    match recipe:
        case Leaf(index, path):
            found[places[index]] = _normal(spec, leaves[places[index]], path)
        case Container(_, _, children) | Plain(_, _, children):
            parts = list(spec.values()) if isinstance(spec, Mapping) else list(spec)
            if len(parts) != len(children):
                raise CaptureError(f"dynamic_shapes has {len(parts)} entries for a container of {len(children)}")
            for child, part in zip(children, parts, strict=True):
                _walk(child, part, places, leaves, found)


def _normal(spec: Any, leaf: torch.Tensor, name: str) -> dict[int, Any] | None:
    if spec is None:
        return None
    entries = dict(spec) if isinstance(spec, Mapping) else dict(enumerate(spec))
    for dim in entries:
        if not 0 <= dim < leaf.ndim:
            raise CaptureError(
                f"dynamic_shapes[{name!r}] names dimension {dim}; the example has {leaf.ndim} dimensions"
            )
    return {dim: what for dim, what in entries.items() if what is not None} or None
