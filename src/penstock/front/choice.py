"""Choice: which plan was chosen for which stages, what they cost, and among what it was chosen. Built: what was made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise

from penstock.balance import Profile
from penstock.capture import PipeInfo
from penstock.comm.decoding import reading
from penstock.front.stage_costs import FREE, BudgetRows, Machine, stage_costs, with_budgets
from penstock.lower import lower
from penstock.nest import Value
from penstock.plan import Placement, Plan, dumps, loads
from penstock.simulate import Costs, Link, Timeline, dumps_costs, loads_costs, simulate
from penstock.stage.pipeline_stage import PipelineStage


@dataclass(frozen=True)
class Spared:
    """One stage that holds less, to keep to a limit.

    [(one.stage, one.way, one.size, one.time) for one in pipe.choice.spared]
    """

    stage: int
    way: str  # "recompute", "offload" or "budget"
    microbatches: int  # of how many
    size: int  # bytes less on its rank
    time: float  # what the step takes longer for it, in the unit of the profile
    budget: float | None = None  # of a stage that is compiled with one: which share the graph keeps


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
    def of(cls, choice: Choice) -> Tried:
        plan, timeline = choice.plan, choice.timeline
        return cls(plan.name, per_rank(plan), timeline.makespan, timeline.bubble_makespan, max(choice.memory))


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
    budgets: tuple[tuple[int, float], ...] = ()  # stages that are compiled with a budget of memory, and it

    @property
    def num_stages(self) -> int:
        return self.plan.num_stages

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The layers of each stage: first, and one after the last."""
        edges = [0, *self.boundaries, len(self.profile.layers)]
        return tuple(pairwise(edges))

    def key(self, stage: int) -> str:
        """The layers of a stage, as the profile names them where it knows more of a stage than the sum of its layers."""
        start, stop = self.bounds[stage]
        return f"{start}:{stop}"

    @property
    def is_timed(self) -> bool:
        """Whether the costs are seconds, or only say how large one stage is beside another."""
        return is_timed(self.profile)

    @cached_property
    def costs(self) -> Costs:
        if self.calibrated is not None:
            return self.calibrated
        return with_budgets(self.bare_costs, {stage: (self.budget_rows(stage), b) for stage, b in self.budgets})

    @cached_property
    def bare_costs(self) -> Costs:
        """By the layers alone, without budgets."""
        found = stage_costs(self.profile, self.bounds, self.machine, self.plan.placement)
        return replace(found, microbatches=self.microbatches)

    def budget_rows(self, stage: int) -> BudgetRows:
        """What budgets of memory were measured to do to a stage; the first row is that of none."""
        forward = self.bare_costs.forward[stage]
        rows: BudgetRows = [(1.0, 0.0, 0.0)]
        for budget, size, longer in self.profile.metadata.get("budgets", {}).get(self.key(stage), ()):
            if size > rows[-1][1]:
                rows.append((budget, size, max(longer * forward, rows[-1][2])))
        return rows

    def least_budget(self, stage: int) -> float | None:
        """The smallest budget that was measured and saved something."""
        *_, (budget, size, _) = self.budget_rows(stage)
        return budget if size else None

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
        stages_of = self.plan.placement.stages_of
        return tuple(
            round(peak) + self.state_bytes(stages_of(rank)) for rank, peak in enumerate(self.timeline.peak_memory)
        )

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


def per_rank(plan: Plan) -> int:
    """How many stages the fullest rank has, if they are spread evenly."""
    return -(-plan.num_stages // plan.num_ranks)


def is_timed(profile: Profile) -> bool:
    """Whether its times are seconds: only those can be added to what was measured of the machine."""
    return profile.metadata.get("unit") == "s"
