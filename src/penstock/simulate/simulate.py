"""simulate(plan, costs) -> Timeline. Each rank works through its list; each action is timed once, in linear time."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import NamedTuple

from penstock.errors import DeadlockError, PlanError
from penstock.misfits import takes
from penstock.plan import Plan
from penstock.plan.actions import (
    KEY,
    MICROBATCH,
    MICROBATCH_FIELD,
    MICROBATCH_SHIFT,
    OP,
    key_of,
    partner_of,
    split_overlap,
    stage_of,
    text,
)
from penstock.plan.ops import CHOICES, COMPUTES, COPIES, MESSAGES, OVERLAP, ROWS, SENDS, Op
from penstock.simulate.costs import Costs
from penstock.simulate.timeline import Timeline

_NEVER = -1.0
_MESSAGE, _SPECIAL = (-1,), (-2,)
_HALVES = tuple(tuple(half - op for half in row.halves) for op, row in enumerate(ROWS))  # from a whole to its halves
_HOW = tuple(  # by the number of an op: how it is timed, and for a computation its halves
    _MESSAGE if op in MESSAGES else _HALVES[op] if op in COMPUTES - {OVERLAP} else _SPECIAL for op in range(OVERLAP + 1)
)
_Need = tuple[list[float], int, list[float]]  # when it is done, its key, how long it takes to here; by microbatch


@takes(PlanError)
def simulate(plan: Plan, costs: Costs | None = None) -> Timeline:
    """When would each action of this plan start and end?

    A rank does its actions in order; a compute action starts when the rank is free and what it needs is there. A copy
    occupies the copy engine of its rank, and waits for those before it there. A message occupies no rank: it leaves when
    it is posted on both sides and the one before it on the same ordered pair of ranks has left, and arrives after the
    latency and, given a bandwidth, its bytes. In a compute-only plan a value that crosses ranks arrives after the latency
    and its bytes, as if it were alone on its way. Given `overhead` and `posting`, a compute action occupies its rank that
    much longer, and a send or receive occupies it for that long before the message is posted.

    >>> from penstock.schedules import get_schedule
    >>> simulate(get_schedule("1f1b")(2, 2)).makespan
    9.0
    """
    costs = Costs.unit(plan) if costs is None else costs
    costs.check_sizes(plan.num_stages, plan.num_ranks, plan.num_microbatches)
    try:
        return _Run(plan, costs).timeline()
    except LookupError as error:
        raise PlanError(
            "the plan has an action of a stage or microbatch that it does not have; penstock.plan.check(plan) says which"
        ) from error


class _Link(NamedTuple):
    """A message as seen from one of its halves."""

    needs: list[list[float]]  # a send: when what it carries was computed
    here: list[float]  # when this half was posted, by microbatch
    there: list[float]  # when the other half was
    channel: list[float]  # one number: from when on the ordered pair of ranks is free
    transfer: list[float]  # the time on the wire, by microbatch
    latency: float
    done: list[float]  # when it arrived
    recv: int  # the key of the receiving half


class _Run:
    """The state of one simulation.

    `done[key][microbatch]` is the time at which that action's result is there, `_NEVER` before that. A rank whose next
    action lacks something parks itself under what it lacks; whoever completes that wakes the rank.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        m = plan.num_microbatches
        self.done: defaultdict[int, list[float]] = defaultdict(lambda: [_NEVER] * m)
        self.posted: defaultdict[int, list[float]] = defaultdict(lambda: [_NEVER] * m)  # sends and receives, by key
        self.scale = costs.microbatches
        self.sizes = [*self.scale] if self.scale else [1.0] * m
        self.at_once = [0.0] * m
        self.duration = _durations(plan, costs)
        self.cursor = [0] * plan.num_ranks
        self.clock = [0.0] * plan.num_ranks
        self.waiting: dict[int, list[int]] = {}  # packed action -> the ranks that wait for it
        self.starts: list[list[float]] = [[] for _ in range(plan.num_ranks)]
        self.ends: list[list[float]] = [[] for _ in range(plan.num_ranks)]
        self.ready = list(range(plan.num_ranks - 1, -1, -1))
        self.needs: dict[int, list[_Need]] = {}
        self.links: dict[int, _Link] = {}
        self.copier = [0.0] * plan.num_ranks  # from when on the copy engine of each rank is free
        self.channels: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0])  # free from then on
        for key in plan.rules.chosen:
            self.done[key] = [0.0] * m  # nobody waits for what is not there
        if plan.rules.chosen:
            for code in chain.from_iterable(plan.codes):
                if code & OP in CHOICES:
                    self.done[code & KEY][code >> MICROBATCH_SHIFT] = _NEVER

    def timeline(self) -> Timeline:
        while self.ready:
            self.advance(self.ready.pop())
        stuck = [r for r, codes in enumerate(self.plan.codes) if self.cursor[r] < len(codes)]
        if stuck:
            waits = "; ".join(f"rank {r} at {text(self.plan.codes[r][self.cursor[r]])}" for r in stuck[:8])
            raise DeadlockError(f"the plan cannot run to its end: {waits}. penstock.plan.check(plan) shows the cycle")
        return Timeline(self.plan, tuple(self.starts), self.settle_receives(), costs=self.costs)

    def settle_receives(self) -> tuple[list[float], ...]:
        """The ends of all actions, those of the messages being their arrival."""
        if self.plan.is_lowered:
            arrived = {key: link.done for key, link in self.links.items()}
            for ends, codes in zip(self.ends, self.plan.codes, strict=True):
                for at, code in enumerate(codes):
                    if (key := code & KEY) in arrived:
                        ends[at] = arrived[key][code >> MICROBATCH_SHIFT & MICROBATCH]
        return tuple(self.ends)

    def needs_of(self, key: int) -> list[_Need]:
        found = self.needs.get(key)
        if found is None:
            found = self.needs[key] = [
                (self.done[need], need, self.way(stage_of(need), stage_of(key))) for need in self.plan.rules.needs(key)
            ]
        return found

    def way(self, stage: int, other: int) -> list[float]:
        """By microbatch: how long a value takes from stage to stage where no message is in the plan."""
        here, there = self.plan.placement.rank_of(stage), self.plan.placement.rank_of(other)
        if here == there:
            return self.at_once
        link = self.costs.link(here, there)
        transfer = self.costs.transfer(link, min(stage, other))
        return [link.latency + transfer * size for size in self.sizes]

    def advance(self, rank: int) -> None:
        """Work through the list of a rank as far as it goes."""
        codes, now = self.plan.codes[rank], self.clock[rank]
        starts, ends, needs, done, waiting = self.starts[rank], self.ends[rank], self.needs, self.done, self.waiting
        duration, ready, posting = self.duration, self.ready, self.costs.posting
        scale, overhead = self.scale, self.costs.overhead
        ways, message, special, links = _HOW, _MESSAGE, _SPECIAL, self.links
        for at in range(self.cursor[rank], len(codes)):
            code = codes[at]
            how = ways[code & OP]
            if how is message:
                if not self.message(code, links.get(code & KEY) or self.link(code & KEY), now + posting):
                    break
                starts.append(now)
                now += posting
                ends.append(now)
                continue
            if how is special:
                after = self.special(rank, code, now)
                if after < 0.0:
                    break
                now = after
                continue
            key = code & KEY
            microbatch = code >> MICROBATCH_SHIFT
            begin = now
            for need in needs.get(key) or self.needs_of(key):
                time = need[0][microbatch]
                if time < 0.0:
                    self.park(rank, need[1] | code & MICROBATCH_FIELD)
                    break
                time += need[2][microbatch]
                if time > begin:
                    begin = time
            else:
                starts.append(begin)
                now = begin + (duration[key] if scale is None else duration[key] * scale[microbatch] + overhead)
                ends.append(now)
                done[key][microbatch] = now
                if code in waiting:
                    ready += waiting.pop(code)
                for half in how:  # a full backward is both
                    self.complete(code + half, now)
                continue
            break
        else:
            at = len(codes)
        self.cursor[rank], self.clock[rank] = at, now

    def complete(self, code: int, time: float) -> None:
        self.done[code & KEY][code >> MICROBATCH_SHIFT & MICROBATCH] = time
        self.ready += self.waiting.pop(code, ())

    def park(self, rank: int, code: int) -> None:
        self.waiting.setdefault(code, []).append(rank)

    def special(self, rank: int, code: int, now: float) -> float:
        """A pair, a copy or care of parameters: when the rank goes on after it, or `_NEVER` if it cannot start."""
        starts, ends = self.starts[rank], self.ends[rank]
        if code & OP in COPIES:  # what it needs stands before it, here or on the engine
            starts.append(max(now, self.copier[rank]))
            self.copier[rank] = starts[-1] + self.duration[code & KEY] * self.sizes[code >> MICROBATCH_SHIFT]
            ends.append(self.copier[rank])
            self.complete(code, ends[-1])
            return now
        if code & OP != OVERLAP:
            starts.append(now)
            ends.append(now + self.duration[code])
            return ends[-1]
        begin = now
        both = split_overlap(code)
        for part in both:
            for times, need, way in self.needs_of(part & KEY):
                time = times[part >> MICROBATCH_SHIFT]
                if time < 0.0:
                    self.park(rank, need | part & MICROBATCH_FIELD)
                    return _NEVER
                begin = max(begin, time + way[part >> MICROBATCH_SHIFT])
        starts.append(begin)
        first, second = map(self.took, both)
        fused = self.costs.overlap
        ends.append(begin + (first + second if fused is None else fused + self.costs.overhead))
        for part, end in zip(both, (begin + first if fused is None else ends[-1], ends[-1]), strict=True):
            self.complete(part, end)
            for half in _HALVES[part & OP]:
                self.complete(part + half, end)
        return ends[-1]

    def took(self, code: int) -> float:
        """How long a compute action occupies its rank."""
        if self.scale is None:
            return self.duration[code & KEY]
        return self.duration[code & KEY] * self.scale[code >> MICROBATCH_SHIFT] + self.costs.overhead

    def message(self, code: int, link: _Link, now: float) -> bool:
        """Post one half of a message; the second half to be posted sends it on its way."""
        microbatch = code >> MICROBATCH_SHIFT & MICROBATCH
        needs, here, there, channel, transfer, latency, done, recv = link
        for times in needs:
            if times[microbatch] < 0.0:
                return False
        here[microbatch] = now
        if there[microbatch] >= 0.0:
            leave = now if now > channel[0] else channel[0]
            leave = (leave if leave > there[microbatch] else there[microbatch]) + transfer[microbatch]
            channel[0] = leave
            done[microbatch] = leave + latency
            self.ready += self.waiting.pop(recv | code & MICROBATCH_FIELD, ())
        return True

    def link(self, key: int) -> _Link:
        """All that is known of a message before it is sent, by the key of either half."""
        other, is_send = partner_of(key), key & OP in SENDS
        send, recv = (key, other) if is_send else (other, key)
        stages = stage_of(send), stage_of(recv)
        way = self.costs.link(*map(self.plan.placement.rank_of, stages))
        transfer = self.costs.transfer(way, min(stages))
        found = self.links[key] = _Link(
            needs=[need[0] for need in self.needs_of(key)] if is_send else [],
            here=self.posted[key],
            there=self.posted[other],
            channel=self.channels[way.sender, way.receiver],
            transfer=[transfer * size for size in self.sizes],
            latency=way.latency,
            done=self.done[recv],
            recv=recv,
        )
        return found


def _durations(plan: Plan, costs: Costs) -> dict[int, float]:
    """By key: how long an action occupies its rank; without the overhead where microbatches differ in size."""
    overhead = 0.0 if costs.microbatches is not None else costs.overhead
    slow = costs.ranks or (1.0,) * plan.num_ranks
    return {
        key_of(op, stage): costs.time(op, stage) * slow[rank] + overhead if op.is_compute else costs.time(op, stage)
        for op in Op
        if not op.is_message
        for stage, rank in enumerate(plan.placement.ranks)
    }
