"""Captured stages under data parallelism: two pipelines of two ranks, trained for three steps, equal one model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from penstock.capture import Pipe, pipeline
from penstock.run.schedule import Schedule
from penstock.schedules import get_schedule
from tests.capture.test_cuts import Lopsided, _entropy
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]

STEPS = 3


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Lopsided().double(), torch.randint(0, 13, (STEPS, 8, 3))


def train_one(model: nn.Module, batches: Tensor) -> dict[str, Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for ids in batches:
        optimizer.zero_grad()
        for part in ids.chunk(4):  # two replicas of two microbatches
            (_entropy(model(part), part) / 4).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}


def train_replica(pipe: Pipe, batches: Tensor, way: str) -> tuple[dict[str, Tensor], list[str]]:
    """The trained parameters of this rank's stage, and those that were left out when it was sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh.get_coordinate()
    stage = pipe.build_stage(rank, "cpu", group=mesh["pp"].get_group())
    left_out: list[str] = []
    if way == "ddp":
        stage.submod = DistributedDataParallel(
            stage.submod, process_group=mesh["dp"].get_group(), find_unused_parameters=True
        )
    else:
        fully_shard(stage.submod, mesh=mesh["dp"])
        left_out = [name for name, p in stage.submod.named_parameters() if not isinstance(p, DTensor)]
    schedule = Schedule.from_plan(get_schedule("1f1b")(2, 2), stage, loss_fn=_entropy)
    optimizer = torch.optim.Adam(stage.submod.parameters(), lr=0.01)
    for ids in batches:
        optimizer.zero_grad()
        own = ids.chunk(2)[replica]
        schedule.step(own, target=own)
        optimizer.step()
    found = {}
    for name, p in stage.submod.named_parameters():
        found[name.removeprefix("module.")] = (p.full_tensor() if isinstance(p, DTensor) else p).detach()
    return found, left_out


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_replicas_train_like_one_model(gloo_pool: GlooPool, way: str) -> None:
    model, batches = make()
    want = train_one(copy.deepcopy(model), batches)
    pipe = pipeline(model, (batches[0, :2],), num_stages=2)
    for found, left_out in gloo_pool.run(4, train_replica, pipe, batches, way):
        assert left_out == []
        for name, value in found.items():
            torch.testing.assert_close(value, want[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
