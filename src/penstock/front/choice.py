"""Choice: which plan was chosen for which stages, what these cost by their layers, and among what it was chosen. Built: what was
made of it.

    costs = stage_costs(profile, [(0, 4), (4, 8)], Machine(), Placement.loop(2))     # times and bytes for one microbatch
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

from penstock.balance import Profile
from penstock.capture import PipeInfo
from penstock.health.decoding import reading
from penstock.lower import lower
from penstock.nest import Value
from penstock.plan import Placement, Plan, dumps, loads
from penstock.simulate import Costs, Link, Timeline, dumps_costs, loads_costs, simulate
from penstock.stage.pipeline_stage import PipelineStage


@dataclass(frozen=True)
class Machine:
    """What ranks and connections cost beside the computing, in seconds. By default nothing."""

    latency: float = 0.0  # of a message between two ranks
    bandwidth: float | None = None  # bytes a second; None: no limit
    overhead: float = 0.0  # of each compute action
    posting: float = 0.0  # of each send or receive, for the rank that posts it
    around: float = 0.0  # of a step beside its actions: the batch cut, the ranks asked before and after
    # For each rank how many times as long as the others it takes; None: they are alike.
    ranks: tuple[float, ...] | None = None
    links: tuple[Link, ...] = ()  # between ranks that are further from one another than the others
    copy_bandwidth: float | None = None  # bytes a second off the device, and back; None: not measured


FREE: Final = Machine()


def stage_costs(profile: Profile, bounds: Sequence[tuple[int, int]], machine: Machine, placement: Placement) -> Costs:
    """The costs of stages that hold the layers from each first of the bounds to one before each second."""
    layers = profile.layers

    def total(name: str) -> tuple[float, ...]:
        return tuple(sum(getattr(layer, name) for layer in layers[start:stop]) for start, stop in bounds)

    full = profile.metadata.get("backward")
    crossing = (*profile.crossing, 0)
    kept = (*profile.metadata.get("crossing_kept", profile.crossing), 0)
    unsaved = (*profile.metadata.get("crossing_unsaved", [0] * len(profile.crossing)), 0)
    outputs = tuple(float(crossing[stop - 1]) for _, stop in bounds)
    # An output is held to its gradient, whether a graph keeps it or not. What comes from another rank is in a buffer of
    # this one; what comes from this one belongs to the stage that made it.
    beside = tuple(float(crossing[stop - 1] - kept[stop - 1]) for _, stop in bounds)
    neighbours = pairwise(placement.ranks)
    inputs = (0.0, *(size if here != there else 0.0 for size, (here, there) in zip(outputs, neighbours, strict=False)))
    held = tuple(map(sum, zip(inputs, total("activation_to_input"), beside, strict=True)))
    unmoved = tuple(map(sum, zip(inputs, outputs, total("unmoved"), strict=True)))
    copied = [max(whole - stays, 0.0) for whole, stays in zip(held, unmoved, strict=True)]
    moments = list(zip(*(_moments(profile, start, stop) for start, stop in bounds), strict=True))
    return Costs(
        forward=total("forward"),
        backward_input=total("backward_input"),
        backward_weight=total("backward_weight"),
        held_to_input=held,
        held_to_weight=total("activation_to_weight"),
        kept_input=inputs,
        unsaved=tuple(float(unsaved[stop - 1]) for _, stop in bounds),
        casts=total("cast_bytes"),
        unmoved=unmoved,
        copy=None if machine.copy_bandwidth is None else tuple(size / machine.copy_bandwidth for size in copied),
        forward_moment=moments[0],
        backward_moment=moments[1],
        input_moment=moments[2],
        weight_moment=total("weight_peak"),  # all weights of a stage at once
        backward=None if full is None else tuple(sum(full[start:stop]) for start, stop in bounds),
        output_bytes=outputs,
        **{name: getattr(machine, name) for name in ("latency", "bandwidth", "overhead", "posting", "links", "ranks")},
    )


def _moments(profile: Profile, start: int, stop: int) -> tuple[float, float, float]:
    """Bytes beside those that a stage holds in the end: the most in its F, in its B and in its I.

    A forward has held what the layers before this one left. A backward has let go of what the layers after it had, but for
    what waits for the weight-backward, and brings the gradient of the output of this one.
    """
    layers, crossing = profile.layers, (*profile.crossing, 0)
    kept = (*profile.metadata.get("crossing_kept", profile.crossing), 0)
    whole = sum(layer.activation_to_input for layer in layers[start:stop]) + crossing[stop - 1] - kept[stop - 1]
    waiting = sum(layer.activation_to_weight for layer in layers[start:stop])
    before, forward, full, inputs = 0, 0, 0, 0
    for index in range(start, stop):
        layer = layers[index]
        given = crossing[index - 1] - kept[index - 1] if index > start else 0
        forward = max(forward, before + given + layer.forward_peak - whole)
        before += layer.activation_to_input
        waiting -= layer.activation_to_weight
        gradient = crossing[index] if index + 1 < stop else 0
        full = max(full, before + gradient + layer.backward_peak - whole)
        inputs = max(inputs, before + waiting + gradient + layer.input_peak - whole)
    return float(forward), float(full), float(inputs)


@dataclass(frozen=True)
class Spared:
    """One stage that holds less, to keep to a limit.

    [(one.stage, one.way, one.size, one.time) for one in pipe.choice.spared]
    """

    stage: int
    way: str  # "recompute" or "offload"
    microbatches: int  # of how many
    size: int  # bytes less on its rank
    time: float  # what the step takes longer for it, in the unit of the profile


@dataclass(frozen=True)
class Tried:
    """One candidate.

    [(one.schedule, one.makespan) for one in pipe.choice.tried]
    """

    schedule: str
    stages_per_rank: int
    makespan: float | None  # in the unit of the profile; None: impossible, and `why` says why
    bubble: float = 0.0
    memory: int = 0  # bytes of the fullest rank
    why: str = ""

    @classmethod
    def of(cls, choice: Choice, why_not: str = "") -> Tried:
        """One that was simulated; or one that cannot be, and why."""
        plan, found = choice.plan, None if why_not else choice.timeline
        stages = -(-plan.num_stages // plan.num_ranks)  # of the fullest rank, if they are spread evenly
        if found is None:
            return cls(plan.name, stages, None, why=why_not)
        return cls(plan.name, stages, found.makespan, found.bubble_makespan, max(choice.memory))


@dataclass(frozen=True)
class Choice:
    """What was chosen, and among what.

    pipe.choice.plan.name, pipe.choice.timeline.makespan
    """

    plan: Plan  # compute actions
    boundaries: tuple[int, ...]  # the first layer of each stage but the first
    profile: Profile
    tried: tuple[Tried, ...] = ()
    machine: Machine = FREE
    optimizer_bytes: float = 2.0
    why: str = ""
    calibrated: Costs | None = None  # of the stages, measured in steps of all ranks; see `Pipeline.calibrate`
    spared: tuple[Spared, ...] = ()  # the stages that hold less, to keep to a limit
    smallest_limit: int | None = None  # bytes a rank: the least limit that would have done
    microbatches: tuple[float, ...] | None = None  # how large each is beside the others

    @property
    def num_stages(self) -> int:
        return self.plan.num_stages

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The layers of each stage: first, and one after the last."""
        return tuple(pairwise([0, *self.boundaries, len(self.profile.layers)]))

    @property
    def is_timed(self) -> bool:
        """Whether the costs are seconds, or only say how large one stage is beside another."""
        return is_timed(self.profile)

    @cached_property
    def costs(self) -> Costs:
        if self.calibrated is not None:
            return self.calibrated
        found = stage_costs(self.profile, self.bounds, self.machine, self.plan.placement)
        return replace(found, microbatches=self.microbatches)

    @property
    def predicted(self) -> float:
        """How long a step takes, by these costs: its actions, what they take longer now and then, and what is around them."""
        return self.timeline.makespan + self.costs.uneven + self.machine.around

    @cached_property
    def timeline(self) -> Timeline:
        """The lowered plan in time, by these costs."""
        return replace(simulate(lower(self.plan), self.costs), unit="s" if self.is_timed else "")

    def parameter_bytes(self, stages: Sequence[int]) -> int:
        """The parameters of some stages together; what they share counts once."""
        layers = [layer for s in stages for layer in self.profile.layers[slice(*self.bounds[s])]]
        shared = frozenset[str]().union(*(layer.shared for layer in layers))
        return sum(layer.parameter_bytes for layer in layers) + sum(self.profile.shared_parameters[n] for n in shared)

    def state_bytes(self, stages: Sequence[int]) -> int:
        """Parameters, gradients and optimizer state."""
        return round(self.parameter_bytes(stages) * (2 + self.optimizer_bytes))

    @cached_property
    def memory(self) -> tuple[int, ...]:
        """Bytes of each rank at its peak, all told."""
        states = map(self.state_bytes, map(self.plan.placement.stages_of, range(self.plan.num_ranks)))
        return tuple(round(peak) + state for peak, state in zip(self.timeline.peak_memory, states, strict=True))

    def dumps(self) -> str:
        """As text; `Choice.loads` is the inverse."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        plain |= {
            "plan": dumps(self.plan),
            "schedule": self.plan.name,
            "placement": self.plan.placement.ranks,
            "profile": self.profile.dumps(),
            "calibrated": None if self.calibrated is None else dumps_costs(self.calibrated),
        }
        return json.dumps(plain, default=asdict)

    @classmethod
    def loads(cls, text: str) -> Choice:
        """Read what `dumps` wrote."""
        with reading("the choice of a schedule"):
            data = _tuples(json.loads(text))
            name, placement = data.pop("schedule"), Placement.of(data.pop("placement"))
            links = tuple(Link(*link) for link in data["machine"].get("links", ()))
            calibrated = data.get("calibrated")
            data |= {
                "plan": replace(loads(data["plan"]), name=name, placement=placement),
                "profile": Profile.loads(data["profile"]),
                "tried": tuple(Tried(**tried) for tried in data["tried"]),
                "machine": Machine(**{**data["machine"], "links": links}),
                "calibrated": None if calibrated is None else loads_costs(calibrated),
                "spared": tuple(Spared(**spared) for spared in data.get("spared", ())),
            }
            return cls(**data)


@dataclass(frozen=True)
class Built:
    """The stages of this rank, and what is known of all."""

    stages: list[PipelineStage]
    plan: Plan
    info: PipeInfo | None = None  # of a captured model
    choice: Choice | None = None  # with measured costs

    def with_plan(self, plan: Plan, **of_choice: Value) -> Built:
        """The same stages under another plan; `of_choice` is what else the choice says from now on."""
        choice = None if self.choice is None else replace(self.choice, plan=plan, **of_choice)
        return replace(self, plan=plan, choice=choice)


def _tuples(value: Value) -> Value:
    """What JSON gives, with a tuple in place of each list."""
    if isinstance(value, dict):
        return {key: _tuples(one) for key, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def is_timed(profile: Profile) -> bool:
    """Whether its times are seconds: only those can be added to what was measured of the machine."""
    return profile.metadata.get("unit") == "s"
