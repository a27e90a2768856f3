"""Which schedule, and what it is said to rest on: no model, only costs."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.balance import LayerCost, Profile
from penstock.comm import LocalTransport, LocalWorld
from penstock.front import Choice, choose
from penstock.front.candidates import Wishes
from penstock.front.choice import Built, Machine
from penstock.front.choice_text import explanation, tried_rows
from penstock.front.machine import measure_machine
from penstock.front.mesh import PipelineMesh
from penstock.front.model_profile import without_calls
from penstock.front.pipeline_options import FIRST, GROUPS
from penstock.plan import Placement
from penstock.schedules import get_schedule

SECONDS = {"unit": "s"}


def layers(seconds: float, number: int = 8) -> tuple[LayerCost, ...]:
    return tuple(LayerCost(f"layers.{i}", seconds, seconds, seconds, activation_to_input=1000) for i in range(number))


def explained(choice: Choice) -> str:
    return explanation(Built([], choice.plan, None, choice))


def test_overhead_makes_many_small_stages_lose() -> None:
    profile = Profile(layers(1e-4), metadata=SECONDS)
    free = choose(profile, Wishes(2, 8))
    assert free.num_stages == 4
    costly = choose(profile, Wishes(2, 8, machine=Machine(overhead=1e-4, posting=5e-5)))
    assert costly.num_stages == 2
    before = {(tried.schedule, tried.stages_per_rank): tried.makespan for tried in free.tried}
    for tried in costly.tried:
        assert tried.makespan is not None
        free_time = before[tried.schedule, tried.stages_per_rank]
        assert free_time is not None
        actions = 16 * tried.stages_per_rank  # forwards and backwards of a rank; a split backward is two
        assert tried.makespan >= free_time + 1e-4 * actions


def test_a_memory_limit_drops_what_does_not_fit() -> None:
    held = tuple(
        replace(layer, activation_to_input=1_000_000, activation_to_weight=1_000_000) for layer in layers(1e-3)
    )
    profile = Profile(held, metadata=SECONDS)
    free = choose(profile, Wishes(4, 16))
    most = max(tried.memory for tried in free.tried)
    fastest = next(tried for tried in free.tried if tried.makespan is not None)
    limit = fastest.memory - 1
    tight = choose(profile, Wishes(4, 16, memory_limit=limit))
    assert max(tight.timeline.peak_memory) <= limit < most
    assert tight.timeline.makespan >= free.timeline.makespan
    assert tight.spared or tight.plan.name != free.plan.name
    assert max(tried.memory for tried in tight.tried) <= limit


def test_schedule_placement_stages_and_plan_can_each_be_given() -> None:
    profile = Profile(layers(1e-3), metadata=SECONDS)
    assert choose(profile, Wishes(2, 8, placement="v")).plan.placement.kind == "v"
    loop = Placement.loop(2, 2)
    assert choose(profile, Wishes(2, 8, placement=loop)).plan.placement == loop
    assert choose(profile, Wishes(2, 8, num_stages=8)).num_stages == 8
    assert choose(profile, Wishes(2, 8, "zbv")).plan.name == "zbv"
    plan = get_schedule("gpipe")(2, 8)
    own = choose(profile, Wishes(2, 8, plan))
    assert own.plan is plan
    assert own.why == "given"


def test_nothing_measured_is_added_to_costs_that_are_no_seconds() -> None:
    """A latency of 0.1 seconds means nothing beside costs in floating-point operations."""
    profile = Profile(layers(1e9))
    measured = Machine(latency=0.1, bandwidth=1e6, overhead=0.1, posting=0.1)
    choice = choose(profile, Wishes(2, 8, machine=measured))
    assert choice.machine == Machine()
    assert not choice.is_timed
    assert choice.timeline.unit == ""
    text = explained(choice)
    assert "candidates at the costs of the given profile" in text
    assert "the profile is not in seconds, messages count as free" in text
    assert "measured costs" not in text
    assert "ms" not in text
    assert tried_rows(choice)[0][2] == "1.000 x", "compare and explain show steps beside the best, not seconds"
    assert choose(replace(profile, metadata=SECONDS), Wishes(2, 8, machine=measured)).machine == measured


def test_what_is_predicted_says_what_was_reckoned_with() -> None:
    machine = Machine(latency=1e-5, bandwidth=2**30, overhead=2e-5, posting=3e-5)
    text = explained(choose(Profile(layers(1e-3), metadata=SECONDS), Wishes(2, 8, machine=machine)))
    assert "20 µs for an action, 30 µs to send or receive, 10 µs under way, 1.0 GiB a second" in text
    assert "predicted: a step takes" in text


@pytest.mark.parametrize(
    ("ranks", "microbatches", "expected"),
    [(1, 1, "1 stage on 1 rank (loop), 1 microbatch, "), (2, 3, "2 stages on 2 ranks (loop), 3 microbatches, ")],
)
def test_one_and_many(ranks: int, microbatches: int, expected: str) -> None:
    choice = choose(Profile(layers(1.0), metadata=SECONDS), Wishes(ranks, microbatches, "1f1b"))
    assert explained(choice).startswith(expected)


def test_a_choice_survives_its_text() -> None:
    machine = Machine(latency=1e-5, bandwidth=1e9, overhead=2e-5, posting=3e-5)
    choice = choose(Profile(layers(1e-3), metadata=SECONDS), Wishes(3, 6, machine=machine))
    again = Choice.loads(choice.dumps())
    assert again == choice
    assert again.timeline.makespan == choice.timeline.makespan


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_machine_is_measured_without_a_trace(ranks: int) -> None:
    def run(transport: LocalTransport) -> Any:
        before = torch.random.get_rng_state()
        machine = measure_machine(PipelineMesh.of(transport, None, torch.device("cpu")))
        assert torch.equal(torch.random.get_rng_state(), before)
        return machine

    with torch.no_grad():  # as around a Pipeline that is made for evaluation
        first, *_ = LocalWorld(ranks).run(run)
    assert 0 < first.overhead < 0.1
    assert (0 < first.posting < 0.1) == (ranks > 1)
    assert (first.bandwidth is not None) == (ranks > 1)


def test_calls_around_a_layer_are_taken_off() -> None:
    small, large = layers(1e-7, 1)[0], replace(layers(1.0, 1)[0], name="large")
    profile = Profile((small, large), metadata={**SECONDS, "backward": [2e-7, 2.0]})
    net = without_calls(profile, torch.device("cpu"))
    small, large = net.layers
    assert small.forward == pytest.approx(1e-8), "a tenth stays: nothing is free"
    assert 0.9 < large.forward < 1.0
    assert 1.9 < net.metadata["backward"][-1] < 2.0
    assert small.activation_to_input == 1000


def uneven(number: int = 12) -> Profile:
    """Layers that differ, so that no schedule for equal stages fits them."""
    costs = [1e-3 * (1 + i % 3) for i in range(number)]
    found = tuple(
        LayerCost(f"layers.{i}", t, 1.2 * t, 0.7 * t, activation_to_input=1000, activation_to_weight=600)
        for i, t in enumerate(costs)
    )
    return Profile(found, metadata=SECONDS)


def test_a_searched_schedule_beats_the_known_ones_within_their_memory() -> None:
    profile = uneven()
    known = choose(profile, Wishes(3, 8))
    found = choose(profile, Wishes(3, 8, schedule="search"))
    assert found.plan.name == "searched"
    assert found.boundaries == known.boundaries
    assert found.timeline.makespan < known.timeline.makespan
    assert all(a <= b + 1e-6 for a, b in zip(found.timeline.peak_memory, known.timeline.peak_memory, strict=True))
    assert f"faster than {known.plan.name}" in found.why
    assert found.tried[0].schedule == "searched"
    assert Choice.loads(found.dumps()) == found


def test_a_search_keeps_to_the_memory_limit() -> None:
    limit = 9_000
    found = choose(uneven(), Wishes(4, 8, schedule="search", memory_limit=limit))
    for rank, peak in enumerate(found.timeline.peak_memory):
        assert peak + found.state_bytes(found.plan.placement.stages_of(rank)) <= limit


def test_a_search_that_finds_nothing_better_says_so() -> None:
    found = choose(uneven(), Wishes(1, 4, schedule="search"))
    assert found.plan.name != "searched"
    assert found.why.endswith("a search found none that is faster")


def test_the_table_of_options_is_whole() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/guides/options.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted([*FIRST, *(f.name for group in GROUPS for f in fields(group))])
