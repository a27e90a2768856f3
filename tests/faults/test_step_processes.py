"""The same over processes: whatever happens to one rank, the others raise within seconds, though the group waits 30 minutes."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.comm import DistributedTransport
from penstock.errors import PenstockError
from penstock.run import Schedule, Schedule1F1B, ScheduleGPipe
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.faults.fragile import SOON, Trip, attempt, describe, expected_grads, loss_fn, make_batch, make_modules, until
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def fail_somewhere(name: str, trips: list[tuple[str, int, int, int]]) -> tuple[list[Any], bool, float]:
    """Several steps, some of which fail; what each raised, whether the last one is right, and the longest failure."""
    plan = get_schedule(name)(dist.get_world_size(), 4)
    made = [
        Trip(where, stage, microbatch, step=step, error=ArithmeticError) for where, stage, microbatch, step in trips
    ]
    modules = make_modules(plan.num_stages, made)
    start = time.monotonic()
    raised, grads, left = attempt(None, plan, modules, made, num_steps=len(trips) + 2)
    seconds = time.monotonic() - start
    assert left == []
    own = plan.placement.stages_of(dist.get_rank())
    every = expected_grads(plan.num_stages, 4)
    each = len(every) // plan.num_stages
    want = [grad for stage in own for grad in every[stage * each : (stage + 1) * each]]
    right = len(grads) == len(want) and all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(grads, want, strict=True))
    return raised, right, seconds


@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 2), ("zbv", 2), ("interleavedzerobubble", 2), ("gpipe", 4)])
def test_failures_are_told_and_survived(gloo_pool: GlooPool, name: str, num_ranks: int) -> None:
    plan = get_schedule(name)(num_ranks, 4)
    last = plan.num_stages - 1
    trips = [  # step 0 is cold, as is each step after a failure
        ("forward", last, 0, 0),
        ("backward", 0, 2, 1),
        ("loss", last, 3, 3),
        ("hook", last // 2, 3, 4),
    ]
    results = gloo_pool.run(num_ranks, fail_somewhere, name, trips, timeout=60.0)
    for rank, (raised, right, seconds) in enumerate(results):
        assert right
        assert seconds < SOON
        assert [error is not None for error in raised] == [True, True, False, True, True, False]
        for where, stage, _, step in trips:
            culprit = plan.placement.rank_of(stage)
            if rank == culprit:
                assert raised[step] == ("ArithmeticError", f"on purpose, in {where}")
            else:
                assert raised[step][:3] == ("PeerFailed", culprit, stage)
                assert raised[step][-1] == f"ArithmeticError: on purpose, in {where}"


def slow_failure() -> tuple[str, float]:
    """Rank 1 raises while rank 0 waits in a backward for it and rank 2 for its forward."""
    rank = dist.get_rank()
    modules = make_modules(3, [])
    stage = PipelineStage(modules[rank], rank, 3, "cpu")
    schedule = Schedule1F1B(stage, 4, loss_fn=loss_fn)
    x, y = make_batch(8)
    schedule.step(x, target=y)
    start = [0.0]
    if rank == 1:
        modules[1].first.register_forward_pre_hook(_sleep_and_raise)
    start[0] = time.monotonic()
    try:
        schedule.step(x, target=y)
    except (PenstockError, ValueError) as error:
        return str(error), time.monotonic() - start[0]
    return "nothing was raised", 0.0


def _sleep_and_raise(module: Any, args: Any) -> None:
    time.sleep(0.5)
    raise ValueError("too late")


def test_waiting_ranks_hear_of_it_within_seconds(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(3, slow_failure, group_timeout=1800.0)
    for rank, (text, seconds) in enumerate(results):
        assert seconds < SOON
        assert text == (
            "too late" if rank == 1 else "rank 1 failed in action 1F0 (stage 1, microbatch 0): ValueError: too late"
        )


def killed_in_a_step(victim: int, step: int) -> tuple[tuple[Any, ...], float, str]:
    rank = dist.get_rank()
    modules = make_modules(3, [])
    schedule = ScheduleGPipe(PipelineStage(modules[rank], rank, 3, "cpu"), 4, loss_fn=loss_fn)
    x, y = make_batch(8)
    for _ in range(step):
        schedule.step(x, target=y)
    if rank == victim:
        modules[rank].second.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    with pytest.raises(PenstockError) as caught:
        schedule.step(x, target=y)
    seconds = time.monotonic() - start
    with pytest.raises(PenstockError) as again:  # a later step cannot work, and says so at once
        schedule.step(x, target=y)
    return describe(caught.value), seconds, str(again.value)


@pytest.mark.parametrize(("victim", "step", "store"), [(1, 0, "file"), (2, 1, "tcp"), (0, 1, "tcp")])
def test_a_killed_rank_is_named(gloo_pool: GlooPool, victim: int, step: int, store: str) -> None:
    outcomes = gloo_pool.outcomes(3, killed_in_a_step, victim, step, store=store)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.ok, outcome.details
            facts, seconds, again = outcome.value
            assert seconds < SOON
            assert facts[:2] == ("PeerFailed", victim), facts
            assert again


def interrupted() -> tuple[str, float]:
    rank = dist.get_rank()
    modules = make_modules(2, [])
    schedule = ScheduleGPipe(PipelineStage(modules[rank], rank, 2, "cpu"), 4, loss_fn=loss_fn)
    x, y = make_batch(8)
    schedule.step(x, target=y)
    handle = None
    if rank == 1:
        handle = modules[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    start = time.monotonic()
    try:
        schedule.step(x, target=y)
        text = "nothing"
    except (KeyboardInterrupt, PenstockError) as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    if handle is not None:
        handle.remove()
    schedule.step(x, target=y)
    return text, seconds


def test_ctrl_c_on_one_rank_ends_the_step_everywhere(gloo_pool: GlooPool) -> None:
    (first, quick), (second, _) = gloo_pool.run(2, interrupted)
    assert "rank 1 failed" in first
    assert "KeyboardInterrupt" in first
    assert quick < SOON
    assert second.startswith("KeyboardInterrupt")


def interrupted_while_waiting(warm: bool) -> tuple[str, float, bool]:
    """Ctrl-C reaches rank 0 while it waits for a gradient; rank 1 takes its time, hears of it and drains."""
    rank, transport = dist.get_rank(), DistributedTransport.of()
    modules = make_modules(2, [])
    schedule = ScheduleGPipe(PipelineStage(modules[rank], rank, 2, "cpu"), 4, loss_fn=loss_fn)
    x, y = make_batch(8)
    if warm:
        schedule.step(x, target=y)
    handle = None
    if rank == 1:
        done = modules[1].forwards

        def wait_in_the_last_forward(*_: Any) -> None:
            if modules[1].forwards == done + 3:
                transport.store.set("all forwards were sent", b"")
                until(lambda: transport.failed)

        handle = modules[1].register_forward_pre_hook(wait_in_the_last_forward)
    else:

        def interrupt() -> None:
            until(lambda: transport.store.check("all forwards were sent"))
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
    start = time.monotonic()
    try:
        schedule.step(x, target=y)
        text = "nothing"
    except (KeyboardInterrupt, PenstockError) as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    if handle is not None:
        handle.remove()
    modules[rank].zero_grad()
    schedule.step(x, target=y)
    every = expected_grads(2, 4)
    want = every[: len(every) // 2] if rank == 0 else every[len(every) // 2 :]
    got = [p.grad for p in modules[rank].parameters()]
    return text, seconds, all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_ctrl_c_reaches_a_rank_that_waits(gloo_pool: GlooPool, warm: bool) -> None:
    (first, seconds, right), (second, _, also) = gloo_pool.run(2, interrupted_while_waiting, warm)
    assert first.startswith("KeyboardInterrupt")
    assert second.startswith("PeerFailed: rank 0 failed")
    assert "KeyboardInterrupt" in second
    assert seconds < SOON
    assert right
    assert also


def killed_while_measured() -> str:
    rank = dist.get_rank()
    modules = make_modules(2, [])
    schedule = ScheduleGPipe(PipelineStage(modules[rank], rank, 2, "cpu"), 4, loss_fn=loss_fn)
    x, y = make_batch(8)
    schedule.step(x, target=y)
    if rank == 1:
        modules[rank].second.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(PenstockError) as caught, schedule.record():
        schedule.step(x, target=y)
    return str(caught.value)


def test_a_killed_rank_is_named_while_a_step_is_measured(gloo_pool: GlooPool) -> None:
    first, _ = gloo_pool.outcomes(2, killed_while_measured)
    assert first.ok, first.details
    assert first.value.startswith(("rank 1 failed: connection lost", "rank 1 failed: its process has ended"))


LASTS = 0.1  # seconds that a forward of the first rank takes while it is measured: more than any error of a clock


def measured() -> tuple[list[float], list[float]]:
    """Two processes with clocks of their own: a message is used after it was made."""
    rank = dist.get_rank()
    modules = make_modules(2, [])
    schedule = Schedule1F1B(PipelineStage(modules[rank], rank, 2, "cpu"), 4, loss_fn=loss_fn)
    x, y = make_batch(8)
    schedule.step(x, target=y)
    if rank == 0:
        modules[0].register_forward_pre_hook(lambda *_: time.sleep(LASTS))
    with schedule.record() as recording:
        schedule.step(x, target=y)
    forwards = [[span for span in recording.timeline.spans(r) if str(span.action)[1] == "F"] for r in range(2)]
    return [span.end for span in forwards[0]], [span.start for span in forwards[1]]


def test_clocks_of_processes_are_aligned(gloo_pool: GlooPool) -> None:
    first, second = gloo_pool.run(2, measured)
    assert first == second
    assert all(use > end - LASTS / 2 for end, use in zip(*first, strict=True)), first


def leave_early() -> tuple[str, float]:
    """Rank 1's data runs out one step before the others'."""
    rank = dist.get_rank()
    modules = make_modules(3, [])
    schedule = ScheduleGPipe(PipelineStage(modules[rank], rank, 3, "cpu"), 4, loss_fn=loss_fn)
    x, y = make_batch(8)
    schedule.step(x, target=y)
    if rank == 1:
        return "left", 0.0
    start = time.monotonic()
    with pytest.raises(PenstockError) as caught:
        schedule.step(x, target=y)
    return str(caught.value), time.monotonic() - start


def test_a_rank_that_leaves_is_named_by_those_that_step(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(3, leave_early)
    for rank in (0, 2):
        text, seconds = results[rank]
        assert text.startswith("rank 1 failed: it left after step 1"), text
        assert seconds < SOON


def disagree(how: str) -> tuple[str, str, float]:
    """Rank 1 is about to do something else; then, where that can be mended, both do the same."""
    rank = dist.get_rank()
    odd = rank == 1
    modules = make_modules(2, [])
    stage = PipelineStage(modules[rank], rank, 2, "cpu")
    x, y = make_batch(4 if how.startswith("rows") and odd else 8)
    kind = ScheduleGPipe if how == "schedule" and odd else Schedule1F1B
    schedule: Schedule = kind(stage, 2 if how == "microbatches" and odd else 4, loss_fn=loss_fn)
    if how == "plan" and odd:  # the same name, another order
        lists = get_schedule("gpipe")(2, 4).codes
        schedule = Schedule.from_plan(get_schedule("1f1b")(2, 4).with_codes(lists), stage, loss_fn=loss_fn)
    if how in ("mode", "mode later"):
        if how == "mode later":
            schedule.step(x, target=y)
            schedule.eval(x, target=y)
    start = time.monotonic()
    error = ""
    torch.set_default_dtype(torch.float64 if how == "dtype" and odd else torch.float32)
    try:
        if (how.startswith("mode") and odd) or how == "rows of an evaluation":
            schedule.eval(x, target=y)
        else:
            schedule.step(x, target=y)
    except PenstockError as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        torch.set_default_dtype(torch.float32)
    seconds = time.monotonic() - start
    after = ""
    try:
        x, y = make_batch(8)
        Schedule1F1B(stage, 4, loss_fn=loss_fn).step(x, target=y)
        dist.barrier()
    except PenstockError as caught:
        after = f"{type(caught).__name__}: {caught}"
    return error, after, seconds


@pytest.mark.parametrize(
    "how", ["schedule", "plan", "microbatches", "dtype", "mode", "mode later", "rows", "rows of an evaluation"]
)
def test_ranks_that_disagree_are_told_the_difference(gloo_pool: GlooPool, how: str) -> None:
    results = gloo_pool.run(2, disagree, how)
    for error, after, seconds in results:
        assert seconds < SOON
        assert after == ""
        if not how.startswith(("mode", "rows")):
            assert error.startswith("RanksDisagree")
        differences = {
            "schedule": ("1f1b", "gpipe"),
            "microbatches": ("4", "2"),
            "plan": ("rank  plan", "0", "1"),
            "dtype": ("float32", "float64"),
            "rows": ("rank 1: 4 rows of the input here, 8 there",),
            "rows of an evaluation": ("rank 1: 4 rows of the input here, 8 there",),
        }
        words = differences.get(how, ("training step", "evaluation"))
        assert all(word in error for word in words), error
