"""The front door over real processes: with data-parallel replicas, and with checkpoints that all of them write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import penstock
from tests.front.models import batch, loss_fn, make
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]

STEPS = 2


def data(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(10 * step + replica)


def expected(steps: int, *, tied: bool) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """The unsplit model over the data of both replicas."""
    model = make(tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(steps):
        losses = [loss_fn(model(x), y) for x, y in (data(step, replica) for replica in range(2))]
        loss = sum(losses) / 2
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found, model.state_dict()


def replicated(kind: str, schedule: str, folder: str) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh["dp"].get_local_rank()
    options: dict[str, Any] = {"loss_fn": loss_fn, "microbatches": 4, "profile": False, "schedule": schedule}
    pipe = penstock.Pipeline(make(tied=True), (batch()[0],), mesh=mesh, data_parallel=kind, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(STEPS):
        tokens, labels = data(step, replica)
        loss = pipe.step(tokens, target=labels).loss
        found.append((loss, pipe.clip_grad_norm_(0.1)))
        optimizer.step()
        optimizer.zero_grad()
    pipe.save(folder, optimizer=optimizer, extra={"kind": kind})
    full = {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in pipe.state_dict().items()}
    again = penstock.Pipeline(make(tied=True), (batch()[0],), mesh=mesh, data_parallel=kind, **options)
    fresh = torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.9)
    again.load(folder, optimizer=fresh)
    same = all(
        torch.equal(getattr(v, "_local_tensor", v), getattr(w, "_local_tensor", w))
        for v, w in zip(pipe.state_dict().values(), again.state_dict().values(), strict=True)
    )
    moments = all(
        torch.equal(
            getattr(optimizer.state[p]["momentum_buffer"], "_local_tensor", optimizer.state[p]["momentum_buffer"]),
            getattr(fresh.state[q]["momentum_buffer"], "_local_tensor", fresh.state[q]["momentum_buffer"]),
        )
        for p, q in zip(pipe.parameters(), again.parameters(), strict=True)
    )
    return found, {name: value.tolist() for name, value in full.items()}, same, moments


@pytest.mark.parametrize(("kind", "schedule"), [("ddp", "1f1b"), ("fsdp", "zbv")])
def test_replicas(gloo_pool: GlooPool, tmp_path: Path, kind: str, schedule: str) -> None:
    numbers, state = expected(STEPS, tied=True)
    place = tmp_path / "checkpoint"
    for found, full, same, moments in gloo_pool.run(4, replicated, kind, schedule, str(place)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(numbers))
        assert same, "parameters come back"
        assert moments, "the optimizer's state comes back"
        for name, value in full.items():
            torch.testing.assert_close(torch.tensor(value, dtype=torch.float64), state[name])
    plain = make(tied=True)
    plain.load_state_dict(penstock.load(place).model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, state[name])


def failing() -> str:
    model = make()
    if dist.get_rank() == 0:
        model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(penstock.errors.PenstockError) as caught:
        penstock.Pipeline(model, (batch()[0],), loss_fn=loss_fn, microbatches=4)
    return str(caught.value)


def test_a_rank_that_cannot_capture_tells_the_others(gloo_pool: GlooPool) -> None:
    first, second = gloo_pool.run(2, failing)
    assert "ZeroDivisionError" in first
    assert "rank 0 failed at profiling the model" in second
    assert "ZeroDivisionError" in second
