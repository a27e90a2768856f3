"""Stages that are tensor parallel, 2 x 2 processes: DTensors cross from stage to stage, and their gradients come back."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from penstock.errors import NotCompiled, NotDeferred
from penstock.run import Schedule
from penstock.schedules import get_schedule
from penstock.stage.deferred import _SAID
from penstock.stage.pipeline_stage import PipelineStage
from tests.gloo_pool import GlooPool
from tests.parity.harness import WIDTH, assert_nothing_left

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo"), pytest.mark.timeout(300)]

MICROBATCHES = 2
LAYOUTS = {"shard": Shard(-1), "replicate": Replicate(), "partial": Partial()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def split(module: nn.Module, mesh: DeviceMesh, *, given: Any, gives: Any, last: bool) -> nn.Module:
    """First layer by columns, second by rows; what leaves a stage is a DTensor with the given placement."""
    return parallelize_module(
        module,
        mesh,
        {
            "first": ColwiseParallel(input_layouts=given),
            "second": RowwiseParallel(output_layouts=Replicate() if last else gives, use_local_output=last),
        },
    )


def train(name: str, layout: str, mesh: DeviceMesh, **options: Any) -> None:
    pipe = mesh["pp"].get_group()
    plan = get_schedule(name)(2, MICROBATCHES)
    torch.manual_seed(4)
    modules = [Block().double() for _ in range(plan.num_stages)]
    reference = copy.deepcopy(modules)
    own = plan.placement.stages_of(dist.get_rank(pipe))
    gives = LAYOUTS[layout]
    for index in own:
        given = Replicate() if index == 0 else gives
        split(modules[index], mesh["tp"], given=given, gives=gives, last=index == plan.num_stages - 1)
    seen: list[Any] = []
    for index in own:
        if index:
            modules[index].register_forward_pre_hook(lambda module, args: seen.append(type(args[0])))
    stages = [PipelineStage(modules[i], i, plan.num_stages, "cpu", group=pipe, **options) for i in own]
    schedule = Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss)
    generator = torch.Generator().manual_seed(9)
    x, y = (torch.randn(2 * MICROBATCHES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    for _ in range(2):
        schedule.step(x, target=y)
        schedule.eval(x)
        assert_nothing_left(schedule)
    assert set(seen) <= {DTensor}
    model = nn.Sequential(*reference)
    for _ in range(2):
        for a, b in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
            (nn.functional.mse_loss(model(a), b) / MICROBATCHES).backward()
    for index in own:
        pairs = zip(reference[index].named_parameters(), modules[index].parameters(), strict=True)
        for (parameter, want), got in pairs:
            assert isinstance(got.grad, DTensor)
            whole = got.grad.full_tensor()
            assert want.grad is not None
            close = torch.allclose(whole, want.grad, rtol=1e-11, atol=1e-13)
            assert close, f"{name}, {layout}, stage {index}, {parameter}: {whole} instead of {want.grad}"


def train_all(wanted: list[tuple[str, str]]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    for name, layout in wanted:
        train(name, layout, mesh)


def test_dtensors_cross_between_stages(gloo_pool: GlooPool) -> None:
    wanted = [("1f1b", layout) for layout in LAYOUTS]
    wanted += [("interleavedzerobubble", "partial"), ("zbv", "shard"), ("dualpipev", "replicate")]
    gloo_pool.run(4, train_all, wanted, timeout=280.0)


def train_compiled() -> list[list[str]]:
    """What was said of it, with a backward in one piece and in two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    said: list[list[str]] = []
    _SAID.clear()
    for name in ("1f1b", "zbv"):
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train(name, "shard", mesh, compile={"backend": "aot_eager"})
        said.append([str(one.message) for one in told if issubclass(one.category, NotDeferred | NotCompiled)])
    return said


@pytest.mark.slow
def test_compiled_stages_keep_the_gradients_of_tensor_parallel_weights(gloo_pool: GlooPool) -> None:
    """They were lost: the graph ran on aliases of the weights, and nobody asked its uncut backward for their gradients."""
    for whole, (told,) in gloo_pool.run(4, train_compiled, timeout=280.0):
        assert whole == []
        assert told.startswith("compiled tensor-parallel weights (DTensor) do all weight work in the input pass")


def without_a_mesh() -> str:
    """A stage without DTensor parameters cannot know where to put what arrives, unless it is told."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipe = mesh["pp"].get_group()
    rank = dist.get_rank(pipe)

    class Spread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return distribute_tensor(x, mesh["tp"], [Shard(0)])

    class Gather(nn.Module):
        def forward(self, x: Any) -> Tensor:
            return x.full_tensor()

    module = (Spread, Gather)[rank]()
    x = torch.arange(8.0).reshape(4, 2)
    plan = get_schedule("gpipe")(2, 2)
    told = Schedule.from_plan(
        plan, PipelineStage(module, rank, 2, "cpu", group=pipe, get_mesh=lambda names, layout: mesh["tp"])
    )
    output = told.eval(x)
    if rank == 1:
        assert torch.equal(output, x)
    schedule = Schedule.from_plan(plan, PipelineStage(module, rank, 2, "cpu", group=pipe))
    with pytest.raises(RuntimeError) as caught:
        schedule.eval(x)
    return str(caught.value)


def test_a_stage_without_a_mesh_says_so(gloo_pool: GlooPool) -> None:
    assert all("this stage has no mesh to put it on" in text for text in gloo_pool.run(4, without_a_mesh))
