"""The table in docs/guides/when-something-goes-wrong.md over gloo alone, without the lines between ranks of one host.

The programs are those of the other files here, in processes that make no lines.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from penstock import PipelineStage, ScheduleGPipe
from penstock.comm import DistributedTransport, switchboard
from penstock.comm.distributed import close_all
from penstock.errors import PenstockError
from tests.faults.fragile import SOON, loss_fn, make_batch, make_modules
from tests.faults.test_heartbeat import stopped_in_a_step
from tests.faults.test_step_processes import (
    disagree,
    fail_somewhere,
    interrupted_while_waiting,
    killed_in_a_step,
    leave_early,
)
from tests.gloo_pool import GlooPool
from tests.run.test_top import late

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def without_lines(function: Callable[..., Any], *args: Any) -> Any:
    """As with PENSTOCK_LINES=0, which is read when a process starts."""
    host, switchboard._HOST = switchboard._HOST, ""
    try:
        found = function(*args)
        board = DistributedTransport.of()._switchboard
        assert board is not None
        assert all(line.limit < 0 for line in board._lines.values()), "there are lines all the same"
        return found
    finally:
        switchboard._HOST = host


def test_an_exception_is_named_and_the_next_step_works(gloo_pool: GlooPool) -> None:
    trips = [("forward", 1, 0, 0), ("backward", 0, 2, 1), ("loss", 1, 3, 3), ("hook", 0, 3, 4)]
    for rank, (raised, right, _) in enumerate(gloo_pool.run(2, without_lines, fail_somewhere, "1f1b", trips)):
        assert right
        assert [error is not None for error in raised] == [True, True, False, True, True, False]
        for where, stage, _, step in trips:
            told = ("ArithmeticError", f"on purpose, in {where}") if rank == stage else ("PeerFailed", stage, stage)
            assert raised[step][: len(told)] == told


def test_ctrl_c_reaches_a_rank_that_waits(gloo_pool: GlooPool) -> None:
    (first, seconds, right), (second, _, also) = gloo_pool.run(2, without_lines, interrupted_while_waiting, True)
    assert first.startswith("KeyboardInterrupt")
    assert second.startswith("PeerFailed: rank 0 failed")
    assert seconds < SOON
    assert right
    assert also


def test_ranks_that_disagree_are_told(gloo_pool: GlooPool) -> None:
    for error, after, _ in gloo_pool.run(2, without_lines, disagree, "microbatches"):
        assert error.startswith("RanksDisagree")
        assert after == ""


def test_a_rank_that_leaves_is_named(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(3, without_lines, leave_early)
    for rank in (0, 2):
        assert results[rank][0].startswith("rank 1 failed: it left after step 1"), results[rank]


def leave_connected() -> str:
    """Rank 1 leaves while something still holds its process group: its connections stay open. Rank 2 hears of that last."""
    rank, store = dist.get_rank(), _get_default_store()
    modules = make_modules(3, [])
    schedule = ScheduleGPipe(PipelineStage(modules[rank], rank, 3, "cpu"), 4, loss_fn=loss_fn)
    x, y = make_batch(8)
    schedule.step(x, target=y)
    if rank == 1:
        close_all()
        store.wait(["over/0", "over/2"], timedelta(seconds=50))
        return "left"
    if rank == 2:
        store.wait(["over/0"], timedelta(seconds=50))
    with pytest.raises(PenstockError) as caught:
        schedule.step(x, target=y)
    store.set(f"over/{rank}", "")
    return str(caught.value)


def test_a_wait_for_a_rank_that_left_ends_though_another_is_gone_before(gloo_pool: GlooPool) -> None:
    """A rank broke its connections by a wait on one certain peer, and waited for ever if that peer had closed before."""
    results = gloo_pool.run(3, without_lines, leave_connected)
    for rank in (0, 2):
        assert results[rank].startswith("rank 1 failed: it left after step 1"), results[rank]


def test_a_stopped_rank_is_named(gloo_pool: GlooPool) -> None:
    for rank, (found, _) in enumerate(gloo_pool.run(3, without_lines, stopped_in_a_step, 1, "1")):
        if rank != 1:
            assert found[0].startswith("PeerFailed: rank 1 failed: its process has been stopped for"), found


def test_a_wait_that_runs_out_says_where_everybody_was(gloo_pool: GlooPool) -> None:
    first, second = gloo_pool.run(2, without_lines, late)
    assert first.startswith("StepTimeout: rank 0 waited 1 s for a message of the step, rank 1\nrank  step"), first
    assert "waits for rank 1" in first
    assert second.startswith("PeerFailed: rank 0 failed: StepTimeout"), second


def test_a_killed_rank_is_named_though_the_store_was_in_it(gloo_pool: GlooPool) -> None:
    victim = 0
    outcomes = gloo_pool.outcomes(3, without_lines, killed_in_a_step, victim, 1, store="tcp")
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.ok, outcome.details
            facts, seconds, again = outcome.value
            assert facts[:2] == ("PeerFailed", victim), facts
            assert seconds < SOON
            assert again
