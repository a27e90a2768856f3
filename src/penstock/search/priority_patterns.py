"""Patterns: families of orders, each from few numbers. They give the list scheduler its urgency, and can be shaken.

Three families:

- `Groups`: a group of microbatches goes through all stages of a rank before the next group does, and comes back in groups,
  as in interleaved and generalised interleaved schedules; rank by rank a number of forwards is ahead of the gradients.
- `BlockPattern`: the life of one microbatch, repeated at a fixed interval, as in arXiv 2405.15362; how long a
  microbatch stays on its way there and back decides the memory.
- `AsPlanned`: the order of a known schedule, whose gaps are filled anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from penstock.plan import Op, Plan
from penstock.plan.actions import OP, microbatch_of, parts, stage_of
from penstock.search.list_scheduler import Manner
from penstock.search.search_problem import SearchJob

_Shaken = TypeVar("_Shaken", "Groups", "BlockPattern")
_Ways = dict[str, tuple[int, Callable[[Any], Any]]]  # by field: how often it is changed beside the others, and how
PATIENCES = (0.0, 0.25, 0.5, 0.75, 1.0)
HOLDS = (0.0, 0.1, 0.35, 1.0)
_SPREADS = (0.2, 0.7, 2.0)  # of changes to the keys of a known schedule, in places
_SHAKEN = 0.1  # the share of its microbatches that are moved by themselves


def _another(manner: Manner, job: SearchJob, rng: random.Random) -> Manner:
    """The manner with one thing changed."""
    if job.merges and rng.random() < 0.7:
        whole = manner.whole or (0,) * job.placement.num_ranks
        return replace(manner, whole=_nudged(whole, rng) if rng.random() < 0.8 else rng.choice(late_splits(job)))
    if rng.random() < 0.5:
        return replace(manner, patience=rng.choice(PATIENCES))
    return replace(manner, hold=rng.choice(HOLDS))


def late_splits(job: SearchJob) -> list[tuple[int, ...]]:
    """`Manner.whole` if the last microbatches alone have split backwards, as many as the ranks have in flight, or none."""
    ranks, count = job.placement.num_ranks, job.num_microbatches
    last = (0, -(-ranks // 2), ranks, 2 * ranks, count)
    return [*dict.fromkeys((max(0, count - split),) * ranks for split in last)]


@dataclass(frozen=True)
class Groups:
    """Forwards and gradients in groups of microbatches; `ahead[rank]` forwards before the first gradient."""

    forward: tuple[int, ...]  # the sizes of the groups
    backward: tuple[int, ...]
    ahead: tuple[int, ...]
    manner: Manner

    @classmethod
    def of(cls, job: SearchJob, manner: Manner, *, group: int) -> Groups:
        """Equal groups: the order of the generalised interleaved schedules."""
        sizes = _groups_of(job.num_microbatches, group, group)
        return cls(sizes, sizes, _ahead(job, group, 1, 0), manner)

    @classmethod
    def any(cls, job: SearchJob, manner: Manner, rng: random.Random) -> Groups:
        """The first group, which fills the pipeline, has a size of its own; so have the groups of gradients."""
        count, ranks = job.num_microbatches, job.placement.num_ranks
        first, rest = rng.randint(-(-ranks // 2), ranks + 2), rng.randint(-(-ranks // 2), ranks)
        back = rng.randint(1, count)
        ahead = _ahead(job, first, rng.choice((1, 1, 1, 2)), rng.choice((-1, 0, 0, 1, 2, ranks // 2)))
        return cls(_groups_of(count, first, rest), _groups_of(count, back, back), ahead, manner)

    def urgency(self, job: SearchJob) -> list[float]:
        """A rank's forwards are numbered in their order, gradients in theirs, and stand in turn after those ahead."""
        keys = [0.0] * job.num_tasks
        size, links = job.num_microbatches, job.num_links
        for rank, ahead in enumerate(self.ahead):
            stages = job.placement.stages_of(rank)
            for place, task in enumerate(_grouped(self.forward, [stage * size for stage in stages])):
                keys[task] = place if place < ahead else 2 * place - ahead
            for place, task in enumerate(_grouped(self.backward, [(links - 1 - s) * size for s in reversed(stages)])):
                keys[task] = 2 * place + ahead + 1
        return keys

    def shaken(self, job: SearchJob, rng: random.Random) -> Groups:
        regroup, nudge = partial(_regrouped, rng=rng), partial(_nudged, rng=rng)
        return _changed(self, {"forward": (3, regroup), "backward": (3, regroup), "ahead": (3, nudge)}, job, rng)


def _changed(pattern: _Shaken, ways: _Ways, job: SearchJob, rng: random.Random) -> _Shaken:
    """The pattern with one change, or a few, to what `ways` names or to its manner."""
    ways = ways | {"manner": (4 if job.merges else 1, partial(_another, job=job, rng=rng))}
    for _ in range(rng.choice((1, 1, 2, 3))):
        [name] = rng.choices([*ways], [often for often, _ in ways.values()])
        pattern = replace(pattern, **{name: ways[name][1](getattr(pattern, name))})
    return pattern


def _groups_of(count: int, first: int, rest: int) -> tuple[int, ...]:
    """The sizes of groups of `count` microbatches: one of `first`, the others of `rest`, the last with what is left."""
    sizes = [min(first, count)]
    while (left := count - sum(sizes)) > 0:
        sizes.append(min(rest, left))
    return tuple(sizes)


def _ahead(job: SearchJob, group: int, per_hop: int, more: int) -> tuple[int, ...]:
    """By rank: a group through all stages but the last, `per_hop` for each hop to the last rank, and `more`."""
    ranks = job.placement.num_ranks
    stages = (len(job.placement.stages_of(rank)) for rank in range(ranks))
    return tuple(group * (count - 1) + per_hop * (ranks - 1 - rank) + more for rank, count in enumerate(stages))


def _grouped(sizes: Sequence[int], firsts: Sequence[int]) -> Iterator[int]:
    """The tasks of a rank group by group; `firsts` are those of microbatch 0, stage by stage."""
    begin = 0
    for count in sizes:
        for first in firsts:
            yield from range(first + begin, first + begin + count)
        begin += count


def _regrouped(sizes: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """One microbatch goes to another group, a group is divided, or two become one."""
    groups = list(sizes)
    here, there = rng.randrange(len(groups)), rng.randrange(len(groups))
    way = rng.random()
    if way < 0.5:
        if here != there and groups[here] > 1:
            groups[here] -= 1
            groups[there] += 1
    elif way < 0.75:
        if groups[here] > 1:
            part = rng.randint(1, groups[here] - 1)
            groups[here : here + 1] = [part, groups[here] - part]
    else:
        groups[here : here + 2] = [sum(groups[here : here + 2])]
    return tuple(groups)


def _nudged(numbers: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """All numbers, or one of them, a little larger or smaller."""
    if rng.random() < 0.3:
        step = rng.choice((-1, 1))
        return tuple(number + step for number in numbers)
    chosen = rng.randrange(len(numbers))
    step = rng.choice((-2, -1, 1, 2))
    return tuple(number + step * (place == chosen) for place, number in enumerate(numbers))


@dataclass(frozen=True)
class BlockPattern:
    """The life of one microbatch, repeated: distances from link to link in shares of the mean time of a forward.

    A *leg* is as many links as there are ranks: in a loop one round, in a V one way.
    """

    hops: tuple[float, ...]  # by leg: from one of its links to the next
    turns: tuple[float, ...]  # by leg: from the leg before to its first link
    shift: tuple[int, ...]  # by rank: how many microbatches later its gradients are wanted
    manner: Manner

    @classmethod
    def any(cls, job: SearchJob, rng: random.Random) -> BlockPattern:
        ranks = job.placement.num_ranks
        legs = -(-job.num_links // ranks)
        return cls(
            tuple(rng.choice((1.0, 1.0, 1.5, 2.0, 2.0, 3.0)) for _ in range(legs)),
            tuple(rng.choice((1.0, 1.0, 2.0, 3.0, 4.0, 5.0)) for _ in range(legs)),
            (0,) * ranks,
            Manner(rng.choice(PATIENCES), rng.choice(HOLDS)),
        )

    def urgency(self, job: SearchJob) -> list[float]:
        size, half, ranks = job.num_microbatches, job.placement.num_stages, job.placement.num_ranks
        unit = sum(job.time[: half * size]) / (half * size)
        keys: list[float] = []
        offset = 0.0
        for link, rank in enumerate(job.rank_of_link):
            leg, place = divmod(link, ranks)
            offset += (self.hops[leg] if place else self.turns[leg]) * unit
            first = offset + (self.shift[rank] * job.pace if link >= half else 0.0)
            keys += (first + number * job.pace for number in range(size))
        return keys

    def shaken(self, job: SearchJob, rng: random.Random) -> BlockPattern:
        ways: _Ways = {
            "hops": (4, partial(_stretched, rng=rng, spread=0.5, least=0.5)),
            "turns": (3, partial(_stretched, rng=rng, spread=1.5, least=0.0)),
            "shift": (2, partial(_nudged, rng=rng)),
        }
        return _changed(self, ways, job, rng)


def _stretched(lengths: tuple[float, ...], rng: random.Random, *, spread: float, least: float) -> tuple[float, ...]:
    chosen, step = rng.randrange(len(lengths)), rng.gauss(0.0, spread)
    return tuple(max(least, length + step * (place == chosen)) for place, length in enumerate(lengths))


@dataclass(frozen=True)
class AsPlanned:
    """The order of a plan: its gaps are filled anew, and what would make a rank wait may be overtaken."""

    keys: tuple[float, ...]  # by task: its place in the list of its rank
    manner: Manner

    @classmethod
    def of(cls, job: SearchJob, plan: Plan, manner: Manner) -> AsPlanned:
        size, links = job.num_microbatches, job.num_links
        keys = [0.0] * job.num_tasks
        for codes in plan.codes:
            for position, code in enumerate(part for packed in codes for part in parts(packed)):
                if code & OP != Op.W:
                    link = stage_of(code) if code & OP == Op.F else links - 1 - stage_of(code)
                    keys[link * size + microbatch_of(code)] = float(position)
        return cls(tuple(keys), manner)

    def urgency(self, job: SearchJob) -> list[float]:
        return list(self.keys)

    def shaken(self, job: SearchJob, rng: random.Random) -> AsPlanned:
        """Each link, and a few microbatches, a little more or less urgent."""
        if rng.random() < (0.5 if job.merges else 0.2):
            return replace(self, manner=_another(self.manner, job, rng))
        spread, size = rng.choice(_SPREADS), job.num_microbatches
        keys: list[float] = []
        for first in range(0, job.num_tasks, size):
            shift = rng.gauss(0.0, spread)
            row = self.keys[first : first + size]
            keys += sorted(key + shift + (rng.gauss(0.0, spread) if rng.random() < _SHAKEN else 0.0) for key in row)
        return replace(self, keys=tuple(keys))


Pattern = Groups | BlockPattern | AsPlanned
