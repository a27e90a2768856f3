"""Context and expert parallel dimensions beside "pp", tensor parallel ones beside "dp": every row and parameter counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

import penstock
from tests.front import test_dimensions as tensor_parallel
from tests.front.test_dimensions import STEPS, WIDTH, by_name, make
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]
LENGTH, EXPERTS = 4, 2


class Token(nn.Module):
    """Works on each token of a sequence alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Experts(nn.Module):
    """Each row is a mixture of what the experts make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.matrices = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.matmul(x.unsqueeze(0), self.matrices)
        return x + (made * self.gate(x).softmax(-1).t().unsqueeze(-1)).sum(0)


def model_of(kind: str) -> nn.Sequential:
    if kind == "tp":
        return make()
    torch.manual_seed(0)
    return nn.Sequential(*(Token() if kind == "cp" else Experts() for _ in range(2))).double()


def data(kind: str, step: int) -> tuple[Tensor, Tensor]:
    shape = (8, LENGTH, WIDTH) if kind == "cp" else (8, WIDTH)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, x.sin()


def along_the_sequence(module: nn.Module, mesh: Any) -> nn.Module:
    """Each rank has its part of every sequence, also between the stages."""
    first, last = mesh["pp"].get_local_rank() == 0, mesh["pp"].get_local_rank() == 1

    def enter(_: nn.Module, inputs: Any, cp: Any) -> Any:
        (x,) = inputs
        if first:
            return DTensor.from_local(x, cp, [Replicate()], run_check=False).redistribute(cp, [Shard(1)])
        assert x.placements == (Shard(1),)
        assert x.to_local().shape[1] == LENGTH // 2  # nothing was gathered on the way
        return x

    def leave(_: nn.Module, output: Any, cp: Any) -> Any:
        return output.redistribute(cp, [Replicate()]).to_local() if last else output

    return distribute_module(module, mesh["cp"], input_fn=enter, output_fn=leave)


def by_experts(module: nn.Module, mesh: Any) -> None:
    penstock.shard_parameters(module, mesh["ep"], {"*matrices": 0})


def pipe_of(kind: str) -> tuple[penstock.Pipeline, slice]:
    """The pipeline, and the rows of a batch that are this rank's."""
    given: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "microbatches": 2, "schedule": "1f1b"}
    if kind == "cp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
        place = mesh["pp"].get_local_rank()
        stage = penstock.PipelineStage(model_of(kind)[place], place, 2, "cpu", group=mesh["pp"].get_group())
        return penstock.Pipeline(stages=[stage], mesh=mesh, parallelize=along_the_sequence, **given), slice(None)
    given["profile"] = False
    if kind == "ep":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
        pipe = penstock.Pipeline(model_of(kind), (data(kind, 0)[0],), mesh=mesh, parallelize=by_experts, **given)
        assert {p.to_local().shape[0] for n, p in pipe.named_parameters() if "matrices" in n} == {EXPERTS // 2}
        return pipe, slice(None)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
    mine = slice(4 * mesh["dp"].get_local_rank(), 4 * mesh["dp"].get_local_rank() + 4)
    given |= {"mesh": mesh, "parallelize": by_name, "data_parallel": "fsdp"}
    return penstock.Pipeline(model_of(kind), (data(kind, 0)[0][mine],), **given), mine


def spread(folder: str, kind: str) -> Any:
    pipe, mine = pipe_of(kind)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = data(kind, step)
        losses.append(pipe.step(x[mine], target=y[mine]).loss)
        norms.append(pipe.clip_grad_norm_(0.1))
        optimizer.step()
        optimizer.zero_grad()
    pipe.save(folder, optimizer=optimizer)
    return losses, norms


@pytest.mark.parametrize("kind", ["cp", "ep", "tp"])
def test_four_processes_are_one(
    gloo_pool: GlooPool, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind)
    monkeypatch.setattr(tensor_parallel, "data", lambda step: data(kind, step))
    losses, norms, state = tensor_parallel.one_process(model)
    for found in gloo_pool.run(4, spread, str(tmp_path / "kept"), kind, timeout=120.0):
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[1] == pytest.approx(norms, rel=1e-9)
    saved = penstock.load(tmp_path / "kept").model
    assert len(saved) == len(state)
    for name, value in state.items():
        torch.testing.assert_close(saved[f"stages.{name}" if kind == "cp" else name], value)
