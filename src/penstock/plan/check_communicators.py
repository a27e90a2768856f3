"""Check of the order of messages in communicators of accelerators, by a model that runs a lowered plan.

gloo keeps the messages of an ordered pair of ranks in order, and nothing else. NCCL keeps more of them in order, because
a communicator runs what it is given one after another, on one stream. `QueueLayout` names who shares a queue:

"direction"  one queue for each ordered pair of ranks (gloo, or a communicator for each direction)
"pair"       one queue for both directions of a pair (NCCL's communicators of two ranks, which a first message makes)
"one"        one queue for all messages of a rank (NCCL with `device_id`: one communicator for the whole group)

The rules: a rank works through its list; a compute action waits for the messages that it needs; a message is put on its
queue when its turn comes in the list, and nobody waits for it there. It runs when it is the first of its queue on *both*
ends, and both ends then take it off. So a receive that is posted before a send, on a queue that both share, holds the
send up. With `batches`, messages that stand side by side in a list are one entry of the queue, as with
`batch_isend_irecv`: they run in any order, and what is behind them waits for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from penstock.errors import DeadlockError
from penstock.plan.actions import KEY, OP, partner_of, peer_of, stage_of, text
from penstock.plan.ops import MESSAGES, SENDS
from penstock.plan.plan import Plan

QueueLayout = Literal["direction", "pair", "one"]
_Queue = tuple[int, ...]  # (rank,), or rank and peer, or rank, sender and receiver


def check_queues(plan: Plan, layout: QueueLayout, *, blocking: bool = False, batches: bool = False) -> None:
    """Raise if ranks that work through their lists, with queues of this layout between them, stop for ever."""
    queues = _Queues(plan, layout, blocking=blocking, batches=batches)
    order = TopologicalSorter(queues.waits)
    try:
        order.prepare()
    except CycleError:
        while ready := order.get_ready():
            queues.done.update(ready)
            order.done(*ready)
        raise DeadlockError(queues.counterexample()) from None


def stopped(plan: Plan, rank: int, at: int) -> str:
    """The beginning of a line about a rank that stands at a position of its list."""
    place = f"{text(plan.codes[rank][at])} (position {at + 1})"
    return f"{rank:>6}  {place:<24}"


def _event(message: int) -> int:
    """One number for both halves of a message: its receive."""
    return partner_of(message) if message & OP in SENDS else message


class _Queues:
    """Events that each event waits for: all of `waits[event]` happen before it.

    An event is a message that runs, or a rank that completes an action which waits for messages; the latter have the number of
    the action.
    """

    def __init__(self, plan: Plan, layout: QueueLayout, *, blocking: bool, batches: bool) -> None:
        self.plan, self.layout, self.blocking, self.batches = plan, layout, blocking, batches
        self.queue = cache(self._queue)  # by key
        self.waits: defaultdict[int, list[int]] = defaultdict(list)
        self.entries: defaultdict[_Queue, list[list[int]]] = defaultdict(list)  # packed messages of one rank
        self.done: set[int] = set()
        for codes in plan.codes:
            passed: list[int] = []  # the last action of this rank that waits for messages
            batch: set[_Queue] = set()  # the queues that have the messages right before
            for code in codes:
                if code & OP in MESSAGES:
                    queue = self.queue(code & KEY)
                    entries = self.entries[queue]
                    if self.batches and queue in batch:
                        entries[-1].append(code)
                    else:
                        entries.append([code])
                    batch.add(queue)
                    waits = self.waits[_event(code)]
                    waits += passed
                    if len(entries) > 1:
                        waits += map(_event, entries[-2])
                else:
                    batch.clear()
                if awaited := self.awaited(code):
                    self.waits[code] += [*passed, *map(_event, awaited)]
                    passed = [code]

    def awaited(self, code: int) -> list[int]:
        """The messages without which a rank does not get past an action."""
        if code & OP in MESSAGES:
            return [code] if self.blocking and code & OP in SENDS else []
        return self.plan.rules.awaited(code)

    def _queue(self, key: int) -> _Queue:
        rank, peer = (self.plan.placement.rank_of(stage) for stage in (stage_of(key), peer_of(key)))
        way = (rank, peer) if key & OP in SENDS else (peer, rank)
        return {"one": (rank,), "pair": (rank, peer), "direction": (rank, *way)}[self.layout]

    def counterexample(self) -> str:
        """Describe the message that each blocked rank waits for, and the message that delays it."""
        batches = " in batches" if self.batches else ""
        rule = "a message runs when it is the first of its queue on both ends"
        lines = [
            f"the plan deadlocks when messages queue by {self.layout!r}{batches}; {rule}",
            f"{'rank':>6}  {'stopped at':<24}{'waits for':<14}held up by",
        ]
        stops: dict[int, tuple[int, int]] = {}  # by rank: where it stands, and the message that it waits for
        for rank, codes in enumerate(self.plan.codes):
            left = ((at, m) for at, code in enumerate(codes) for m in self.awaited(code) if _event(m) not in self.done)
            if stop := next(left, None):
                stops[rank] = stop
        for rank, (at, message) in stops.items():
            other = partner_of(message)
            there = self.plan.placement.rank_of(stage_of(other))
            reached = self.plan.codes[there][: stops[there][0] + 1] if there in stops else self.plan.codes[there]
            why = f"{text(other)} is not reached on rank {there}"
            for which, code in ((there, other), (rank, message)) if other in reached else ((rank, message),):
                front = self.front(code)
                if code not in front:
                    why = f"{' '.join(map(text, sorted(front)))} before it on rank {which}"
            lines.append(f"{stopped(self.plan, rank, at)}{text(message):<14}{why}")
        return "\n".join(lines)

    def front(self, code: int) -> list[int]:
        """The messages that run next on the queue of this one."""
        left = ([m for m in entry if _event(m) not in self.done] for entry in self.entries[self.queue(code & KEY)])
        return next(filter(None, left))
