"""Orders in lockstep: one slot an action, whatever it costs. The clock of torch.distributed.pipelining's own checks.

    simulate_comms_compute(order, stage_to_rank, num_stages)     # which rank does what in which slot, messages and all

penstock's own clock is `simulate`, which knows costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from penstock.compat._vocabulary import NamedAction, Order, to_code
from penstock.errors import DeadlockError
from penstock.plan import Placement, Rules, StageGraph
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, parts, with_op
from penstock.plan.ops import ROWS


def simulate_comms_compute(
    pipeline_order: Order, stage_to_rank: Callable[[int], int], num_stages: int
) -> dict[int, list[NamedAction | None]]:
    """Work through a lowered order in lockstep, one slot an action: which rank does what in which slot, None where it waits.

    A rank that waits gets a second chance in the same slot, after all others. penstock's own clock is `penstock.simulate`.
    """
    placement = Placement.of([stage_to_rank(stage) for stage in range(num_stages)])
    lockstep = _Lockstep(pipeline_order, Rules(StageGraph.chain(num_stages), placement, lowered=True))
    while lockstep.left:
        lockstep.slot()
    return lockstep.slots


class _Lockstep:
    """The ranks, one slot after another. A rank that waits is woken by what it waits for."""

    def __init__(self, order: Order, rules: Rules) -> None:
        self.rules = rules
        self.rows = {rank: [action for action in order[rank] if action is not None] for rank in sorted(order)}
        self.at = dict.fromkeys(self.rows, 0)
        self.slots: dict[int, list[NamedAction | None]] = {rank: [] for rank in self.rows}
        self.left = {rank for rank, row in self.rows.items() if row}  # that have something to do
        self.ready: set[int] = set()  # that can do it
        self.done: set[int] = set()
        self.waited: dict[int, int] = {}  # packed action -> the rank that waits for it
        self.time = 0
        for rank in self.left:
            self.look(rank)

    def slot(self) -> None:
        """Each rank in turn, then once more those that others have woken meanwhile."""
        if not self.ready:
            stuck = ", ".join(f"rank {rank} at {self.rows[rank][self.at[rank]]}" for rank in sorted(self.left))
            raise DeadlockError(f"Schedule is not progressing: {stuck} wait for ever")
        acted: set[int] = set()
        for _ in range(2):
            turns = sorted(self.ready - acted)
            while turns:
                rank = heapq.heappop(turns)
                acted.add(rank)
                for woken in self.act(rank):
                    if woken > rank and woken not in acted:
                        heapq.heappush(turns, woken)
        self.time += 1

    def act(self, rank: int) -> list[int]:
        """Do the next action of a rank; the ranks that waited for it."""
        action = self.rows[rank][self.at[rank]]
        self.slots[rank].extend([None] * (self.time - len(self.slots[rank])))
        self.slots[rank].append(action)
        self.ready.remove(rank)
        codes = [*_doing(action)]
        self.done.update(codes)
        self.at[rank] += 1
        woken = [self.waited.pop(code) for code in codes if code in self.waited]
        if self.at[rank] == len(self.rows[rank]):
            self.left.remove(rank)
        else:
            self.look(rank)
        return [other for other in woken if other != rank and self.look(other)]

    def look(self, rank: int) -> bool:
        """Whether a rank can do its next action; if not, it waits for what brings the input."""
        for need in _needs(self.rules, self.rows[rank][self.at[rank]]):
            if need not in self.done:
                self.waited[need] = rank
                return False
        self.ready.add(rank)
        return True


def _doing(action: NamedAction) -> Iterator[int]:
    """The packed actions that are done with this one: those of a pair, and the halves of a whole."""
    for code in parts(to_code(action)):
        yield code
        yield from (with_op(code, half) for half in ROWS[code & OP].halves)


def _needs(rules: Rules, action: NamedAction) -> list[int]:
    """The packed actions that must be done before this one."""
    return [need | code & MICROBATCH_FIELD for code in parts(to_code(action)) for need in rules.needs(code & KEY)]
