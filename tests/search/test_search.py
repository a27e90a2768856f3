"""Searched schedules: complete and in order, within their memory, no worse than any known one, and never below the floor."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.lower import lower
from penstock.plan import Op, Placement, check
from penstock.schedules import Recipe, all_schedules, get_schedule
from penstock.search import floor, search
from penstock.search.search_problem import SearchJob
from penstock.simulate import Costs, Link, simulate

TIMES = st.lists(st.floats(0.1, 10.0), min_size=24, max_size=24)


def profiled(*, stages_per_rank: int, num_ranks: int = 8) -> Costs:
    """The 6.2B model of the Zero Bubble paper (arXiv 2401.10241): hidden size 4,096, 32 heads, sequence 1,024."""
    return Costs.per_rank(
        num_stages=num_ranks * stages_per_rank,
        stages_per_rank=stages_per_rank,
        forward=29.718,
        backward_input=29.444,
        backward_weight=19.927,
        latency=0.527,
        held_to_weight=32 * 4096 / (34 * 4096 + 5 * 32 * 1024),
    )


@settings(max_examples=40)
@given(
    num_ranks=st.integers(1, 4),
    per_rank=st.integers(1, 3),
    num_microbatches=st.integers(1, 6),
    times=TIMES,
    latency=st.floats(0.0, 2.0),
    room=st.floats(1.0, 8.0),
    kept=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    placement=st.sampled_from(["loop", "v", None]),
)
def test_any_costs_and_any_limit_that_holds_a_microbatch(
    num_ranks: int,
    per_rank: int,
    num_microbatches: int,
    times: list[float],
    latency: float,
    room: float,
    kept: float,
    placement: str | None,
) -> None:
    count = num_ranks * per_rank
    held = tuple(times[:count])
    costs = Costs(
        tuple(times[:count]),
        tuple(times[6 : 6 + count]),
        tuple(times[12 : 12 + count]),
        held_to_input=held,
        held_to_weight=tuple(kept * size for size in held),
        latency=latency,
    )
    kinds = [Placement.loop(num_ranks, per_rank), Placement.v(num_ranks, per_rank)]
    limit = room * max(sum(held[s] for s in kind.stages_of(r)) for kind in kinds for r in range(num_ranks))
    found = search(num_ranks, num_microbatches, costs, memory_limit=limit, placement=placement, tries=8)  # type: ignore[arg-type]
    check(found.plan)
    check(lower(found.plan), sends="blocking")
    assert max(simulate(found.plan, costs).peak_memory) <= limit * (1 + 1e-6)
    assert found.gap > -1e-9
    again = search(num_ranks, num_microbatches, costs, memory_limit=limit, placement=placement, tries=8)  # type: ignore[arg-type]
    assert again.plan == found.plan


@pytest.mark.parametrize("stages_per_rank", [1, 2, 4])
def test_no_known_schedule_is_better(stages_per_rank: int) -> None:
    costs = profiled(stages_per_rank=stages_per_rank)
    for limit in (8.0, 16.0):
        found = search(8, 24, costs, memory_limit=limit, tries=10)
        for recipe in all_schedules():
            if recipe.stages_per_rank in (None, stages_per_rank):
                known = simulate(recipe(8, 24, stages_per_rank=stages_per_rank), costs)
                if known.plan.has_backward and max(known.peak_memory) <= limit:
                    assert found.makespan <= known.makespan * (1 + 1e-9), recipe.name


@pytest.mark.parametrize("stages_per_rank", [1, 2, 4])
def test_with_twice_the_memory_the_floor_is_reached(stages_per_rank: int) -> None:
    """ANCHORS: bubbles of .1003, .0537 and .0285 are the floor for 1, 2 and 4 stages a rank."""
    found = search(8, 24, profiled(stages_per_rank=stages_per_rank), memory_limit=16.0)
    assert found.gap == pytest.approx(0.0, abs=1e-9)
    bubble = {1: 0.1003, 2: 0.0537, 4: 0.0285}[stages_per_rank]
    assert found.timeline.bubble_makespan == pytest.approx(bubble, abs=5e-5)


def test_four_stages_a_rank_within_the_memory_of_1f1b() -> None:
    """The best known is interleaved zero bubble, .0482."""
    found = search(8, 24, profiled(stages_per_rank=4), memory_limit=8.0, placement="loop", tries=600)
    assert found.origin == "search"
    assert found.timeline.bubble_makespan < 0.0475
    assert max(found.timeline.peak_memory) <= 8.0 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("ranks", "stages_per_rank", "microbatches", "memory", "bubble"),
    [
        (8, 2, 24, 6.0, 0.0710),
        (8, 4, 24, 8.0, 0.0237),
        (8, 4, 24, 6.5, 0.0432),
        (8, 4, 24, 5.75, 0.0526),
        (8, 4, 24, 5.0, 0.0619),
        (8, 4, 32, 5.0, 0.0471),
        (16, 4, 48, 10.0, 0.0634),
    ],
)
def test_with_unit_costs_the_floor_is_reached_at_little_memory(
    ranks: int, stages_per_rank: int, microbatches: int, memory: float, bubble: float
) -> None:
    """The best that is published, generalised interleaved, has bubbles of .1111 and .0464 to .0857 there."""
    costs = Costs.per_rank(num_stages=ranks * stages_per_rank, stages_per_rank=stages_per_rank)
    found = search(ranks, microbatches, costs, memory_limit=memory, placement="loop", tries=60)
    assert found.gap == 0.0
    assert round(found.timeline.bubble_makespan, 4) == bubble
    assert max(found.timeline.peak_memory) <= memory * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_floor_of_a_v_is_that_of_the_paper(ranks: int) -> None:
    """arXiv 2405.15362: with room for k activations at least 6m + 6p - 3k - 1 slots of half a rank's work."""
    count = 3 * ranks
    for room in range(2, 2 * ranks + 1):
        job = SearchJob.of(Placement.v(ranks), count, Costs.per_rank(num_stages=2 * ranks, stages_per_rank=2), room / 2)
        theirs = max(6 * count + 6 * ranks - 3 * room - 1, 6 * count + ranks - 1)
        assert 2 * floor(job) >= theirs * (1 - 1e-9)


@settings(max_examples=100)
@given(
    recipe=st.sampled_from([recipe for recipe in all_schedules() if recipe.name != "forward"]),
    num_ranks=st.integers(1, 5),
    num_microbatches=st.integers(1, 12),
    times=TIMES,
    latency=st.floats(0.0, 2.0),
    kept=st.floats(0.0, 3.0),
    unlike=st.sets(st.sampled_from(["links", "microbatches", "ranks"])),
)
def test_no_known_schedule_beats_the_floor_at_its_own_memory(
    recipe: Recipe,
    num_ranks: int,
    num_microbatches: int,
    times: list[float],
    latency: float,
    kept: float,
    unlike: set[str],
) -> None:
    plan = recipe(num_ranks, num_microbatches)
    count = plan.num_stages
    costs = Costs(
        tuple(times[:count]),
        tuple(times[6 : 6 + count]),
        tuple(times[12 : 12 + count]),
        held_to_input=tuple(times[14 : 14 + count]),
        held_to_weight=tuple(size * kept for size in times[14 : 14 + count]),
        latency=latency,
        links=(Link(0, 1, 3 * latency),) if "links" in unlike and num_ranks > 1 else (),
        microbatches=tuple(0.5 + m % 3 for m in range(num_microbatches)) if "microbatches" in unlike else None,
        ranks=tuple(1.0 + rank % 2 for rank in range(num_ranks)) if "ranks" in unlike else None,
    )
    timeline = simulate(plan, costs)
    bound = floor(SearchJob.of(plan.placement, num_microbatches, costs, timeline.peak_memory))
    assert timeline.makespan >= bound * (1 - 1e-9)


def test_memory_between_the_known_schedules_is_used() -> None:
    """The costs of a model of 1.5B, two stages a rank: V-Half's memory is 5, and it stays at .1906 up to 6."""
    costs = Costs.per_rank(
        num_stages=16, stages_per_rank=2, forward=18.522, backward_input=18.086, backward_weight=9.337, latency=0.601
    )
    bubbles = [search(8, 24, costs, memory_limit=room, tries=80).timeline.bubble_makespan for room in (5.0, 5.5, 6.0)]
    assert bubbles[0] < 0.19
    assert bubbles[1] <= bubbles[0] + 0.002
    assert bubbles[2] < 0.15


@pytest.mark.parametrize("latency", [10.0, 30.0, 60.0])
def test_one_slow_link_costs_its_latency_once(latency: float) -> None:
    """Re-planned by PipeMorph (NSDI 2026): 799, 862 and 855; the best of the known schedules: 800, 1080 and 1560."""
    costs = Costs.per_rank(num_stages=8, forward=10.0, backward_input=10.0, backward_weight=10.0)
    slow = replace(costs, links=(Link(6, 7, latency), Link(7, 6, latency)))
    found = search(8, 24, slow, memory_limit=16.0)
    assert found.makespan == pytest.approx(790 + latency)
    assert found.gap == 0.0


def test_uneven_stages() -> None:
    """The first stage is short, the last long: a tenth less than V-Min, the only known schedule for this memory."""
    sizes = [0.3, *[0.5] * 14, 0.75]
    costs = replace(Costs.per_stage(sizes, sizes, sizes), held_to_input=(0.5,) * 16, held_to_weight=(0.5,) * 16)
    fixed = simulate(get_schedule("v-min")(8, 24), costs)
    assert max(fixed.peak_memory) == 4.0
    assert search(8, 24, costs, memory_limit=4.0).makespan <= 0.9 * fixed.makespan


def test_unequal_microbatches_and_ranks() -> None:
    costs = Costs.per_rank(num_stages=8, stages_per_rank=2, latency=0.1)
    costs = replace(costs, microbatches=(1.0, 0.5, 2.0, 1.0, 0.25, 1.0, 1.5, 0.75), ranks=(1.0, 1.0, 1.5, 1.0))
    found = search(4, 8, costs, memory_limit=4.0, tries=60)
    check(found.plan)
    assert max(found.timeline.peak_memory) <= 4.0 * (1 + 1e-9)
    assert found.gap >= 0.0
    for recipe in all_schedules():
        if recipe.stages_per_rank in (None, 2) and recipe.name != "forward":
            known = simulate(recipe(4, 8, stages_per_rank=2), costs)
            if max(known.peak_memory) <= 4.0:
                assert found.makespan <= known.makespan * (1 + 1e-9)


def test_microbatches_of_unequal_size_may_change_their_order() -> None:
    costs = replace(Costs.per_rank(num_stages=4), microbatches=(2.0, 0.25, 1.0, 0.5, 2.0, 0.25, 1.0, 0.5))
    kept = search(4, 8, costs, memory_limit=6.0, tries=60, reorder=False)
    found = search(4, 8, costs, memory_limit=6.0, tries=60)
    assert found.makespan < 0.97 * kept.makespan
    assert found.floor == kept.floor <= found.makespan
    assert found.costs == costs
    assert max(found.timeline.peak_memory) <= 6.0 * (1 + 1e-9)
    check(lower(found.plan), sends="blocking")
    first = [action.microbatch for action in kept.plan.actions(0) if getattr(action, "op", None) is Op.F]
    assert first == list(range(8))
    other = [action.microbatch for action in found.plan.actions(0) if getattr(action, "op", None) is Op.F]
    assert other != first
    assert sorted(other) == first
    exact = search(4, 8, costs, memory_limit=6.0, tries=60, exact=0.02)
    assert exact.makespan <= found.makespan
    assert exact.floor >= found.floor
    assert exact.costs == costs


def test_a_placement_is_given_up_only_if_its_own_floor_says_so() -> None:
    """A loop can be the best loop there is, and still be slower than a V."""
    sizes = [0.3, *[0.5] * 14, 0.75]
    costs = replace(Costs.per_stage(sizes, sizes, sizes), held_to_input=(0.5,) * 16, held_to_weight=(0.5,) * 16)
    both = search(8, 24, costs, memory_limit=8.0, tries=60)
    loop = search(8, 24, costs, memory_limit=8.0, tries=60, placement="loop")
    assert loop.gap == 0.0
    assert both.makespan < 0.9 * loop.makespan
    assert both.floor < loop.floor


def test_a_limit_for_each_rank() -> None:
    costs = Costs.per_rank(num_stages=3)
    limits = (1.0, 3.0, 2.0)
    found = search(3, 6, costs, memory_limit=limits)
    peaks = found.timeline.peak_memory
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    assert peaks[0] == 1.0


def test_stages_that_are_placed_unevenly() -> None:
    costs = Costs.per_stage([1.0] * 5, [1.0] * 5, [1.0] * 5)
    found = search(2, 4, costs, placement=Placement.of([0, 1, 1, 1, 0]))
    check(found.plan)
    assert found.plan.placement.ranks == (0, 1, 1, 1, 0)


def test_the_floor_of_one_rank_is_its_work() -> None:
    job = SearchJob.of(Placement.loop(1), 5, Costs.per_rank(num_stages=1), inf)
    assert floor(job) == 15.0
    assert search(1, 5, job.costs).gap == 0.0


def test_every_backward_is_split_or_whole() -> None:
    found = search(2, 4, Costs.per_rank(num_stages=4, stages_per_rank=2), memory_limit=2.0)
    split = found.plan.has(Op.I)
    assert split == found.plan.has(Op.W)
    assert split != found.plan.has(Op.B)


def test_progress_is_told() -> None:
    seen: list[tuple[int, float]] = []
    found = search(
        4,
        8,
        profiled(stages_per_rank=1, num_ranks=4),
        memory_limit=4.0,
        tries=20,
        progress=lambda n, best: seen.append((n, best.makespan)),
    )
    assert [number for number, _ in seen] == list(range(1, len(seen) + 1))
    assert [time for _, time in seen] == sorted((time for _, time in seen), reverse=True)
    assert seen[-1][1] == found.makespan


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"memory_limit": 0.5}, "memory_limit=0.5 on rank 0, whose stages hold 1 for a single microbatch"),
        ({"memory_limit": float("nan")}, "memory_limit=nan on rank 0"),
        ({"memory_limit": (1.0, 2.0)}, "memory_limit has 2 numbers for 4 ranks"),
        ({"placement": "zigzag"}, "placement='zigzag'; expected 'loop', 'v' or a Placement"),
        ({"placement": Placement.loop(2)}, "a placement of 2 stages on 2 ranks; expected 4"),
    ],
)
def test_errors_teach(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words.replace("(", r"\(").replace("[", r"\[")):
        search(4, 8, Costs.per_rank(num_stages=4), **arguments)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="costs of 5 stages for 4 ranks"):
        search(4, 8, Costs.per_rank(num_stages=5))
    with pytest.raises(PlanError, match="tries=0; expected how many schedules are tried, from 1 up"):
        search(4, 8, Costs.per_rank(num_stages=4), tries=0)


@pytest.mark.parametrize(
    ("ranks", "per_rank", "microbatches", "memory", "known", "wanted"),
    [(4, 1, 8, 6.0, 27.24, 25.7), (4, 2, 8, 4.0, 25.76, 24.2), (8, 2, 24, 8.0, 76.16, 70.5)],
)
def test_backwards_are_split_only_where_that_pays(
    ranks: int, per_rank: int, microbatches: int, memory: float, known: float, wanted: float
) -> None:
    """Measured: a backward in one piece takes about three quarters of its halves. Known schedules split all, or none."""
    even = Costs.per_rank(num_stages=ranks * per_rank, stages_per_rank=per_rank, latency=0.02)
    costs = replace(even, backward=(1.54 / per_rank,) * even.num_stages)
    found = search(ranks, microbatches, costs, memory_limit=memory)
    fixed = [
        simulate(recipe(ranks, microbatches, stages_per_rank=per_rank), costs)
        for recipe in all_schedules()
        if recipe.stages_per_rank in (None, per_rank) and recipe.name != "forward"
    ]
    assert min(one.makespan for one in fixed if max(one.peak_memory) <= memory * (1 + 1e-9)) == pytest.approx(known)
    assert found.makespan < wanted
    assert found.plan.has(Op.B)
    assert found.plan.has(Op.I)
    assert max(found.timeline.peak_memory) <= memory * (1 + 1e-9)
    check(lower(found.plan), sends="blocking")


def test_what_a_split_backward_would_not_fit_into() -> None:
    """Between the halves of a backward more is held than before it: one microbatch fits if it stays in one piece."""
    costs = Costs.per_rank(num_stages=2, held_to_weight=3.0)
    found = search(2, 3, costs, memory_limit=1.0, tries=5)
    assert max(found.timeline.peak_memory) == 1.0
    assert found.makespan == pytest.approx(18.0)
    assert found.floor <= 18.0, "nor does the floor say that it is impossible"


def test_memory_counts_down_to_the_last_whole_activation() -> None:
    costs = Costs.per_rank(num_stages=4)
    floors = [floor(SearchJob.of(Placement.loop(4), 8, costs, limit)) for limit in (2.0, 2.5, 2.99, 3.0)]
    assert floors[0] == pytest.approx(floors[1]) == pytest.approx(floors[2])
    assert floors[3] < 0.95 * floors[0]


def test_the_largest_microbatch_has_its_whole_way_to_go() -> None:
    costs = replace(Costs.per_rank(num_stages=4), microbatches=(1.0, 8.0, 1.0))
    assert floor(SearchJob.of(Placement.loop(4), 3, costs, None)) >= 8 * 9
