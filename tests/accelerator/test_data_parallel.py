"""Two replicas of a pipeline of two ranks on the simulated accelerator: DDP, and FSDP2."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from tests.accelerator import pipes
from tests.accelerator.pool import SimPool
from tests.accelerator.test_pipeline import MICROBATCHES, Noticed, whole_model
from tests.faults.fragile import SOON
from tests.faults.replicas import die, fail, in_trouble

STEPS = 3


def data(replica: int) -> tuple[Tensor, Tensor]:
    x, y = pipes.batch(MICROBATCHES)
    return x + replica, y


def expected() -> list[tuple[float, float]]:
    """Loss and norm of the unsplit model over the data of both replicas."""
    model = whole_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(STEPS):
        loss = sum(nn.functional.mse_loss(model(x), y) for x, y in map(data, range(2))) / 2
        assert isinstance(loss, Tensor)
        loss.backward()
        found.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def replicated(device: torch.device, kind: str) -> dict[str, Any]:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "pp"))
    x, y = (part.to(device) for part in data(mesh["dp"].get_local_rank()))
    pipe = penstock.Pipeline(
        whole_model().to(device),
        (x,),
        loss_fn=nn.functional.mse_loss,
        schedule="1f1b",
        microbatches=MICROBATCHES,
        profile=False,
        mesh=mesh,
        data_parallel=kind,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    noticed = Noticed(device)
    found, waits, violations = [], [], []
    for _ in range(STEPS):
        noticed.again()
        result = pipe.step(x, target=y)
        waits = noticed.sim.waits()
        # Of the step alone: FSDP2 by itself frees reduced gradients without telling the stream that they were made on,
        # which it makes wait before it asks for memory again.
        violations += noticed.sim.violations()
        found.append((result.loss, pipe.clip_grad_norm_(0.5)))
        optimizer.step()
        torch.accelerator.synchronize()  # for the same reason
        optimizer.zero_grad()
    return {"found": found, "waits": waits, "violations": violations}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_replicas_train_as_one_and_no_host_waits(sim: SimPool, kind: str) -> None:
    for told in sim.run(4, "lazy", replicated, kind):
        for found, wanted in zip(told["found"], expected(), strict=True):
            assert found == pytest.approx(wanted)
        assert told["waits"] == []
        assert told["violations"] == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_replica_that_fails_is_named_on_every_rank_and_the_next_step_works(sim: SimPool, kind: str) -> None:
    told = sim.run(4, "lazy", in_trouble, kind, 3, fail)
    texts = [found[1] for found, _ in told]
    assert texts[3] == "ArithmeticError: on purpose"
    assert texts[2].startswith("PeerFailed: rank 1 failed in action 1F0"), texts
    for text in texts[:2]:
        assert "ReplicaFailed" in text, texts
        assert "rank 2 of the job failed" in text or "rank 3 of the job failed" in text, texts
    for found, seconds in told:
        assert found[0] == found[2] == found[3] == ""
        assert seconds < SOON


def loses_a_process(device: torch.device, kind: str) -> tuple[list[str], float]:
    """Rank 3 is killed in the second step. The groups of the replicas are the user's, who ends them when that is over."""
    told = in_trouble(device, kind, 3, die)
    for group in dist.distributed_c10d._world.pg_map:
        with suppress(RuntimeError):  # gloo has no device
            group._get_backend(device).abort()
    with suppress(RuntimeError):  # what was on it is lost, and the device says so
        torch.accelerator.synchronize()
    return told


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_process_of_a_replica_that_is_killed_is_named_on_every_rank(sim: SimPool, kind: str) -> None:
    """The rank beside it waited for its device before it told the other replica, which waited for that rank."""
    outcomes = sim.outcomes(4, "lazy", loses_a_process, kind)
    told = [outcome.value for outcome in outcomes[:3]]
    assert all(outcome.ok for outcome in outcomes[:3]), [outcome.details for outcome in outcomes]
    # Its host waits for no message of the step: of two true news it may hear first that the other replica has failed.
    assert told[2][0][1].startswith(("PeerFailed: rank 1 failed", "ReplicaFailed: rank 0 of the job failed")), told
    for found, seconds in told:
        assert found[0] == ""
        assert all("failed" in text for text in found[1:]), found
        assert "tart the job again" in found[3], found
        assert seconds < SOON
    for found, _ in told[:2]:
        assert "of the job, which holds the same stage in another data-parallel replica, failed" in found[1], found
