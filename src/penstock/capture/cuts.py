"""Where to cut when only the number of stages is given: a quick estimate from shapes.

    choose_cuts(flat, 4)        # positions in flat.nodes

Cuts are made only where little crosses, by the values that are alive there; among these places, so that the stage with
the most work, estimated from shapes, has the least.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf, prod
from typing import Any

import torch
from torch import fx

from penstock.capture.flat import Flat
from penstock.capture.modules import even_cuts
from penstock.capture.ops import is_size
from penstock.capture.trace import FromState
from penstock.errors import CaptureError


def choose_cuts(flat: Flat, num_stages: int) -> list[int]:
    """The cuts that make the slowest stage fastest, by the estimate."""
    if num_stages == 1:
        return []
    active = _activations(flat)
    work = [estimate(node) if node in active else 0.0 for node in flat.nodes]
    alive = alive_bytes(flat, active)
    places = _places(flat, alive, active, num_stages)
    if len(places) < num_stages - 1:
        raise CaptureError(
            f"{num_stages} stages were asked for, and the model has only {len(places)} places where it can be cut; "
            f"ask for at most {len(places) + 1}"
        )
    between = [sum(work[start:end]) for start, end in pairwise([0, *places, len(work)])]
    return [places[boundary - 1] for boundary in even_cuts(between, num_stages)]


def cut_places(flat: Flat, num_stages: int) -> list[int]:
    """Every position where the model can well be cut, more of them if many stages are wanted."""
    active = _activations(flat)
    return _places(flat, alive_bytes(flat, active), active, num_stages)


def _activations(flat: Flat) -> set[fx.Node]:
    """Nodes that depend on a parameter: the real work."""
    found: set[fx.Node] = set()
    for node in flat.nodes:
        for arg in node.all_input_nodes:
            origin = flat.traced.origins.get(arg)
            if arg in found or (isinstance(origin, FromState) and origin.parameter):
                found.add(node)
                break
    return {n for n in found if not is_size(n)}


def alive_bytes(flat: Flat, active: set[fx.Node]) -> list[float]:
    """For each position, the bytes of the values made before it and used at or after it."""
    change = [0.0] * (len(flat.nodes) + 2)
    for i, node in enumerate(flat.nodes):
        if node not in active:
            continue
        last = max((flat.index[u] for u in node.users if u in flat.index), default=i)
        size = _bytes(node.meta.get("val"))
        change[i + 1] += size
        change[last + 1] -= size
    total = 0.0
    alive = []
    for delta in change[: len(flat.nodes)]:
        total += delta
        alive.append(total)
    return alive


def _places(flat: Flat, alive: list[float], active: set[fx.Node], num_stages: int) -> list[int]:
    """Positions where little crosses: no more than just before and just after, between two pieces of real work."""
    real = [i for i, node in enumerate(flat.nodes) if node in active]
    spots = [b for a, b in pairwise(real)]
    low = [
        p
        for k, p in enumerate(spots)
        if alive[p] <= alive[spots[max(k - 1, 0)]] and alive[p] <= alive[spots[min(k + 1, len(spots) - 1)]]
    ]
    if not low:
        return spots
    floor = min(alive[p] for p in low)
    for slack in (1.01, 2.0, inf):
        near = [p for p in low if alive[p] <= slack * floor]
        if len(near) >= 2 * (num_stages - 1):
            return near
    return spots


def estimate(node: fx.Node) -> float:
    """Operations of one node, roughly: matrix products by their sizes, everything else by what it makes."""
    made = _elements(node.meta.get("val"))
    tensors = [a.meta.get("val") for a in node.all_input_nodes]
    shapes = [_sizes(t) for t in tensors if isinstance(t, torch.Tensor)]
    name = str(node.target)
    if "linear" in name or "mm" in name or "matmul" in name:
        return 2.0 * made * (shapes[0][-1] if shapes and shapes[0] else 1)
    if "scaled_dot_product" in name and shapes:
        return 4.0 * made * (shapes[0][-2] if len(shapes[0]) > 1 else 1)
    if "conv" in name and len(shapes) > 1:
        return 2.0 * made * prod(shapes[1][1:])
    return made


def _sizes(value: torch.Tensor) -> list[int]:
    return [s.node.hint if isinstance(s, torch.SymInt) else int(s) for s in value.shape]


def _elements(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(prod(_sizes(value)))
    if isinstance(value, list | tuple):
        return sum(_elements(v) for v in value)
    return 0.0


def _bytes(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(prod(_sizes(value))) * value.dtype.itemsize
    return 0.0
