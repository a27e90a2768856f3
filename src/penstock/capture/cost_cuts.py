"""Where to cut when only the number of stages is given: by cost, measured where that is possible.

    profile = agreed_profile(flat, 4, names, measure=measure, why_not="")
    facts = best_cuts(profile, 4)                        # {"cuts": their table, "cut_by": what its numbers are, ...}

The model is cut everywhere where little crosses (`cut_places`), by the values that are alive there. Each piece is run alone,
and `penstock.balance` looks for the best of all cuts. A model without values, or one that cannot be run with the example, is
judged by the work counted in the graph (`estimated`).
"""

from __future__ import annotations

import hashlib
import operator
import re
import threading
import warnings
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx, nn

from penstock.balance import LayerCost, Profile, balance
from penstock.capture.cutter import module_path
from penstock.capture.export import Traced, has_no_data
from penstock.capture.flat import is_size
from penstock.capture.graph_work import ExampleSizes, decided_by_data
from penstock.capture.place import inseparable
from penstock.capture.stage_state import StateNames
from penstock.checks import check_types
from penstock.errors import CaptureError, PenstockError, UnevenCut
from penstock.nest import Value, tensors_in

Where = Sequence[tuple[int, str]]  # cuts: positions in the graph, and the names of the operators there


def best_cuts(profile: Profile, num_stages: int) -> dict[str, Value]:
    """What `PipeInfo` says of the best cuts by these costs."""
    cuts = balance(profile, num_stages)
    return {"cuts": cuts, "cut_by": basis_of(profile), "uneven": unevenness(profile, cuts.boundaries)}


def agreed_profile(
    flat: Traced, num_stages: int, names: StateNames, *, measure: Callable[[Traced, Where], Profile], why_not: str
) -> Profile:
    """What lies between all good places for a cut costs, the same on all ranks: measured, or estimated if there is a reason."""
    places = cut_places(flat, num_stages)
    if len(places) < num_stages - 1:
        raise CaptureError(
            f"{num_stages} stages were asked for, and the model has only {len(places)} places where it can be cut; "
            f"ask for at most {len(places) + 1}"
        )

    def answer() -> str:
        where, why = [(place, flat.nodes[place].name) for place in places], why_not
        if not why:
            try:
                return measure(flat, where).dumps()
            except (PenstockError, RuntimeError, ValueError, TypeError, LookupError) as error:
                why = f"it cannot be run with the example: {(str(error).splitlines() or [''])[0]}"
        return estimated(flat, places, names, why=why, places=where).dumps()

    kind = "estimated" if why_not else "measured"
    return Profile.loads(agreed(f"cut/{fingerprint(flat, num_stages)}", answer, kind=kind))


_UNEVEN = 1.5  # times the mean: more than that in one stage is said
_NOTICEABLE = 1e-3  # seconds for a stage; shorter ones are those of toys, and mostly noise


def unevenness(profile: Profile, boundaries: Sequence[int]) -> str:
    """Which of the stages that begin at these layers takes more than 1.5 times the mean, and where it could be cut; or ""."""
    stages = [profile.layers[start:stop] for start, stop in pairwise([0, *boundaries, len(profile.layers)])]
    costs = [sum(layer.total for layer in stage) for stage in stages]
    worst = max(range(len(costs)), key=costs.__getitem__)
    mean = sum(costs) / len(costs)
    if costs[worst] <= _UNEVEN * mean:
        return ""
    before = list(accumulate(layer.total for layer in stages[worst]))[:-1]
    if before:
        middle = min(range(len(before)), key=lambda i: abs(2 * before[i] - costs[worst]))
        where = f"it could be cut before {stages[worst][middle + 1].name}"
    else:
        where = f"it is {stages[worst][0].name}, in which no good place was found: say where to cut inside it (split_spec=, or "
        where += "pipe_split() in its code), or ask for fewer stages"
    return (
        f"stage {worst} of {len(stages)} takes {costs[worst] / mean:.1f} times the mean of all, and the others wait for it: "
        f"{where} ({basis_of(profile)})"
    )


def warn_if_uneven(profile: Profile, boundaries: Sequence[int]) -> str:
    """Say it, once for all ranks, of cuts that penstock chose.

    warn_if_uneven(profile, [3, 6, 9])  # what it says, or ""
    """
    check_types("warn_if_uneven", CaptureError, profile=(profile, Profile), boundaries=(boundaries, Sequence[int]))
    text = unevenness(profile, boundaries)
    total = sum(layer.total for layer in profile.layers)
    heavy = "estimated" in profile.metadata or total > _NOTICEABLE * (len(boundaries) + 1)
    if text and heavy and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        warnings.warn(text, UnevenCut, stacklevel=2)
    return text


def basis_of(profile: Profile) -> str:
    """What the numbers of a profile are, in words."""
    about = profile.metadata
    if "estimated" in about:
        why = f" ({about['why']})" if about.get("why") else ""
        return f"costs estimated by {about['estimated']}{why}"
    return f"costs measured on {about['device']}, in seconds" if "device" in about else "costs as given"


def cuts_at(where: Where) -> Callable[[Traced, int], list[int]]:
    """For `pipeline`: cut before these operators (position and name), found on another rank or another day in the same model.

    pipeline(model, (x,), num_stages=4, choose_cuts=cuts_at(places))
    """

    def choose(flat: Traced, _: int) -> list[int]:
        for place, name in where:
            here = flat.nodes[place].name if place < len(flat.nodes) else "nothing"
            if here != name:
                raise CaptureError(
                    f"this model has {here} as operator {place}, the one that was measured has {name}: they differ; "
                    "build the same model on every rank, or measure it again"
                )
        return [place for place, _ in where]

    return choose


def why_not_measured(model: nn.Module, example: object) -> str:
    """Why the layers of a model cannot be run with an example, or ""."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_in(example)]
    if any(map(has_no_data, tensors)):
        return "it has no values"
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return "it holds tensors of a class of their own"
    if len({tensor.device for tensor in tensors}) > 1:
        return "it is spread over several devices"
    return ""


def fingerprint(flat: Traced, num_stages: int) -> str:
    """A text that is equal for captures of one model with examples of one size, whatever process makes them."""
    digest, sizes = hashlib.sha256(f"{num_stages}".encode()), _sizes(flat)
    for node in (*flat.origins, *flat.nodes):
        value = node.meta.get("val")
        kind = (sizes.of(value), value.dtype, value.device.type) if isinstance(value, Tensor) else None
        line = f"{node.name} {node.target} {node.args} {node.kwargs} {kind}"
        digest.update(re.sub(r" at 0x[0-9a-f]+", "", line).encode())
    return digest.hexdigest()[:24]


PATIENCE = timedelta(minutes=10)  # for the rank that answers

_known: dict[str, str] = {}
_lock = threading.Lock()


def agreed(question: str, answer: Callable[[], str], *, kind: str = "") -> str:
    """The answer of the rank that asked first. In this process, an answer is given again to questions of its kind."""

    def own() -> str:
        with _lock:
            key = f"{kind}/{question}"
            if key not in _known:
                _known[key] = answer()
            return _known[key]

    if not dist.is_available() or not dist.is_initialized() or "fake" in dist.get_backend():
        return own()
    store: Any = dist.distributed_c10d._get_default_store()
    # The n-th time that a rank asks it gets the answer to the n-th question of all others.
    place = f"penstock/{question}/{store.add(f'penstock/{question}/asked by {dist.get_rank()}', 1)}"
    if store.add(f"{place}/answering", 1) == 1:
        text = ""
        try:
            text = own()
        finally:
            store.set(place, text)
        return text
    try:
        store.wait([place], PATIENCE)
    except dist.DistError as error:
        raise CaptureError(
            f"another rank measures the model for all, and has not told the result for {PATIENCE}; say where to cut "
            "(split_spec=), or give the same profile= on every rank"
        ) from error
    return store.get(place).decode() or own()


def forget() -> None:
    """Answer anew what was answered in this process before."""
    with _lock:
        _known.clear()


def cut_places(flat: Traced, num_stages: int) -> list[int]:
    """Positions where little crosses, enough of them for stages that are about as even as cuts anywhere would make them.

    Little is less than just before and just after, between two pieces of real work, of which taking a part out of a tuple is
    none. Where the model is as wide all along, the best of all such positions do. Where it is not (a decoder reads what the
    encoder made in every layer; a convolutional net narrows towards its end) the narrowest are all in one part, and each position
    is held against those near it.
    """
    active, sizes = _activations(flat), _sizes(flat)
    alive = alive_bytes(flat, active, sizes)
    real = [i for i, node in enumerate(flat.nodes) if node in active and node.target is not operator.getitem]
    whole = inseparable(flat) | _of_changing_size(flat, active)
    spots = [p for p in real[1:] if p not in whole]
    neighbours = zip(spots, [*spots[:1], *spots], [*spots[1:], *spots[-1:]], strict=False)
    low = [p for p, before, after in neighbours if alive[p] <= min(alive[before], alive[after])]
    floor = min((alive[p] for p in low), default=0.0)
    narrowest = [p for p in low if alive[p] <= _AS_NARROW * floor]
    work = (sizes.work(node) if node in active else 0.0 for node in flat.nodes)
    done = [0.0, *accumulate(work)]  # before each position
    best = heaviest([done[p] for p in spots], done[-1], num_stages)
    for places in (narrowest, _narrow_here(low, alive, done, num_stages), low):
        if len(places) >= 2 * (num_stages - 1):
            if heaviest([done[p] for p in places], done[-1], num_stages) <= _GIVEN_UP * best:
                return places
    return spots


def estimated(flat: Traced, cuts: Sequence[int], names: StateNames, **facts: object) -> Profile:
    """What lies between the cuts, with the work of each counted in the graph."""
    active, sizes = _activations(flat), _sizes(flat)
    alive = alive_bytes(flat, active, sizes)
    parts = [flat.nodes[start:end] for start, end in pairwise([0, *cuts, len(flat.nodes)])]
    users: defaultdict[str, set[int]] = defaultdict(set)
    held_bytes: dict[str, int] = {}
    for parameter, name in flat.parameters.items():
        held_bytes[names.first[name]] = int(sizes.bytes(parameter.meta["val"]))
        users[names.first[name]] |= {bisect_right(cuts, flat.index[u]) for u in parameter.users if u in flat.index}
    shared = {name: held_bytes[name] for name, held in users.items() if len(held) > 1}
    named = numbered([[module_path(node) for node in part if node in active] for part in parts])
    layers = (
        LayerCost(
            name,
            forward=sum(sizes.work(node) for node in part if node in active),
            parameter_bytes=sum(held_bytes[n] for n, held in users.items() if held == {k}),
            shared=frozenset(n for n in shared if k in users[n]),
        )
        for k, (name, part) in enumerate(zip(named, parts, strict=True))
    )
    crossing = tuple(int(alive[cut]) for cut in cuts)
    about = {"unit": "operations", "estimated": "the work in its graph", **facts}
    return Profile(tuple(layers), shared, crossing, metadata=about)


def numbered(layers: Sequence[Sequence[str]]) -> list[str]:
    """A name for each layer, out of the modules of its operators: the one in which it begins; again with a number."""
    found: list[str] = []
    for paths in layers:
        name = next((path for path in paths if path), "output" if found else "input")
        again = sum(other == name or other.startswith(f"{name} #") for other in found)
        found.append(f"{name} #{again + 1}" if again else name)
    return found


def _activations(flat: Traced) -> set[fx.Node]:
    """Nodes that depend on a parameter: the real work."""
    parameters = flat.parameters.keys()
    found = set(parameters)
    for node in flat.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return {node for node in found - parameters if not is_size(node)}


def _sizes(flat: Traced) -> ExampleSizes:
    return ExampleSizes((*flat.origins, *flat.nodes))


def alive_bytes(flat: Traced, active: set[fx.Node], sizes: ExampleSizes) -> list[float]:
    """For each position, the bytes of the values made before it and used at or after it."""
    change = [0.0] * (len(flat.nodes) + 2)
    for node in active:
        i = flat.index[node]
        last = max((flat.index[u] for u in node.users if u in flat.index), default=i)
        size = sizes.bytes(node.meta.get("val"))
        change[i + 1] += size
        change[last + 1] -= size
    return list(accumulate(change[: len(flat.nodes)]))


def _of_changing_size(flat: Traced, active: set[fx.Node]) -> set[int]:
    """The positions where something would cross whose size depends on data: a step takes the sizes of the first one."""
    found: set[int] = set()
    for node in active:
        if decided_by_data(node.meta.get("val")):
            last = max((flat.index[u] for u in node.users if u in flat.index), default=0)
            found |= set(range(flat.index[node] + 1, last + 1))
    return found


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
    ends, low, high = [0.0, *places, total], total / num_stages, total
    while high - low > total / 1000:
        limit, done = (low + high) / 2, 0.0
        for _ in range(num_stages):
            done = ends[bisect_right(ends, done + limit) - 1]  # where it was, if one piece alone is too heavy
        low, high = (low, limit) if done == total else (limit, high)
    return high
