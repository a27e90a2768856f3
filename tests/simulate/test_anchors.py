"""Figures from papers, reproduced: closed forms, the tables of the zero-bubble paper, the peaks of the V schedules.

Times are per rank and microbatch: T_F forward, T_B gradient of the inputs only, T_W gradient of the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.plan import check
from penstock.schedules import generalized_interleaved, get_schedule
from penstock.simulate import Costs, Timeline, simulate

UNIT = (1.0, 1.0, 1.0)
TIMES = [UNIT, (3.0, 2.5, 2.0), (18.522, 18.086, 9.337)]
SIZES = [(1, 3), (2, 4), (3, 6), (4, 8), (4, 16), (5, 15), (8, 16)]  # multiples, as the closed forms want them


def run(
    name: str,
    sizes: tuple[int, int],
    times: tuple[float, float, float] = UNIT,
    *,
    stages_per_rank: int | None = None,
    latency: float = 0.0,
) -> Timeline:
    plan = get_schedule(name)(*sizes, stages_per_rank=stages_per_rank)
    forward, backward_input, backward_weight = times
    costs = Costs.per_rank(
        num_stages=plan.num_stages,
        stages_per_rank=plan.num_stages // plan.num_ranks,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        latency=latency,
    )
    return simulate(plan, costs)


def peak(timeline: Timeline) -> float:
    return max(timeline.peak_memory)


# name, stages a rank, (p, v, T_F, T_B, T_W) -> idle time of the longest rank, (p, v, m) -> peak in microbatches
CLOSED_FORMS: list[tuple[str, int, Callable[..., float], Callable[..., float]]] = [
    ("gpipe", 1, lambda p, v, f, b, w: (p - 1) * (f + b + w), lambda p, v, m: m),
    ("1f1b", 1, lambda p, v, f, b, w: (p - 1) * (f + b + w), lambda p, v, m: p),
    *(
        (
            "interleaved1f1b",
            stages,
            lambda p, v, f, b, w: (p - 1) * (f + b + w) / v,
            lambda p, v, m: (2 * (p - 1) + (v - 1) * p + 1) / v,
        )
        for stages in (2, 3, 4)
    ),
    *(
        ("loopedbfs", stages, lambda p, v, f, b, w: (p - 1) * (f + b + w) / v, lambda p, v, m: m)
        for stages in (1, 2, 3, 4)
    ),
    ("zb-h1", 1, lambda p, v, f, b, w: (p - 1) * (f + b - w), lambda p, v, m: p),
    ("zb-h2", 1, lambda p, v, f, b, w: (p - 1) * (f + b - 2 * w), lambda p, v, m: 2 * p - 1),
]


@pytest.mark.parametrize(("name", "stages_per_rank", "idle", "memory"), CLOSED_FORMS)
@pytest.mark.parametrize("times", TIMES)
def test_closed_forms(
    name: str,
    stages_per_rank: int,
    idle: Callable[..., float],
    memory: Callable[..., float],
    times: tuple[float, float, float],
) -> None:
    for num_ranks, num_microbatches in SIZES:
        if num_microbatches < 2 * num_ranks - 1:
            continue
        timeline = run(name, (num_ranks, num_microbatches), times, stages_per_rank=stages_per_rank)
        expected = idle(num_ranks, stages_per_rank, *times)
        assert timeline.longest_rank - num_microbatches * sum(times) == pytest.approx(expected, abs=1e-9)
        assert peak(timeline) == pytest.approx(memory(num_ranks, stages_per_rank, num_microbatches))


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (3, 6), (4, 8), (4, 17), (8, 15), (8, 32)])
def test_zbv_has_no_bubble_at_unit_costs(p: int, m: int) -> None:
    timeline = run("zbv", (p, m))
    assert timeline.bubble_longest_rank == pytest.approx(0, abs=1e-12)
    assert timeline.bubble_makespan == pytest.approx((p - 1) / (6 * m + p - 1))
    assert peak(timeline) == p


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_interleaved_zero_bubble_at_unit_costs(p: int, m: int, v: int) -> None:
    timeline = run("interleavedzerobubble", (p, m), stages_per_rank=v)
    assert timeline.bubble_makespan == pytest.approx((p - 1) / (3 * v * m + p - 1))
    assert peak(timeline) == pytest.approx(p)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 9), (3, 9), (4, 8), (4, 20), (8, 20)])
@pytest.mark.parametrize(("forward", "weight", "fused"), [(1.0, 1.0, 3.0), (1.0, 1.0, 2.5), (2.0, 1.0, 4.5)])
def test_dualpipev_with_a_fused_slot(p: int, m: int, forward: float, weight: float, fused: float) -> None:
    """The formula knows no T_F: it holds where forward and input backward take the same time. Costs are per stage."""
    plan = get_schedule("dualpipev")(p, m)
    costs = Costs.per_rank(
        num_stages=2 * p, forward=forward, backward_input=forward, backward_weight=weight, overlap=fused
    )
    timeline = simulate(plan, costs)
    whole = forward + weight
    assert timeline.makespan - min(timeline.busy) == pytest.approx((p - 1) * (fused + whole - 3 * weight))
    assert timeline.peak_memory == (2 * p + 1,) * p  # activations of one stage


# microbatches, T_F, T_B, T_W, T_comm on 8 ranks; bubble rates of 1F1B, ZB-H1, ZB-H2 (longest rank)
ZERO_BUBBLE_PAPER = [
    (24, (18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.1083)),
    (32, (18.513, 18.086, 9.331), 0.626, (0.1985, 0.1242, 0.0837)),
    (64, (18.546, 18.097, 9.321), 0.762, (0.1240, 0.0674, 0.0444)),
    (24, (29.718, 29.444, 19.927), 0.527, (0.2347, 0.1323, 0.0698)),
    (32, (29.802, 29.428, 19.530), 0.577, (0.1898, 0.1045, 0.0559)),
    (64, (29.935, 29.621, 19.388), 0.535, (0.1091, 0.0554, 0.0294)),
]


@pytest.mark.parametrize(("m", "times", "latency", "rates"), ZERO_BUBBLE_PAPER)
def test_the_table_of_the_zero_bubble_paper(
    m: int, times: tuple[float, float, float], latency: float, rates: tuple[float, float, float]
) -> None:
    found = [
        round(run(name, (8, m), times, latency=latency).bubble_longest_rank, 4) for name in ("1f1b", "zb-h1", "zb-h2")
    ]
    assert found == list(rates)


@pytest.mark.parametrize(
    ("name", "v", "first", "fourth"),
    [
        ("zbv", 2, 0.0728, 0.0601),
        ("interleavedzerobubble", 2, 0.0960, 0.0761),
        ("interleavedzerobubble", 4, 0.0668, 0.0482),
        ("interleaved1f1b", 4, 0.0964, 0.0827),
    ],
)
def test_the_best_known_at_the_memory_of_1f1b(name: str, v: int, first: float, fourth: float) -> None:
    """Makespan bubble on the costs of the first and the fourth row above."""
    for row, expected in ((0, first), (3, fourth)):
        m, times, latency, _ = ZERO_BUBBLE_PAPER[row]
        timeline = run(name, (8, m), times, stages_per_rank=v, latency=latency)
        assert round(timeline.bubble_makespan, 4) == expected
        assert peak(timeline) == pytest.approx(9.75 if name == "interleaved1f1b" else 8)


def test_the_peaks_of_the_v_schedules_on_8_ranks() -> None:
    assert {name: peak(run(name, (8, 32))) for name in ("v-min", "v-half", "zbv")} == {
        "v-min": 4,
        "v-half": 5,
        "zbv": 8,
    }


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16])
def test_v_schedules_trade_memory_for_bubble(p: int) -> None:
    m = 4 * p
    one_f_one_b = run("1f1b", (p, m))
    for name, memory, share in (("v-min", (p + 4) // 3, 2 / 3), ("v-half", (p + 2) // 2, 7 / 12)):
        timeline = run(name, (p, m))
        assert peak(timeline) == memory
        # The lower bound counts in activations and slots of one stage, which is half a rank's.
        slots, held = 2 * timeline.makespan, 2 * memory
        assert slots >= 6 * m + 6 * p - 3 * held - 1
        idle, theirs = timeline.makespan - 3 * m, one_f_one_b.makespan - 3 * m
        assert idle <= share * theirs + 2


@pytest.mark.parametrize("p", [4, 7, 10, 13])
def test_v_min_meets_the_lower_bound(p: int) -> None:
    """Where its building block fits without a gap, no schedule of the same memory is faster."""
    m, held = 3 * p, 2 * ((p + 4) // 3)
    assert 2 * run("v-min", (p, m)).makespan == 6 * m + 6 * p - 3 * held - 1


# p, v, m, g; peak in microbatches and makespan bubble as published; makespan bubble with weight work left for later
GENERALISED_INTERLEAVED = [
    ((4, 2, 8, 4), 4, 0.1111, 0.0588),
    ((4, 2, 8, 2), 3, 0.1429, 0.1111),
    ((8, 2, 24, 8), 8, 0.0886, 0.0464),
    ((8, 2, 24, 4), 6, 0.1111, 0.0886),
    ((8, 4, 24, 8), 8, 0.0464, 0.0237),
    ((8, 4, 24, 6), 6.5, 0.0649, 0.0432),
    ((8, 4, 24, 5), 5.75, 0.0740, 0.0619),
    ((8, 4, 24, 4), 5, 0.0828, 0.0710),
    ((8, 4, 32, 4), 5, 0.0634, 0.0542),
    ((16, 4, 48, 8), 10, 0.0857, 0.0740),
]


@pytest.mark.parametrize(("sizes", "memory", "published", "zero_bubble"), GENERALISED_INTERLEAVED)
def test_generalized_interleaved(
    sizes: tuple[int, int, int, int], memory: float, published: float, zero_bubble: float
) -> None:
    p, v, m, g = sizes
    for zb, bubble in ((False, published), (True, zero_bubble)):
        timeline = simulate(generalized_interleaved.recipe(g, zero_bubble=zb)(p, m, stages_per_rank=v))
        assert round(timeline.bubble_makespan, 4) == bubble
        assert peak(timeline) == pytest.approx(memory)
    if m % g == 0:
        idle = (p - 1) * 2 + (p - g) * (v - 1)
        assert published == pytest.approx(idle / (3 * v * m + idle), abs=5e-5)


@pytest.mark.parametrize("group", [2, 3, 4, 5, 9])
def test_any_group_from_half_the_ranks_up(group: int) -> None:
    for num_microbatches in (1, group, 7, 2 * group + 1):
        for zero_bubble in (False, True):
            check(
                generalized_interleaved.recipe(group, zero_bubble=zero_bubble)(4, num_microbatches, stages_per_rank=3)
            )
