"""What precedes what, in a chain and with skip connections."""

from __future__ import annotations

import pytest

from penstock.plan import Action, Placement, Rules, StageGraph, parse
from penstock.plan.actions import text


def required(rules: Rules, action: str) -> set[str]:
    parsed = parse(action)
    assert isinstance(parsed, Action)
    return set(map(str, rules.requires(parsed)))


def sent(rules: Rules, action: str) -> set[str]:
    return {text(send) for send in rules.sends(parse(action).code)}


CHAIN = StageGraph.chain(4)


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        ("0F3", set()),
        ("2F3", {"1F3"}),
        ("3B3", {"3F3"}),
        ("1B3", {"1F3", "2I3"}),
        ("1I3", {"1F3", "2I3"}),
        ("1W3", {"1I3"}),
    ],
)
def test_a_chain_as_if_by_magic(action: str, needs: set[str]) -> None:
    """A compute-only plan: values cross ranks without messages."""
    for placement in (Placement.loop(4), Placement.loop(2, 2), Placement.v(2)):
        assert required(Rules(CHAIN, placement, lowered=False), action) == needs


@pytest.mark.parametrize(
    ("action", "needs"),
    [
        ("0F3", set()),
        ("1F3", {"1RECV_F3"}),
        ("2F3", {"1F3"}),  # on the same rank: handed over
        ("3F3", {"3RECV_F3"}),
        ("3I3", {"3F3"}),
        ("2I3", {"2F3", "2RECV_B3"}),
        ("1B3", {"1F3", "2I3"}),
        ("0B3", {"0F3", "0RECV_B3"}),
        ("2W3", {"2I3"}),
        ("0SEND_F3", {"0F3"}),
        ("1SEND_B3", {"1I3"}),
        ("1RECV_F3", {"0SEND_F3"}),
        ("2RECV_B3", {"3SEND_B3"}),
    ],
)
def test_a_v_with_messages(action: str, needs: set[str]) -> None:
    assert required(Rules(CHAIN, Placement.v(2), lowered=True), action) == needs


def test_sends_of_a_v() -> None:
    rules = Rules(CHAIN, Placement.v(2), lowered=True)
    assert sent(rules, "0F0") == {"0SEND_F0"}
    assert sent(rules, "1F0") == set()
    assert sent(rules, "2I0") == set()
    assert sent(rules, "3B0") == {"3SEND_B0"}
    assert sent(rules, "3W0") == set()


def test_skip_connections() -> None:
    """0 feeds 1 and 3 on other ranks: one message each; 3 sends a gradient to each of its producers."""
    rules = Rules(StageGraph.chain(4, skips=[(0, 3)]), Placement.loop(4), lowered=True)
    assert sent(rules, "0F0") == {"0SEND_F0", "0SEND_F0>3"}
    assert required(rules, "3F0") == {"3RECV_F0", "3RECV_F0<0"}
    assert sent(rules, "3I0") == {"3SEND_B0", "3SEND_B0>0"}
    assert required(rules, "0B0") == {"0F0", "0RECV_B0", "0RECV_B0<3"}
    assert required(rules, "3RECV_F0<0") == {"0SEND_F0>3"}
    assert required(rules, "0RECV_B0<3") == {"3SEND_B0>0"}


def test_a_value_crosses_to_a_rank_once() -> None:
    """Stages 1 and 3 are on rank 1 and both use stage 0: 1 is the carrier, and the gradients of both travel summed."""
    rules = Rules(StageGraph.chain(4, skips=[(0, 3)]), Placement.loop(2, 2), lowered=True)
    assert rules.carrier(0, 1) == 1
    assert sent(rules, "0F0") == {"0SEND_F0"}
    assert required(rules, "1F0") == {"1RECV_F0"}
    assert required(rules, "3F0") == {"1RECV_F0", "3RECV_F0"}
    assert sent(rules, "1I0") == sent(rules, "3I0") - {"3SEND_B0"} == {"1SEND_B0"}
    assert required(rules, "1SEND_B0") == {"1I0", "3I0"}
    assert required(rules, "0B0") == {"0F0", "0RECV_B0"}


def test_a_skip_within_a_rank_needs_no_message() -> None:
    rules = Rules(StageGraph.chain(4, skips=[(0, 2)]), Placement.loop(2, 2), lowered=True)
    assert required(rules, "2F0") == {"0F0", "2RECV_F0"}
    assert required(rules, "0I0") == {"0F0", "0RECV_B0", "2I0"}
    assert sent(rules, "0F0") == {"0SEND_F0"}
