"""Where to cut when only the number of stages is given: by cost, measured where that is possible.

    chooser = CostCuts(model, args, kwargs, source)
    chooser(flat, 4)                    # positions in flat.nodes
    chooser.cuts, chooser.basis         # the table, and what its numbers are

The model is cut everywhere where little crosses, each piece is run alone, and `penstock.balance` looks for the best of
all cuts. A model without values, or one that cannot be run with the example, is judged by the work counted in the graph.
"""

from __future__ import annotations

import hashlib
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.balance import Cuts, Profile, balance
from penstock.capture.cut_places import cut_places, estimated, sizes_in_example
from penstock.capture.flat import Flat, Mark
from penstock.capture.layer_costs import profile_layers
from penstock.capture.one_layer import LayerSetting
from penstock.capture.pipe import Pipe
from penstock.capture.skeleton import has_no_data
from penstock.capture.stage_state import StateNames
from penstock.errors import CaptureError, PenstockError, UnevenCut
from penstock.misfits import takes
from penstock.nest import Value, map_tensors, tensors_in

ENOUGH = 0.3  # seconds for one layer


@dataclass
class CostCuts:
    """Chooses the cuts of one capture, and remembers why."""

    model: nn.Module
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    names: StateNames
    make_layers: Callable[[Flat, Sequence[Mark]], Pipe]
    given: Profile | None = None
    cuts: Cuts | None = field(default=None, init=False)
    basis: str = field(default="", init=False)
    uneven: str = field(default="", init=False)

    def __call__(self, flat: Flat, num_stages: int) -> list[int]:
        if num_stages == 1:
            return []
        profile = self.given or self._agreed(flat, num_stages)
        boundaries = self.best(profile, num_stages).boundaries
        warn_if_uneven(profile, boundaries)
        places = [tuple(place) for place in profile.metadata["places"]]
        return cuts_at([places[boundary - 1] for boundary in boundaries])(flat, num_stages)

    def best(self, profile: Profile, num_stages: int) -> Cuts:
        """The best cuts by these costs, which are remembered."""
        self.cuts, self.basis = balance(profile, num_stages), basis_of(profile)
        self.uneven = unevenness(profile, self.cuts.boundaries)
        return self.cuts

    def _agreed(self, flat: Flat, num_stages: int) -> Profile:
        places = cut_places(flat, num_stages)
        if len(places) < num_stages - 1:
            raise CaptureError(
                f"{num_stages} stages were asked for, and the model has only {len(places)} places where it can be cut; "
                f"ask for at most {len(places) + 1}"
            )
        why_not = _why_not_measured(self.model, (self.args, self.kwargs))
        question, kind = f"cut/{fingerprint(flat, num_stages)}", "estimated" if why_not else "measured"
        return Profile.loads(agreed(question, lambda: self._profile(flat, places, why_not).dumps(), kind=kind))

    def _profile(self, flat: Flat, places: Sequence[int], why_not: str) -> Profile:
        where = [(place, flat.nodes[place].name) for place in places]
        if not why_not:
            try:
                layers = self.make_layers(flat.copied(), [Mark(place, f"operator {place}") for place in places])
                args, kwargs = map_tensors(Tensor.clone, (self.args, dict(self.kwargs)))
                setting = LayerSetting(args, kwargs, device_of(self.model), enough=ENOUGH)
                return profile_layers(layers, where, setting, progress=False)
            except (PenstockError, RuntimeError, ValueError, TypeError, LookupError) as error:
                why_not = f"it cannot be run with the example: {(str(error).splitlines() or [''])[0]}"
        found = estimated(flat, places, self.names)
        metadata = {"unit": "operations", "estimated": "the work in its graph", "why": why_not, "places": where}
        return replace(found, metadata=metadata)


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


def cuts_at(where: Sequence[tuple[int, str]]) -> Callable[[Flat, int], list[int]]:
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


def device_of(model: nn.Module) -> torch.device:
    """Where the model is; one without data will be on the CPU."""
    return next((p.device for p in model.parameters() if not has_no_data(p)), torch.device("cpu"))


def _why_not_measured(model: nn.Module, example: object) -> str:
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
