"""Tensor parallel stages, 2 x 2 processes: losses, gradients, norms and checkpoints are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import penstock
from penstock.errors import StageError
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]

WIDTH, STEPS = 8, 2


class Block(nn.Module):
    def __init__(self, *, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.down(torch.tanh(self.up(self.norm(x))))
        return x + made if self.residual else made


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(residual=True) for _ in range(4))).double()


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
    return x, x.sin()


def one_process(model: nn.Module) -> tuple[list[float], list[float], dict[str, Tensor]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = data(step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def by_name(module: nn.Module, mesh: Any) -> None:
    rows = {"*up.weight": 0, "*up.bias": 0, "*down.weight": 1}
    penstock.shard_parameters(module, mesh["tp"], rows)


def train(pipe: penstock.Pipeline, folder: str) -> Any:
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = data(step)
        losses.append(pipe.step(x, target=y).loss)
        norms.append(pipe.clip_grad_norm_(0.1))
        optimizer.step()
        optimizer.zero_grad()
    pipe.save(folder, optimizer=optimizer)
    return losses, norms


def captured(folder: str, schedule: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    given: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss,
        "microbatches": 2,
        "profile": False,
        "schedule": schedule,
    }
    x, y = data(0)
    pipe = penstock.Pipeline(make(), (x,), mesh=mesh, parallelize=by_name, **given)
    local = {name: tuple(p.to_local().shape) for name, p in pipe.named_parameters()}
    losses, norms = train(pipe, folder)
    scores, loss = pipe.predict(x), pipe.evaluate(x, target=y).loss
    again = penstock.Pipeline(make(), (x,), mesh=mesh, parallelize=by_name, **given)
    again.load(folder, optimizer=torch.optim.Adam(again.parameters(), lr=1e-2))
    return losses, norms, local, scores, loss, again.evaluate(x, target=y).loss


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_captured_model_spread_by_the_names_of_its_parameters(
    gloo_pool: GlooPool, tmp_path: Path, schedule: str
) -> None:
    model = make()
    losses, norms, state = one_process(model)
    x, y = data(0)
    with torch.no_grad():
        after = nn.functional.mse_loss(model(x), y).item()
    for found in gloo_pool.run(4, captured, str(tmp_path / "kept"), schedule, timeout=120.0):
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[1] == pytest.approx(norms, rel=1e-9)
        assert all(
            shape == (WIDTH, WIDTH)
            for name, shape in found[2].items()
            if name.endswith("weight") and "norm" not in name
        )
        torch.testing.assert_close(found[3], model(x).detach())
        assert found[4] == found[5] == pytest.approx(after, rel=1e-9)
    saved = penstock.load(tmp_path / "kept").model
    for name, value in state.items():
        torch.testing.assert_close(saved[name], value)


def by_modules(module: nn.Module, mesh: Any) -> nn.Module:
    """torch's own plan, for real modules: what travels between the stages is sharded."""
    first, last = mesh["pp"].get_local_rank() == 0, mesh["pp"].get_local_rank() == 1
    plan = {
        "up": ColwiseParallel(input_layouts=Replicate() if first else Shard(-1)),
        "down": RowwiseParallel(output_layouts=Replicate() if last else Shard(-1), use_local_output=last),
    }
    return parallelize_module(module, mesh["tp"], plan)


def blocks() -> list[Block]:
    torch.manual_seed(0)
    made = [Block(residual=False).double() for _ in range(2)]
    for block in made:
        block.norm = nn.Identity()  # type: ignore[assignment]  # what is not in torch's plan takes plain tensors alone
    return made


def by_hand(folder: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    place = mesh["pp"].get_local_rank()
    stage = penstock.PipelineStage(blocks()[place], place, 2, "cpu", group=mesh["pp"].get_group())
    pipe = penstock.Pipeline(
        stages=[stage],
        mesh=mesh,
        parallelize=by_modules,
        loss_fn=nn.functional.mse_loss,
        schedule="1f1b",
        microbatches=2,
    )
    return train(pipe, folder)


def test_stages_made_by_hand_send_shards(gloo_pool: GlooPool, tmp_path: Path) -> None:
    model = nn.Sequential(*blocks())
    losses, norms, state = one_process(model)
    for found in gloo_pool.run(4, by_hand, str(tmp_path / "kept"), timeout=120.0):
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[1] == pytest.approx(norms, rel=1e-9)
    saved = penstock.load(tmp_path / "kept").model
    assert len(saved) == len(state)
    for name, value in state.items():
        torch.testing.assert_close(saved[f"stages.{name}"], value)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(StageError, match="parallelize=function without a mesh"):
        penstock.Pipeline(make(), (data(0)[0],), parallelize=by_name, profile=False)
    with pytest.raises(StageError, match=r"no dimension 2 to be cut along"):
        penstock.shard_parameters(nn.Linear(2, 2), None, {"weight": 2})
