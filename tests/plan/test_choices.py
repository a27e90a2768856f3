"""Actions that a plan may do without: recompute, offload and load. They may be there for any microbatch, in their place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import IncompleteError, OrderError, PlanError
from penstock.plan import Op, Plan, check
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
        "0F0 0O0 0L0 0B0",
        "0F0 0O0 0F1 0L0 0B0 0B1",
        "0F0 0O0 0F1 0O1 0F2 0R2 0B2 0L1 0L0 0B1 0B0",
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
        ("0O0 0F0 0L0 0B0", OrderError, "position 1: 0O0 stands before 0F0"),
        ("0F0 0L0 0O0 0B0", OrderError, "position 2: 0L0 stands before 0O0"),
        ("0F0 0O0 0B0 0L0", OrderError, "position 3: 0B0 stands before 0L0"),
        ("0F0 0O0 0B0", IncompleteError, "has 0O0 and lacks 0L0; expected both, or neither"),
        ("0F0 0L0 0B0", IncompleteError, "lacks 0O0, which 0L0 needs"),
        ("0F0 0F1 0O1 0L1 0L0 0B0 0B1", IncompleteError, "has 0L0 and lacks 0O0"),
        ("0F0 0R0 0O0 0L0 0B0", IncompleteError, "has 0R0 and 0O0; expected one way"),
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


def test_copies_run_beside_computing_one_after_another() -> None:
    plan = one_rank("0F0 0O0 0F1 0O1 0F2 0L0 0B2 0L1 0B0 0B1")
    timeline = simulate(plan, replace(Costs.unit(plan), copy=(1.5,)))
    spans = {str(span.action): (span.start, span.end) for span in timeline.spans(0)}
    assert [spans[name] for name in ("0O0", "0O1", "0L0", "0L1")] == [(1, 2.5), (2.5, 4), (4, 5.5), (5.5, 7)]
    assert spans["0B2"] == (3, 5)
    assert spans["0B0"] == (5.5, 7.5), "it waits for its load"
    assert timeline.makespan == 9.5
    assert timeline.busy == (9.0,)
    assert timeline.idle[0].imbalance == 0.5
    assert timeline.memory[0] == [
        (0, 0), (0, 1), (1, 2), (2, 3), (2.5, 2), (4, 1), (4, 2), (5, 1), (5.5, 2), (7.5, 1), (9.5, 0),
    ]  # fmt: skip


def test_what_a_copy_takes() -> None:
    plan = one_rank("0F0 0O0 0L0 0B0")
    unit = Costs.unit(plan)
    assert unit.time(Op.O, 0) == unit.time(Op.L, 0) == unit.forward[0]
    assert replace(unit, held_to_input=(6.0,), copy_bandwidth=2.0).time(Op.O, 0) == 3
    assert replace(unit, copy_bandwidth=2.0, copy=(0.25,)).time(Op.L, 0) == 0.25
    with pytest.raises(PlanError, match="copy_bandwidth=0"):
        replace(unit, copy_bandwidth=0)
