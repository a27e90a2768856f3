"""Actions that a plan may do without: recomputing. They may be there for any microbatch, in their place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import IncompleteError, OrderError, PlanError
from penstock.plan import Plan, check
from penstock.simulate import Costs, simulate


def one_rank(actions: str) -> Plan:
    return Plan.of([actions.split()])


@pytest.mark.parametrize(
    "actions",
    [
        "0F0 0R0 0B0",
        "0F0 0F1 0R0 0B0 0B1",  # of some microbatches
        "0F0 0F1 0R1 0R0 0B0 0B1",
        "0F0 0F1 0R0 0I0 0W0 0R1 0I1 0W1",
    ],
)
def test_what_may_stand_there(actions: str) -> None:
    check(one_rank(actions))


@pytest.mark.parametrize(
    ("actions", "error", "message"),
    [
        ("0R0 0F0 0B0", OrderError, "position 1: 0R0 stands before 0F0"),
        ("0F0 0B0 0R0", OrderError, "position 2: 0B0 stands before 0R0"),
        ("0F0 0I0 0R0 0W0", OrderError, "position 2: 0I0 stands before 0R0"),
        ("0F0 0F1 0R1 0B1 0B0 0R0", OrderError, "position 5: 0B0 stands before 0R0"),
        ("0F0 0R0", IncompleteError, "lacks 0I0"),
        ("0F0 0R0 0R0 0B0", PlanError, "stands twice"),
        ("0F0 0B0 0R1", PlanError, "lacks 0F1"),
    ],
)
def test_what_may_not(actions: str, error: type[PlanError], message: str) -> None:
    with pytest.raises(error, match=message):
        check(one_rank(actions))


def test_a_microbatch_that_is_recomputed_holds_its_input_alone_until_then() -> None:
    plan = one_rank("0F0 0F1 0R0 0B0 0B1")
    timeline = simulate(plan, replace(Costs.unit(plan), kept_input=(0.25,)))
    assert timeline.makespan == 7
    assert timeline.memory[0] == [(0, 0), (0, 1), (1, 0.25), (1, 1.25), (2, 2), (5, 1), (7, 0)]
