"""What would the step take if ...: answers from a step whose faults are known, because they were put in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.lower import lower
from penstock.plan import Plan
from penstock.schedules import get_schedule
from penstock.show import predicted_vs_measured
from penstock.show.what_if import WhatIf, explained
from penstock.simulate import Costs, Link, simulate
from tests.simulate.test_measured import recorded

PLAN = lower(get_schedule("1f1b")(4, 8))
EVEN = Costs.unit(PLAN)


def step(costs: Costs, plan: Plan = PLAN) -> WhatIf:
    """A step that was measured with these costs; even stages were expected."""
    return WhatIf.of([recorded(simulate(plan, costs))], EVEN)


def test_a_good_step_has_only_its_schedule_to_blame() -> None:
    found = step(EVEN).mended()
    assert [one.what.split(":")[0] for one in found] == ["the schedule 1f1b"]
    assert found[0].saved == pytest.approx(simulate(PLAN, EVEN).makespan - 24)


def test_a_slow_rank_is_named_with_its_seconds() -> None:
    slow = replace(EVEN, ranks=(1.0, 1.0, 1.5, 1.0))
    found = step(slow)
    first = found.mended()[0]
    assert first.what.startswith("rank 2 is slower than its peers: it takes 1.50 times")
    assert first.step == pytest.approx(simulate(PLAN, EVEN).makespan)
    assert first.saved == pytest.approx(simulate(PLAN, slow).makespan - first.step)


def test_a_heavy_stage_is_named() -> None:
    heavy = Costs.per_stage((1.0, 1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 2.0), (1.0, 1.0, 1.0, 2.0))
    found = WhatIf.of([recorded(simulate(PLAN, heavy))], heavy).mended()
    assert any(one.what.startswith("stage 3 has 1.60 times the work") for one in found)
    assert any(one.what.startswith("the cut is uneven") for one in found)
    assert not any("slower than its peers" in one.what for one in found), "it was expected of it"


def test_a_slow_link_is_named() -> None:
    slow = replace(EVEN, latency=0.05, links=(Link(1, 2, 3.0), Link(2, 1, 3.0)))
    named = [one.what for one in step(slow).mended() if one.what.startswith("messages from rank")]
    assert len(named) == 2
    assert "messages from rank 1 to rank 2 take 3 s instead of" in "".join(named)


def test_the_schedule_is_not_blamed_for_the_time_that_messages_occupy_links() -> None:
    """The waiting of a schedule was reckoned with messages that took no time to arrive, and still occupied their links."""
    narrow = replace(EVEN, bandwidth=2.0, output_bytes=(1.0,) * 4)
    found = [one for one in WhatIf(PLAN, narrow, EVEN, 33.0).mended() if one.what.startswith("the schedule")]
    assert [one.saved for one in found] == pytest.approx([simulate(PLAN, EVEN).makespan - 24])


def test_unequal_microbatches_are_named() -> None:
    uneven = replace(EVEN, microbatches=(3.0, 1.0, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0))
    found = [one for one in step(uneven).mended() if one.what.startswith("microbatches of unequal")]
    assert found[0].step == pytest.approx(simulate(PLAN, EVEN).makespan, rel=0.01)


def test_what_else_could_be_done() -> None:
    found = step(EVEN)
    names = {name: seconds for name, seconds, _ in found.schedules()}
    assert names["zb-h1"] == pytest.approx(simulate(lower(get_schedule("zb-h1")(4, 8)), EVEN).makespan)
    assert found.more_microbatches() == pytest.approx(simulate(get_schedule("1f1b")(4, 16)).makespan)
    assert found.more_ranks() == pytest.approx(simulate(get_schedule("1f1b")(8, 8)).makespan / 2)


def test_the_answers_in_words() -> None:
    text = explained(step(replace(EVEN, ranks=(1.0, 1.0, 1.5, 1.0))))
    ranked = [line for line in text.splitlines() if line.lstrip()[:2] in ("1.", "2.")]
    assert "rank 2 is slower than its peers" in ranked[0]
    assert "twice as many ranks" in text
    assert "zb-h1 for the same stages" in text


def test_what_nobody_named_has_no_other_sizes() -> None:
    found = step(EVEN, replace(PLAN, name="mine"))
    assert found.more_ranks() is None
    assert found.more_microbatches() is None


def test_which_assumption_was_off() -> None:
    planned = replace(simulate(PLAN, EVEN), unit="s")
    assert "every assumption held" in predicted_vs_measured.verdict(planned, recorded(planned))
    slow = recorded(simulate(PLAN, replace(EVEN, forward=(2.0,) * 4)))
    said = predicted_vs_measured.verdict(planned, slow)
    assert "forward took" in said
    assert "more than predicted" in said
    rows = predicted_vs_measured.rows(predicted_vs_measured.kinds(planned, slow), 4)
    assert [row[0] for row in rows[1:]] == ["forward", "backward", "sends and receives", "waiting"]
    assert rows[1][4] == "+100%"
    taken = replace(slow, processor=tuple(busy - 5.0 for busy in slow.busy))
    assert "that the machine is free: a rank had no processor for 5 s while it" in predicted_vs_measured.verdict(
        planned, taken
    )
    late = recorded(simulate(PLAN, replace(EVEN, latency=1.0)))
    assert "how long messages are under way" in predicted_vs_measured.verdict(planned, late)
