"""Costs from measured steps: what each action and message took while all ranks were at work.

costs = measured_costs([recording.timeline, ...], known)     # several steps of one plan
simulate(plan, costs)                                        # this plan again, or another for the same stages

The quickest and the slowest steps do not count, so that what disturbs a step now and then has no say. Of the others the time of
an action is the mean: what makes every action a little longer now and then makes every step longer, and a median would not see
it. Of a stage and op it is the mean over the microbatches. An action's time ends where its call ended; what a rank takes to pick
up a message that is there already is counted to the action that needs it. A message's latency is what passes from the end of its
send to the start of an action that waited for nothing else.

With these costs every action of a kind takes the same time. In a real step it does not, and the ranks wait for one another
longer: that is `Costs.uneven`, found by replaying the steps with the time that each single action took.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from operator import sub
from typing import Any, NamedTuple

from penstock.checks import check_types
from penstock.errors import DeadlockError, PlanError
from penstock.plan import Plan
from penstock.plan.actions import KEY, OP, key_of, microbatch_of, partner_of
from penstock.plan.ops import COMPUTES, MESSAGES, OVERLAP, SENDS, Op
from penstock.simulate.costs import Costs, Link
from penstock.simulate.simulate import simulate
from penstock.simulate.timeline import Timeline

_DIFFERENT = 1.5  # a link whose latency is so many times that of the others has one of its own
_BY_OP = {Op.F: "forward", Op.I: "backward_input", Op.W: "backward_weight", Op.B: "backward"}


@dataclass(frozen=True)
class Steps:
    """Measured steps of one plan, put together into a typical one."""

    plan: Plan
    lengths: tuple[tuple[float, ...], ...]  # of each action, by rank and position
    delays: dict[tuple[int, int], float]  # by ordered pair of ranks: how long a message is under way
    pickup: float  # what it takes to pick up a message that is there
    each: tuple[tuple[tuple[float, ...], ...], ...] = ()  # `lengths` of each of the steps

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> Steps:
        """The typical step of some; all have the same plan.

        Steps.of([recording.timeline])
        """
        if not timelines:
            raise PlanError("no measured steps; expected at least one timeline of schedule.record()")
        plan = timelines[0].plan
        if any(timeline.plan != plan for timeline in timelines[1:]):
            raise PlanError("measured steps of different plans; expected one plan")
        typical = undisturbed(timelines)
        rows = [zip(timeline.ends, timeline.starts, strict=True) for timeline in typical]
        each = tuple(tuple(tuple(map(sub, *row)) for row in step) for step in rows)
        lengths = tuple(tuple(map(statistics.fmean, zip(*rank, strict=True))) for rank in zip(*each, strict=True))
        waits = [wait for timeline in typical for wait in _waits(timeline)]
        under_way = _under_way(waits)
        slowest = max(under_way.values(), default=0.0)
        there = [wait.gap for wait in waits if wait.lay >= 0 and wait.lay > under_way.get(wait.pair, slowest)]
        pickup = statistics.fmean(there) if there else 0.0
        delays = {pair: max(delay - pickup, 0.0) for pair, delay in under_way.items()}
        return cls(plan, lengths, delays, pickup, each)

    def by_stage(self) -> dict[int, list[tuple[int, float]]]:
        """By key of a compute action: the microbatch and the time of each; pairs are left out."""
        found: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for code, length in self._timed():
            if code & OP in COMPUTES and code & OP != OVERLAP:
                more = self.pickup if self.plan.rules.awaited(code) else 0.0
                found[code & KEY].append((microbatch_of(code), length + more))
        return found

    def _timed(self) -> Iterator[tuple[int, float]]:
        """All actions, each with its time."""
        return chain.from_iterable(map(zip, self.plan.codes, self.lengths))

    def of_kind(self, ops: frozenset[int]) -> list[float]:
        """The times of all actions of some kinds."""
        return [length for code, length in self._timed() if code & OP in ops]

    def microbatches(self) -> tuple[float, ...]:
        """Return the time of the actions of each microbatch, relative to the mean."""
        rows: list[list[float]] = [[] for _ in range(self.plan.num_microbatches)]
        for times in self.by_stage().values():
            typical = statistics.mean(time for _, time in times)
            for microbatch, time in times if typical else ():
                rows[microbatch].append(time / typical)
        return tuple(statistics.median(row) if row else 1.0 for row in rows)


def replayed(
    plan: Plan, lengths: Sequence[Sequence[float]], delays: Mapping[tuple[int, int], float], *, pickup: float
) -> float:
    """Replay a measured step: the measured time of each action, and the known delays of messages.

        replayed(plan, lengths, delays, pickup=3e-5)      # lengths by rank and position, delays by ordered pair of ranks

    Equal actions do not take equal time, and not on all ranks at once: so the ranks wait for one another longer than they would
    if every action took its mean. (The end of a step is a maximum of sums of such times, so with the means it comes never later
    than on the mean of the steps.) The difference is what `Costs.uneven` says.

    A rank does its actions one after another. One that needs messages begins when the last of them has been under way for its
    delay, or, if they are there already, when the rank has picked them up.
    """
    usual = max(delays.values(), default=0.0)
    sent: dict[int, tuple[int, float]] = {}  # by receive: by whom and when
    at, free = [0] * plan.num_ranks, [0.0] * plan.num_ranks
    first, last, waiting = inf, 0.0, set(range(plan.num_ranks))
    while waiting:
        before = sum(at)
        for rank in tuple(waiting):
            codes = plan.codes[rank]
            while at[rank] < len(codes):
                code, start = codes[at[rank]], free[rank]
                wanted = plan.rules.awaited(code)
                if not all(need in sent for need in wanted):
                    break
                if wanted:
                    there = (left + delays.get((sender, rank), usual) for sender, left in map(sent.__getitem__, wanted))
                    start = max(start, *there) + pickup
                free[rank] = start + lengths[rank][at[rank]]
                if code & OP in COMPUTES:
                    first, last = min(first, start), max(last, free[rank])
                elif code & OP in SENDS:
                    sent[partner_of(code)] = rank, free[rank]
                at[rank] += 1
            else:
                waiting.discard(rank)
        if sum(at) == before and waiting:
            raise DeadlockError(f"ranks {sorted(waiting)} wait for messages that nobody sends; expected a lowered plan")
    return last - first if last else 0.0


def undisturbed(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Those that took neither most nor least: about the middle half.

    undisturbed([recording.timeline, ...])
    """
    dropped = (len(timelines) + 1) // 4
    return sorted(timelines, key=lambda timeline: timeline.makespan)[dropped : len(timelines) - dropped]


def measured_costs(timelines: Sequence[Timeline], known: Costs, *, per_microbatch: bool = False) -> Costs:
    """Return the costs of actions and messages in measured steps; `known` supplies those that are not measured, such as bytes.

        measured_costs([recording.timeline], pipe.choice.costs)

    Ops that the plan does not have keep their known proportion to those that it has. With `per_microbatch` the costs say how
    much longer one microbatch takes than another.
    """
    check_types("measured_costs", PlanError, timelines=(timelines, Sequence[Timeline]), known=(known, Costs))
    check_types("measured_costs", PlanError, per_microbatch=(per_microbatch, bool | int))
    steps = Steps.of(timelines)
    times = {key: statistics.mean(time for _, time in found) for key, found in steps.by_stage().items()}
    posts, pairs = steps.of_kind(MESSAGES), steps.of_kind(frozenset({OVERLAP}))
    found = replace(
        known,
        **_filled(times, known),
        **_ways(steps.delays),
        overlap=statistics.mean(pairs) if pairs else known.overlap,
        overhead=0.0,  # as it is in the times of the actions
        posting=statistics.mean(posts) if posts else known.posting,
        microbatches=steps.microbatches() if per_microbatch else known.microbatches,
        ranks=None,
    )
    # How much longer a step takes since each action takes a time of its own, and not what these costs say of its kind.
    replays = [replayed(steps.plan, lengths, steps.delays, pickup=steps.pickup) for lengths in steps.each]
    return replace(found, uneven=max(statistics.fmean(replays) - simulate(steps.plan, found).makespan, 0.0))


def _filled(times: dict[int, float], known: Costs) -> dict[str, Any]:
    """Every op of every stage: measured, or as long as the known costs say beside what was measured of the stage."""
    found: dict[str, list[float]] = {name: [] for name in _BY_OP.values()}
    for stage in range(known.num_stages):
        before = {name: known.time(op, stage) for op, name in _BY_OP.items()}
        now = {name: times.get(key_of(op, stage)) for op, name in _BY_OP.items()}
        both = [(value, before[name]) for name, value in now.items() if value is not None]
        scale = sum(new for new, _ in both) / (sum(old for _, old in both) or 1.0) if both else 1.0
        backward, first, second = now["backward"], now["backward_input"], now["backward_weight"]
        if backward is None and first is not None and second is not None:
            now["backward"] = first + second
        elif backward is not None and first is None and second is None:
            halves = before["backward_input"] + before["backward_weight"] or 1.0
            now["backward_input"] = backward * before["backward_input"] / halves
            now["backward_weight"] = backward * before["backward_weight"] / halves
        for name, value in now.items():
            found[name].append(scale * before[name] if value is None else value)
    return {name: tuple(values) for name, values in found.items()}


class _Awaited(NamedTuple):
    """An action that needs a message."""

    pair: tuple[int, int]  # sender and receiver
    gap: float  # seconds until it began, after the rank was free and the message was sent
    lay: float  # how long before the rank was free the message was sent; negative if it was sent later


def _waits(timeline: Timeline) -> list[_Awaited]:
    """For each action that needs a message: how long after its send the action began; or, where the message was sent
    before the rank was free, how long after that.
    """
    plan = timeline.plan
    sent = {partner_of(code): (rank, end) for rank, code, _, end in timeline.every() if code & OP in SENDS}
    found = []
    for rank in range(plan.num_ranks):
        free = 0.0
        for code, start, end in timeline.timed(rank):
            if messages := plan.rules.awaited(code):
                sender, left = max(map(sent.__getitem__, messages), key=lambda one: one[1])
                found.append(_Awaited((sender, rank), start - max(left, free), free - left))
            free = end
    return found


def _under_way(waits: Sequence[_Awaited]) -> dict[tuple[int, int], float]:
    """Return the delay of a message to a waiting rank, by ordered pair of ranks.

    Both ways get the mean, since what the clocks of two ranks differ by counts once each way.
    """
    late: dict[tuple[int, int], list[float]] = defaultdict(list)
    for wait in waits:
        if wait.lay < 0:
            late[wait.pair].append(wait.gap)
    one_way = {pair: statistics.fmean(found) for pair, found in late.items()}
    return {pair: (there + one_way.get(pair[::-1], there)) / 2 for pair, there in one_way.items()}


def _ways(delays: dict[tuple[int, int], float]) -> dict[str, Any]:
    """The usual latency, in which all is that a message takes, and the links that are much slower or quicker; nothing if nobody
    waited for a message.
    """
    if not delays:
        return {}
    usual = statistics.median(delays.values())
    unlike = [pair for pair, delay in delays.items() if not usual / _DIFFERENT <= delay <= usual * _DIFFERENT]
    links = tuple(Link(*pair, delays[pair]) for pair in sorted(unlike))
    return {"latency": usual, "links": links, "bandwidth": None}
