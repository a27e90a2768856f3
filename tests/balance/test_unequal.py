"""Ranks, links and microbatches that are not alike: the cut is the best of all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from penstock.balance import LayerCost, Profile, balance, in_flight
from penstock.errors import BalanceError
from penstock.plan import Placement
from penstock.schedules import get_schedule
from penstock.simulate import Link


def profile(*times: float) -> Profile:
    return Profile(tuple(LayerCost(f"layers.{i}", time, activation_to_input=10) for i, time in enumerate(times)))


def brute_force(times: tuple[float, ...], ranks: tuple[int, ...], rank_times: tuple[float, ...]) -> float:
    found = []
    for places in combinations(range(1, len(times)), len(ranks) - 1):
        stages = [sum(times[a:b]) for a, b in pairwise([0, *places, len(times)])]
        found.append(max(cost * rank_times[rank] for cost, rank in zip(stages, ranks, strict=True)))
    return min(found)


@pytest.mark.parametrize("rank_times", [(1.0, 2.0), (3.0, 1.0), (1.0, 1.1)])
@pytest.mark.parametrize("placement", [Placement.loop(2), Placement.loop(2, 2), Placement.v(2)])
def test_no_cut_is_better(placement: Placement, rank_times: tuple[float, ...]) -> None:
    times = (1.0, 4.0, 2.0, 2.0, 3.0, 1.0, 1.0, 5.0)
    cuts = balance(profile(*times), placement.num_stages, placement=placement, num_ranks=2, rank_times=rank_times)
    slowest = max(stage.forward * rank_times[stage.rank] for stage in cuts.stages)
    assert slowest == pytest.approx(brute_force(times, placement.ranks, rank_times))
    assert cuts.exact


def test_a_slow_rank_gets_fewer_layers() -> None:
    even = profile(*[1.0] * 12)
    assert balance(even, 2, rank_times=(1.0, 1.0)).boundaries == (6,)
    assert balance(even, 2, rank_times=(1.0, 2.0)).boundaries == (8,)


def test_memory_still_holds() -> None:
    cuts = balance(profile(*[1.0] * 8), 2, rank_times=(1.0, 3.0), memory_limit=50)
    assert cuts.boundaries == (5,)
    assert max(cuts.rank_memory) <= 50


@pytest.mark.parametrize(
    ("rank_times", "objective"), [((1.0, 2.0, 3.0), "stage"), ((0.0, 1.0), "stage"), ((1.0, 2.0), "rank")]
)
def test_what_rank_times_are(rank_times: tuple[float, ...], objective: str) -> None:
    with pytest.raises(BalanceError, match="rank_times"):
        balance(profile(1.0, 1.0), 2, rank_times=rank_times, objective=objective)  # type: ignore[arg-type]


def test_little_crosses_a_narrow_link() -> None:
    layers = [LayerCost(f"layers.{i}", 2.0, output_bytes=1 if i == 4 else 8) for i in range(9)]
    even = Profile(tuple(layers))
    assert balance(even, 3).boundaries == (3, 6)
    narrow = balance(even, 3, links=[Link(1, 2, 0.0, 2.0), Link(2, 1, 0.0, 2.0)])
    assert narrow.boundaries == (3, 5), "only the boundary between ranks 1 and 2 moves to where less crosses it"
    assert balance(even, 3, links=[Link(1, 2, 9.0)]).boundaries == (3, 6), "a latency is the same wherever the cut is"
    with pytest.raises(BalanceError, match="expected ranks from 0 to 2"):
        balance(even, 3, links=[Link(1, 3, 0.0, 2.0)])


def test_large_microbatches_need_their_room() -> None:
    plan = get_schedule("gpipe")(2, 4)
    assert in_flight(plan) == in_flight(plan, (1.0,) * 4) == [(4, 0), (4, 0)]
    assert in_flight(plan, (1.0, 0.5, 3.0, 0.25)) == [(5, 0), (5, 0)], "4.75 of the usual size, rounded up"
    held = in_flight(plan, (2.0, 2.0, 2.0, 2.0))
    with pytest.raises(BalanceError, match="fits the memory limit"):
        balance(profile(*[1.0] * 4), 2, memory_limit=80, microbatches_in_flight=held)
    assert balance(profile(*[1.0] * 4), 2, memory_limit=80, microbatches_in_flight=in_flight(plan)).boundaries == (2,)
