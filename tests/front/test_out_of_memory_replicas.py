"""A rank of one replica runs out of memory: all replicas are as before the step, or take the same leaner plan together."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.plan import Op
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


def replan(kind: str) -> bool:
    expected = train(kind, tight=False, recompute=[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", penstock.HoldsLess)
        losses, state, plan = train(kind, tight=True, on_oom="replan")
    assert losses == expected[0]
    assert all(map(torch.equal, state, expected[1]))
    assert {action.stage for action in plan.actions(0) if action.op is Op.R} == {0}  # type: ignore[union-attr]
    assert not any(action.op is Op.R for action in plan.actions(1))  # type: ignore[union-attr]
    return any(issubclass(one.category, penstock.HoldsLess) for one in caught)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_replicas_take_the_same_leaner_plan(gloo_pool: GlooPool, kind: str) -> None:
    told = gloo_pool.run(4, replan, kind)
    assert told == [True, False, False, False]  # one rank speaks for all


def give_up(kind: str) -> list[str]:
    pipe, module, _ = pipeline(kind, tight=False)
    x, y = data()
    pipe.step(x, target=y)
    before = [*(local(p.grad) for p in module.parameters()), *map(local, module.buffers())]  # type: ignore[arg-type]
    if torch.distributed.get_rank() == 2:
        module.budget = 2.5 * SAVED
    with pytest.raises(penstock.RunError) as caught:
        pipe.step(x, target=y)
    after = [*(local(p.grad) for p in module.parameters()), *map(local, module.buffers())]  # type: ignore[arg-type]
    assert all(map(torch.equal, before, after))
    module.budget = ROOM
    assert pipe.step(x, target=y).loss is not None
    return [type(caught.value).__name__]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_replicas_are_as_before_a_step_that_is_given_up(gloo_pool: GlooPool, kind: str) -> None:
    first, second, third, fourth = gloo_pool.run(4, give_up, kind)
    assert third == fourth == ["OutOfMemory"]
    assert {*first, *second} <= {"ReplicaFailed", "PeerFailed"}


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
