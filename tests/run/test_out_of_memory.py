"""What is said of a rank that ran out of memory: the numbers are those of what was held at that action."""

from __future__ import annotations

import pytest

from penstock.plan import Plan
from penstock.run.draining import explained, in_flight

PLAIN = ["0F0", "0F1", "0B0", "0F2", "0I1", "0B2", "0W1"]
RECOMPUTED = ["0F0", "0F1", "0F2", "0R0", "0B0", "0R1", "0B1", "0B2"]  # all but the last microbatch
OFFLOADED = ["0F0", "0O0", "0F1", "0L0", "0B0", "0B1"]


@pytest.mark.parametrize(
    ("actions", "full", "spared"),
    [
        (PLAIN, [0, 1, 2, 1, 2, 1, 0], [0] * 7),
        (RECOMPUTED, [0, 0, 0, 1, 2, 1, 2, 1], [0, 1, 2, 2, 1, 1, 0, 0]),
        (OFFLOADED, [0, 1, 0, 1, 2, 1], [0, 0, 1, 1, 0, 0]),
    ],
)
def test_what_is_held_before_each_action(actions: list[str], full: list[int], spared: list[int]) -> None:
    mine = Plan.of({0: actions}).actions(0)
    found = [in_flight(mine, at) for at in range(len(mine))]
    assert [held[0] for held, _ in found] == full
    assert [less for _, less in found] == spared


def test_stages_are_counted_apart_and_the_text_has_the_numbers() -> None:
    actions = Plan.of({0: ["0F0", "1F0", "0F1", "1F1", "1B0", "0R0", "0B0", "1B1", "0R1", "0B1"]}).actions(0)
    held, less = in_flight(actions, 4)
    assert (dict(held), less) == ({1: 2}, 2)
    text = str(explained(MemoryError("no more"), actions, 6, rank=0))
    assert (
        "no more. It held what the forwards of 2 microbatches saved (1 of stage 0, 1 of stage 1); of 1 more only"
        in text
    )
    assert "It held nothing that forwards" in str(explained(MemoryError(), actions, 0, rank=0))
