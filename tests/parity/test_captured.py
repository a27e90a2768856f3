"""Captured models under every schedule: what they compute, what they send, and what they say when they cannot."""

from __future__ import annotations

import pytest

from penstock.comm.local import LocalWorld
from penstock.schedules import all_schedules
from tests.parity import captured as cases

SCHEDULES = [recipe.name for recipe in all_schedules() if recipe.name != "forward"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", list(cases.CASES))
def test_every_schedule(name: str, schedule: str) -> None:
    """A cold step, a warm one, one with another batch size that does not divide evenly, an evaluation."""
    plan = cases.plan_for(schedule, 3)
    batches = cases.make_batches(name, (6, 6, 10))
    ranks = LocalWorld(plan.num_ranks, rendezvous=True).run(cases.rank_of_threads, plan, name, batches)
    cases.assert_equal(plan, ranks, *cases.run_loop(name, batches, 3))
