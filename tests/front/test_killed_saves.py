"""A save beside the steps of tensor parallel stages whose first rank is killed, loaded into such stages and by one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.checkpoint.disk import Disk
from penstock.front import saving
from tests.checkpoint.crashes import Interrupted
from tests.front.test_dimensions import by_name, data, make
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def pipeline(**given: Any) -> penstock.Pipeline:
    given |= {"loss_fn": nn.functional.mse_loss, "microbatches": 2, "profile": False, "schedule": "1f1b"}
    return penstock.Pipeline(make(), (data(0)[0],), **given)


def step(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer, number: int) -> None:
    x, y = data(number)
    pipe.step(x, target=y)
    optimizer.step()
    optimizer.zero_grad()


def loss(pipe: penstock.Pipeline) -> float | None:
    x, y = data(9)
    return pipe.evaluate(x, target=y).loss


class InThread(Interrupted):
    """What is done before `save` returns is not counted."""

    def act(self) -> None:
        if threading.current_thread().name == "penstock-checkpoint":
            super().act()


def save_and_be_killed(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer, folder: str, at: int) -> int:
    """How many acts the first rank did; the disks of the others go on, as those of other hosts do."""
    disk = InThread(at if pipe.is_first else 1 << 60)
    disk.then = disk.kill
    saving.DISK = disk
    pipe.ranks.barrier("the disk")
    made = pipe.save(folder, optimizer=optimizer, keep=2, wait=False)
    assert made is not None
    made._thread.join(60)
    assert made.done
    made.told = True  # the process is gone: nobody hears how it ended
    saving._UNDER_WAY.pop(made._thread, None)
    pipe.ranks.barrier("the end")
    saving.DISK = Disk()
    return int(pipe.ranks.all_gather("acts", disk.count)[0])


def killed_again_and_again(folder: str) -> Any:
    spoken, threading.excepthook = threading.excepthook, lambda args: None  # a thread that is killed says nothing
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipe, again = (pipeline(mesh=mesh, parallelize=by_name) for _ in range(2))
    optimizer, other = (torch.optim.Adam(one.parameters(), lr=1e-2) for one in (pipe, again))
    step(pipe, optimizer, 0)
    acts = save_and_be_killed(pipe, optimizer, folder, 1 << 60)
    before, found = loss(pipe), []
    step(pipe, optimizer, 1)
    for at in (acts // 2, *range(acts - 2, acts + 2), 1 << 60):
        done = save_and_be_killed(pipe, optimizer, folder, at)
        again.load(folder, optimizer=other, or_older=True)
        found.append(loss(again))
        if done < at:
            break
    threading.excepthook = spoken
    step(again, other, 2)
    again.save(folder, optimizer=other)
    return before, loss(pipe), found, loss(again)


def test_a_killed_save_is_loaded_into_tensor_parallel_stages(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """It is the state before or after, never a mixture of what the ranks have written; and the run goes on from it."""
    place = tmp_path / "kept"
    for before, after, found, goes_on in gloo_pool.run(4, killed_again_and_again, str(place), timeout=100.0):
        assert before != after
        assert set(found) == {before, after}
        assert found[-1] == after
        assert len(found) > 4
        last = goes_on
    model = make()
    model.load_state_dict(penstock.load(place).model)
    x, y = data(9)
    assert nn.functional.mse_loss(model(x), y).item() == pytest.approx(last, rel=1e-9)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"], "nothing half-written is left"
