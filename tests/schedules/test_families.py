"""What is known of every family of plans, so that no run has to prove it again.

A *family* is a named schedule of penstock's own on a chain of stages, as it is, forward only, or lowered for a run. A rank that
binds its share of such a plan checks nothing (`Plan.is_share`), however many ranks there are. It may rely on this:

1. Every plan is right: complete, well ordered, and free of deadlock, but for one forward even where a rank stays in each
   send until its receive is posted. It is proved here for all small sizes. They show every pattern that there is: a list is
   a warm-up, a steady part that repeats, and a drain, whose lengths are linear in the sizes; from `2 * num_ranks`
   microbatches on only the steady part grows. A few larger sizes stand for the rest.
2. Lowered rank by rank it is the plan that is lowered as a whole.
3. The first and the last rank have every op that any rank has.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.lower import Ahead, Early, ReceivePolicy, lower
from penstock.lower.lower import Care, lower_shares
from penstock.plan import Plan, StageGraph, check
from penstock.plan.actions import OP
from penstock.run.binding import runs_with_blocking_sends
from penstock.schedules import Recipe, all_schedules, get_schedule

FAMILIES = [pytest.param(recipe, id=recipe.name) for recipe in all_schedules() if recipe.is_family]
CARES = (Care(), Care(shards=True, reduce=True))


def small(recipe: Recipe) -> Iterator[Plan]:
    for per_rank in (1, 2, 3) if recipe.stages_per_rank is None else (recipe.stages_per_rank,):
        for num_ranks in range(1, 5):
            for num_microbatches in range(1, 2 * num_ranks + 3):
                yield recipe(num_ranks, num_microbatches, stages_per_rank=per_rank)


def large(recipe: Recipe) -> Iterator[Plan]:
    for num_ranks, num_microbatches in ((7, 17), (12, 9)):
        yield recipe(num_ranks, num_microbatches)


def hold(plan: Plan, receives: ReceivePolicy, care: Care) -> None:
    whole = lower(plan, receives=receives, shards=care.shards, reduce=care.reduce)
    assert not whole.is_share
    check(whole)
    shares = lower_shares(plan, receives=receives, care=care)
    if runs_with_blocking_sends(shares):
        check(whole, sends="blocking")
    assert shares.is_share
    assert shares == whole, plan.family
    assert shares.is_lowered == whole.is_lowered
    assert shares.rules == whole.rules
    for each in (plan, shares):
        ops = [frozenset(code & OP for code in codes) for codes in each.codes]
        assert ops[0] | ops[-1] == frozenset[int]().union(*ops), each.family


@pytest.mark.parametrize("recipe", FAMILIES)
def test_what_is_known_of_every_family(recipe: Recipe) -> None:
    for plan in (*small(recipe), *large(recipe)):
        hold(plan, Early(), CARES[plan.num_microbatches % 2])
        if plan.has_backward and plan.num_microbatches % 2 == 0:
            hold(plan.forward_only(), Ahead(2), CARES[plan.num_ranks % 2])


def test_what_is_of_a_family() -> None:
    plan = get_schedule("1f1b")(3, 4)
    assert plan.is_share
    assert plan.forward_only().is_share
    assert plan.with_graph(StageGraph.chain(3)).is_share
    assert not plan.with_graph(StageGraph.chain(3, skips=[(0, 2)])).is_share
    assert not plan.with_codes(plan.codes).is_share, "lists of somebody's own"
    mine = Recipe("mine", "a schedule of the user's", get_schedule("1f1b").rank_actions, stages_per_rank=1)
    assert not mine(3, 4).is_share
    assert mine(3, 4).codes == plan.codes


def test_a_rank_makes_its_own_list_and_those_of_its_neighbours_only() -> None:
    asked: list[int] = []
    known = get_schedule("interleavedzerobubble")

    def counted(sizes: object, rank: int) -> list[int]:
        asked.append(rank)
        return known.rank_actions(sizes, rank)  # type: ignore[arg-type]

    plan = Recipe("counted", "", counted, default_stages_per_rank=2, is_family=True)(1024, 16)
    share = lower_shares(plan).codes[500]
    assert sorted(set(asked)) == [499, 500, 501]
    assert len(share) > 16 * 2 * 3
