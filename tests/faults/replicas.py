"""Two data-parallel replicas of a pipeline of two ranks, in which one of the four processes does something."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipeline
from penstock.errors import PenstockError
from penstock.front import spread
from penstock.run import Schedule1F1B
from penstock.stage import PipelineStage
from tests.faults.fragile import when_all_others_have_come

CPU = torch.device("cpu")
WIDTH, MICROBATCHES = 4, 3


class Acts(nn.Module):
    """A layer that does something before a forward, once, when it is told to."""

    act: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        act, self.act = self.act, None
        if act is not None:
            act()
        value: Tensor = self.inner(x)
        return value


def fail() -> None:
    raise ArithmeticError("on purpose")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def in_trouble(device: torch.device, kind: str, victim: int, act: Any) -> tuple[list[str], float]:
    """A good step; one in which the victim acts, or with `act=None` is given a wrong batch; two more. What each raised."""
    os.environ["PENSTOCK_HEARTBEAT"] = "1"
    try:
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "pp"))
        place, module = mesh["pp"].get_local_rank(), Acts().to(device)
        wrapped = (
            DistributedDataParallel(module, process_group=mesh["dp"].get_group())
            if kind == "ddp"
            else fully_shard(module, mesh=mesh["dp"])
        )
        stage = PipelineStage(wrapped, place, 2, device, group=mesh["pp"].get_group())
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        pids: list[Any] = [None] * 4
        dist.all_gather_object(pids, os.getpid(), group=dist.new_group(backend="gloo"))
        acts = dist.get_rank() == victim
        found = [stepped(schedule, device)]
        module.act = act if acts else None
        start = time.monotonic()
        found.append(stepped(schedule, device, rows=5 if acts and act is None else 6))
        module.act = None
        found += [stepped(schedule, device) for _ in range(2)]
        seconds = time.monotonic() - start
        if act is stop and when_all_others_have_come(victim):
            os.kill(pids[victim], signal.SIGCONT)
        return found, seconds
    finally:
        del os.environ["PENSTOCK_HEARTBEAT"]


def outside_a_step(where: str, size: tuple[int, int], act: Any, folder: str) -> tuple[str, str, float]:
    """A pipeline makes a good step; then the last rank of the last replica acts where the others go on. What they raised."""
    os.environ["PENSTOCK_HEARTBEAT"] = "1"
    try:
        mesh = init_device_mesh("cpu", size, mesh_dim_names=("dp", "pp"))
        stage = PipelineStage(Acts(), mesh["pp"].get_local_rank(), size[1], CPU, group=mesh["pp"].get_group())
        kind = "fsdp" if where == "clip" else "ddp"  # what is not sharded has its norm without the replicas
        pipe = Pipeline(
            stages=[stage], mesh=mesh, data_parallel=kind, loss_fn=nn.functional.mse_loss, microbatches=MICROBATCHES
        )
        x, y = torch.ones(6, WIDTH), torch.zeros(6, WIDTH)
        pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        victim = len(pids) - 1
        pipe.step(x, target=y)
        if dist.get_rank() == victim:
            if where == "loss":
                share = spread.Telling._in_host_memory
                with patch.object(spread.Telling, "_in_host_memory", lambda *a: (act(), share(*a))[1]):
                    return said(lambda: pipe.step(x, target=y)), "", 0.0
            act()
        calls = {
            "loss": lambda: pipe.step(x, target=y),
            "clip": lambda: pipe.clip_grad_norm_(1.0),
            "any": lambda: pipe.ranks.any(False),
            "save": lambda: pipe.save(folder),
        }
        start = time.monotonic()
        found = said(calls[where]), said(calls["loss"])
        seconds = time.monotonic() - start
        if act is stop and when_all_others_have_come(victim):
            os.kill(pids[victim], signal.SIGCONT)
        return *found, seconds
    finally:
        del os.environ["PENSTOCK_HEARTBEAT"]


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def stepped(schedule: Schedule1F1B, device: torch.device, *, rows: int = 6) -> str:
    x, y = torch.ones(6, WIDTH, device=device), torch.zeros(rows, WIDTH, device=device)
    try:
        schedule.step(x, target=y)
    except (PenstockError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
