"""`balance` on cases whose answer is plain to see, its errors, its table, and its way into the simulator."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from penstock.balance import LayerCost, Profile, balance, in_flight, placement_ranks, repair
from penstock.errors import BalanceError
from penstock.plan import Placement
from penstock.schedules import get_schedule
from penstock.simulate import Costs, simulate


def chain(*times: float, **same: Any) -> Profile:
    return Profile(tuple(LayerCost(f"l{i}", t, **same) for i, t in enumerate(times)))


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    cuts = balance(chain(5, 1, 1, 1, 1, 1), 2)
    assert cuts.boundaries == (1,)
    assert cuts.names == ("l1",)
    assert cuts.slowest == 5.0


def test_every_asked_stage_is_there_even_when_fewer_would_do() -> None:
    cuts = balance(chain(9, 0, 0, 0), 4)
    assert [stage.layers for stage in cuts.stages] == [("l0",), ("l1",), ("l2",), ("l3",)]


def test_ties_go_to_fewer_bytes_then_to_even_stages() -> None:
    numbers = [(1, 9), (1, 9), (1, 2), (1, 9), (4, 0)]
    layers = [LayerCost(f"l{i}", time, output_bytes=size) for i, (time, size) in enumerate(numbers)]
    assert balance(Profile(tuple(layers)), 3).boundaries == (3, 4)
    assert balance(chain(1, 1, 1, 1, 4), 3).boundaries == (2, 4)


def test_a_slow_wire_moves_the_cut() -> None:
    layers = [LayerCost(f"l{i}", 1.0, output_bytes=b) for i, b in enumerate([1, 50, 1, 1])]
    profile = Profile(tuple(layers))
    assert balance(profile, 2).boundaries == (2,)
    slow = balance(profile, 2, bandwidth=10.0)
    assert slow.boundaries in {(1,), (3,)}
    assert slow.slowest == pytest.approx(3.1)


def test_the_turn_of_a_v_crosses_no_wire() -> None:
    layers = [LayerCost(f"l{i}", 1.0, output_bytes=b) for i, b in enumerate([1, 50, 1, 1])]
    cuts = balance(Profile(tuple(layers)), 3, placement=[0, 1, 1], bandwidth=10.0)
    assert cuts.boundaries == (1, 2)
    assert cuts.slowest == 2.0


def test_memory_moves_layers_away_from_the_stage_that_holds_more_microbatches() -> None:
    profile = chain(1, 1, 1, 1, activation_to_input=10)
    held = {"microbatches_in_flight": [3, 1]}
    assert balance(profile, 2, **held).boundaries == (2,)
    cuts = balance(profile, 2, memory_limit=50, **held)
    assert cuts.boundaries == (1,)
    assert cuts.rank_memory == (30, 30)
    function = balance(profile, 2, memory_limit=50, microbatches_in_flight=lambda stage: 3 - 2 * stage)
    assert function == cuts


def test_activations_held_to_w_count() -> None:
    profile = chain(1, 1, activation_to_input=10, activation_to_weight=4)
    assert balance(profile, 2, microbatches_in_flight=[(2, 3), 1]).rank_memory == (32, 10)


def test_a_shared_parameter_counts_once_on_a_rank_and_twice_on_two() -> None:
    tied = frozenset({"wte"})
    profile = Profile(
        (LayerCost("embed", shared=tied), LayerCost("block"), LayerCost("head", shared=tied)), {"wte": 100}
    )
    assert balance(profile, 3).rank_memory == (400, 0, 400)
    together = balance(profile, 3, placement=[0, 1, 0], optimizer_bytes_per_parameter_byte=0.0)
    assert together.rank_memory == (200, 0)
    assert [stage.parameter_bytes for stage in together.stages] == [100, 0, 100]
    assert balance(profile, 3, placement=[0, 1, 0], memory_limit=400).rank_memory == (400, 0)


def test_the_slowest_rank_is_another_question_than_the_slowest_stage() -> None:
    profile = chain(4, 1, 1, 3, 3)
    by_rank = balance(profile, 4, num_ranks=2, placement="v", objective="rank")
    assert by_rank.slowest == 7.0
    by_stage = balance(profile, 4, num_ranks=2, placement="v")
    assert by_stage.slowest == 4.0


def test_placements() -> None:
    assert placement_ranks("loop", 5, num_ranks=2) == (0, 1, 0, 1, 0)
    assert placement_ranks("v", 6, num_ranks=2) == (0, 1, 1, 0, 0, 1)
    assert placement_ranks("v", 4) == Placement.v(2).ranks
    assert placement_ranks(Placement.loop(2, 2), 4) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_stages": 4}, "3 layers cannot fill 4 stages"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"num_ranks": 3}, "num_ranks is 3, expected 1 to 2"),
        ({"placement": "w"}, "placement is 'w'"),
        ({"placement": [0]}, "lists 1 ranks, num_stages is 2"),
        ({"placement": [0, 2]}, r"uses ranks \[0, 2\]"),
        ({"objective": "mean"}, "objective is 'mean'"),
        ({"memory_limit": [1, 2, 3]}, "3 entries, expected 2"),
        ({"memory_limit": 0}, "memory_limit is 0"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0"),
        ({"microbatches_in_flight": [1]}, "1 entries, expected 2"),
        ({"microbatches_in_flight": [1, (1, 2, 3)]}, r"stage 1 is \(1, 2, 3\)"),
        ({"optimizer_bytes_per_parameter_byte": -1.0}, "optimizer_bytes_per_parameter_byte is -1.0"),
        ({"memory_limit": 39}, "layer 'l0' alone needs 40 bytes"),
        ({"memory_limit": 60}, "the least possible is 80 bytes"),
        ({"memory_limit": [60, 50]}, "each rank needs at least 20 bytes"),
    ],
)
def test_errors_say_why_not(options: dict[str, Any], says: str) -> None:
    profile = chain(1, 1, 1, parameter_bytes=10)
    with pytest.raises(BalanceError, match=says):
        balance(profile, **{"num_stages": 2, **options})


def test_local_search_gives_a_cut_that_fits_and_says_so() -> None:
    rng = random.Random(3)
    layers = (LayerCost(f"l{i}", rng.random(), activation_to_input=rng.randrange(50, 100)) for i in range(30))
    profile = Profile(tuple(layers))
    options: dict[str, Any] = {"num_ranks": 4, "microbatches_in_flight": list(range(8, 0, -1))}
    free = balance(profile, 8, **options)
    assert free.exact
    limit = int(max(free.rank_memory) * 0.95)
    found = balance(profile, 8, **options, memory_limit=limit)
    assert not found.exact
    assert "not proved" in found.table()
    assert max(found.rank_memory) <= limit
    assert free.slowest <= found.slowest <= 1.1 * free.slowest
    by_rank = balance(profile, 8, num_ranks=4, objective="rank")
    assert not by_rank.exact
    assert by_rank.slowest <= 1.05 * sum(layer.forward for layer in profile.layers) / 4
    with pytest.raises(BalanceError, match="no cut was found in which the stages of every rank fit together"):
        balance(profile, 8, **options, memory_limit=int(max(free.rank_memory) * 0.38))


@pytest.mark.parametrize("objective", ["stage", "rank"])
def test_local_search_comes_close_to_the_best_cut(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all cuts, under limits that half of them keep."""
    rng = random.Random(7)
    ratios = []
    for placement in ("loop", "v") * 10:
        layers = (LayerCost(f"l{i}", rng.random(), activation_to_input=rng.randrange(10, 30)) for i in range(12))
        profile = Profile(tuple(layers))
        options: dict[str, Any] = {"placement": placement, "num_ranks": 3, "objective": objective}
        options["memory_limit"] = int(sum(layer.activation_to_input for layer in profile.layers) / 3 * 1.25)
        best = balance(profile, 6, **options)
        assert best.exact
        with monkeypatch.context() as few:
            few.setattr(repair, "_ALL", 0)
            ratios.append(balance(profile, 6, **options).slowest / best.slowest)
    assert min(ratios) >= 1
    assert statistics.median(ratios) <= 1.02
    assert max(ratios) <= 1.25


def test_the_table_names_every_stage() -> None:
    layers = (LayerCost("embed", 1.0, parameter_bytes=4096), LayerCost("a", 2.5), LayerCost("head", 1.0))
    assert balance(Profile(layers), 2).table().splitlines() == [
        "stage  rank  layers     parameters  cost    memory",
        "    0     0  embed         4.0 KiB     1  16.0 KiB",
        "    1     1  a .. head         0 B   3.5       0 B",
    ]


def test_the_result_feeds_the_simulator() -> None:
    profile = chain(1, 2, 3, 4, 5, 6, backward_input=1.0, backward_weight=1.0, activation_to_input=8, output_bytes=3)
    plan = get_schedule("1f1b")(3, 6)
    cuts = balance(profile, 3, microbatches_in_flight=in_flight(plan))
    costs = Costs(**cuts.costs(), bandwidth=100.0)
    assert costs.output_bytes == (3, 3, 0)
    timeline = simulate(plan, costs)
    assert timeline.makespan >= 6 * cuts.slowest


def test_in_flight_counts_what_a_plan_holds() -> None:
    assert in_flight(get_schedule("1f1b")(4, 8)) == [(4, 0), (3, 0), (2, 0), (1, 0)]
    assert in_flight(get_schedule("gpipe")(2, 5)) == [(5, 0), (5, 0)]
    split = in_flight(get_schedule("zbv")(2, 6))
    assert len(split) == 4
    assert all(to_input >= 1 and to_weight >= 1 for to_input, to_weight in split)


def test_extreme_numbers_stay_exact() -> None:
    cuts = balance(chain(1e300, 1e-300, 1e-300, 1e300), 2)
    assert cuts.boundaries == (2,)
    assert balance(chain(0.1, 0.2, 0.3), 2).boundaries == (2,)
    assert balance(chain(0.0, 0.0, 0.0), 3).boundaries == (1, 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bandwidth": 50.0},
        {"placement": "v", "num_ranks": 32},
        {"memory_limit": 90_000, "microbatches_in_flight": lambda stage: 64 - stage},
    ],
    ids=["plain", "bandwidth", "v", "memory"],
)
def test_a_thousand_nodes_into_64_stages(options: dict[str, Any]) -> None:
    rng = random.Random(0)
    layers = (
        LayerCost(f"n{i}", rng.random(), rng.random(), rng.random(), rng.randrange(100), output_bytes=rng.randrange(9))
        for i in range(1000)
    )
    profile = Profile(tuple(layers))
    cuts = balance(profile, 64, **options)  # benchmarks/balance.py measures the time
    assert sum(len(stage.layers) for stage in cuts.stages) == 1000
