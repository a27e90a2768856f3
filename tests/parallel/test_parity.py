"""Every wrapper, full and split, over two processes: gradients equal those of a plain loop over all the data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import ReplicaFailed
from tests.gloo_pool import GlooPool
from tests.parallel.driver import FREED, SCRIPTS, SPLIT, Driver, compare, differences, make_data, make_model, plain_loop

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_inside(model: nn.Module) -> nn.Module:
    return nn.Sequential(DistributedDataParallel(model[0]), DistributedDataParallel(model[1]))  # type: ignore[index]


def ddp_small_buckets(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=0.0005, gradient_as_bucket_view=True)  # type: ignore[arg-type]


def ddp_static(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def ddp_find_unused(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def mesh(*shape: int) -> torch.distributed.device_mesh.DeviceMesh:
    return init_device_mesh("cpu", shape or (2,))


def shard_whole(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh())


def shard_layers(model: nn.Module) -> nn.Module:
    grid = mesh()
    for layer in model.children():
        fully_shard(layer, mesh=grid)
    return fully_shard(model, mesh=grid)


def shard_layers_frugal(model: nn.Module) -> nn.Module:
    grid = mesh()
    for layer in model.children():
        fully_shard(layer, mesh=grid, reshard_after_forward=True)
    return fully_shard(model, mesh=grid, reshard_after_forward=True)


def shard_layers_kept(model: nn.Module) -> nn.Module:
    grid = mesh()
    for layer in model.children():
        fully_shard(layer, mesh=grid, reshard_after_forward=False)
    return fully_shard(model, mesh=grid, reshard_after_forward=False)


def shard_inside(model: nn.Module) -> nn.Module:
    grid = mesh()
    return nn.Sequential(fully_shard(model[0], mesh=grid), fully_shard(model[1], mesh=grid))  # type: ignore[index]


def shard_and_ddp(model: nn.Module) -> nn.Module:
    return nn.Sequential(fully_shard(model[0], mesh=mesh()), DistributedDataParallel(model[1]))  # type: ignore[index]


def hybrid(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def replicate_old(model: nn.Module) -> nn.Module:
    return replicate_by_ddp(model)


def replicate_new(model: nn.Module) -> nn.Module:
    grid = mesh()
    for layer in model.children():
        replicate_by_fsdp(layer, mesh=grid)
    return replicate_by_fsdp(model, mesh=grid)


WRAPPERS = [
    ddp, ddp_inside, ddp_small_buckets, ddp_static, ddp_find_unused,
    shard_whole, shard_layers, shard_layers_frugal, shard_layers_kept, shard_inside, shard_and_ddp, hybrid,
    replicate_old, replicate_new,
]  # fmt: skip


def run_all(wrap: object) -> dict[str, list[str]]:
    """One wrapper in every setting, in one call: what differs in each."""
    found: dict[str, list[str]] = {}
    for name, script in SCRIPTS.items():
        found[f"{name}, three steps"] = compare(wrap, script, steps=3)  # type: ignore[arg-type]
        found[f"{name}, frozen"] = compare(wrap, script, frozen=True, steps=2)  # type: ignore[arg-type]
        found[f"{name}, first stage"] = compare(wrap, script, first=True)  # type: ignore[arg-type]
    return found


def ddp_hook(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return wrapped


def one_replica_fails(wrap: Callable[[nn.Module], nn.Module], script: str) -> tuple[str, list[str]]:
    model, reference = make_model(), make_model()
    driver = Driver(wrap(model))
    rank = dist.get_rank()
    broken = script.replace("F2", "! F2") if rank else script
    try:
        driver.step(broken, make_data(7, rank))
        outcome = "success"
    except (ArithmeticError, ReplicaFailed) as error:
        outcome = type(error).__name__
    driver.module.zero_grad()
    driver.step(script, make_data(0, rank))
    plain_loop(reference, 1)
    return outcome, differences(driver.module, reference)


@pytest.mark.parametrize("script", [SPLIT, FREED])
@pytest.mark.parametrize("wrap", [ddp, ddp_hook, shard_layers, shard_and_ddp, hybrid, replicate_old, replicate_new])
def test_a_replica_that_fails_is_noticed_by_the_others_at_once(
    gloo_pool: GlooPool, wrap: Callable[[nn.Module], nn.Module], script: str
) -> None:
    (first, *good), (second, *as_good) = gloo_pool.run(2, one_replica_fails, wrap, script)
    assert (first, second) == ("ReplicaFailed", "ArithmeticError")
    assert good == as_good == [[]]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_gradients_equal_those_of_a_plain_loop(gloo_pool: GlooPool, wrap: object) -> None:
    for found in gloo_pool.run(2, run_all, wrap):
        assert {setting: wrong for setting, wrong in found.items() if wrong} == {}
