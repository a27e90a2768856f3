"""Pipelines of replicas, 2 x 2 processes: gradients are those of one process over the data of all replicas."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import NotCompiled, PenstockError
from penstock.run import Schedule
from penstock.schedules import all_schedules, get_schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.gloo_pool import GlooPool
from tests.parity.cases import block
from tests.parity.harness import WIDTH, assert_nothing_left

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo"), pytest.mark.timeout(300)]

TRAINING = [recipe.name for recipe in all_schedules() if recipe.name != "forward"]
MICROBATCHES = 3
Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


def ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def fsdp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in module.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return replicate(module, mesh=mesh)


def make_modules(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [block().double() for _ in range(num_stages)]


def data(replica: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, y = (torch.randn(2 * MICROBATCHES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def loop(modules: list[nn.Module], steps: int, replicas: int) -> None:
    model = nn.Sequential(*modules)
    for step in range(steps):
        for replica in range(replicas):
            x, y = data(replica, step)
            for a, b in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
                (nn.functional.mse_loss(model(a), b) / (MICROBATCHES * replicas)).backward()


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def train(name: str, wrap: Wrap, mesh: DeviceMesh, *, steps: int = 2, **options: Any) -> None:
    """Accumulated steps with an evaluation in between, against the loop."""
    pipe, replica = mesh["pp"].get_group(), mesh["dp"].get_local_rank()
    plan = get_schedule(name)(mesh["pp"].size(), MICROBATCHES)
    modules = make_modules(plan.num_stages)
    reference = copy.deepcopy(modules)
    own = plan.placement.stages_of(dist.get_rank(pipe))
    wrapped = {index: wrap(modules[index], mesh["dp"]) for index in own}
    stages = [PipelineStage(wrapped[i], i, plan.num_stages, "cpu", group=pipe, **options) for i in own]
    schedule = Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss)
    for step in range(steps):
        x, y = data(replica, step)
        schedule.step(x, target=y)
        schedule.eval(x)
        assert_nothing_left(schedule)
    loop(reference, steps, mesh["dp"].size())
    for index in own:
        for (parameter_name, want), got in zip(
            reference[index].named_parameters(), wrapped[index].parameters(), strict=True
        ):
            assert want.grad is not None
            close = torch.allclose(whole(got.grad), want.grad, rtol=1e-12, atol=1e-14)
            assert close, f"{name}, stage {index}, {parameter_name}: {whole(got.grad)} instead of {want.grad}"


def train_all(wrap: Wrap, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    for name in names:
        train(name, wrap, mesh)


@pytest.mark.parametrize("wrap", [ddp, fsdp, replicated])
def test_every_schedule_with_replicas(gloo_pool: GlooPool, wrap: Wrap) -> None:
    gloo_pool.run(4, train_all, wrap, TRAINING, timeout=280.0)


def train_compiled(wrap: Wrap, names: list[str], ranks: tuple[int, int], options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", ranks, mesh_dim_names=("dp", "pp"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile has much to say about hooks of wrappers
        warnings.simplefilter("error", NotCompiled)
        for name in names:
            torch._dynamo.reset()
            train(name, wrap, mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_compiled_stages_with_replicas(gloo_pool: GlooPool, wrap: Wrap) -> None:
    options = {"compile": {"backend": "aot_eager"}}  # two processes: all that import the compiler take their time
    gloo_pool.run(2, train_compiled, wrap, ["1f1b", "zbv"], (2, 1), options, timeout=280.0)


def ddp_compiled(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return torch.compile(ddp(module, mesh), backend="aot_eager")  # type: ignore[return-value]


def ddp_compiled_in_place(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    wrapped = ddp(module, mesh)
    wrapped.compile(backend="aot_eager")
    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [ddp_compiled, ddp_compiled_in_place])
def test_a_wrapper_that_was_compiled_around_layers_of_torchs(gloo_pool: GlooPool, wrap: Wrap) -> None:
    """torch.compile itself compiles nothing there: it looks neither into the wrapper nor, from there, into nn.Sequential."""
    gloo_pool.run(2, train_compiled, wrap, ["zb-h1"], (1, 2), {}, timeout=280.0)


def fail_on_one(wrap: Wrap) -> tuple[str, bool]:
    """A stage fails on one replica: its pipeline is told, the other replicas do not hang, and the next step is right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe, replica = mesh["pp"].get_group(), mesh["dp"].get_local_rank()
    modules = make_modules(2)
    reference = copy.deepcopy(modules)
    index = dist.get_rank(pipe)
    wrapped = wrap(modules[index], mesh["dp"])
    schedule = Schedule.from_plan(
        get_schedule("1f1b")(2, MICROBATCHES),
        PipelineStage(wrapped, index, 2, "cpu", group=pipe),
        loss_fn=nn.functional.mse_loss,
    )
    x, y = data(replica, 0)
    schedule.step(x, target=y)
    handle = None
    if dist.get_rank() == 0:
        handle = modules[0][1].register_forward_pre_hook(_refuse)  # type: ignore[index]
    try:
        schedule.step(x, target=y)
        text = ""
    except (PenstockError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    if handle is not None:
        handle.remove()
    wrapped.zero_grad()
    schedule.step(x, target=y)
    loop(reference, 1, 2)
    pairs = zip(reference[index].parameters(), wrapped.parameters(), strict=True)
    return text, all(torch.allclose(whole(got.grad), whole(want.grad), rtol=1e-12, atol=1e-14) for want, got in pairs)


def _refuse(module: nn.Module, args: object) -> None:
    raise ValueError("not today")


@pytest.mark.parametrize("wrap", [ddp, fsdp])
def test_a_failure_on_one_replica(gloo_pool: GlooPool, wrap: Wrap) -> None:
    results = gloo_pool.run(4, fail_on_one, wrap, timeout=280.0)
    assert all(right for _, right in results), results
    texts = [text for text, _ in results]
    assert all(texts), texts
    assert "not today" in texts[0]
    assert "not today" in texts[1]
