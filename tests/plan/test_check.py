"""check: each kind of fault gets its own error, which names the place; a right plan passes."""

from __future__ import annotations

import pytest

from penstock.errors import DeadlockError, IncompleteError, OrderError, PlanError
from penstock.lower import lower
from penstock.plan import Action, Op, Overlap, Placement, Plan, StageGraph, check, parse
from penstock.schedules import get_schedule

RIGHT = {
    0: ["0F0", "0RECV_B0", "0SEND_F0", "0F1", "0RECV_B1", "0SEND_F1", "0B0", "0B1"],
    1: ["1RECV_F0", "1RECV_F1", "1F0", "1B0", "1SEND_B0", "1F1", "1I1", "1SEND_B1", "1W1"],
}


def of(rows: dict[int, list[str]], *, microbatches: int = 2) -> Plan:
    """A plan on two ranks; repeated and misplaced actions pass, so that the check has something to find."""
    codes = tuple(tuple(parse(cell).code for cell in rows[rank]) for rank in range(2))
    return Plan(Placement.loop(2), StageGraph.chain(2), microbatches, codes)


def test_the_plan_that_all_others_here_are_spoilt_from() -> None:
    check(of(RIGHT))
    check(of(RIGHT), sends="blocking")


def spoilt(rank: int, before: str, after: str) -> dict[int, list[str]]:
    """RIGHT with one run of actions replaced by another."""
    row = " ".join(RIGHT[rank])
    assert before in row
    return {**RIGHT, rank: row.replace(before, after).split()}


@pytest.mark.parametrize(
    ("rank", "before", "after", "error", "complaint"),
    [
        (
            0,
            "0F1 ",
            "",
            IncompleteError,
            "rank 0 lacks 0F1; expected each microbatch once through every stage, forward and",
        ),
        (0, " 0B1", "", IncompleteError, "rank 0 lacks 0I1 (or 0B1)"),
        (1, " 1W1", "", IncompleteError, "rank 1 lacks 1W1 (or 1B1)"),
        (0, "0F1 ", "0F1 0F1 ", IncompleteError, "rank 0, position 5: 0F1 stands there twice"),
        (1, "1B0 ", "1B0 1I0 ", IncompleteError, "rank 1, position 5: 1I0 does again what 1B0 does"),
        (1, "1B0 ", "1B0 1W0 ", IncompleteError, "rank 1, position 5: 1W0 does again what 1B0 does"),
        (
            0,
            "0F1 ",
            "0F1 0F2 ",
            IncompleteError,
            "rank 0, position 5: 0F2 is out of range; expected microbatches 0 to 1",
        ),
        (
            0,
            "0F1 ",
            "0F1 0B2 ",
            IncompleteError,
            "rank 0, position 5: 0B2 is out of range; expected microbatches 0 to 1",
        ),
        (0, "0F1 ", "0F1 2F0 ", IncompleteError, "rank 0, position 5: 2F0 is out of range; expected stages 0 to 1"),
        (
            0,
            "0F1 ",
            "0F1 1F0 ",
            IncompleteError,
            "rank 0, position 5: 1F0 is on the wrong rank; stage 1 sits on rank 1",
        ),
        (0, "0F0 0RECV_B0 0SEND_F0", "0B0 0F0 0RECV_B0 0SEND_F0", IncompleteError, "0B0 stands there twice"),
        (1, "1F0 1B0", "1B0 1F0", OrderError, "rank 1, position 3: 1B0 stands before 1F0, which it needs"),
        (1, "1I1 1SEND_B1 1W1", "1W1 1I1 1SEND_B1", OrderError, "rank 1, position 7: 1W1 stands before 1I1"),
        (0, "0F1 0RECV_B1 0SEND_F1", "0SEND_F1 0RECV_B1 0F1", OrderError, "0SEND_F1 stands before 0F1, which it needs"),
        (1, "1RECV_F0 1RECV_F1 1F0", "1F0 1RECV_F0 1RECV_F1", OrderError, "1F0 stands before 1RECV_F0, which it needs"),
        (0, "0SEND_F1 ", "", IncompleteError, "rank 0 lacks 0SEND_F1"),
        (1, "1RECV_F0 1RECV_F1 ", "", IncompleteError, "rank 1 lacks 1RECV_F0, which 1F0 needs"),
        (0, "0SEND_F1 ", "0SEND_F1 0SEND_F1 ", IncompleteError, "0SEND_F1 stands there twice"),
        (0, "0F1 ", "0SEND_B0 0F1 ", IncompleteError, "0SEND_B0 goes to or comes from stage -1, which does not exist"),
        (1, "1B0 ", "1B0 1SEND_F0 ", IncompleteError, "1SEND_F0 goes to or comes from stage 2, which does not exist"),
        (0, "0F1 ", "0SEND_F0>0 0F1 ", IncompleteError, "0SEND_F0>0 is a message within a rank"),
        (
            1,
            "1RECV_F0 1RECV_F1",
            "1RECV_F1 1RECV_F0",
            DeadlockError,
            "number 1 is sent as 0SEND_F0 and received as 1RECV_F1",
        ),
        (0, "0F1 ", "0RESHARD 0F1 ", OrderError, "0RESHARD comes while stage 0 is not unsharded"),
        (
            0,
            "0F0 ",
            "0UNSHARD 0F0 0UNSHARD ",
            OrderError,
            "rank 0, position 3: 0UNSHARD comes while stage 0 is unsharded",
        ),
        (0, "0F0 ", "0UNSHARD 0F0 0RESHARD ", OrderError, "position 6: 0F1 uses stage 0 while it is sharded"),
        (
            0,
            "0F0 ",
            "0UNSHARD 0F0 ",
            IncompleteError,
            "rank 0 leaves stage 0 unsharded; expected 0RESHARD before the next",
        ),
        (0, "0F0 ", "1UNSHARD 0F0 ", IncompleteError, "1UNSHARD is on the wrong rank; here are the stages (0,)"),
        (
            0,
            "0B0 0B1",
            "0B0 0REDUCE_GRAD 0B1",
            OrderError,
            "0REDUCE_GRAD stands before the last backward of its stage; 1 follow",
        ),
        (0, "0B1", "0B1 0REDUCE_GRAD 0REDUCE_GRAD", IncompleteError, "0REDUCE_GRAD stands twice"),
        (
            0,
            "0B1",
            "0B1 0REDUCE_GRAD",
            IncompleteError,
            "rank 1 lacks 1REDUCE_GRAD; expected one for every stage, or none",
        ),
    ],
)
def test_each_fault_is_found(rank: int, before: str, after: str, error: type[PlanError], complaint: str) -> None:
    with pytest.raises(error) as caught:
        check(of(spoilt(rank, before, after)))
    assert complaint in str(caught.value)


def without(op: str) -> dict[int, list[str]]:
    return {rank: [cell for cell in row if op not in cell] for rank, row in RIGHT.items()}


def test_messages_without_their_other_end() -> None:
    with pytest.raises(IncompleteError, match=r"rank 1 posts 1RECV_F0, but rank 0 never sends 0SEND_F0"):
        check(of(without("SEND_F")))
    with pytest.raises(IncompleteError, match=r"rank 0 lacks 0RECV_B0, which 0B0 needs"):
        check(of(without("RECV_B")))
    evaluation = {0: ["0F0", "0SEND_F0"], 1: ["1RECV_F0", "1F0"]}
    check(of(evaluation, microbatches=1))
    with pytest.raises(IncompleteError, match="carries a gradient in a plan without backwards"):
        check(of({**evaluation, 1: ["1RECV_F0", "1F0", "1SEND_B0"]}, microbatches=1))


def test_without_any_message_it_is_a_plan_of_compute_actions() -> None:
    check(of({rank: [cell for cell in row if "_" not in cell] for rank, row in RIGHT.items()}))


def test_messages_that_the_graph_does_not_ask_for() -> None:
    chain = Plan.of([["0F0"], ["1F0"], ["2F0"]])
    check(chain)
    codes = [["0F0", "0SEND_F0", "0SEND_F0>2"], ["1RECV_F0", "1F0", "1SEND_F0"], ["2RECV_F0", "2RECV_F0<0", "2F0"]]
    skip = Plan.of(codes)
    assert skip.graph == StageGraph.chain(3, [(0, 2)])
    check(skip)
    with pytest.raises(IncompleteError, match="0SEND_F0>2 carries what nobody needs; 0 does not feed 2"):
        check(skip.with_graph(StageGraph.chain(3)))
    with pytest.raises(IncompleteError, match="rank 3 lacks 3RECV_F0<0, which 3F0 needs"):
        check(lower(get_schedule("forward")(4, 1)).with_graph(StageGraph.chain(4, [(0, 3)])))


def test_a_value_that_crosses_twice() -> None:
    graph = StageGraph.chain(4, [(0, 3)])  # stages 1 and 3 are both on rank 1
    right = lower(get_schedule("forward")(2, 1, stages_per_rank=2, graph=graph))
    check(right)
    twice = right.with_codes([right.codes[0], (parse("3RECV_F0<0").code, *right.codes[1])])
    with pytest.raises(IncompleteError, match="3RECV_F0<0 crosses twice; stage 1 on that rank brings the same value"):
        check(twice)


def test_overlapped_pairs() -> None:
    check(Plan.of([["0F0", "1F0", "(0F1;1B0)OVERLAP_F_B", "1F1", "0B0", "1B1", "0B1"]]))
    with pytest.raises(OrderError, match=r"\(1F0;1B0\)OVERLAP_F_B overlaps two actions that need each other"):
        check(Plan.of([["0F0", "(1F0;1B0)OVERLAP_F_B", "0B0"]]))
    with pytest.raises(OrderError, match=r"position 2: \(0F1;1B0\)OVERLAP_F_B stands before 1F0, which it needs"):
        check(Plan.of([["0F0", "(0F1;1B0)OVERLAP_F_B", "1F0", "1F1", "0B0", "1B1", "0B1"]]))
    wrong = Overlap(Action(Op.F, 0, 0), Action(Op.F, 1, 0))
    with pytest.raises(OrderError, match=r"expected an F overlapped with a B"):
        check(Plan(Placement.loop(1, 2), StageGraph.chain(2), 1, ((wrong.code,),)))


def test_numbers_that_are_no_actions() -> None:
    with pytest.raises(IncompleteError, match="no packed actions"):
        check(Plan(Placement.loop(1), StageGraph.chain(1), 1, ((0, 30),)))


def test_a_deadlock_of_computing() -> None:
    """Each rank starts with what the other does last."""
    plan = Plan.of({0: ["0F0", "0F1", "0B1", "0B0"], 1: ["1F0", "1B0", "1F1", "1B1"]})
    check(plan)
    stuck = Plan.of({0: ["0F0", "0B0", "0F1", "0B1"], 1: ["1F1", "1F0", "1B1", "1B0"]})
    with pytest.raises(DeadlockError) as caught:
        check(stuck)
    assert str(caught.value).splitlines() == [
        "the plan deadlocks: 2 ranks wait for one another",
        "  rank  stopped at              waits for",
        "     0  0B0 (position 2)        1B0 on rank 1",
        "     1  1F1 (position 1)        0F1 on rank 0",
    ]


def test_a_deadlock_of_three_ranks_while_others_only_wait() -> None:
    """Rank 0 waits as well, but it is no part of the cycle."""
    plan = Plan.of(
        {
            0: ["0F0", "0F1", "0B0", "0B1"],
            1: ["1F0", "1B0", "1F1", "1B1"],
            2: ["2F0", "2F1", "2B0", "2B1"],
        }
    )
    with pytest.raises(DeadlockError) as caught:
        check(plan)
    assert str(caught.value).splitlines() == [
        "the plan deadlocks: 2 ranks wait for one another",
        "  rank  stopped at              waits for",
        "     1  1B0 (position 2)        2B0 on rank 2",
        "     2  2F1 (position 2)        1F1 on rank 1",
    ]


def test_a_deadlock_of_messages() -> None:
    stuck = of(
        {
            0: ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0F1", "0SEND_F1", "0RECV_B1", "0B1"],
            1: ["1RECV_F0", "1F0", "1RECV_F1", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"],
        }
    )
    with pytest.raises(DeadlockError) as caught:
        check(stuck)
    assert str(caught.value).splitlines()[1:] == [
        "  rank  stopped at              waits for",
        "     0  0B0 (position 4)        1SEND_B0 on rank 1",
        "     1  1F1 (position 4)        0SEND_F1 on rank 0",
    ]


def test_a_plan_that_only_blocking_sends_stop() -> None:
    """Both ranks send before they post the receive of what the other sends: the classic."""
    plan = of(
        {
            0: ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
            1: ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
        }
    )
    check(plan)
    with pytest.raises(DeadlockError) as caught:
        check(plan, sends="blocking")
    assert str(caught.value).splitlines()[1:] == [
        "  rank  stopped at              waits for",
        "     0  0SEND_F1 (position 4)   1RECV_F1 on rank 1",
        "     1  1SEND_B0 (position 4)   0RECV_B0 on rank 0",
    ]
