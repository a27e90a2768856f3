"""simulate(plan, costs) -> Timeline. Each rank works through its list; each action is timed once, in linear time."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import NamedTuple

from penstock.checks import check_types
from penstock.errors import DeadlockError, PlanError
from penstock.plan import Plan
from penstock.plan.action_positions import is_sparse
from penstock.plan.actions import KEY, MICROBATCH_FIELD, OP, partner_of, split_overlap, stage_of, text
from penstock.plan.actions import MICROBATCH_SHIFT as SHIFT
from penstock.plan.ops import CHOICES, COMPUTES, COPIES, MESSAGES, OVERLAP, SENDS, Op
from penstock.simulate.costs import Costs
from penstock.simulate.timeline import Timeline

_NEVER = -1.0
_PLAIN, _MESSAGE, _SPECIAL = range(3)  # how an action is timed: the first, which is most of them, counts as False
_HOW = tuple(
    _MESSAGE if op in MESSAGES else _PLAIN if op in COMPUTES - {OVERLAP} else _SPECIAL for op in range(OVERLAP + 1)
)
# When it is done, its key, and how long it is under way to here; both times by microbatch.
_Need = tuple[list[float], int, list[float]]
# What is known of the actions with one key: their needs; by microbatch, how long they take and when they are done; and, of a
# full backward, the way from its key to those of its halves.
_Facts = tuple[list[_Need], list[float], list[float], tuple[int, ...]]


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
    if not isinstance(plan, Plan) or not isinstance(costs, Costs | None):
        check_types("simulate", PlanError, plan=(plan, Plan), costs=(costs, Costs | None))
    costs = Costs.unit(plan) if costs is None else costs
    costs.check_sizes(plan.num_stages, plan.num_ranks, plan.num_microbatches)
    if not plan.is_share and is_sparse(sum(map(len, plan.keys)), plan.num_microbatches, plan.num_actions):
        raise PlanError(
            f"the plan has {plan.num_actions:,} actions for {plan.num_microbatches:,} microbatches, too few for each of them; "
            "penstock.plan.check(plan) says which one is missing"
        )
    try:
        return _Run(plan, costs).timeline()
    except LookupError as error:
        raise PlanError(
            "the plan has an action of a stage or microbatch that it does not have; penstock.plan.check(plan) says which"
        ) from error


class _Link(NamedTuple):
    """A message as seen from one of its halves; each list has one number a microbatch, unless it says otherwise."""

    needs: list[list[float]]  # a send: when what it carries was computed
    here: list[float]  # when this half was posted
    there: list[float]  # when the other half was
    channel: list[float]  # one number: from when on the ordered pair of ranks is free
    transfer: list[float]  # the time on the wire
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
        self.sizes = costs.microbatches or (1.0,) * m
        self.at_once = [0.0] * m
        self.cursor = [0] * plan.num_ranks
        self.clock = [0.0] * plan.num_ranks
        self.copier = [0.0] * plan.num_ranks  # from when on the copy engine of each rank is free
        self.waiting: dict[int, list[int]] = {}  # packed action -> the ranks that wait for it
        self.starts: list[list[float]] = [[] for _ in range(plan.num_ranks)]
        self.ends: list[list[float]] = [[] for _ in range(plan.num_ranks)]
        self.ready = list(range(plan.num_ranks - 1, -1, -1))
        self.facts: dict[int, _Facts] = {}
        self.links: dict[int, _Link] = {}
        self.channels: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0])  # free from then on
        for key in plan.rules.chosen:
            self.done[key] = [0.0] * m  # nobody waits for what is not there
        for code in chain.from_iterable(plan.codes) if plan.rules.chosen else ():
            if code & OP in CHOICES:
                self.done[code & KEY][code >> SHIFT] = _NEVER

    def timeline(self) -> Timeline:
        while self.ready:
            self.advance(self.ready.pop())
        stuck = [r for r, codes in enumerate(self.plan.codes) if self.cursor[r] < len(codes)]
        if stuck:
            waits = "; ".join(f"rank {r} at {text(self.plan.codes[r][self.cursor[r]])}" for r in stuck[:8])
            raise DeadlockError(f"the plan cannot run to its end: {waits}. penstock.plan.check(plan) shows the cycle")
        if self.plan.is_lowered:  # a message ends when it arrives
            arrived = {key: link.done for key, link in self.links.items()}
            for ends, codes in zip(self.ends, self.plan.codes, strict=True):
                for at, code in enumerate(codes):
                    if (key := code & KEY) in arrived:
                        ends[at] = arrived[key][(code & MICROBATCH_FIELD) >> SHIFT]
        return Timeline(self.plan, tuple(self.starts), tuple(self.ends), costs=self.costs)

    def facts_of(self, key: int) -> _Facts:
        op, stage, rank = Op(key & OP), stage_of(key), self.plan.placement.rank_of(stage_of(key))
        takes, overhead = self.costs.time(op, stage), 0.0
        if op.is_compute:
            takes, overhead = takes * (self.costs.ranks[rank] if self.costs.ranks else 1.0), self.costs.overhead
        needs = [(self.done[need], need, self.way(stage_of(need), stage)) for need in self.plan.rules.needs(key)]
        took = [takes * size + overhead for size in (self.sizes if op.has_microbatch else (1.0,))]
        found = self.facts[key] = needs, took, self.done[key], tuple(half - op for half in op.row.halves)
        return found

    def way(self, stage: int, other: int) -> list[float]:
        """Return the time of a transfer between two stages in a plan without messages."""
        here, there = self.plan.placement.rank_of(stage), self.plan.placement.rank_of(other)
        if here == there:
            return self.at_once
        link = self.costs.link(here, there)
        transfer = self.costs.transfer(link, min(stage, other))
        return [link.latency + transfer * size for size in self.sizes]

    def advance(self, rank: int) -> None:
        """Work through the list of a rank as far as it goes."""
        codes, now = self.plan.codes[rank], self.clock[rank]
        starts, ends, facts, links = self.starts[rank], self.ends[rank], self.facts, self.links
        waiting, ready, posting, ways = self.waiting, self.ready, self.costs.posting, _HOW
        for at in range(self.cursor[rank], len(codes)):
            code = codes[at]
            key = code & KEY
            if how := ways[code & OP]:
                if how == _MESSAGE:
                    if not self.message(code, links.get(key) or self.link(key), now + posting):
                        break
                    starts.append(now)
                    now += posting
                    ends.append(now)
                    continue
                after = self.special(rank, code, now)
                if after < 0.0:
                    break
                now = after
                continue
            needs, took, done, halves = facts.get(key) or self.facts_of(key)
            microbatch = code >> SHIFT
            begin = now
            for times, need, way in needs:
                time = times[microbatch]
                if time < 0.0:
                    waiting.setdefault(need | code & MICROBATCH_FIELD, []).append(rank)
                    break
                time += way[microbatch]
                if time > begin:
                    begin = time
            else:
                starts.append(begin)
                now = begin + took[microbatch]
                ends.append(now)
                done[microbatch] = now
                if code in waiting:
                    ready += waiting.pop(code)
                for half in halves:
                    self.complete(code + half, now)
                continue
            break
        else:
            at = len(codes)
        self.cursor[rank], self.clock[rank] = at, now

    def complete(self, code: int, time: float) -> None:
        self.done[code & KEY][(code & MICROBATCH_FIELD) >> SHIFT] = time
        self.ready += self.waiting.pop(code, ())

    def special(self, rank: int, code: int, now: float) -> float:
        """A pair, a copy or care of parameters: when the rank goes on after it, or `_NEVER` if it cannot start."""
        if code & OP == OVERLAP:
            return self.pair(rank, split_overlap(code), now)
        _, took, _, _ = self.facts.get(code & KEY) or self.facts_of(code & KEY)
        is_copy = code & OP in COPIES  # what it needs stands before it, here or on the engine
        begin = max(now, self.copier[rank]) if is_copy else now
        end = begin + took[code >> SHIFT if is_copy else 0]
        self.starts[rank].append(begin)
        self.ends[rank].append(end)
        if not is_copy:
            return end
        self.copier[rank] = end
        self.complete(code, end)
        return now

    def pair(self, rank: int, both: tuple[int, int], now: float) -> float:
        """The two halves of an overlapped pair start together, and run in series unless they are fused."""
        begin, known = now, []
        for part in both:
            needs, took, _, halves = self.facts.get(part & KEY) or self.facts_of(part & KEY)
            known.append((part, halves, took[part >> SHIFT]))
            for times, need, way in needs:
                time = times[part >> SHIFT]
                if time < 0.0:
                    self.waiting.setdefault(need | part & MICROBATCH_FIELD, []).append(rank)
                    return _NEVER
                begin = max(begin, time + way[part >> SHIFT])
        end, fused = begin, self.costs.overlap
        for part, halves, length in known:
            end = end + length if fused is None else begin + fused + self.costs.overhead
            self.complete(part, end)
            for half in halves:
                self.complete(part + half, end)
        self.starts[rank].append(begin)
        self.ends[rank].append(end)
        return end

    def message(self, code: int, link: _Link, now: float) -> bool:
        """Post one half of a message; the second half to be posted sends it on its way."""
        microbatch = (code & MICROBATCH_FIELD) >> SHIFT
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
            needs=[self.done[need] for need in self.plan.rules.needs(key)] if is_send else [],
            here=self.posted[key],
            there=self.posted[other],
            channel=self.channels[way.sender, way.receiver],
            transfer=[transfer * size for size in self.sizes],
            latency=way.latency,
            done=self.done[recv],
            recv=recv,
        )
        return found
