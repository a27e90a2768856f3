"""Costs: what an action takes and holds. Data beside the plan, never part of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Final, NamedTuple, get_type_hints

from penstock.checks import check_types
from penstock.errors import PlanError
from penstock.plan import Op, Plan
from penstock.plan.actions import MAX_STAGE
from penstock.plan.ops import NOTHING, OpKind

_LINK: Final = re.compile(r"(\d{1,6})([->])(\d{1,6})=(\d{0,15}\.?\d{1,15}(?:e-?\d{1,2})?)", re.IGNORECASE)


class Link(NamedTuple):
    """The way from one rank to another, where it differs from the others: `Link(6, 7, latency=30.0)`."""

    sender: int
    receiver: int
    latency: float
    bandwidth: float | None = None  # bytes a unit of time; None: no limit

    @classmethod
    def read(cls, text: str) -> list[Link]:
        """Links as people write them: both ways, or one.

        >>> Link.read("6-7=30"), Link.read("6>7=0.5")
        ([Link(sender=6, receiver=7, latency=30.0, ...), Link(sender=7, receiver=6, ...)], [Link(sender=6, ...)])
        """
        found = _LINK.fullmatch(text.strip())
        if found is None:
            raise PlanError(f"the link {text!r}; expected A-B=T or A>B=T, such as 6-7=30")
        one, other, latency = int(found[1]), int(found[3]), float(found[4])
        return [cls(one, other, latency), *([cls(other, one, latency)] if found[2] == "-" else [])]


_MOST = 1e60  # of a number: sums and products of a few of them are finite too
_NOT_PER_STAGE: Final = ("links", "microbatches", "ranks")
# Of stages that become one: what is of the first, or of the last of them. Times and sizes are added, of moments the most counts.
_JOINED: Final = {"kept_input": itemgetter(0), "output_bytes": itemgetter(-1), "unsaved": itemgetter(-1)}


@dataclass(frozen=True)
class Costs:
    """Times in any one unit, sizes in bytes (or any one unit). Per stage unless it says otherwise.

    >>> Costs.per_rank(num_stages=4, stages_per_rank=2, forward=2.0).forward
    (1.0, 1.0, 1.0, 1.0)
    """

    forward: tuple[float, ...]  # F
    backward_input: tuple[float, ...]  # I
    backward_weight: tuple[float, ...]  # W
    held_to_input: tuple[float, ...]  # bytes that a microbatch holds from its F to its I (or B)
    held_to_weight: tuple[float, ...]  # bytes that it still holds from its I to its W
    kept_input: tuple[float, ...] | None = None  # bytes that it holds from F to R where it is recomputed; None: none
    unmoved: tuple[float, ...] | None = None  # bytes of it that stay where the rest is offloaded; None: none
    unsaved: tuple[float, ...] | None = None  # bytes of it that an R does not make again, for a B: an output
    casts: tuple[float, ...] | None = None  # bytes that a stage holds from its first F on: parameters in another type
    forward_moment: tuple[float, ...] | None = None  # bytes that operators need for a moment in F and R
    backward_moment: tuple[float, ...] | None = None  # and in B
    input_moment: tuple[float, ...] | None = None  # and in I; None: as in B
    weight_moment: tuple[float, ...] | None = None  # and in W; None: as in B
    backward: tuple[float, ...] | None = None  # B, if it differs from I + W
    copy: tuple[float, ...] | None = None  # O, and L; None: what is held, by `copy_bandwidth`
    copy_bandwidth: float | None = None  # bytes a unit of time off the device, and back; None: as quick as the forward
    overlap: float | None = None  # one fused F&B slot; None: the two run in series
    latency: float = 0.0  # of a message between two ranks; occupies neither
    bandwidth: float | None = None  # bytes a unit of time on each ordered pair of ranks; None: no limit
    output_bytes: tuple[float, ...] | None = None  # what a stage sends for a microbatch; its gradient is as large
    overhead: float = 0.0  # what a rank spends on each compute action beside the computation
    posting: float = 0.0  # what a rank spends on each send or receive of a lowered plan
    # of a step: what ranks wait for one another since equal actions do not take equal time; not simulated
    uneven: float = 0.0
    unshard: float = 0.0  # gather the parameters of a stage
    reshard: float = 0.0
    reduce_grad: float = 0.0
    links: tuple[Link, ...] = ()  # ordered pairs of ranks with a latency and a bandwidth of their own
    microbatches: tuple[float, ...] | None = None  # by microbatch: its times and bytes are so many times those above
    ranks: tuple[float, ...] | None = None  # by rank: its compute actions take so many times as long as said above

    def __post_init__(self) -> None:
        try:
            self._check_values()
        except Exception:
            hints = get_type_hints(Costs).items()
            check_types("Costs", PlanError, **{name: (getattr(self, name), hint) for name, hint in hints})
            raise

    def _check_values(self) -> None:
        lengths = {name: len(column) for name, column in self.columns().items()}
        if len(set(lengths.values())) != 1:
            raise PlanError(f"costs for different numbers of stages: {lengths}; expected one number a stage in each")
        for name in (field.name for field in fields(self) if field.name != "links"):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else () if value is None else (value,)
            if not all(0 <= number <= _MOST for number in numbers):
                raise PlanError(f"costs: {name}={value}; expected finite numbers >= 0, at most {_MOST:g}")
        for link in self.links:
            if min(link[:2]) < 0 or link.sender == link.receiver or not 0 <= link.latency <= _MOST:
                raise PlanError(f"costs: {link}; expected two ranks and a finite latency >= 0")
        ways: Sequence[Costs | Link] = (self, *self.links)
        for way in ways:
            if way.bandwidth is not None and (not 1 / _MOST <= way.bandwidth <= _MOST or self.output_bytes is None):
                given = way if isinstance(way, Link) else f"bandwidth={way.bandwidth}"
                raise PlanError(
                    f"costs: {given}; a bandwidth must be above 0 and needs output_bytes, the bytes of each stage's output"
                )
        if self.copy_bandwidth is not None and self.copy_bandwidth < 1 / _MOST:
            raise PlanError(
                f"costs: copy_bandwidth={self.copy_bandwidth}; expected more than 0, or None for copies as quick as the forward"
            )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    def columns(self) -> dict[str, tuple[float, ...]]:
        """Return the per-stage costs by name."""
        known = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_PER_STAGE}
        return {name: value for name, value in known.items() if isinstance(value, tuple)}

    @cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        return {link[:2]: link for link in self.links}

    def link(self, sender: int, receiver: int) -> Link:
        """The way from one rank to another."""
        try:
            return self._links.get((sender, receiver)) or Link(sender, receiver, self.latency, self.bandwidth)
        except TypeError:
            check_types("Costs.link", PlanError, sender=(sender, int), receiver=(receiver, int))
            raise

    def transfer(self, link: Link, stage: int) -> float:
        """Return the time for which the output of a stage (or its gradient) occupies a link, for a microbatch of size 1."""
        try:
            return (
                self.output_bytes[stage] / link.bandwidth if link.bandwidth is not None and self.output_bytes else 0.0
            )
        except Exception:
            check_types("Costs.transfer", PlanError, link=(link, Link), stage=(stage, int))
            raise

    def check_sizes(self, num_stages: int, num_ranks: int, num_microbatches: int) -> None:
        """Raises PlanError if these are not the costs of a plan of this size."""
        check_types("Costs.check_sizes", PlanError, num_stages=(num_stages, int), num_ranks=(num_ranks, int))
        if self.num_stages != num_stages:
            raise PlanError(f"costs for {self.num_stages} stages, a plan for {num_stages}; expected the same")
        sizes = {"microbatches": (self.microbatches, num_microbatches), "ranks": (self.ranks, num_ranks)}
        for what, (given, wanted) in sizes.items():
            if given is not None and len(given) != wanted:
                raise PlanError(f"costs with {len(given)} {what}, a plan with {wanted}; expected one number for each")
        for link in self.links:
            if max(link[:2]) >= num_ranks:
                raise PlanError(f"costs: {link} on {num_ranks} ranks; expected ranks from 0 to {num_ranks - 1}")

    def time(self, op: Op, stage: int) -> float:
        """Return the time of an op on a stage, without the overhead of a compute action."""
        try:
            return self._time(op, stage)
        except Exception:
            check_types("Costs.time", PlanError, op=(op, Op), stage=(stage, int))
            raise

    def _time(self, op: Op, stage: int) -> float:
        cost = getattr(self, op.row.cost)
        if cost is None and op.row.kind is OpKind.COPY:
            return self.held_to_input[stage] / self.copy_bandwidth if self.copy_bandwidth else self.forward[stage]
        if cost is None:
            return sum(self._time(half, stage) for half in op.row.halves)
        return float(cost[stage] if isinstance(cost, tuple) else cost)

    def scale(self, microbatch: int) -> float:
        """Return the factor for the times and bytes of a microbatch."""
        return self.microbatches[microbatch] if self.microbatches else 1.0

    def sizes(self, what: str | None) -> tuple[float, ...] | None:
        """By stage: what is held under a name from the table of ops; None for None, which changes nothing."""
        if what is None:
            return None
        if not isinstance(what, str) or what not in {NOTHING, *self.__dataclass_fields__}:
            raise PlanError(f"sizes({what!r:.80}); expected a field of Costs, such as 'held_to_input'")
        sizes: tuple[float, ...] | None = None if what == NOTHING else getattr(self, what)
        return (0.0,) * self.num_stages if sizes is None else sizes

    def joined(self, count: int) -> Costs:
        """The costs if every `count` stages, one after another, were one.

        >>> Costs.per_rank(num_stages=4, stages_per_rank=2).joined(2).forward
        (1.0, 1.0)
        """
        check_types("Costs.joined", PlanError, count=(count, int))
        if count < 1 or self.num_stages % count:
            raise PlanError(f"joined({count}) of {self.num_stages} stages; expected a number that divides them")
        changed: dict[str, Any] = {}
        for name, column in self.columns().items():
            join = _JOINED.get(name, max if name.endswith("_moment") else sum)
            changed[name] = tuple(join(column[at : at + count]) for at in range(0, self.num_stages, count))
        return replace(self, **changed)

    @classmethod
    def per_rank(
        cls,
        *,
        num_stages: int,
        stages_per_rank: int = 1,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        latency: float = 0.0,
        held_to_input: float = 1.0,
        held_to_weight: float | None = None,
        kept_input: float = 0.0,
        overlap: float | None = None,
        overhead: float = 0.0,
    ) -> Costs:
        """Equal stages, with times per rank and microbatch as in papers: with v stages a rank each costs 1/v.

        `held_to_weight` is as much as `held_to_input` unless given; `overlap` and `overhead` are per stage, as they are.
        """

        check_types("Costs.per_rank", PlanError, num_stages=(num_stages, int), stages_per_rank=(stages_per_rank, int))
        check_types("Costs.per_rank", PlanError, forward=(forward, float), backward_input=(backward_input, float))
        check_types(
            "Costs.per_rank", PlanError, backward_weight=(backward_weight, float), kept_input=(kept_input, float)
        )
        check_types("Costs.per_rank", PlanError, held_to_input=(held_to_input, float))
        check_types("Costs.per_rank", PlanError, held_to_weight=(held_to_weight, float | None))
        if not (0 < num_stages <= MAX_STAGE + 1 and stages_per_rank > 0):
            raise PlanError(
                f"num_stages={num_stages}, stages_per_rank={stages_per_rank}; expected numbers from 1, and at most "
                f"{MAX_STAGE + 1:,} stages"
            )

        def each(total: float) -> tuple[float, ...]:
            return (total / stages_per_rank,) * num_stages

        return cls(
            forward=each(forward),
            backward_input=each(backward_input),
            backward_weight=each(backward_weight),
            held_to_input=each(held_to_input),
            held_to_weight=each(held_to_input if held_to_weight is None else held_to_weight),
            kept_input=each(kept_input),
            latency=latency,
            overlap=overlap,
            overhead=overhead,
        )

    @classmethod
    def unit(cls, plan: Plan) -> Costs:
        """F = I = W = 1 per rank and microbatch, free messages: what to draw a plan with when nothing is measured."""
        check_types("Costs.unit", PlanError, plan=(plan, Plan))
        per_rank = -(-plan.num_stages // plan.num_ranks)
        return cls.per_rank(num_stages=plan.num_stages, stages_per_rank=per_rank)

    @classmethod
    def per_stage(
        cls, forward: Iterable[float], backward_input: Iterable[float], backward_weight: Iterable[float]
    ) -> Costs:
        """Stages that differ; each holds one unit of memory for a microbatch in flight."""
        check_types(
            "Costs.per_stage", PlanError, forward=(forward, Iterable), backward_input=(backward_input, Iterable)
        )
        check_types("Costs.per_stage", PlanError, backward_weight=(backward_weight, Iterable))
        times: Sequence[tuple[float, ...]] = [tuple(forward), tuple(backward_input), tuple(backward_weight)]
        ones = (1.0,) * len(times[0])
        return cls(times[0], times[1], times[2], held_to_input=ones, held_to_weight=ones)
