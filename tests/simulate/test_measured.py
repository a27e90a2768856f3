"""Costs from measured steps: a step that was simulated with known costs gives these costs back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import DeadlockError, PlanError
from penstock.lower import lower
from penstock.plan import Plan
from penstock.plan.actions import OP
from penstock.plan.ops import MESSAGES
from penstock.schedules import get_schedule
from penstock.simulate import Costs, Link, Timeline, dumps_costs, loads_costs, measured_costs, simulate
from penstock.simulate.fit_costs import Steps, replayed

FOUR = Costs.per_stage((1.0, 2.0, 3.0, 2.0), (1.5, 2.5, 2.0, 2.0), (0.5, 1.0, 2.0, 1.0))


def recorded(timeline: Timeline) -> Timeline:
    """As a recorder would have it: a message's action is its posting, and ends when it is posted."""
    posting = timeline.costs.posting if timeline.costs else 0.0
    ends = tuple(
        [
            start + posting if code & OP in MESSAGES else end
            for code, start, end in zip(codes, starts, stops, strict=True)
        ]
        for codes, starts, stops in zip(timeline.plan.codes, timeline.starts, timeline.ends, strict=True)
    )
    return replace(timeline, ends=ends, measured=True, costs=None)


@pytest.mark.parametrize("name", ["1f1b", "interleaved1f1b", "zbv", "interleavedzerobubble", "gpipe"])
def test_the_costs_of_a_simulated_step_come_back(name: str) -> None:
    num_ranks = 4 if get_schedule(name).stages_per_rank == 1 else 2
    plan = lower(get_schedule(name)(num_ranks, 6))
    costs = replace(FOUR, latency=0.25, posting=0.01)
    step = simulate(plan, costs)
    found = measured_costs([recorded(step)], Costs.unit(plan))
    for stage in range(4):
        assert found.forward[stage] == pytest.approx(costs.forward[stage])
        both = costs.backward_input[stage] + costs.backward_weight[stage]
        assert found.backward is not None
        assert found.backward[stage] == pytest.approx(both)
        assert found.backward_input[stage] + found.backward_weight[stage] == pytest.approx(both)
    assert found.posting == pytest.approx(0.01)
    assert simulate(plan, found).makespan == pytest.approx(step.makespan, rel=0.02)


def test_a_slow_link_is_found() -> None:
    plan = lower(get_schedule("1f1b")(4, 6))
    costs = replace(Costs.unit(plan), latency=0.1, links=(Link(1, 2, 2.0), Link(2, 1, 2.0)))
    found = measured_costs([recorded(simulate(plan, costs))], Costs.unit(plan))
    assert found.latency == pytest.approx(0.1, rel=0.3)
    assert {link[:2]: round(link.latency, 1) for link in found.links} == {(1, 2): 2.0, (2, 1): 2.0}


def test_links_stay_as_known_where_nobody_waited() -> None:
    plan = lower(get_schedule("forward")(2, 1))
    known = replace(Costs.unit(plan), latency=0.1, links=(Link(0, 1, 2.0),))
    at_once = replace(Costs.unit(plan), forward=(0.0, 1.0))  # the message is there when the rank begins
    found = measured_costs([recorded(simulate(plan, at_once))], known)
    assert (found.latency, found.links) == (known.latency, known.links)


def test_microbatches_of_unequal_length_are_found() -> None:
    plan = lower(get_schedule("1f1b")(2, 4))
    costs = replace(Costs.unit(plan), microbatches=(1.0, 2.0, 0.5, 0.5))
    found = measured_costs([recorded(simulate(plan, costs))], Costs.unit(plan), per_microbatch=True)
    assert found.microbatches == pytest.approx((1.0, 2.0, 0.5, 0.5))
    assert found.forward == pytest.approx((1.0, 1.0))


def test_a_step_that_was_disturbed_does_not_count() -> None:
    plan = lower(get_schedule("1f1b")(2, 4))
    quiet = recorded(simulate(plan, Costs.unit(plan)))
    slow = recorded(simulate(plan, Costs.per_rank(num_stages=2, forward=9.0)))
    assert measured_costs([quiet, slow, quiet], Costs.unit(plan)).forward == pytest.approx((1.0, 1.0))


def test_steps_take_longer_where_equal_actions_take_unequal_time() -> None:
    """Each microbatch is slow on one rank only, and in half of the steps: no rank does more than another in the mean."""
    plan = lower(get_schedule("1f1b")(2, 4))
    base = replace(Costs.unit(plan), latency=0.1, posting=0.01)
    steps = [recorded(simulate(plan, replace(base, ranks=ranks))) for ranks in ((1.5, 0.5), (0.5, 1.5))]
    even = recorded(simulate(plan, base))
    assert measured_costs([even], base).uneven == pytest.approx(0.0, abs=0.3)
    found = measured_costs(steps, base)
    assert found.forward == pytest.approx((1.0, 1.0), abs=0.05)
    predicted = simulate(plan, found).makespan
    assert predicted < 0.9 * steps[0].makespan, "the means alone promise too much"
    mean = sum(step.makespan for step in steps) / 2
    assert predicted + found.uneven == pytest.approx(mean, rel=0.02)
    assert loads_costs(dumps_costs(found)) == found


@pytest.mark.parametrize("name", ["1f1b", "interleaved1f1b", "zbv", "interleavedzerobubble", "dualpipev"])
def test_a_step_replayed_with_its_own_times_takes_what_it_took(name: str) -> None:
    plan = lower(get_schedule(name)(2, 6))
    step = recorded(simulate(plan, replace(Costs.unit(plan), latency=0.2, microbatches=(1.0, 2.0, 0.5, 1.0, 3.0, 0.5))))
    lengths = Steps.of([step]).lengths
    delays = {(0, 1): 0.2, (1, 0): 0.2}
    assert replayed(plan, lengths, delays, pickup=0.0) == pytest.approx(step.makespan)


def test_a_plan_without_messages_is_not_replayed() -> None:
    plan = Plan.of([["0F0", "0RECV_B0", "0B0"], ["1F0", "1B0"]])
    with pytest.raises(DeadlockError, match="wait for messages that nobody sends"):
        replayed(plan, [[1.0] * 3, [1.0] * 2], {}, pickup=0.0)


def test_what_cannot_be_put_together() -> None:
    with pytest.raises(PlanError, match="at least one"):
        Steps.of([])
    steps = [simulate(lower(get_schedule("1f1b")(2, m))) for m in (2, 3)]
    with pytest.raises(PlanError, match="different plans"):
        Steps.of(steps)
