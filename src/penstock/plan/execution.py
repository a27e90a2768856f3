"""The second half of the check: all ranks work through their lists; those that wait for ever are deadlocked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

from penstock.errors import DeadlockError
from penstock.plan.actions import OP, key_of, partner_of, stage_of, text
from penstock.plan.ops import RECEIVES, SENDS, Op
from penstock.plan.plan import Plan


class Execution:
    """Ranks go from wait to wait; `progress[rank]` is the number of actions that a rank has behind it.

    A wait is (position, source, needed): a rank stands at the position until the source has got beyond position `needed`.
    `columns` is what the ledger read: where each action stands, by key and microbatch.
    """

    def __init__(self, plan: Plan, columns: dict[int, list[int]], *, blocking: bool) -> None:
        self.plan, self.columns = plan, columns
        self.waits = [sorted(chain(*self.waits_of(rank, blocking=blocking))) for rank in range(plan.num_ranks)]
        self.next = [0] * plan.num_ranks  # the wait that is next
        self.progress = [0] * plan.num_ranks
        self.parked: list[list[int]] = [[] for _ in range(plan.num_ranks)]  # the ranks that wait for this one

    def waits_of(self, rank: int, *, blocking: bool) -> Iterator[Iterator[tuple[int, int, int]]]:
        """What this rank waits for from other ranks: in a lowered plan, the sends of the messages that it needs."""
        rank_of = self.plan.placement.rank_of
        for stage in self.plan.placement.stages_of(rank):
            for key in (key_of(Op.F, stage), key_of(Op.I, stage)):
                for need in self.plan.rules.needs(key) if key in self.columns else ():
                    source = partner_of(need) if need & OP in RECEIVES else need
                    there = rank_of(stage_of(source))
                    if there != rank:
                        yield zip(self.columns[key], repeat(there), self.columns[source])
        if blocking:
            for key, column in self.columns.items():
                if key & OP in SENDS and rank_of(stage_of(key)) == rank:
                    other = partner_of(key)
                    posted = (at + 1 for at in column)  # the send itself is there for others to see
                    yield zip(posted, repeat(rank_of(stage_of(other))), self.columns[other])

    def run(self) -> None:
        ready = list(range(self.plan.num_ranks))
        while ready:
            rank = ready.pop()
            if self.advance(rank):
                ready += self.parked[rank]
                self.parked[rank] = []
        if any(self.next[rank] < len(waits) for rank, waits in enumerate(self.waits)):
            raise DeadlockError(self.counterexample())

    def advance(self, rank: int) -> bool:
        """Go on as far as it goes; whether that is any further than before."""
        waits, progress = self.waits[rank], self.progress
        start, before = self.next[rank], progress[rank]
        for number in range(start, len(waits)):
            at, source, needed = waits[number]
            if progress[source] <= needed:
                self.next[rank], progress[rank] = number, at
                self.parked[source].append(rank)
                return at > before
        self.next[rank], progress[rank] = len(waits), len(self.plan.codes[rank])
        return True

    def counterexample(self) -> str:
        """The cycle of waits, rank by rank."""
        codes = self.plan.codes
        stuck = {
            rank: waits[at] for rank, (waits, at) in enumerate(zip(self.waits, self.next, strict=True)) if waits[at:]
        }
        path: list[int] = []
        rank = min(stuck)
        while rank not in path:
            path.append(rank)
            rank = stuck[rank][1]
        cycle = path[path.index(rank) :]
        lines = [
            f"the plan deadlocks: {len(cycle)} ranks wait for one another",
            f"{'rank':>6}  {'stopped at':<24}waits for",
        ]
        for rank in cycle:
            at, source, needed = stuck[rank]
            awaited = codes[source][needed]
            if awaited & OP in RECEIVES:  # it stays in a send, which counts as passed
                at -= 1
            stopped = f"{text(codes[rank][at])} (position {at + 1})"
            lines.append(f"{rank:>6}  {stopped:<24}{text(awaited)} on rank {source}")
        return "\n".join(lines)
