"""Two pipelines of the same parameters: one model to both, or refused."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import RunError
from tests.gloo_pool import GlooPool

X, Y = torch.randn(2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
SHARES = "shares parameters with another one: the other has changed"


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()


def make(model: nn.Module, cut: int | None, **where: Any) -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
    split = {} if cut is None else {"split_spec": {str(cut): penstock.SplitPoint.BEGINNING}}
    options = {"loss_fn": nn.functional.mse_loss, "microbatches": 2, "profile": False, "schedule": "1f1b"}
    pipe = penstock.Pipeline(model, (X,), **options, **split, **where)
    return pipe, torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)


def train(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer) -> float:
    loss = float(pipe.step(X, target=Y).loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def plain(steps: int) -> list[float]:
    """A loop in which two optimizers take turns."""
    model, losses = make_model(), []
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2)]
    for number in range(steps):
        loss = nn.functional.mse_loss(model(X), Y)
        loss.backward()
        optimizers[number % 2].step()
        optimizers[number % 2].zero_grad()
        losses.append(loss.item())
    return losses


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(RunError, match=SHARES) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_pipelines_that_would_drift_apart_are_refused(tmp_path: Path) -> None:
    """Two pipelines of one model were cut at different places. What one trained on a rank, the other had on another rank, where
    it kept the value from before: the losses of both were near to right, and wrong."""

    def run(transport: LocalTransport) -> float:
        model = make_model()  # each rank its own, as in processes
        first, second = (make(model, cut, group=transport) for cut in (1, 3))
        train(*first)
        before = {name: value.clone() for name, value in second[0].state_dict().items()}
        assert "copy.deepcopy(model)" in refusal(second[0].step, X, target=Y)
        refusal(second[0].evaluate, X, target=Y)
        assert all(torch.equal(value, before[name]) for name, value in second[0].state_dict().items())
        assert all(p.grad is None for p in second[0].parameters())
        first[0].save(tmp_path / "checkpoint")
        second[0].load(tmp_path / "checkpoint")  # as the error says; the first one lives on
        loss = train(*second)
        refusal(first[0].step, X, target=Y)
        del second
        gc.collect()
        first[0].step(X, target=Y)
        return loss

    assert LocalWorld(2).run(run) == pytest.approx([plain(2)[1]] * 2, abs=1e-12)


def test_a_module_in_two_models_is_shared_too() -> None:
    """The same with an encoder that two models have, under other names."""

    def run(transport: LocalTransport) -> None:
        encoder = make_model()
        first = make(nn.Sequential(*encoder, nn.Linear(4, 4).double()), 1, group=transport)
        second = make(nn.Sequential(nn.Linear(4, 4).double(), *encoder), 4, group=transport)
        train(*first)
        refusal(second[0].step, X, target=Y)

    LocalWorld(2).run(run)


@pytest.mark.parametrize(
    ("cuts", "shared"), [((1, 1), False), ((1, 3), True), ((3, 1), True)], ids=["cut alike", "threads", "threads again"]
)
def test_pipelines_that_are_one_model_train_in_turn(cuts: tuple[int, int], shared: bool) -> None:
    """What was right stays allowed: the same cut, or ranks that are threads over one model."""
    whole = make_model()

    def run(transport: LocalTransport) -> list[float]:
        model = whole if shared else make_model()
        pipes = [make(model, cut, group=transport) for cut in cuts]
        return [train(*pipes[number % 2]) for number in range(6)]

    for losses in LocalWorld(2).run(run):
        assert losses == pytest.approx(plain(6), abs=1e-12)


def test_what_does_not_share_is_not_refused() -> None:
    """Copies, gradients without an update, and a pipeline that was dropped in a cycle."""

    def run(transport: LocalTransport) -> None:
        model = make_model()
        first, second = (make(model, cut, group=transport) for cut in (1, 3))
        first[0].step(X, target=Y)  # gradients alone
        second[0].step(X, target=Y)
        copied = make(copy.deepcopy(model), 3, group=transport)
        train(*first)
        train(*copied)
        cycle: list[Any] = [first]
        cycle.append(cycle)
        del first, cycle
        second[0].step(X, target=Y)

    LocalWorld(2).run(run)


def in_processes(kind: str) -> Any:
    model, world = make_model(), dist.get_world_size()
    if kind == "cuts":
        first, second = make(model, 1), make(model, 3)
    else:
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "pp"))
        first, second = (make(model, None, mesh=mesh, data_parallel=kind, stages=1) for _ in range(2))
    if kind == "ddp":
        return [train(*(first, second)[number % 2]) for number in range(6)]
    train(*first)
    return refusal(second[0].step, X, target=Y)


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize("kind", ["cuts", "fsdp", "ddp"])
def test_pipelines_in_processes(gloo_pool: GlooPool, kind: str) -> None:
    """Each process has its own model: other cuts drift apart, and so do two that shard the same parameters, each for itself.
    Under DDP both keep the tensors of the model."""
    for found in gloo_pool.run(2, in_processes, kind):
        assert found == pytest.approx(plain(6), abs=1e-12) if kind == "ddp" else SHARES in found
