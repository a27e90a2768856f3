"""A limit of memory: everything counts, the stages that must hold less do, and the smallest limit is the smallest."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from penstock.balance import LayerCost, Profile
from penstock.errors import BalanceError
from penstock.front import Choice, choose
from penstock.front.candidates import Wishes
from penstock.front.choice import Built, Machine
from penstock.front.choice_text import explanation
from penstock.front.choose import holding_less
from penstock.lower import recompute
from penstock.plan import Op, Plan, check
from penstock.schedules import get_schedule

HELD, WEIGHT, MOMENT = 1_000_000, 200_000, 50_000


def profile(count: int = 8) -> Profile:
    layer = LayerCost(
        "",
        1e-3,
        1e-3,
        1e-3,
        activation_to_input=HELD,
        activation_to_weight=HELD // 2,
        forward_peak=HELD + MOMENT,
        backward_peak=MOMENT,
        parameter_bytes=WEIGHT,
        output_bytes=HELD // 16,
    )
    return Profile(tuple(replace(layer, name=f"layers.{i}") for i in range(count)), metadata={"unit": "s"})


def wishes(limit: int | list[int], schedule: str | Plan = "gpipe", **options: object) -> Wishes:
    return Wishes(2, 8, schedule, memory_limit=limit, **options)  # type: ignore[arg-type]


@cache
def free(schedule: str = "gpipe") -> Choice:
    return choose(profile(), Wishes(2, 8, schedule))


def test_with_room_for_all_nothing_changes() -> None:
    choice = choose(profile(), wishes(max(free().memory)))
    assert choice.plan == free().plan
    assert choice.spared == ()


def test_all_that_a_rank_holds_counts() -> None:
    """Four layers: eight microbatches, parameters four times over, buffers, and a moment."""
    found = free().memory
    assert found[0] >= 4 * WEIGHT * 4 + 8 * 4 * HELD + MOMENT
    assert found[1] >= found[0] - HELD, "its inputs are held in buffers"
    state = choose(profile(), Wishes(2, 8, "gpipe", optimizer_bytes=0.0))
    assert free().memory[0] - state.memory[0] == 2 * 4 * WEIGHT


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv", "interleaved1f1b", "auto"])
@pytest.mark.parametrize("share", [0.7, 0.1])
def test_stages_hold_less_until_it_fits(schedule: str, share: float) -> None:
    """From the least that a schedule can do with to what it holds as it is."""
    most = max(free("gpipe" if schedule == "auto" else schedule).memory)
    least = choose(profile(), wishes(most, schedule)).smallest_limit
    assert least is not None
    limit = round(least + share * (most - least))
    choice = choose(profile(), wishes(limit, schedule))
    assert max(choice.memory) <= limit
    check(choice.plan)
    assert Choice.loads(choice.dumps()) == choice
    if schedule != "auto":
        assert choice.spared
        assert choice.plan.has(Op.R)
        assert choice.timeline.makespan >= free(schedule).timeline.makespan
        text = explanation(Built([], choice.plan, None, choice))
        assert "holds less by" in text
        assert "2 bytes of optimizer state" in text


def test_no_more_microbatches_are_recomputed_than_must_be() -> None:
    """GPipe holds eight of four layers: one microbatch less needs one recomputed, or two of two stages."""
    before = max(free().memory)
    slightly = choose(profile(), wishes(before - 4 * HELD))
    assert 0 < sum(one.microbatches for one in slightly.spared) <= 2 * 2
    much = choose(profile(), wishes(round(0.5 * before)))
    assert sum(one.microbatches for one in much.spared) > sum(one.microbatches for one in slightly.spared)
    assert all(one.size > 0 and one.time >= 0 for one in much.spared)


def test_each_rank_may_have_a_limit_of_its_own() -> None:
    before = free().memory
    choice = choose(profile(), wishes([round(0.6 * before[0]), 2 * before[1]]))
    assert {choice.plan.placement.rank_of(one.stage) for one in choice.spared} == {0}
    with pytest.raises(BalanceError, match="3 entries, expected 2"):
        choose(profile(), wishes([1, 2, 3]))


@pytest.mark.parametrize(
    ("schedule", "offload"),
    [("gpipe", False), ("1f1b", False), ("zbv", False), ("auto", False), ("gpipe", True), ("interleaved1f1b", True)],
)
def test_the_smallest_limit_is_named_and_does(schedule: str, offload: bool) -> None:
    """Whoever has room enough is told the same as whoever has none; one byte in a hundred less does not do."""
    with pytest.raises(BalanceError, match="The smallest limit that would do is") as caught:
        choose(profile(), wishes(1000, schedule, offload=offload))
    smallest = int(re.search(r"would do is (\d+) bytes", str(caught.value))[1])  # type: ignore[index]
    choice = choose(profile(), wishes(smallest, schedule, offload=offload))
    assert max(choice.memory) <= smallest
    assert choice.smallest_limit == smallest
    assert choose(profile(), wishes(1 << 40, schedule, offload=offload)).smallest_limit == smallest
    with pytest.raises(BalanceError):
        choose(profile(), wishes(round(0.99 * smallest), schedule, offload=offload))


def test_a_plan_that_recomputes_already_is_given_a_limit_too() -> None:
    """What it recomputes stays as it is; what it does not may come to be."""
    some = recompute(get_schedule("gpipe")(2, 8), {0: range(4)})
    options = {"schedule": some, "num_stages": 2}
    bare = choose(profile(), wishes(1 << 40, **options))
    assert bare.plan == some
    assert bare.smallest_limit is not None
    tight = choose(profile(), wishes(bare.smallest_limit, **options))
    assert tight.plan.has(Op.R)
    assert max(tight.memory) <= bare.smallest_limit < max(bare.memory)


def test_without_measured_activations_no_smallest_limit_is_named() -> None:
    guessed = replace(profile(), metadata={"unit": "", "estimated": "the number of parameters"})
    choice = choose(guessed, wishes(1 << 40))
    assert choice.smallest_limit is None
    assert choice.why.endswith("a rank by its parameters: no step was measured")


def test_offload_is_taken_where_it_may_be_and_costs_less() -> None:
    limit = round(0.6 * max(free().memory))
    choice = choose(profile(), wishes(limit, offload=True))
    without = choose(profile(), wishes(limit))
    assert max(choice.memory) <= limit
    assert choice.timeline.makespan <= without.timeline.makespan
    assert choice.plan.has(Op.O)


def test_microbatches_are_spread_evenly() -> None:
    plan = holding_less(get_schedule("gpipe")(2, 8), {0: ("recompute", 2)})
    assert [str(a) for a in plan.actions(0) if a.op is Op.R] == ["0R3", "0R7"]  # type: ignore[union-attr]


def test_the_state_of_an_optimizer_is_measured() -> None:
    from penstock.front.build import state_of

    assert state_of(torch.optim.AdamW, torch.float32) == 2.0
    assert state_of(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.float64) == 1.0


def test_stages_come_in_pieces_where_whole_ones_are_too_large() -> None:
    """1F1B in whole stages holds one of two microbatches at least; in pieces, a part of one."""
    whole = choose(profile(), wishes(max(free("1f1b").memory), "1f1b", num_stages=2)).smallest_limit
    assert whole is not None
    with pytest.raises(BalanceError):
        choose(profile(), wishes(round(0.7 * whole), "1f1b", num_stages=2))
    choice = choose(profile(), wishes(round(0.7 * whole), "1f1b"))
    assert choice.plan.name in ("1f1b in 2 pieces", "1f1b in 4 pieces")
    assert choice.plan.has(Op.R)
    assert max(choice.memory) <= round(0.7 * whole)
    assert Choice.loads(choice.dumps()) == choice
    ranks = choice.plan.placement.ranks
    assert ranks == tuple(sorted(ranks))


def test_copies_take_what_was_measured() -> None:
    limit = round(0.6 * max(free().memory))
    quick, slow = (
        choose(profile(), wishes(limit, offload=True, machine=Machine(copy_bandwidth=speed))) for speed in (1e12, 1e6)
    )
    assert quick.plan.has(Op.O)
    assert quick.costs.copy is not None
    assert quick.costs.copy[0] < 1e-3  # seconds
    assert not slow.plan.has(Op.O), "a copy takes seconds, a forward milliseconds"
