"""Where messages queue: the rules of accelerators' communicators, as a model that runs a lowered plan.

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

from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cache
from typing import Literal

from penstock.errors import DeadlockError
from penstock.plan.actions import KEY, OP, partner_of, parts, peer_of, stage_of, text
from penstock.plan.ops import MESSAGES, SENDS
from penstock.plan.plan import Plan

QueueLayout = Literal["direction", "pair", "one"]
_Queue = tuple[int, ...]  # (rank,), or rank and peer, or rank, sender and receiver


class QueueRun:
    """All ranks work through their lists, with queues of this layout between them. Raises when they stop for ever."""

    def __init__(self, plan: Plan, layout: QueueLayout, *, blocking: bool = False, batches: bool = False) -> None:
        self.plan, self.layout, self.blocking, self.batches = plan, layout, blocking, batches
        self.at = [0] * plan.num_ranks  # the position of each rank
        self.queues: defaultdict[_Queue, deque[set[int]]] = defaultdict(deque)  # of packed messages of one rank
        self.done: list[set[int]] = [set() for _ in range(plan.num_ranks)]  # the messages that have run
        self.receives = cache(plan.rules.receives)

    def run(self) -> None:
        ready = deque(range(self.plan.num_ranks))
        while ready:
            rank = ready.popleft()
            for message in self.advance(rank):
                ready += self.match(rank, message)
        if any(at < len(codes) for at, codes in zip(self.at, self.plan.codes, strict=True)):
            raise DeadlockError(self.counterexample())

    def advance(self, rank: int) -> Iterator[int]:
        """Work through the list until something is missing; the messages that were put on queues."""
        codes, batch = self.plan.codes[rank], False
        while self.at[rank] < len(codes):
            code = codes[self.at[rank]]
            if self.missing(rank) is not None:
                return
            self.at[rank] += 1
            if code & OP in MESSAGES:
                queue = self.queues[self.queue(rank, code)]
                if not (batch and self.batches and queue):
                    queue.append(set())
                queue[-1].add(code)
                yield code
            batch = code & OP in MESSAGES

    def missing(self, rank: int) -> int | None:
        """The message without which a rank cannot go on."""
        codes, at, done = self.plan.codes[rank], self.at[rank], self.done[rank]
        if self.blocking and at and (last := codes[at - 1]) & OP in SENDS and last not in done:
            return last
        for part in parts(codes[at]):
            microbatch = part & ~KEY
            for receive in self.receives(part & KEY):
                if receive | microbatch not in done:
                    return receive | microbatch
        return None

    def queue(self, rank: int, code: int) -> _Queue:
        peer = self.plan.placement.rank_of(peer_of(code))
        way = (rank, peer) if code & OP in SENDS else (peer, rank)
        return {"one": (rank,), "pair": (rank, peer), "direction": (rank, *way)}[self.layout]

    def match(self, rank: int, message: int) -> set[int]:
        """Run what has come to the front; the ranks that may go on because of it."""
        woken: set[int] = set()
        fronts = [(rank, message)]
        while fronts:
            here, code = fronts.pop()
            other = partner_of(code)
            there = self.plan.placement.rank_of(stage_of(other))
            ends = ((here, code), (there, other))
            queues = [self.queues[self.queue(*end)] for end in ends]
            if not all(queue and end in queue[0] for queue, (_, end) in zip(queues, ends, strict=True)):
                continue
            for queue, (which, end) in zip(queues, ends, strict=True):
                queue[0].remove(end)
                self.done[which].add(end)
                woken.add(which)
                if not queue[0]:
                    queue.popleft()
                    fronts += [(which, following) for following in (queue[0] if queue else ())]
        return woken

    def counterexample(self) -> str:
        """What every rank that is stopped waits for, and what holds that message up."""
        lines = [
            f"the plan deadlocks when messages queue by {self.layout!r}"
            + (" in batches" if self.batches else "")
            + "; a message runs when it is the first of its queue on both ends",
            f"{'rank':>6}  {'stopped at':<24}{'waits for':<14}held up by",
        ]
        for rank, codes in enumerate(self.plan.codes):
            if self.at[rank] < len(codes):
                stopped = f"{text(codes[self.at[rank]])} (position {self.at[rank] + 1})"
                awaited = self.missing(rank)
                assert awaited is not None, "a rank is stopped by a message alone"
                lines.append(f"{rank:>6}  {stopped:<24}{text(awaited):<14}{self.held_up(rank, awaited)}")
        return "\n".join(lines)

    def held_up(self, rank: int, awaited: int) -> str:
        other = partner_of(awaited)
        there = self.plan.placement.rank_of(stage_of(other))
        for which, code in ((rank, awaited), (there, other)):
            queue = self.queues[self.queue(which, code)]
            if any(code in entry for entry in queue) and code not in queue[0]:
                return f"{' '.join(map(text, sorted(queue[0])))} before it on rank {which}"
        return f"{text(other)} is not reached on rank {there}"
