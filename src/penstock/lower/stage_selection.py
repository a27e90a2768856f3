"""Which microbatches of which stages a pass is asked to change, and where their forwards and backwards stand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from penstock.errors import PlanError
from penstock.plan import Op, Plan
from penstock.plan.actions import OP, microbatch_of, parts, stage_of, text, with_op
from penstock.plan.ops import CHOICES, COMPUTES, INPUT_GRADIENTS

Stages = Iterable[int] | Mapping[int, Iterable[int]] | None  # some, some microbatches of some, or all


class Life(NamedTuple):
    """Lifetime of saved activations: from the slot of the forward to that of the backward in the list of a rank."""

    code: int  # the packed F
    forward: int
    backward: int
    between: int  # how many slots of computing lie between the two


Wanted = Mapping[int, Collection[int]]  # by stage: the microbatches that a pass is asked to change


def wanted(plan: Plan, stages: Stages) -> Wanted:
    """Return the selected microbatches of each stage. Selected ones must not be recomputed or offloaded already."""
    if not plan.has_backward:
        raise PlanError(
            "the plan has no backward, so nothing that a forward saved is held for one; expected a training plan"
        )
    every = range(plan.num_microbatches)
    asked = range(plan.num_stages) if stages is None else stages
    try:
        if isinstance(stages, str):
            raise TypeError("a text")
        given = asked if isinstance(asked, Mapping) else dict.fromkeys(asked, every)
        chosen = {stage: some if some is every else frozenset(some) for stage, some in given.items()}
    except TypeError as error:
        expected = "expected numbers of stages, {stage: [microbatches]}, or nothing for all"
        raise PlanError(f"stages {stages!r}; {expected}") from error
    for stage, microbatches in chosen.items():
        if stage not in range(plan.num_stages):
            raise PlanError(f"stage {stage} of a plan with {plan.num_stages}; expected 0 to {plan.num_stages - 1}")
        for microbatch in sorted(set(microbatches).difference(every)) if microbatches is not every else ():
            raise PlanError(f"microbatch {microbatch} of stage {stage}; expected 0 to {plan.num_microbatches - 1}")
    for code in chain.from_iterable(plan.codes) if stages is not None else ():
        if code & OP in CHOICES and microbatch_of(code) in chosen.get(stage_of(code), ()):
            raise PlanError(f"the plan has {text(code)} already; expected one way to hold less of a microbatch")
    return chosen


def lives(plan: Plan, rank: int, asked: Wanted) -> Iterator[Life]:
    """The wanted forwards on this rank, in the order of their backwards, but for those that hold less already."""
    taken = {with_op(code, Op.F) for code in plan.codes[rank] if code & OP in CHOICES}
    begun: dict[int, tuple[int, int]] = {}  # by packed F: its slot, and how many slots of computing there were before
    computed = 0
    for slot, code in enumerate(plan.codes[rank]):
        for part in parts(code):
            forward = with_op(part, Op.F)
            if part & OP == Op.F:
                begun[part] = slot, computed
            elif part & OP in INPUT_GRADIENTS and forward not in taken:
                if microbatch_of(part) in asked.get(stage_of(part), ()):
                    begin, before = begun[forward]
                    yield Life(forward, begin, slot, computed - before - 1)
        computed += code & OP in COMPUTES


Inserted = Mapping[int, Sequence[int]]  # by slot of a list: what comes before it, or after it


def inserted(codes: Sequence[int], before: Inserted, after: Inserted) -> list[int]:
    """A list with actions put in before some slots, and after some."""
    return [c for slot, code in enumerate(codes) for c in (*before.get(slot, ()), code, *after.get(slot, ()))]


def one_a_rank(memory_limit: float | Sequence[float], num_ranks: int) -> tuple[float, ...]:
    """A limit for each rank, given one number for all, or one for each."""
    limits = tuple(memory_limit) if isinstance(memory_limit, Sequence) else (memory_limit,) * num_ranks
    if len(limits) != num_ranks:
        raise PlanError(f"memory_limit has {len(limits)} numbers for {num_ranks} ranks; expected one, or one a rank")
    return limits
