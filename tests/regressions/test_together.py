"""Calls that the ranks make together: what is wrong on one of them is an error on all, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh

import penstock
import penstock.errors
from penstock.comm.local import LocalWorld
from penstock.errors import PenstockError
from penstock.schedules import get_schedule
from penstock.stage.dtensors import whole_tensor
from tests.gloo_pool import GlooPool
from tests.regressions.test_tied_weights import NORMS

pytestmark = [pytest.mark.xdist_group("gloo")]

WIDTH = 3
X, Y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()


def pipe_of(**options: Any) -> penstock.Pipeline:
    given: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "schedule": "1f1b", "microbatches": 2, "profile": False}
    return penstock.Pipeline(make(), (X,), **(given | options))


def raised_by(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:  # noqa: BLE001  that is what is looked at
        return type(error).__name__, str(error)
    return "nothing", ""


Call = Callable[[penstock.Pipeline, Path], object]
CALLS: dict[str, tuple[Call, Call]] = {
    "a negative norm": (lambda pipe, _: pipe.clip_grad_norm_(-1), lambda pipe, _: pipe.clip_grad_norm_(1.0)),
    "no kind of norm": (lambda pipe, _: pipe.clip_grad_norm_(1.0, 0), lambda pipe, _: pipe.clip_grad_norm_(1.0)),
    "another norm": (lambda pipe, _: pipe.clip_grad_norm_(2.0), lambda pipe, _: pipe.clip_grad_norm_(1.0)),
    "outputs nowhere": (
        lambda pipe, _: pipe.step(X, target=Y, outputs=7),  # type: ignore[arg-type]
        lambda pipe, _: pipe.step(X, target=Y),
    ),
    "arguments of a loss": (
        lambda pipe, _: pipe.step(X, target=Y, loss_kwargs=3),  # type: ignore[arg-type]
        lambda pipe, _: pipe.step(X, target=Y),
    ),
    "an evaluation": (
        lambda pipe, _: pipe.evaluate(X, target=Y, outputs="some"),  # type: ignore[arg-type]
        lambda pipe, _: pipe.evaluate(X, target=Y),
    ),
    "a prediction": (
        lambda pipe, _: pipe.predict(X, outputs="some"),  # type: ignore[arg-type]
        lambda pipe, _: pipe.predict(X),
    ),
    "a batch without rows": (lambda pipe, _: pipe.predict(X[:0]), lambda pipe, _: pipe.predict(X)),
    "no rounds": (
        lambda pipe, _: pipe.calibrate(X, target=Y, rounds=0),
        lambda pipe, _: pipe.calibrate(X, target=Y, rounds=1),
    ),
    "no folder": (lambda pipe, _: pipe.save(None), lambda pipe, folder: pipe.save(folder / "kept")),  # type: ignore[arg-type]
    "a stager": (
        lambda pipe, folder: pipe.save(
            folder / "kept", stager=DefaultStager(StagingOptions(False, False, False, False))
        ),
        lambda pipe, folder: pipe.save(folder / "kept"),
    ),
    "no file": (
        lambda pipe, _: pipe.save_pretrained(None),  # type: ignore[arg-type]
        lambda pipe, folder: pipe.save_pretrained(folder / "published"),
    ),
    "a plan for others": (
        lambda pipe, _: pipe.run_plan(get_schedule("1f1b")(3, 2)),
        lambda pipe, _: pipe.run_plan(get_schedule("gpipe")(2, 2)),
    ),
    "no flag": (lambda pipe, _: pipe.ranks.any(torch.ones(2)), lambda pipe, _: pipe.ranks.any(False)),  # type: ignore[arg-type]
}
"""Each as it is called on one rank, and as on the other."""


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_wrong_on_one_rank_raises_on_all(name: str, tmp_path: Path) -> None:
    """The rank raised before it told anybody, and the others waited for it as long as the group's timeout is: half an hour."""
    wrong, right = CALLS[name]

    def rank(transport: Any) -> tuple[str, str]:
        pipe = pipe_of(group=transport)
        loss = pipe.step(X, target=Y).loss
        found = raised_by(lambda: (wrong if pipe.rank == 1 else right)(pipe, tmp_path))
        assert pipe.step(X, target=Y).loss == loss  # the pipeline goes on, as it was
        return found

    (first, told), (second, _) = LocalWorld(2).run(rank)
    assert "nothing" not in (first, second)
    assert "rank 1" in told
    assert issubclass(getattr(penstock.errors, first), PenstockError)


def replicas(kind: str) -> tuple[penstock.Pipeline, Tensor, Tensor]:
    """A pipeline of two ranks in two replicas, and the rows of this one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    mine = slice(4 * mesh["dp"].get_local_rank(), 4 * mesh["dp"].get_local_rank() + 4)
    return pipe_of(mesh=mesh, data_parallel=kind), X[mine], Y[mine]


def raises_in_one_replica(kind: str) -> list[tuple[str, str]]:
    pipe, x, y = replicas(kind)
    pipe.step(x, target=y)
    unlike = pipe.replica == 1 and pipe.rank == 0
    found = [raised_by(lambda: pipe.clip_grad_norm_(-1 if unlike else 1.0))]
    with pipe.stages[0].submod.register_forward_pre_hook(lambda *_: 1 / 0 if unlike else None):
        found.append(raised_by(lambda: pipe.evaluate(x, target=y)))
    pipe.step(x, target=y)
    assert pipe.evaluate(x, target=y).loss is not None
    return found


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_goes_wrong_in_one_replica_is_heard_in_all(gloo_pool: GlooPool, kind: str) -> None:
    """The other replica waited for the group's timeout: with its shards for their norm, with its loss for the mean."""
    for number, (clipped, evaluated) in enumerate(gloo_pool.run(4, raises_in_one_replica, kind)):
        assert clipped[0] == "RunError", number
        assert "max_norm=-1" in clipped[1]
        assert number == 2 or clipped[1].startswith("rank 2 failed at clip_grad_norm_()")
        assert "ZeroDivisionError" in evaluated if number == 2 else "division by zero" in evaluated[1], number


def norms(kind: str) -> tuple[bool, list[float], dict[str, Tensor]]:
    pipe, x, y = replicas(kind)
    pipe.step(x, target=y)
    found = [pipe.clip_grad_norm_(1e9, one) for one in NORMS]
    pipe.clip_grad_norm_(0.1)
    return pipe._ends.beside, found, {name: whole_tensor(p.grad) for name, p in pipe.named_parameters()}


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_norms_over_replicas(gloo_pool: GlooPool, kind: str) -> None:
    """Each mesh was taken for one with dimensions beside "dp" and "pp", since a slice of a mesh is another object each time: a
    norm had a message for each parameter, and the largest gradient could not be told where a replica had no row of it."""
    model = make()
    nn.functional.mse_loss(model(X), Y).backward()
    want = [nn.utils.clip_grad_norm_(model.parameters(), 1e9, one).item() for one in NORMS]
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    grads = {name: p.grad for name, p in model.named_parameters()}
    for beside, found, clipped in gloo_pool.run(4, norms, kind):
        assert not beside
        assert found == pytest.approx(want, rel=1e-9)
        for name, grad in clipped.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-9, atol=1e-12)


def clip_empty_shards() -> list[float]:
    """Parameters of one row over two replicas, one of which has nothing of them."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    given: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "schedule": "1f1b", "microbatches": 2, "profile": False}
    pipe = penstock.Pipeline(nn.Linear(WIDTH, 1).double(), (X,), mesh=mesh, data_parallel="fsdp", **given)
    pipe.step(X, target=Y[:, :1])
    return [pipe.clip_grad_norm_(1e9, one) for one in NORMS]


@pytest.mark.processes
def test_the_largest_gradient_where_a_shard_is_empty(gloo_pool: GlooPool) -> None:
    """The replica without a row raised, and the other one waited for it."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1).double()
    nn.functional.mse_loss(model(X), Y[:, :1]).backward()
    want = [nn.utils.clip_grad_norm_(model.parameters(), 1e9, one).item() for one in NORMS]
    for found in gloo_pool.run(2, clip_empty_shards):
        assert found == pytest.approx(want, rel=1e-9)


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.table(tokens).sum(1))


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_sparse_gradients(kind: float) -> None:
    """Their rank raised in the middle of the call, and the others waited for it. The norm is that of the dense gradient."""
    tokens = torch.randint(10, (8, 4), generator=torch.Generator().manual_seed(2))
    model = Looking().double()
    dense = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    scores = nn.functional.linear(dense["table.weight"][tokens].sum(1), dense["last.weight"], dense["last.bias"])
    nn.functional.mse_loss(scores, Y[:, :1]).backward()
    want = nn.utils.clip_grad_norm_(dense.values(), 0.01, kind).item()

    def rank(transport: Any) -> tuple[float, dict[str, Tensor]]:
        stages = [nn.Sequential(model.table), nn.Sequential(Summed(), model.last)]
        stage = penstock.PipelineStage(stages[transport.rank], transport.rank, 2, "cpu", group=transport)
        pipe = penstock.Pipeline(stages=[stage], loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=2)
        pipe.step(tokens, target=Y[:, :1])
        return pipe.clip_grad_norm_(0.01, kind), {name: p.grad.to_dense() for name, p in pipe.named_parameters()}

    found = LocalWorld(2).run(rank)
    assert [norm for norm, _ in found] == pytest.approx([want, want], rel=1e-9)
    torch.testing.assert_close(found[0][1]["0.weight"], dense["table.weight"].grad, rtol=1e-9, atol=1e-15)


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


def refuse_the_last(module: nn.Module, mesh: Any) -> None:
    if mesh["pp"].get_local_rank() == 1:
        raise ValueError("cannot be spread")


def spread_one() -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    return raised_by(lambda: pipe_of(mesh=mesh, parallelize=refuse_the_last))


@pytest.mark.processes
def test_a_stage_that_cannot_be_spread_is_heard_of_when_the_pipeline_is_made(gloo_pool: GlooPool) -> None:
    """The other ranks had their pipeline, and waited in the first step."""
    for kind, text in gloo_pool.run(2, spread_one):
        assert kind == "RunError"
        assert "ValueError: cannot be spread" in text


def test_one_rank_alone_may_ask_for_the_parameters_of_stages_made_by_hand() -> None:
    """The first look at them compared their names with those of the other ranks, and waited for these."""

    def rank(transport: Any) -> list[str]:
        stage = penstock.PipelineStage(nn.Linear(WIDTH, WIDTH), transport.rank, 2, "cpu", group=transport)
        pipe = penstock.Pipeline(stages=[stage], loss_fn=nn.functional.mse_loss, schedule="1f1b", microbatches=2)
        return [name for name, _ in pipe.named_parameters()] if pipe.rank == 1 else []

    assert LocalWorld(2).run(rank) == [[], ["stages.1.weight", "stages.1.bias"]]
