"""Where to cut when only the number of stages is given: by cost, measured where that is possible.

    profile = agreed_profile(flat, 4, names, measure=measure, why_not="")
    facts = best_cuts(profile, 4)                        # {"cuts": their table, "cut_by": what its numbers are, ...}

The model is cut everywhere where little crosses, each piece is run alone, and `penstock.balance` looks for the best of
all cuts. A model without values, or one that cannot be run with the example, is judged by the work counted in the graph.
"""

from __future__ import annotations

import hashlib
import re
import threading
import warnings
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from penstock.balance import Profile, balance
from penstock.capture.cut_places import cut_places, estimated, sizes_in_example
from penstock.capture.flat import Flat
from penstock.capture.skeleton import has_no_data
from penstock.capture.stage_state import StateNames
from penstock.errors import CaptureError, PenstockError, UnevenCut
from penstock.misfits import takes
from penstock.nest import Value, tensors_in

Where = Sequence[tuple[int, str]]  # cuts: positions in the graph, and the names of the operators there


def best_cuts(profile: Profile, num_stages: int) -> dict[str, Value]:
    """What `PipeInfo` says of the best cuts by these costs."""
    cuts = balance(profile, num_stages)
    return {"cuts": cuts, "cut_by": basis_of(profile), "uneven": unevenness(profile, cuts.boundaries)}


def cuts_by(profile: Profile, num_stages: int) -> tuple[Callable[[Flat, int], list[int]], dict[str, Value]]:
    """What cuts a model where that is best by these costs, and what `PipeInfo` says of it."""
    facts = best_cuts(profile, num_stages)
    boundaries = facts["cuts"].boundaries
    warn_if_uneven(profile, boundaries)
    return cuts_at([tuple(profile.metadata["places"][boundary - 1]) for boundary in boundaries]), facts


def agreed_profile(
    flat: Flat, num_stages: int, names: StateNames, *, measure: Callable[[Flat, Where], Profile], why_not: str
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
        metadata = {"unit": "operations", "estimated": "the work in its graph", "why": why, "places": where}
        return replace(estimated(flat, places, names), metadata=metadata).dumps()

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


@takes(CaptureError)
def warn_if_uneven(profile: Profile, boundaries: Sequence[int]) -> str:
    """Say it, once for all ranks, of cuts that penstock chose.

    warn_if_uneven(profile, [3, 6, 9])  # what it says, or ""
    """
    text = unevenness(profile, boundaries)
    heavy = "estimated" in profile.metadata or sum(layer.total for layer in profile.layers) > _NOTICEABLE * (
        len(boundaries) + 1
    )
    if text and heavy and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        warnings.warn(text, UnevenCut, stacklevel=2)
    return text


def unevenness_of_others(flat: Flat, chosen: Set[int], names: StateNames) -> str:
    """The same for cuts at positions that somebody else chose, by the work in the graph."""
    if not chosen:
        return ""
    places = sorted({*cut_places(flat, len(chosen) + 1), *chosen} - {0, len(flat.nodes)})
    profile = replace(estimated(flat, places, names), metadata={"estimated": "the work in its graph"})
    return unevenness(profile, [i + 1 for i, place in enumerate(places) if place in chosen])


def basis_of(profile: Profile) -> str:
    """What the numbers of a profile are, in words."""
    about = profile.metadata
    if "estimated" in about:
        why = f" ({about['why']})" if about.get("why") else ""
        return f"costs estimated by {about['estimated']}{why}"
    return f"costs measured on {about['device']}, in seconds" if "device" in about else "costs as given"


def cuts_at(where: Where) -> Callable[[Flat, int], list[int]]:
    """For `pipeline`: cut before these operators (position and name), found on another rank or another day in the same model.

    pipeline(model, (x,), num_stages=4, choose_cuts=cuts_at(places))
    """

    def choose(flat: Flat, _: int) -> list[int]:
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


def fingerprint(flat: Flat, num_stages: int) -> str:
    """A text that is equal for captures of one model with examples of one size, whatever process makes them."""
    digest = hashlib.sha256(f"{num_stages}".encode())
    for node in (*flat.traced.origins, *flat.nodes):
        value = node.meta.get("val")
        kind = (sizes_in_example(value), value.dtype, value.device.type) if isinstance(value, Tensor) else None
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

    if (
        not dist.is_available()
        or not dist.is_initialized()
        or dist.get_world_size() == 1
        or "fake" in dist.get_backend()
    ):
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
