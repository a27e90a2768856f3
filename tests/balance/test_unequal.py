"""Ranks that are not equally fast: the cut is the best of all cuts, and a choice is made with it."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from penstock.balance import LayerCost, Profile, balance
from penstock.errors import BalanceError
from penstock.plan import Placement


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
