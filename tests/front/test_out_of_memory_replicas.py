"""A rank of one replica runs out of memory: the step fails on all replicas, and the next one works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from tests.front.test_out_of_memory import ROOM, SAVED, Tight, data
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


def pipeline(kind: str, tight: bool, **options: Any) -> tuple[penstock.Pipeline, Tight, int]:
    """Two replicas of two ranks; the first rank of the second replica may have too little."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    rank, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(rank)
    module = Tight(2.5 * SAVED if tight and (replica, rank) == (1, 0) else ROOM)
    stage = penstock.PipelineStage(module, rank, 2, "cpu", group=mesh["pp"].get_group())
    settings = {"loss_fn": nn.functional.mse_loss, "schedule": "gpipe", "microbatches": 8, **options}
    pipe = penstock.Pipeline(stages=[stage], mesh=mesh, data_parallel=kind, **settings)
    torch.manual_seed(10 * replica + rank)
    return pipe, module, replica


def train(kind: str, tight: bool, **options: Any) -> tuple[list[Any], list[Tensor], penstock.Plan]:
    pipe, module, _ = pipeline(kind, tight, **options)
    x, y = data()
    losses = [pipe.step(x, target=y).loss for _ in range(2)]
    return losses, [*(local(p.grad) for p in module.parameters()), *map(local, module.buffers())], pipe.plan  # type: ignore[arg-type]


def give_up(kind: str) -> str:
    pipe, module, _ = pipeline(kind, tight=False)
    x, y = data()
    pipe.step(x, target=y)
    if torch.distributed.get_rank() == 2:
        module.budget = 2.5 * SAVED
    with pytest.raises(penstock.errors.RunError) as caught:
        pipe.step(x, target=y)
    module.budget = ROOM
    pipe.zero_grad()
    assert pipe.step(x, target=y).loss is not None
    return type(caught.value).__name__


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_step_fails_on_all_replicas_and_the_next_one_works(gloo_pool: GlooPool, kind: str) -> None:
    first, second, third, fourth = gloo_pool.run(4, give_up, kind)
    assert third == fourth == "OutOfMemory"
    assert {first, second} <= {"ReplicaFailed", "PeerFailed"}


def same(kind: str, folder: str) -> None:
    """Recompute and offload under a wrapper, to the bit."""
    losses, state, _ = train(kind, tight=False)
    for options in ({"recompute": True}, {"offload": True, "offload_to": folder}):
        found = train(kind, tight=False, **options)
        assert found[0] == losses
        assert all(map(torch.equal, found[1], state))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_recompute_and_offload_change_no_bit_under_a_wrapper(gloo_pool: GlooPool, kind: str, tmp_path: Any) -> None:
    gloo_pool.run(4, same, kind, str(tmp_path))
