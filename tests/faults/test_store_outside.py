"""The process that holds the store is none of the ranks of a pipeline: when it ends, no rank of the pipeline is blamed, and
their steps go on.

The story: a pipeline over ranks 1 and 2 of a job, whose store is in the process of rank 0. When that was killed, the ranks of the
pipeline said that *their* rank 0 had failed, which was alive and well.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from penstock.comm import DistributedTransport, FailureRecord, distributed
from penstock.errors import PenstockError
from penstock.run import ScheduleGPipe
from penstock.stage.pipeline_stage import PipelineStage
from tests.faults.fragile import SOON, loss_fn, make_batch, make_modules, until
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def outside() -> tuple[list[str], str]:
    group = dist.new_group([1, 2])
    store = _get_default_store()
    if dist.get_rank() == 0:
        store.wait(["in a step"])
        os.kill(os.getpid(), signal.SIGKILL)
    transport = DistributedTransport.of(group)
    rank = transport.rank
    modules = make_modules(2, [])
    schedule = ScheduleGPipe(PipelineStage(modules[rank], rank, 2, "cpu", group=group), 4, loss_fn=loss_fn)
    x, y = make_batch(8)
    schedule.step(x, target=y)
    if rank == 0:
        holder = int(store.get("holder"))

        def wait_for_the_end(*_: Any) -> None:  # the store ends while a step runs
            handle.remove()
            store.set("in a step", "")
            until(
                lambda: not Path(f"/proc/{holder}/cmdline").exists() or not Path(f"/proc/{holder}/cmdline").read_bytes()
            )

        handle = modules[rank].register_forward_pre_hook(wait_for_the_end)
    found = []
    for _ in range(3):
        try:
            schedule.step(x, target=y)
            found.append("")
        except PenstockError as error:
            found.append(f"{type(error).__name__}: {error}")
    try:
        DistributedTransport(group)
        again = ""
    except (PenstockError, RuntimeError) as error:
        again = type(error).__name__
    return found, again


def told_outside() -> tuple[list[str], str]:
    if dist.get_rank() == 0:
        _get_default_store().set("holder", str(os.getpid()))
    return outside()


def test_steps_go_on_without_the_process_that_held_the_store(gloo_pool: GlooPool) -> None:
    """Nothing in a step needs it, and to end would lose what was done since the last checkpoint. What needs a rendezvous next
    says so."""
    first, *others = gloo_pool.outcomes(3, told_outside, store="tcp")
    assert first.exit_code == -signal.SIGKILL
    for outcome in others:
        assert outcome.ok, outcome.details
        steps, again = outcome.value
        assert steps == ["", "", ""]
        assert again in ("TransportError", "DistNetworkError"), again


def holder() -> tuple[int, int]:
    """Of the whole job, and of a group whose order is another."""
    ends = [DistributedTransport.of(), DistributedTransport.of(dist.new_group([1, 0] if dist.get_rank() < 2 else None))]
    found = []
    for transport in ends:
        transport.collectives.all_bytes("all are here", b"")
        transport.connect([])
        found.append(transport.store_holder)
    return found[0], found[1]


def test_the_rank_that_holds_the_store_is_known(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, holder, store="tcp") == [(0, 0)] * 2
    assert gloo_pool.run(2, holder, store="file") == [(-1, -1)] * 2, "a file is in no process"


def farewell(how: str) -> bool:
    """Rank 0, in whose process the store is, leaves first; the other one reads what was agreed on when it gets round to it."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    transport = DistributedTransport.of(alone if how == "of two groups" else None)
    transport.collectives.all_bytes("the last meeting", b"")
    if how == "after a failure":
        transport.begin_step()
        transport.report_failure(FailureRecord(1, cause="on purpose"))
        transport.end_step(fine=False)
    dist.barrier()
    store = transport.farewell._store
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                distributed, "_EXPLAIN" if how == "after a failure" else "_SEE_OFF", SOON
            )  # for a busy machine
            distributed.close_all()
        return store.check("left/1")
    until(lambda: store.check("left/0"))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.close_all()
    return True


@pytest.mark.parametrize("how", ["of one group", "of two groups", "killed", "after a failure"])
def test_the_process_that_holds_the_store_leaves_last(gloo_pool: GlooPool, how: str) -> None:
    """A run under srun had stopped with its checkpoint, and ended with an error since rank 0 was gone too soon. It waits for
    those of other pipelines too, and for nobody who cannot come. After a failure the others read there who has failed: one that
    came late to that blamed the process with the store, to which its connection had ended."""
    first, second = gloo_pool.outcomes(2, farewell, how, store="tcp")
    assert first.ok, first.details
    assert first.value == (how != "killed")
    assert first.seconds < SOON
    assert second.ok == (how != "killed"), second.details
