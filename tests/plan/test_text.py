"""Plan files: load and dump are inverses, and every fault is named with its file, row and column."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from penstock.errors import ParseError, PlanError
from penstock.lower import lower
from penstock.plan import Action, Op, Overlap, Placement, Plan, StageGraph, dump, dumps, load, loads
from tests.plans import plans

TWO = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@given(plans(max_ranks=5, max_microbatches=6))
def test_dump_and_load_are_inverses(plan: Plan) -> None:
    assert loads(dumps(plan), graph=plan.graph, name=plan.name) == plan
    lowered = lower(plan)
    again = loads(dumps(lowered), graph=plan.graph, name=plan.name)
    assert again == lowered
    assert dumps(again) == dumps(lowered)


@given(plans(max_ranks=5, max_microbatches=6))
def test_a_lowered_plan_tells_its_skip_connections(plan: Plan) -> None:
    """Those between ranks, that is, and at the stage that brings the value; others leave no message behind."""
    again = loads(dumps(lower(plan, reduce=plan.has_backward)))
    assert set(again.graph.edges) <= set(plan.graph.edges)
    assert again.placement == plan.placement


def test_files(tmp_path: Path) -> None:
    plan = loads(TWO, name="mine")
    path = tmp_path / "plan.csv"
    dump(plan, path)
    assert path.read_text() == TWO
    assert load(path, name="mine") == plan
    assert load(str(path)).num_microbatches == 2


def test_idle_slots_spaces_and_a_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0F1,,,0B0,0B1,,\r\n, 1F0 ,1B0,1F1,1B1\r\n,,\r\n\r\n")
    assert load(path) == loads(TWO)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("0F0,0F0garbage,0B0\n", "plan.csv, row 1, column 2: '0F0garbage' is no action; expected"),
        ("0F0,0B0\n1F0,1F-1\n", "plan.csv, row 2, column 2: '1F-1' is no action"),
        ("0F0,,0X0\n", "plan.csv, row 1, column 3: '0X0' has the unknown kind 'X'; expected one of F, I, W, B"),
        ("0F0,0B0,0F0\n", "plan.csv, row 1, column 3: 0F0 stands twice, first in plan.csv, row 1, column 1; expected"),
        ("0F0,0B0\n0F0,0B0\n", "plan.csv, row 2, column 1: 0F0 stands twice, first in plan.csv, row 1, column 1"),
        (
            "0F0,0B0\n1F0,1B0,0F1\n",
            "plan.csv, row 2, column 3: 0F1 puts stage 0 on rank 1, but plan.csv, row 1, column 1",
        ),
        ("(0F0;1B0)OVERLAP_F_B,1B0\n", "plan.csv, row 1, column 2: 1B0 stands twice"),
        ("0F0,0B0\n\n1F0,1B0\n", "plan.csv, row 2, column 1: the row is empty; expected every rank to hold a stage"),
        ("0F0,0B0\n2F0,2B0\n", "plan.csv: no rank computes stage 1; expected every stage from 0 to the highest"),
        ("0F0,0SEND_F0\n", "plan.csv, row 1, column 2: 0SEND_F0 is a message between the stages 0 and 1; expected"),
        ("0F0,0SEND_B0,0B0\n", "plan.csv, row 1, column 2: 0SEND_B0 is a message between the stages -1 and 0"),
        ("0UNSHARD\n", "plan.csv: no rank computes stage 0"),
        ("", "plan.csv holds no action; expected one row a rank, such as 0F0,0F1,0B0,0B1"),
        ("\n,,\n \n", "plan.csv holds no action"),
        ("0F0," + "x" * 200_000, "plan.csv is no CSV"),
    ],
)
def test_a_fault_is_named_with_its_place(
    content: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.csv").write_text(content)
    with pytest.raises(ParseError) as caught:
        load("plan.csv")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("content", "known", "complaint"),
    [
        (TWO, {"placement": Placement.loop(1, 2)}, "row 2, column 1: a row too many; expected 1, one for each rank"),
        (
            "0F0,0B0\n1F0,1B0\n2F0,2B0\n",
            {"placement": Placement.loop(2)},
            "row 3, column 1: a row too many; expected 2",
        ),
        ("0F0,0B0\n", {"placement": Placement.loop(2)}, "has 1 rows; expected 2, one for each rank"),
        (
            "0F0,0B0\n1F0,2B0\n",
            {"placement": Placement.loop(2)},
            "row 2, column 2: 2B0 is out of range; expected stages 0 to 1",
        ),
        (
            "1F0,1B0\n0F0,0B0\n",
            {"placement": Placement.loop(2)},
            "row 1, column 1: 1F0 is on rank 0; expected it on rank 1",
        ),
        ("0F0,0F2\n", {"num_microbatches": 2}, "row 1, column 2: 0F2 is out of range; expected microbatches 0 to 1"),
        (TWO, {"graph": StageGraph.chain(1)}, "row 2, column 1: 1F0 is out of range; expected stages 0 to 0"),
    ],
)
def test_what_is_known_is_held_against_the_text(content: str, known: dict[str, object], complaint: str) -> None:
    with pytest.raises(ParseError) as caught:
        loads(content, source="plan.csv", **known)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("wrong", ["0F", "0F-1", "0F1x", "00F1garbage", "0F99999999", "0F1 1", "0F١"])
def test_a_cell_like_an_earlier_one_is_read_as_strictly(wrong: str) -> None:
    with pytest.raises(ParseError, match="row 1, column 2"):
        loads(f"0F0,{wrong},0B0\n")


def test_messages_that_skip_stages_are_told_apart() -> None:
    plan = loads("0F0,0SEND_F0>1,0SEND_F0>2\n1RECV_F0<0,1F0,1SEND_F0\n2RECV_F0<0,2RECV_F0,2F0\n")
    assert dumps(plan).splitlines()[0] == "0F0,0SEND_F0,0SEND_F0>2"
    assert plan.graph == StageGraph.chain(3, [(0, 2)])


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ParseError, match="is no text"):
        load(path)


def test_plans_from_values() -> None:
    plan = Plan.of({0: [Action(Op.F, 0, 0), None, "0B0"], 1: [Action(Op.F, 1, 0).code, Action(Op.B, 1, 0)]})
    assert dumps(plan) == "0F0,0B0\n1F0,1B0\n"
    pair = Overlap(Action(Op.F, 0, 1), Action(Op.B, 1, 0))
    assert dumps(Plan.of([["0F0", "1F0", pair, "0B0", "1F1", "1B1", "0B1"]])).startswith("0F0,1F0,(0F1;1B0)OVERLAP_F_B")


@pytest.mark.parametrize("wrong", [Action(Op.F, -1, 0), Action(Op.F, 0), Action(Op.UNSHARD, 0, 3), 30, -5, 31, "1Z1"])
def test_values_that_are_no_actions_are_refused(wrong: Action | int | str) -> None:
    with pytest.raises(ParseError, match="row 1, column 2"):
        Plan.of([["0F0", wrong, "0B0"]])


def test_a_plan_holds_together() -> None:
    one = Plan.of([["0F0", "0B0"]])
    with pytest.raises(PlanError, match="2 stages, the placement 1"):
        one.with_graph(StageGraph.chain(2))
    with pytest.raises(PlanError, match="2 lists of actions for 1 ranks"):
        one.with_codes([[], []])
    with pytest.raises(PlanError, match="0 microbatches"):
        Plan(one.placement, one.graph, 0, one.codes)
