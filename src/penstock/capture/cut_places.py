"""Where a model can be cut, and what its layers cost by an estimate from shapes.

    places = cut_places(flat, 4)            # positions in flat.nodes
    estimated(flat, places).layers          # what lies between them

Cuts are made only where little crosses, by the values that are alive there.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import fx
from torch.utils import _pytree as pytree

from penstock.balance import LayerCost, Profile
from penstock.capture.cutter import module_path
from penstock.capture.flat import Flat, is_size
from penstock.capture.place import inseparable
from penstock.capture.stage_state import StateNames


def cut_places(flat: Flat, num_stages: int) -> list[int]:
    """Positions where little crosses, enough of them for stages that are about as even as cuts anywhere would make them.

    Little is less than just before and just after, between two pieces of real work, of which taking a part out of a tuple is
    none. Where the model is as wide all along, the best of all such positions do. Where it is not (a decoder reads what the
    encoder made in every layer; a convolutional net narrows towards its end) the narrowest are all in one part, and each position
    is held against those near it.
    """
    active = _activations(flat)
    alive = alive_bytes(flat, active)
    real = [i for i, node in enumerate(flat.nodes) if node in active and node.target is not operator.getitem]
    whole = inseparable(flat)
    spots = [b for a, b in pairwise(real) if b not in whole]
    low = [
        p
        for k, p in enumerate(spots)
        if alive[p] <= alive[spots[max(k - 1, 0)]] and alive[p] <= alive[spots[min(k + 1, len(spots) - 1)]]
    ]
    floor = min((alive[p] for p in low), default=0.0)
    narrowest = [p for p in low if alive[p] <= _AS_NARROW * floor]
    done = [0.0, *accumulate(estimate(node) if node in active else 0.0 for node in flat.nodes)]  # before each position
    best = heaviest([done[p] for p in spots], done[-1], num_stages)
    for places in (narrowest, _narrow_here(low, alive, done, num_stages), low):
        if len(places) >= 2 * (num_stages - 1):
            if heaviest([done[p] for p in places], done[-1], num_stages) <= _GIVEN_UP * best:
                return places
    return spots


def estimated(flat: Flat, places: Sequence[int], names: StateNames) -> Profile:
    """What lies between the places, with the work of each counted in the graph."""
    active = _activations(flat)
    alive = alive_bytes(flat, active)
    parts = [flat.nodes[start:end] for start, end in pairwise([0, *places, len(flat.nodes)])]
    users: defaultdict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for parameter, name in flat.traced.parameters.items():
        sizes[names.first[name]] = int(_bytes(parameter.meta["val"]))
        users[names.first[name]] |= {bisect_right(places, flat.index[u]) for u in parameter.users if u in flat.index}
    shared = {name: sizes[name] for name, held in users.items() if len(held) > 1}
    named = numbered([[module_path(node) for node in part if node in active] for part in parts])
    layers = (
        LayerCost(
            name,
            forward=sum(estimate(node) for node in part if node in active),
            parameter_bytes=sum(sizes[n] for n, held in users.items() if held == {k}),
            shared=frozenset(n for n in shared if k in users[n]),
        )
        for k, (name, part) in enumerate(zip(named, parts, strict=True))
    )
    return Profile(tuple(layers), shared, tuple(int(alive[place]) for place in places))


def numbered(layers: Sequence[Sequence[str]]) -> list[str]:
    """A name for each layer, out of the modules of its operators: the one in which it begins; again with a number."""
    found: list[str] = []
    for paths in layers:
        name = next((path for path in paths if path), "output" if found else "input")
        again = sum(other == name or other.startswith(f"{name} #") for other in found)
        found.append(f"{name} #{again + 1}" if again else name)
    return found


def _activations(flat: Flat) -> set[fx.Node]:
    """Nodes that depend on a parameter: the real work."""
    parameters = flat.traced.parameters.keys()
    found = set(parameters)
    for node in flat.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return {node for node in found - parameters if not is_size(node)}


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
    return list(accumulate(change[: len(flat.nodes)]))


_GIVEN_UP = 1.2  # how much heavier a stage may be for less to cross
_AS_NARROW = 1.01


def _narrow_here(low: Sequence[int], alive: Sequence[float], done: Sequence[float], num_stages: int) -> list[int]:
    """The positions that are as narrow as any near them: within a sixteenth of a stage, or of a quarter of the model."""
    reach = done[-1] / min(num_stages, 4) / 16
    found = []
    for p in low:
        first = bisect_left(low, done[p] - reach, key=done.__getitem__)
        end = bisect_right(low, done[p] + reach, key=done.__getitem__)
        if alive[p] <= _AS_NARROW * min(alive[q] for q in low[first:end]):
            found.append(p)
    return found


def heaviest(places: Sequence[float], total: float, num_stages: int) -> float:
    """The work of the heaviest stage under the best cuts, where `places` say how much lies before each possible one."""
    low, high = total / num_stages, total
    while high - low > total / 1000:
        limit, start, stages = (low + high) / 2, 0.0, 1
        for before, end in pairwise([0.0, *places, total]):
            if end - start > limit:
                start, stages = before, stages + 1
                if end - start > limit:
                    stages = num_stages + 1  # one piece alone is too heavy
        low, high = (low, limit) if stages <= num_stages else (limit, high)
    return high


def estimate(node: fx.Node) -> float:
    """Operations of one node, roughly: matrix products by their sizes, everything else by what it makes."""
    made = _elements(node.meta.get("val"))
    tensors = [a.meta.get("val") for a in node.all_input_nodes]
    shapes = [sizes_in_example(t) for t in tensors if isinstance(t, torch.Tensor)]
    name = str(node.target)
    if "linear" in name or "mm" in name or "matmul" in name:
        return 2.0 * made * (shapes[0][-1] if shapes and shapes[0] else 1)
    if "scaled_dot_product" in name and shapes:
        return 4.0 * made * (shapes[0][-2] if len(shapes[0]) > 1 else 1)
    if "conv" in name and len(shapes) > 1:
        return 2.0 * made * prod(shapes[1][1:])
    return made


def sizes_in_example(value: torch.Tensor) -> list[int]:
    return [s.node.hint if isinstance(s, torch.SymInt) else int(s) for s in value.shape]


def _bytes(value: object) -> float:
    return sum(_elements(part) * part.dtype.itemsize for part in _tensors(value))


def _elements(value: object) -> float:
    return float(sum(prod(sizes_in_example(part)) for part in _tensors(value)))


def _tensors(value: object) -> list[torch.Tensor]:
    """Those in what an operator makes: one, several, or none."""
    return [part for part in pytree.tree_leaves(value) if isinstance(part, torch.Tensor)]
