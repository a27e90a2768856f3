"""Idle time by cause: read off the times, with the same answer whether values cross by messages or as if by magic."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from penstock.lower import lower
from penstock.schedules import all_schedules
from penstock.simulate import Costs, simulate

WITHOUT_PAIRS = [recipe for recipe in all_schedules() if recipe.name != "dualpipev"]


@pytest.mark.parametrize("latency", [0.0, 0.3])
@pytest.mark.parametrize("recipe", WITHOUT_PAIRS, ids=lambda recipe: recipe.name)
def test_messages_change_no_cause(recipe, latency: float) -> None:
    """Of an overlapped pair a compute-only plan knows when each half ends; a message leaves after both."""
    plan = recipe(4, 7)
    costs = Costs.per_rank(
        num_stages=plan.num_stages,
        stages_per_rank=plan.num_stages // 4,
        forward=1.1,
        backward_weight=0.6,
        latency=latency,
    )
    lowered = simulate(lower(plan, shards=True, reduce=recipe.name != "forward"), costs)
    for with_messages, without in zip(lowered.idle, simulate(plan, costs).idle, strict=True):
        assert astuple(with_messages) == pytest.approx(astuple(without))
    assert any(idle.communication > 0 for idle in lowered.idle) == (latency > 0)


@pytest.mark.parametrize("recipe", all_schedules(), ids=lambda recipe: recipe.name)
def test_a_rank_is_busy_or_idle(recipe) -> None:
    plan = lower(recipe(4, 7), shards=True, reduce=recipe.name != "forward")
    timeline = simulate(plan, replace(Costs.unit(plan), latency=0.3, posting=0.1, unshard=0.2))
    for idle, busy in zip(timeline.idle, timeline.busy, strict=True):
        assert idle.total + busy == pytest.approx(timeline.makespan)
