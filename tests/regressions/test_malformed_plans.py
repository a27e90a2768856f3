"""A plan may hold what `check` refuses. Whoever writes it down or times it without asking first gets no error of Python's."""

from __future__ import annotations

import pytest

from penstock.errors import ParseError, PlanError
from penstock.plan import Placement, Plan, StageGraph, dumps, loads
from penstock.plan.actions import backward, forward
from penstock.schedules import Recipe, Sizes
from penstock.simulate import simulate


def plan_with(code: int) -> Plan:
    return Plan(Placement.loop(1), StageGraph.chain(1), 1, ((forward(0, 0), backward(0, 0), code),))


def test_an_action_of_a_microbatch_that_is_not_there_is_written_down() -> None:
    """`dumps` looked up the text of each microbatch's number in a list of those that there are, and raised IndexError."""
    assert dumps(plan_with(forward(0, 3))) == "0F0,0B0,0F3\n"


@pytest.mark.parametrize("code", [forward(0, 3), forward(2, 0)], ids=["microbatch", "stage"])
def test_simulating_an_action_that_is_out_of_range_says_so(code: int) -> None:
    """It raised an IndexError, or a KeyError of a packed number."""
    with pytest.raises(
        PlanError, match=r"stage.* that it does not have; .*check\(plan\) says which|expected a stage from 0"
    ):
        simulate(plan_with(code))


def test_an_index_error_of_a_schedule_comes_out() -> None:
    """Python takes an IndexError for the end of a sequence: the lists of a plan ended at the rank whose schedule raised one."""

    def rank_actions(sizes: Sizes, rank: int) -> list[int]:
        return [[forward(0, 0), backward(0, 0)]][rank]

    with pytest.raises(IndexError, match="list index out of range"):
        Recipe("short", "the first rank alone", rank_actions)(2, 1)


def test_an_action_that_may_stand_twice_is_looked_at_both_times() -> None:
    """Of a second UNSHARD nobody asked on which rank it stands."""
    with pytest.raises(ParseError, match="row 2, column 2: 0UNSHARD is on rank 1; expected it on rank 0"):
        loads("0UNSHARD,0F0,0B0,0RESHARD\n1F0,0UNSHARD,1B0", placement=Placement.loop(2))
