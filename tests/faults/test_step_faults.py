"""A step that fails on one rank fails on all of them, says where and why, and the next step works: over threads."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from penstock.comm import LocalWorld
from penstock.comm.local import LocalTransport
from penstock.plan import Plan
from penstock.schedules import all_schedules, get_schedule
from tests.faults.fragile import Trip, attempt, expected_grads, make_modules

TRAINING = [recipe.name for recipe in all_schedules() if recipe.name != "forward"]
MICROBATCHES = 4


def plan_of(name: str, num_ranks: int = 3) -> Plan:
    return get_schedule(name)(num_ranks, MICROBATCHES)


def run(plan: Plan, trips: list[Trip], *, num_steps: int = 3, **world: Any) -> list[Any]:
    modules = make_modules(plan.num_stages, trips)
    return LocalWorld(plan.num_ranks, **world).run(
        lambda transport: attempt(transport, plan, modules, trips, num_steps=num_steps)
    )


def check_recovery(plan: Plan, results: list[Any], failing: int) -> None:
    """All ranks failed in one and the same step, left nothing, and the last step is right."""
    want = expected_grads(plan.num_stages, plan.num_microbatches)
    got: dict[int, list[torch.Tensor]] = {}
    for rank, (raised, grads, left) in enumerate(results):
        assert left == []
        assert [error is not None for error in raised] == [step == failing for step in range(len(raised))]
        own = plan.placement.stages_of(rank)
        each = len(grads) // len(own)
        for place, stage in enumerate(own):
            got[stage] = grads[place * each : (place + 1) * each]
    flat = [grad for stage in sorted(got) for grad in got[stage]]
    for mine, other in zip(flat, want, strict=True):
        assert torch.allclose(mine, other, rtol=1e-12, atol=1e-14)


OPS = {"forward": "F", "loss": "F", "backward": "[BIW]", "hook": "[BIW]"}


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("where", OPS)
@pytest.mark.parametrize("step", [0, 1], ids=["cold", "warm"])
def test_a_failure_anywhere_is_told_to_all_and_the_next_step_works(name: str, where: str, step: int) -> None:
    plan = plan_of(name)
    stages = [plan.num_stages - 1] if where == "loss" else [0, plan.num_stages // 2, plan.num_stages - 1]
    microbatches = itertools.cycle((0, 2, MICROBATCHES - 1) if step else (1, MICROBATCHES - 1, 0))
    for number, (stage, microbatch) in enumerate(zip(stages, microbatches, strict=False)):
        trip = Trip(where, stage, microbatch, step=step, error=ArithmeticError)
        results = run(plan, [trip], rendezvous=number % 2 == 0, seed=number)
        check_recovery(plan, results, failing=step)
        culprit = plan.placement.rank_of(stage)
        cause = f"on purpose, in {where}"
        for rank, (raised, _, _) in enumerate(results):
            if rank == culprit:
                assert raised[step] == ("ArithmeticError", cause)
                continue
            kind, at, of_stage, action, of_microbatch, why = raised[step]
            assert (kind, at, why) == ("PeerFailed", culprit, f"ArithmeticError: {cause}")
            number = r"\d" if where == "hook" else microbatch  # of gradients, in whatever order they come
            assert re.search(rf"{stage}{OPS[where]}{number}\b", action)
            if "OVERLAP" not in action:
                assert of_stage == stage
                assert action.endswith(str(of_microbatch))


@pytest.mark.parametrize("name", ["1f1b", "interleavedzerobubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("step", [0, 1], ids=["cold", "warm"])
def test_two_ranks_fail_at_once(name: str, step: int) -> None:
    """The first to say so is named everywhere else; the second keeps its own error as the cause."""
    plan = plan_of(name)
    for seed in range(4):
        trips = [Trip("forward", stage, 1, step=step, error=KeyError) for stage in (0, plan.num_ranks - 1)]
        results = run(plan, trips, rendezvous=True, seed=seed)
        check_recovery(plan, results, failing=step)
        kinds = [raised[step][0] for raised, _, _ in results]
        assert sorted(set(kinds)) in (["KeyError", "PeerFailed"], ["KeyError"])
        assert "KeyError" in kinds


@pytest.mark.parametrize("step", [0, 1], ids=["cold", "warm"])
def test_of_two_failures_at_once_all_ranks_name_the_same_even_if_no_news_of_them_arrived(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The end of the step carries the record to every rank: the lowest rank's, where several failed by themselves."""
    monkeypatch.setattr(LocalTransport, "report_failure", lambda _, record: record)
    plan = plan_of("gpipe", num_ranks=5)
    trips = [Trip("forward", stage, MICROBATCHES - 1, step=step, error=KeyError) for stage in (1, 4)]
    results = run(plan, trips)
    check_recovery(plan, results, failing=step)
    for rank, (raised, _, _) in enumerate(results):
        kind, *named = raised[step]
        assert kind == "KeyError" if rank == 1 else (kind, named[0]) == ("PeerFailed", 1), (rank, raised)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("step", [0, 1], ids=["cold", "warm"])
def test_the_last_action_of_the_last_rank_may_fail(name: str, step: int) -> None:
    """All others are done by then; they must not believe that the step succeeded."""
    plan = plan_of(name, num_ranks=2)
    for stage in (0, plan.num_stages - 1):
        results = run(plan, [Trip("hook", stage, MICROBATCHES - 1, step=step, error=ValueError)])
        check_recovery(plan, results, failing=step)


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_in_a_stage_stays_an_interrupt_there(name: str, error: type[BaseException]) -> None:
    plan = plan_of(name)
    for stage, step in itertools.product((0, plan.num_stages - 1), (0, 1)):
        results = run(plan, [Trip("forward", stage, 2, step=step, error=error)])
        check_recovery(plan, results, failing=step)
        culprit = plan.placement.rank_of(stage)
        for rank, (raised, _, _) in enumerate(results):
            assert raised[step][0] == (error.__name__ if rank == culprit else "PeerFailed")
            assert error.__name__ in str(raised[step])


def test_failures_in_a_row_then_a_step() -> None:
    """Cold, warm, cold again after each: the layouts of a failed step are not relied on."""
    plan = plan_of("interleaved1f1b")
    trips = [
        Trip(where, stage, 1, step=step, error=ValueError)
        for step, (where, stage) in enumerate([("forward", 0), ("backward", 3), ("hook", 5), ("forward", 4)])
    ]
    modules = make_modules(plan.num_stages, trips)
    results = LocalWorld(3, rendezvous=True).run(
        lambda transport: attempt(transport, plan, modules, trips, num_steps=6)
    )
    for raised, _, left in results:
        assert left == []
        assert [error is None for error in raised] == [False] * 4 + [True] * 2
