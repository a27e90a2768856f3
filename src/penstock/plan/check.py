"""check(plan): complete, well placed, well ordered, cannot deadlock. The error shows the counterexample.

The proof is by execution. If no rank can ever be blocked for good under the semantics below, whatever the timing, then
the plan cannot deadlock, because ranks meet only through messages and each list is worked through in order:

- a rank goes through its list in order; a compute action waits for the messages that it needs;
- messages between two ranks in one direction are delivered in the order in which they were posted, on both sides;
- a message is complete only when it is posted on both sides (rendezvous; nothing is buffered).

A rank that posts a send goes on, as the runtime does. ``sends="blocking"`` proves more: that the plan runs even if a
rank stays in each send until its receive is posted at the other end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from penstock.errors import DeadlockError, IncompleteError, OrderError
from penstock.plan.actions import (
    KEY,
    MICROBATCH,
    MICROBATCH_FIELD,
    MICROBATCH_SHIFT,
    OP,
    OVERLAP,
    STAGE,
    STAGE_SHIFT,
    Op,
    key_of,
    partner_of,
    parts,
    peer_of,
    text,
)
from penstock.plan.plan import Plan


def check(plan: Plan, *, sends: Literal["asynchronous", "blocking"] = "asynchronous") -> None:
    """Raise a PlanError that shows the counterexample, or return.

    >>> from penstock.plan import Plan
    >>> check(Plan.of({0: ["0F0", "0B0"], 1: ["1B0", "1F0"]}))
    Traceback (most recent call last):
    ...
    penstock.errors.OrderError: rank 1, position 1: 1B0 stands before 1F0, which it needs
    """
    ledger = _Ledger(plan)
    for rank, codes in enumerate(plan.codes):
        ledger.read(rank, codes)
    ledger.close()
    _Execution(plan, blocking=sends == "blocking").run()


# The flags of an action's key, the flags and keys of what it needs on its own rank, and, for a message, the log of its
# channel and its receive's key.
_Entry = tuple[bytearray, tuple[tuple[bytearray, int], ...], list[int], int]


class _Ledger:
    """Reads the lists once: what is there, where, and whether what it needs on its own rank stands before it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        size = plan.num_microbatches
        self.done: defaultdict[int, bytearray] = defaultdict(lambda: bytearray(size))  # by key; a B is an I and a W
        self.sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # the receives, by ordered pair of ranks
        self.received: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.sharded = {code >> STAGE_SHIFT & STAGE for codes in plan.codes for code in codes if code & OP == Op.UNSHARD}
        self.gathered: set[int] = set()
        self.reduced: set[int] = set()
        self.slots: Sequence[int] = ()

    def read(self, rank: int, codes: Sequence[int]) -> None:
        entries: dict[int, _Entry] = {}
        size = self.plan.num_microbatches
        self.slots = codes
        for position, code in enumerate(self.flat(rank, codes)):
            op = code & 15
            if op > 7:
                self.tend(rank, position, code)
                continue
            key = code & KEY
            entry = entries.get(key)
            if entry is None:
                entry = entries[key] = self.entry(rank, position, code)
            microbatch = code >> MICROBATCH_SHIFT & MICROBATCH
            if microbatch >= size:
                raise IncompleteError(f"{self.at(rank, position)} is out of range; expected microbatches 0 to {size - 1}")
            if entry[0][microbatch] or (op == 3 and self.done[key ^ 1][microbatch]):
                raise IncompleteError(f"{self.at(rank, position)} does again what was done before; expected it once")
            for flags, need in entry[1]:
                if not flags[microbatch]:
                    needed = text(need | code & MICROBATCH_FIELD)
                    raise OrderError(f"{self.at(rank, position)} stands before {needed}, which it needs")
            entry[0][microbatch] = 1
            if op == 3:
                self.done[key ^ 1][microbatch] = 1
            elif op > 3:
                entry[2].append(entry[3] | code & MICROBATCH_FIELD)
                continue
            if self.sharded or self.reduced:
                self.tended(rank, position, code, op)

    def flat(self, rank: int, codes: Sequence[int]) -> Sequence[int]:
        """The list with overlapped pairs taken apart; the two of a pair must not need each other."""
        if not any(code & OP == OVERLAP for code in codes):
            return codes
        found: list[int] = []
        for slot, code in enumerate(codes, 1):
            both = parts(code)
            if len(both) == 2:
                first, second = both
                for a, b in ((first, second), (second, first)):
                    same = (a ^ b) & MICROBATCH_FIELD == 0
                    if same and any(n >> STAGE_SHIFT == (b & KEY) >> STAGE_SHIFT for n in self.plan.rules.needs(a & KEY)):
                        raise OrderError(f"rank {rank}, position {slot}: {text(code)} overlaps two actions that need each other")
            found += both
        return found

    def at(self, rank: int, position: int) -> str:
        """Where, for a position in the flat list."""
        for slot, code in enumerate(self.slots, 1):
            for part in parts(code):
                if position == 0:
                    return f"rank {rank}, position {slot}: {text(part)}"
                position -= 1
        raise AssertionError("a position beyond the list")

    def entry(self, rank: int, position: int, code: int) -> _Entry:
        """The flags of a key and of what it needs on its own rank; for B the flags of its I, and its W is set beside."""
        plan, op, stage = self.plan, Op(code & OP), code >> STAGE_SHIFT & STAGE
        if stage >= plan.num_stages:
            raise IncompleteError(f"{self.at(rank, position)} is out of range; expected stages 0 to {plan.num_stages - 1}")
        home = plan.placement.rank_of(stage)
        if home != rank:
            raise IncompleteError(f"{self.at(rank, position)} is on the wrong rank; stage {stage} sits on rank {home}")
        key = code & KEY
        if op.is_message:
            self.expected_message(self.at(rank, position), code, op, stage)
        needs = () if op in (Op.RECV_F, Op.RECV_B) else plan.rules.needs(key)
        rank_of = plan.placement.rank_of
        local = tuple((self.done[n], n) for n in needs if rank_of(n >> STAGE_SHIFT & STAGE) == rank)
        log, receive = self.channel(key, op) if op.is_message else ([], 0)
        return self.done[key ^ 2 if op is Op.B else key], local, log, receive

    def expected_message(self, where: str, code: int, op: Op, stage: int) -> None:
        plan, peer = self.plan, peer_of(code)
        producer, consumer = (stage, peer) if op in (Op.SEND_F, Op.RECV_B) else (peer, stage)
        if not 0 <= min(stage, peer) or max(stage, peer) >= plan.num_stages:
            raise IncompleteError(f"{where}: {text(code)} goes to or comes from stage {peer}, which does not exist")
        there = plan.placement.rank_of(peer)
        if there == plan.placement.rank_of(stage):
            raise IncompleteError(f"{where}: {text(code)} is a message within rank {there}; expected none: it is handed over")
        backward = op in (Op.SEND_B, Op.RECV_B)
        if consumer not in plan.graph.consumers(producer) or (backward and not plan.has_backward):
            raise IncompleteError(f"{where}: {text(code)} carries what nobody needs; stage {producer} does not feed {consumer}")
        carrier = plan.rules.carrier(producer, plan.placement.rank_of(consumer))
        if carrier != consumer:
            raise IncompleteError(f"{where}: {text(code)} crosses twice; stage {carrier} on that rank brings the same value")

    def channel(self, key: int, op: Op) -> tuple[list[int], int]:
        """Where a message is noted, and as which receive."""
        rank_of = self.plan.placement.rank_of
        here, there = rank_of(key >> STAGE_SHIFT & STAGE), rank_of(peer_of(key))
        if op in (Op.RECV_F, Op.RECV_B):
            return self.received[there, here], key
        return self.sent[here, there], partner_of(key)

    def tend(self, rank: int, position: int, code: int) -> None:
        """UNSHARD, RESHARD, REDUCE_GRAD."""
        op, stage = code & OP, code >> STAGE_SHIFT & STAGE
        where = self.at(rank, position)
        if stage >= self.plan.num_stages or self.plan.placement.rank_of(stage) != rank:
            raise IncompleteError(f"{where} is on the wrong rank, or there is no such stage")
        if op == Op.UNSHARD:
            if stage in self.gathered:
                raise OrderError(f"{where} comes while stage {stage} is unsharded already")
            self.gathered.add(stage)
        elif op == Op.RESHARD:
            if stage not in self.gathered:
                raise OrderError(f"{where} comes while stage {stage} is not unsharded")
            self.gathered.remove(stage)
        else:
            if stage in self.reduced:
                raise IncompleteError(f"{where} stands twice; expected it once, after the last backward")
            todo = self.done[key_of(Op.W, stage)].find(0)
            if todo >= 0:
                raise OrderError(f"{where} stands before the last backward of its stage: that of microbatch {todo}")
            self.reduced.add(stage)

    def tended(self, rank: int, position: int, code: int, op: int) -> None:
        stage = code >> STAGE_SHIFT & STAGE
        if stage in self.sharded and stage not in self.gathered:
            raise OrderError(f"{self.at(rank, position)} uses stage {stage} while it is sharded")
        if stage in self.reduced and op != Op.F:
            raise OrderError(f"{self.at(rank, position)} comes after {stage}REDUCE_GRAD; its gradient would not be reduced")

    def close(self) -> None:
        """Is everything there? Do both ends of every channel agree?"""
        plan = self.plan
        ops = (Op.F, Op.I, Op.W) if plan.has_backward else (Op.F,)
        for stage in range(plan.num_stages):
            for op in ops:
                missing = self.done[key_of(op, stage)].find(0)
                if missing >= 0:
                    self.missing(op, stage, missing)
            if self.reduced and stage not in self.reduced:
                raise IncompleteError(
                    f"rank {plan.placement.rank_of(stage)} lacks {stage}REDUCE_GRAD; expected one for every stage, or none at all"
                )
        for pair in self.sent.keys() | self.received.keys():
            self.compare(pair, self.sent[pair], self.received[pair])

    def missing(self, op: Op, stage: int, microbatch: int) -> None:
        name = op.name if op is Op.F else f"{op.name} (or B)"
        raise IncompleteError(
            f"rank {self.plan.placement.rank_of(stage)} lacks {name} of stage {stage} for microbatch {microbatch}; "
            "expected each microbatch once through every stage, forward" + (" and backward" if self.plan.has_backward else "")
        )

    @staticmethod
    def compare(pair: tuple[int, int], sent: list[int], received: list[int]) -> None:
        if sent == received:
            return
        sender, receiver = pair
        lost = set(sent) - set(received)
        if lost:
            code = min(lost)
            raise IncompleteError(f"rank {sender} sends {text(partner_of(code))}, but rank {receiver} never posts {text(code)}")
        wanted = set(received) - set(sent)
        if wanted:
            code = min(wanted)
            raise IncompleteError(f"rank {receiver} posts {text(code)}, but rank {sender} never sends {text(partner_of(code))}")
        number = next(n for n, (a, b) in enumerate(zip(sent, received, strict=True)) if a != b)
        raise DeadlockError(
            f"messages from rank {sender} to rank {receiver} are delivered in order, but number {number + 1} is sent as "
            f"{text(partner_of(sent[number]))} and received as {text(received[number])}"
        )


class _Execution:
    """Works through all lists; ranks that are still waiting when nothing moves any more are deadlocked."""

    def __init__(self, plan: Plan, *, blocking: bool) -> None:
        self.plan, self.blocking = plan, blocking
        size = plan.num_microbatches
        self.there: defaultdict[int, bytearray] = defaultdict(lambda: bytearray(size))  # what other ranks wait for, by key
        self.waiting: dict[int, list[int]] = {}
        self.awaited: dict[int, int] = {}  # rank -> the packed action that it waits for
        self.cursor = [0] * plan.num_ranks
        self.ready = list(range(plan.num_ranks - 1, -1, -1))
        self.afar: dict[int, tuple[tuple[bytearray, int], ...]] = {}

    def run(self) -> None:
        while self.ready:
            self.advance(self.ready.pop())
        if self.awaited:
            raise DeadlockError(self.counterexample())

    def advance(self, rank: int) -> None:
        codes, afar, there, waiting = self.plan.codes[rank], self.afar, self.there, self.waiting
        lowered, blocking = self.plan.is_lowered, self.blocking
        for at in range(self.cursor[rank], len(codes)):
            code = codes[at]
            op = code & 15
            if op < 4 or op == OVERLAP:
                for part in parts(code) if op == OVERLAP else (code,):
                    key = part & KEY
                    needs = afar.get(key)
                    if needs is None:
                        needs = self.needs_of(key)
                    for flags, need in needs:
                        if not flags[part >> MICROBATCH_SHIFT]:
                            self.park(rank, at, need | part & MICROBATCH_FIELD)
                            return
                if not lowered:
                    for part in parts(code):
                        self.complete(part)
            elif op < 8:
                there[code & KEY][code >> MICROBATCH_SHIFT & MICROBATCH] = 1
                if code in waiting:
                    self.wake(code)
                if blocking and not op & 1:
                    other = partner_of(code)
                    if not there[other & KEY][code >> MICROBATCH_SHIFT & MICROBATCH]:
                        self.park(rank, at, other)
                        return
        self.cursor[rank] = len(codes)

    def needs_of(self, key: int) -> tuple[tuple[bytearray, int], ...]:
        """What this action waits for from other ranks: in a lowered plan, the sends of the messages that it needs."""
        rank_of = self.plan.placement.rank_of
        here = rank_of(key >> STAGE_SHIFT & STAGE)
        found = []
        for need in self.plan.rules.needs(key):
            source = partner_of(need) if need & OP in (Op.RECV_F, Op.RECV_B) else need
            if rank_of(source >> STAGE_SHIFT & STAGE) != here:
                found.append((self.there[source], source))
        return self.afar.setdefault(key, tuple(found))

    def complete(self, code: int) -> None:
        for done in (code, code ^ 2) if code & OP == Op.B else (code,):
            self.there[done & KEY][done >> MICROBATCH_SHIFT & MICROBATCH] = 1
            if done in self.waiting:
                self.wake(done)

    def park(self, rank: int, at: int, code: int) -> None:
        self.cursor[rank] = at
        self.awaited[rank] = code
        self.waiting.setdefault(code, []).append(rank)

    def wake(self, code: int) -> None:
        for rank in self.waiting.pop(code):
            del self.awaited[rank]
            self.ready.append(rank)

    def counterexample(self) -> str:
        """The cycle of waits, rank by rank."""
        plan = self.plan
        path: list[int] = []
        rank = min(self.awaited)
        while rank not in path:
            path.append(rank)
            rank = plan.placement.rank_of(self.awaited[rank] >> STAGE_SHIFT & STAGE)
        cycle = path[path.index(rank) :]
        lines = [f"the plan deadlocks: {len(cycle)} ranks wait for one another", f"{'rank':>6}  {'stopped at':<24}waits for"]
        for rank in cycle:
            awaited = self.awaited[rank]
            there = plan.placement.rank_of(awaited >> STAGE_SHIFT & STAGE)
            position = self.cursor[rank]
            stopped = f"{text(plan.codes[rank][position])} (position {position + 1})"
            lines.append(f"{rank:>6}  {stopped:<24}{text(awaited)} on rank {there}")
        return "\n".join(lines)
