"""Idle time read off the times of a plan is what the simulator knows while it makes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.lower import lower
from penstock.schedules import all_schedules
from penstock.simulate import Costs, simulate
from penstock.simulate.idle import idle_of


@pytest.mark.parametrize(("latency", "posting"), [(0.0, 0.0), (0.3, 0.0), (0.3, 0.1)])
@pytest.mark.parametrize("recipe", all_schedules(), ids=lambda recipe: recipe.name)
def test_it_agrees_with_the_simulator(recipe, latency: float, posting: float) -> None:
    plan = lower(recipe(4, 7), shards=True, reduce=recipe.name != "forward")
    costs = Costs.per_rank(
        num_stages=plan.num_stages,
        stages_per_rank=plan.num_stages // 4,
        forward=1.1,
        backward_weight=0.6,
        latency=latency,
    )
    timeline = simulate(plan, replace(costs, posting=posting))
    found_idle = idle_of(plan, timeline.starts, timeline.ends)
    for found, known, busy in zip(found_idle, timeline.idle, timeline.busy, strict=True):
        assert found.filling == pytest.approx(known.filling)
        assert found.draining == pytest.approx(known.draining)
        assert found.communication == pytest.approx(known.communication)
        assert found.imbalance == pytest.approx(known.imbalance)
        assert found.total == pytest.approx(known.total)
        assert found.total + busy == pytest.approx(timeline.makespan)
