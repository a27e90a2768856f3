"""Plan: what every rank does, in which order. A frozen value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.checks import check_types, entry
from penstock.errors import PlanError
from penstock.plan.actions import KEY, OP, AnyAction, below, parts, text, unpack
from penstock.plan.dependencies import Rules
from penstock.plan.lazy_actions import Lists
from penstock.plan.ops import CHOICES, COMPUTES, MESSAGES, OVERLAP, TRAINING, Op
from penstock.plan.placement import Placement
from penstock.plan.stage_graph import StageGraph

_BACKWARDS = COMPUTES & TRAINING | {OVERLAP}


@dataclass(frozen=True)
class Family:
    """Origin of the lists of a plan: a registered schedule, its sizes, and the passes that were applied."""

    name: str
    is_lowered: bool = False


@dataclass(frozen=True)
class Plan:
    """Ordered actions of every rank.

    >>> plan = Plan.of({0: ["0F0", "0B0"], 1: ["1F0", "1B0"]})
    >>> plan.num_ranks, plan.num_stages, plan.num_microbatches
    (2, 2, 1)
    >>> [str(action) for action in plan.actions(1)]
    ['1F0', '1B0']

    Inside, each rank's list is packed (see `penstock.plan.actions`): `codes[rank]` for those in a hurry,
    `actions(rank)` for those who read.
    """

    placement: Placement
    graph: StageGraph
    num_microbatches: int
    codes: Sequence[tuple[int, ...]] = field(repr=False)  # the packed actions of each rank
    name: str = ""  # the schedule that it came from, for titles and messages
    family: Family | None = field(default=None, compare=False, repr=False)  # see `is_share`

    def __post_init__(self) -> None:
        try:
            if self.num_microbatches < 1:
                raise PlanError(f"a plan for {self.num_microbatches} microbatches; expected at least one")
            if self.graph.num_stages != self.num_stages:
                raise PlanError(f"the graph has {self.graph.num_stages} stages, the placement {self.num_stages}")
            if len(self.codes) != self.num_ranks:
                raise PlanError(f"{len(self.codes)} lists of actions for {self.num_ranks} ranks; expected one each")
        except Exception:
            check_types("Plan", PlanError, placement=(self.placement, Placement), graph=(self.graph, StageGraph))
            check_types("Plan", PlanError, num_microbatches=(self.num_microbatches, int), codes=(self.codes, Sequence))
            raise

    @classmethod
    def of(
        cls,
        actions: Mapping[int, Iterable[AnyAction | str | int | None]]
        | Sequence[Iterable[AnyAction | str | int | None]],
        *,
        placement: Placement | None = None,
        graph: StageGraph | None = None,
        num_microbatches: int | None = None,
        name: str = "",
    ) -> Plan:
        """A plan from readable actions, their text, or packed ones; None (an idle slot) is skipped.

        What is not given is read off the actions: a stage sits where it computes, the graph is a chain, the number of
        microbatches is the highest plus one.
        """
        from penstock.plan.csv_format import Reader  # the reading side knows how to complain with rank and position

        check_types("Plan.of", PlanError, placement=(placement, Placement | None), graph=(graph, StageGraph | None))
        check_types("Plan.of", PlanError, num_microbatches=(num_microbatches, int | None), name=(name, str))
        try:
            rows = [iter(actions[rank]) for rank in range(len(actions))]
        except Exception:
            kinds = Mapping[int, Iterable[object]] | Sequence[Iterable[object]]
            check_types("Plan.of", PlanError, actions=(actions, kinds))
            raise
        return Reader("", placement, graph, num_microbatches, name).plan(rows)

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_actions(self) -> int:
        return sum(map(len, self.codes))

    @cached_property
    def keys(self) -> tuple[frozenset[int], ...]:
        """The keys (packed actions without their microbatch) of each rank; of an overlapped pair the pair's own."""
        return tuple(frozenset(map(KEY.__and__, codes)) for codes in self.codes)

    @cached_property
    def _ops(self) -> frozenset[int]:
        """The ops that are there; `OVERLAP` for overlapped pairs."""
        if self.is_share:
            return frozenset(code & OP for rank in (0, -1) for code in self.codes[rank])
        return frozenset(key & OP for keys in self.keys for key in keys)

    @property
    def is_share(self) -> bool:
        """True if the plan belongs to a family: a registered schedule on a chain of stages, lowered or not.

        What is known of the family holds for the plan: it is right, and the first and the last rank have every op that
        any rank has. So a rank that asks for its own list alone pays for that alone. `family` says which one it is.
        `tests/schedules/test_families.py` proves these claims for every family, over all small sizes.
        """
        return self.family is not None

    @property
    def is_lowered(self) -> bool:
        """True if the plan contains its messages; a compute-only plan does not."""
        if self.family is not None:  # no list has to be made to find out
            return self.family.is_lowered and self.num_ranks > 1
        return not self._ops.isdisjoint(MESSAGES)

    def has(self, op: Op) -> bool:
        """Return True if any rank has an action with this op, not counting those in overlapped pairs."""
        check_types("Plan.has", PlanError, op=(op, int))
        return op in self._ops

    @property
    def has_backward(self) -> bool:
        return not self._ops.isdisjoint(_BACKWARDS)

    @cached_property
    def rules(self) -> Rules:
        some = () if self.is_share else self.keys  # families recompute and offload nothing
        chosen = frozenset(key for keys in some for key in keys if key & OP in CHOICES)
        return Rules(self.graph, self.placement, lowered=self.is_lowered, chosen=chosen)

    def actions(self, rank: int) -> tuple[AnyAction, ...]:
        """The actions of one rank, readable."""
        return tuple(map(unpack, entry(self.codes, rank, "actions(rank")))

    def lines(self) -> Iterator[str]:
        """One line a rank, for looking at small plans."""
        for rank, codes in enumerate(self.codes):
            yield f"rank {rank}: " + " ".join(map(text, codes))

    def with_codes(self, codes: Iterable[Iterable[int]]) -> Plan:
        """The same sizes, other actions."""
        try:
            lists = tuple(tuple(some) for some in codes)
        except TypeError:
            check_types("Plan.with_codes", PlanError, codes=(codes, Iterable[Iterable[int]]))
            raise
        return replace(self, codes=lists, family=None)

    def with_lists(self, make: Callable[[int], Iterable[int]], change: str, *, lowered: bool = False) -> Plan:
        """The same sizes, with lists that are made when they are asked for; `change` says in what a family is another one."""
        check_types("Plan.with_lists", PlanError, make=(make, Callable), lowered=(lowered, bool))
        family = self.family and Family(f"{self.family.name}, {change}", lowered or self.family.is_lowered)
        return replace(self, codes=Lists(self.num_ranks, make), family=family)

    def with_graph(self, graph: StageGraph) -> Plan:
        """The same actions for a model with other connections between its stages."""
        return replace(self, graph=graph, family=self.family if graph == self.graph else None)

    def of_first(self, num_microbatches: int) -> Plan:
        """The plan of a smaller batch: the first microbatches alone, in the same order.

        >>> print(*Plan.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]).of_first(1).lines(), sep="\\n")
        rank 0: 0F0 0B0
        rank 1: 1F0 1B0
        """
        check_types("Plan.of_first", PlanError, num_microbatches=(num_microbatches, int))
        rows = tuple(tuple(below(num_microbatches, codes)) for codes in self.codes)
        return replace(self, codes=rows, num_microbatches=num_microbatches, family=None)

    def forward_only(self) -> Plan:
        """The plan of an evaluation: every forward in its place, and nothing of the backward."""
        lists = self.codes

        def forwards(rank: int) -> list[int]:
            return [part for code in lists[rank] for part in parts(code) if part & OP not in TRAINING]

        return self.with_lists(forwards, "forward only")
