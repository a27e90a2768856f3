"""Tensor parallel stages whose boundaries are unusual: losses and gradients are those of a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import penstock
from penstock.stage.dtensors import whole_tensor
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]

ROWS, WIDTH, TOLERANCE = 8, 4, 1e-9


def mean_of_lengths(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).norm(dim=-1).mean()


def probability(output: Tensor, target: Tensor) -> Tensor:
    return functional.binary_cross_entropy(output.sigmoid(), target.sigmoid())


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": functional.mse_loss,
    "huber": functional.huber_loss,
    "smooth l1": functional.smooth_l1_loss,
    "probability": probability,
    "soft margin": lambda output, target: functional.soft_margin_loss(output, target.sign()),
    "logits": lambda output, target: functional.binary_cross_entropy_with_logits(output, target.sigmoid()),
    "lengths": mean_of_lengths,
}


class Columns(nn.Module):
    """PipelineMesh with a layer that is cut by columns, whose output stays so; returns its own loss if it is given labels."""

    def __init__(self, columns: int, loss: str | None = None) -> None:
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, columns), loss

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        y = self.last(torch.tanh(self.first(x)))
        return y if labels is None or self.loss is None else LOSSES[self.loss](y, labels)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Plain(nn.Module):
    """Has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * 2


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def data(columns: int = WIDTH) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1)
    shapes = (ROWS, WIDTH), (ROWS, columns)
    x, y = (torch.randn(*shape, generator=dice, dtype=torch.float64) for shape in shapes)
    return x, y


def gradients(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    return {prefix + name: whole_tensor(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def plain(model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], columns: int = WIDTH) -> Any:
    """Losses and gradients of two microbatches, in one process."""
    x, y = data(columns)
    losses = [loss_fn(model(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses), gradients(model)


def compare(found: list[Any], loss: float, grads: Mapping[str, Tensor]) -> None:
    for got, _ in found:
        assert got == pytest.approx(loss, rel=TOLERANCE)
    everywhere = [(name, grad) for _, own in found for name, grad in own.items()]
    assert {name for name, _ in everywhere} == {*grads}
    for name, grad in everywhere:
        torch.testing.assert_close(grad, grads[name], rtol=TOLERANCE, atol=TOLERANCE)


def cut_by_columns(module: nn.Module, mesh: Any) -> None:
    penstock.shard_parameters(module, mesh["tp"], {"*weight": 0, "*bias": 0})


def two_ranks() -> Any:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))


def used_before(mesh: Any, columns: int) -> None:
    """What torch has found out about a loss before there is a pipeline must not stay."""
    _, y = data(columns)
    here = DTensor.from_local(y[: ROWS // 2], mesh["tp"]).redistribute(placements=[Shard(1)]).requires_grad_()
    functional.mse_loss(here, here.detach() + 1).full_tensor().backward()


def captured(names: list[str], columns: int, where: str) -> Any:
    mesh, found, own = two_ranks(), [], where == "model"
    used_before(mesh, columns)
    x, y = data(columns)
    for name in names:
        model = made(lambda name=name: Columns(columns, name if own else None))
        given: dict[str, Any] = {"mesh": mesh, "schedule": "gpipe", "microbatches": 2, "profile": False}
        given |= {"output_loss_value_spec": True, "example_kwargs": {"labels": y}} if own else {"loss_fn": LOSSES[name]}
        pipe = penstock.Pipeline(model, (x,), parallelize=cut_by_columns, **given)
        result = pipe.step(x, labels=y) if own else pipe.step(x, target=y)
        found.append((result.loss, {n: whole_tensor(p.grad) for n, p in pipe.named_parameters() if p.grad is not None}))
    return found


@pytest.mark.parametrize("columns", [4, 5])
@pytest.mark.parametrize("where", ["loss_fn", "model"])
def test_an_output_that_is_sharded_by_columns(gloo_pool: GlooPool, columns: int, where: str) -> None:
    """torch divides the gradient of a mean that it takes of shards by the size of one shard: it was twice what it should be,
    while the loss was right. With shards of two sizes the loss was wrong too, and so was one that torch adds up of norms.
    """
    names = [name for name in LOSSES if where == "loss_fn" or name != "lengths"]
    found = gloo_pool.run(2, captured, names, columns, where, timeout=120.0)
    for place, name in enumerate(names):
        wanted = plain(made(lambda: Columns(columns)), LOSSES[name], columns)
        compare([one[place] for one in found], *wanted)


def by_columns(module: nn.Module, mesh: Any) -> nn.Module:
    styles = {"first": ColwiseParallel(), "last": RowwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    return parallelize_module(module, mesh["tp"], styles)


def by_hand_and_sharded(name: str) -> Any:
    mesh = two_ranks()
    stage = penstock.PipelineStage(made(lambda: Columns(WIDTH)), 0, 1, "cpu", group=mesh["pp"].get_group())
    given: dict[str, Any] = {"mesh": mesh, "schedule": "gpipe", "microbatches": 2, "loss_fn": LOSSES[name]}
    x, y = data()
    result = penstock.Pipeline(stages=[stage], parallelize=by_columns, **given).step(x, target=y)
    return result.loss, gradients(stage.submod)


@pytest.mark.parametrize("name", ["mse", "probability"])
def test_an_output_that_a_stage_made_by_hand_leaves_sharded(gloo_pool: GlooPool, name: str) -> None:
    """The same, where the output is left as the user placed it."""
    found = gloo_pool.run(2, by_hand_and_sharded, name, timeout=120.0)
    compare(found, *plain(made(lambda: Columns(WIDTH)), LOSSES[name]))


def by_rows(module: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def row_wise(schedule: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    place = mesh["pp"].get_local_rank()
    module = made(lambda: nn.Sequential(Wide(), Wide()))[place]  # type: ignore[index]
    stage = penstock.PipelineStage(module, place, 2, "cpu", group=mesh["pp"].get_group())
    given: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "microbatches": 2, "loss_fn": functional.mse_loss}
    pipe = penstock.Pipeline(stages=[stage], parallelize=by_rows, **given)
    x, y = data()
    loss = pipe.step(x, target=y).loss
    grads = gradients(module, f"{place}.")
    return (loss, grads), pipe.evaluate(x, target=y).loss, pipe.predict(x)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_that_ends_with_a_row_wise_layer(gloo_pool: GlooPool, schedule: str) -> None:
    """Its output is a sum over ranks that may still be under way, and so is the gradient that the next stage sends back. Their
    memory was sent before it was there: the step ended with "Bad address".
    """
    found = gloo_pool.run(4, row_wise, schedule, timeout=120.0)
    model = made(lambda: nn.Sequential(Wide(), Wide()))
    loss, grads = plain(model, functional.mse_loss)
    compare([one for one, _, _ in found], loss, grads)
    for _, evaluated, scores in found:
        assert evaluated == pytest.approx(loss, rel=TOLERANCE)
        torch.testing.assert_close(scores, model(data()[0]).detach(), rtol=TOLERANCE, atol=TOLERANCE)


def with_a_plain_stage() -> nn.Module:
    return made(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Plain(), nn.Linear(WIDTH, WIDTH), Plain()))


def without_parameters(schedule: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    given: dict[str, Any] = {"mesh": mesh, "schedule": schedule, "microbatches": 2, "loss_fn": functional.mse_loss}
    cuts = {str(place): penstock.SplitPoint.BEGINNING for place in (1, 2, 3)}
    x, y = data()
    pipe = penstock.Pipeline(
        with_a_plain_stage(), (x,), parallelize=cut_by_columns, split_spec=cuts, profile=False, **given
    )
    loss = pipe.step(x, target=y).loss
    return loss, {name: whole_tensor(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["interleaved1f1b", "zbv"])
def test_a_captured_stage_without_parameters(gloo_pool: GlooPool, schedule: str) -> None:
    """No parameter told on which mesh to put a DTensor that arrived, and the error told to give `get_mesh` of a stage which
    the user had not made."""
    found = gloo_pool.run(4, without_parameters, schedule, timeout=120.0)
    compare(found, *plain(with_a_plain_stage(), functional.mse_loss))
