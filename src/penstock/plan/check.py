"""check(plan): complete, well placed, well ordered, cannot deadlock. The error shows the counterexample.

The proof is by execution. If no rank can ever be blocked for good under the semantics below, whatever the timing, then
the plan cannot deadlock, because ranks meet only through messages and each list is worked through in order:

- a rank goes through its list in order; a compute action waits for the messages that it needs;
- messages between two ranks in one direction are delivered in the order in which they were posted, on both sides;
- a message is complete only when it is posted on both sides (rendezvous; nothing is buffered).

A rank that posts a send goes on, as the runtime does. ``sends="blocking"`` proves more: that the plan runs even if a
rank stays in each send until its receive is posted at the other end. ``queues`` says which messages share a queue, and
thereby wait for one another; see `penstock.plan.check_communicators`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Literal

from penstock.checks import check_types
from penstock.errors import DeadlockError, PlanError
from penstock.plan.actions import OP, key_of, partner_of, stage_of, text
from penstock.plan.check_communicators import QueueLayout, check_queues, stopped
from penstock.plan.check_rank import Columns, read
from penstock.plan.ops import RECEIVES, SENDS, Op
from penstock.plan.plan import Plan

_Wait = tuple[int, int, int]  # position, source, needed: a rank stands there until the source got beyond `needed`


def check(
    plan: Plan,
    *,
    sends: Literal["asynchronous", "blocking"] = "asynchronous",
    queues: QueueLayout = "direction",
    batches: bool = False,
) -> None:
    """Raise a PlanError that shows the counterexample, or return.

    >>> from penstock.plan import Plan
    >>> check(Plan.of({0: ["0F0", "0B0"], 1: ["1B0", "1F0"]}))
    Traceback (most recent call last):
    ...
    penstock.errors.OrderError: rank 1, position 1: 1B0 stands before 1F0, which it needs
    """
    check_types("check", PlanError, plan=(plan, Plan), queues=(queues, str), batches=(batches, bool | int))
    _execute(plan, read(plan), blocking=sends == "blocking")
    if queues != "direction" or batches:
        check_queues(plan, queues, blocking=sends == "blocking", batches=batches)


def _execute(plan: Plan, columns: Columns, *, blocking: bool) -> None:
    """All ranks go from wait to wait. Those that wait for ever are deadlocked."""
    waits = [
        sorted(chain(*_waits(plan, columns, rank, blocking=blocking)), reverse=True) for rank in range(plan.num_ranks)
    ]  # those that are left, the next one last
    progress = [0] * plan.num_ranks  # how many actions each rank has behind it
    parked: list[list[int]] = [[] for _ in waits]  # the ranks that wait for this one
    ready = [*range(plan.num_ranks)]
    while ready:
        rank = ready.pop()
        left, reached = waits[rank], len(plan.codes[rank])
        while left:
            at, source, needed = left[-1]
            if progress[source] <= needed:
                parked[source].append(rank)
                reached = at
                break
            left.pop()
        if reached > progress[rank]:
            progress[rank] = reached
            ready += parked[rank]
            parked[rank] = []
    if any(waits):
        raise DeadlockError(_cycle(plan, {rank: left[-1] for rank, left in enumerate(waits) if left}))


def _waits(plan: Plan, columns: Columns, rank: int, *, blocking: bool) -> Iterator[Iterator[_Wait]]:
    """Return the waits of a rank for other ranks: in a lowered plan, for the sends of the messages that its actions need."""
    rank_of = plan.placement.rank_of
    for key in (key_of(op, stage) for stage in plan.placement.stages_of(rank) for op in (Op.F, Op.I)):
        for need in plan.rules.needs(key) if key in columns else ():
            source = partner_of(need) if need & OP in RECEIVES else need
            there = rank_of(stage_of(source))
            if there != rank:
                yield zip(columns[key], repeat(there), columns[source])
    for key in columns if blocking else ():
        if key & OP in SENDS and rank_of(stage_of(key)) == rank:
            other = partner_of(key)
            posted = (at + 1 for at in columns[key])  # the send itself is there for others to see
            yield zip(posted, repeat(rank_of(stage_of(other))), columns[other])


def _cycle(plan: Plan, stuck: dict[int, _Wait]) -> str:
    """The cycle of waits, rank by rank."""
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
        awaited = plan.codes[source][needed]
        if awaited & OP in RECEIVES:  # it stays in a send, which counts as passed
            at -= 1
        lines.append(f"{stopped(plan, rank, at)}{text(awaited)} on rank {source}")
    return "\n".join(lines)
