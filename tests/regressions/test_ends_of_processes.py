"""Ranks that end, or are dropped, in ways that the others hear of too late, in raw errors, or not at all."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

import penstock
from penstock.comm import DistributedTransport
from tests.faults.fragile import loss_fn, make_batch, make_modules
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]
PATIENCE = 6.0  # seconds that the child of a killed rank lives on at the most; its rank is to be named within two


def dropped_pipelines(count: int) -> list[int]:
    """How many descriptors this rank has open after each of some pipelines on groups of their own."""
    rank, found = dist.get_rank(), []
    x, y = make_batch(8)
    for _ in range(count):
        group = dist.new_group([0, 1])
        stage = penstock.PipelineStage(make_modules(2, [])[rank], rank, 2, "cpu", group=group)
        pipe = penstock.Pipeline(stages=[stage], loss_fn=loss_fn, microbatches=4, schedule="1f1b")
        pipe.step(x, target=y)
        dist.barrier()
        dist.destroy_process_group(group)
        del pipe, stage, group
        gc.collect()
        end = time.monotonic() + 3.0  # threads let go of theirs when they wake up
        while (now := len(list(Path("/proc/self/fd").iterdir()))) > (
            found[0] if found else now
        ) and time.monotonic() < end:
            time.sleep(0.1)
        found.append(now)
        dist.barrier()
    return found


def test_dropped_pipelines_leave_no_descriptors(gloo_pool: GlooPool) -> None:
    """Two descriptors, a pipe of the thread that listens, stayed open for each pipeline that was dropped after its subgroup had
    been destroyed."""
    for found in gloo_pool.run(2, dropped_pipelines, 4):
        assert found[-1] <= found[0], found


def killed_with_a_child() -> tuple[str, bool]:
    """Rank 1 is killed in a step, and leaves a child as a DataLoader's workers are; what rank 0 says, and whether the child lived
    when it did."""
    rank = dist.get_rank()
    module = make_modules(2, [])[rank]
    stage = penstock.PipelineStage(module, rank, 2, "cpu")
    pipe = penstock.Pipeline(stages=[stage], loss_fn=loss_fn, microbatches=4, schedule="1f1b")
    x, y = make_batch(8)
    pipe.step(x, target=y)
    child = 0
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    child = int(DistributedTransport.of().collectives.all_bytes("children", str(child).encode())[1])
    if rank == 1:
        module.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    ended = threading.Event()

    def end_child() -> None:
        ended.set()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    timer = threading.Timer(PATIENCE, end_child)
    timer.start()
    try:
        pipe.step(x, target=y)
        said = "nothing"
    except Exception as error:  # noqa: BLE001  which one it is, is the question
        said = f"{type(error).__name__}: {error}"
    lived = not ended.is_set()
    timer.cancel()
    end_child()
    return said, lived


def test_a_killed_rank_is_named_though_its_child_lives(gloo_pool: GlooPool) -> None:
    """Its child held copies of its sockets, so they stayed open: the rank was named when the child ended, after 12.6 seconds, and
    not within two."""
    first, second = gloo_pool.outcomes(2, killed_with_a_child)
    if second.exit_code != -signal.SIGKILL or not first.ok:
        pytest.fail(f"{second.exit_code} {first.details}")
    said, lived = first.value
    if not said.startswith("PeerFailed: rank 1 failed"):
        pytest.fail(said)
    assert lived, said


def large_value(size: int) -> list[int]:
    return [len(part) for part in DistributedTransport.of().collectives.all_bytes("something large", bytes(size))]


@pytest.mark.parametrize("size", [1 << 20, 9 << 20], ids=["1 MiB", "9 MiB"])
def test_a_meeting_takes_what_is_large(gloo_pool: GlooPool, size: int) -> None:
    """A value above 8 MiB (a long list of tensors) closed the connection to the store."""
    assert gloo_pool.run(2, large_value, size, store="tcp") == [[size, size]] * 2
