"""Actions: text, packed form and value are inverses of one another; the parser takes nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ParseError
from penstock.plan import Action, AnyAction, Op, Overlap, pack, parse, unpack
from penstock.plan.actions import MAX_MICROBATCH, MAX_STAGE, neighbour, partner_of, peer_of, text

STAGES = st.integers(0, MAX_STAGE - 1)
MICROBATCHES = st.integers(0, MAX_MICROBATCH)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    op, stage = draw(st.sampled_from(Op)), draw(STAGES)
    peer = draw(st.none() | STAGES) if op.is_message else None
    if peer == neighbour(op, stage):
        peer = None  # written without a peer
    return Action(op, stage, draw(MICROBATCHES) if op.has_microbatch else None, peer)


pairs = st.builds(
    Overlap,
    st.builds(Action, st.just(Op.F), STAGES, MICROBATCHES, st.none()),
    st.builds(Action, st.sampled_from([Op.B, Op.I]), STAGES, MICROBATCHES, st.none()),
)


@given(actions() | pairs)
def test_value_text_and_code_are_inverses(action: AnyAction) -> None:
    assert parse(str(action)) == action
    assert unpack(pack(action)) == action
    assert text(action.code) == str(action)


@given(actions().filter(lambda action: action.op.is_message))
def test_the_partner_of_the_partner(action: Action) -> None:
    if action.stage == 0 and peer_of(action.code) < 0:
        return  # a gradient that leaves the first stage: no such message
    other = partner_of(action.code)
    assert partner_of(other) == action.code
    found = unpack(other)
    assert isinstance(found, Action)
    assert found.op == action.op ^ 1
    assert found.microbatch == action.microbatch
    assert found.stage == peer_of(action.code)
    assert peer_of(other) == action.stage


@pytest.mark.parametrize(
    ("written", "action"),
    [
        ("2F0", Action(Op.F, 2, 0)),
        ("1I3", Action(Op.I, 1, 3)),
        ("1W3", Action(Op.W, 1, 3)),
        ("0B12", Action(Op.B, 0, 12)),
        (" 3SEND_F1 ", Action(Op.SEND_F, 3, 1)),
        ("1UNSHARD", Action(Op.UNSHARD, 1)),
        ("0REDUCE_GRAD", Action(Op.REDUCE_GRAD, 0)),
        ("0SEND_F1>3", Action(Op.SEND_F, 0, 1, 3)),
        ("3RECV_F1<0", Action(Op.RECV_F, 3, 1, 0)),
        ("0SEND_F1>1", Action(Op.SEND_F, 0, 1)),
        ("(0F1;3B0)OVERLAP_F_B", Overlap(Action(Op.F, 0, 1), Action(Op.B, 3, 0))),
        ("(0F1; 3I0)OVERLAP_F_B", Overlap(Action(Op.F, 0, 1), Action(Op.I, 3, 0))),
    ],
)
def test_reading(written: str, action: AnyAction) -> None:
    assert parse(written) == action


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("1F0garbage", "is no action; expected [stage][kind][microbatch]"),
        ("garbage1F0", "is no action"),
        ("1F-1", "is no action"),
        ("-1F1", "is no action"),
        ("F0", "is no action"),
        ("", "is no action"),
        ("1F0 1F1", "is no action"),
        ("1f0", "is no action"),
        ("1F٣", "is no action"),
        ("1X0", "the unknown kind 'X'; expected one of F, I, W, B"),
        ("1FORWARD0", "the unknown kind 'FORWARD'"),
        ("1F", "F takes a microbatch"),
        ("1UNSHARD0", "UNSHARD takes no microbatch"),
        ("1F0>2", "only a send"),
        ("1SEND_F0<2", "only a send"),
        ("1RECV_F0>2", "only a receive whence it comes"),
        ("1048576F0", "out of range: stages go up to 1048575"),
        ("0F16777216", "out of range: stages go up to 1048575, microbatches up to 16777215"),
        ("0F" + "9" * 6000, "out of range"),
        ("9" * 6000 + "F0", "out of range"),
        ("(0F1;3B0)", "is no action"),
        ("(0F1)OVERLAP_F_B", "is no action"),
        ("(0F1;1F0)OVERLAP_F_B", "overlaps F with F; expected an F and a B (or I)"),
        ("(0F1;1W0)OVERLAP_F_B", "overlaps F with W"),
        ("((0F1;1B0)OVERLAP_F_B;1B0)OVERLAP_F_B", "is no action"),
    ],
)
def test_the_parser_is_strict(written: str, complaint: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(written)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 300


@given(st.text(alphabet="0123456789FIWBSENDRCVU_<>;()- ", max_size=16))
def test_whatever_is_read_is_written_the_same(written: str) -> None:
    try:
        action = parse(written)
    except ParseError:
        return
    assert parse(str(action)) == action
