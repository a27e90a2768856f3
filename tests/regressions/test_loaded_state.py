"""A load leaves what was saved, and nothing that came later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import penstock
from penstock.comm import LocalTransport, LocalWorld
from tests.gloo_pool import GlooPool

WIDTH = 4


class Late(nn.Module):
    """A layer that gets its first gradient when it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.later = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x).tanh()
        return self.later(x) if self.on else x


class Counting(Optimizer):
    """An optimizer with a number in the state of a parameter and one in its group, both made in its first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter -= group["lr"] * parameter.grad / (state["count"] + group["steps"])


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "counting": Counting,
}


def make(transport: LocalTransport, kind: str) -> tuple[penstock.Pipeline, Optimizer]:
    """Two stages, on as many ranks as there are."""
    torch.manual_seed(0)
    modules = [Late(), Late()]
    own = range(transport.rank, 2, transport.num_ranks)
    stages = [penstock.PipelineStage(modules[k], k, 2, "cpu", group=transport) for k in own]
    pipe = penstock.Pipeline(stages=stages, schedule="1f1b" if transport.num_ranks == 2 else "loopedbfs", microbatches=2,
                             loss_fn=nn.functional.mse_loss)  # fmt: skip
    return pipe, KINDS[kind](pipe.parameters())


def train(pipe: penstock.Pipeline, optimizer: Optimizer, numbers: range, *, late: bool) -> list[float]:
    losses = []
    for number in numbers:
        x, y = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(number))
        for module in (
            module for stage in pipe.stages for module in stage.submod.modules() if isinstance(module, Late)
        ):
            module.on = late
        losses.append(float(pipe.step(x, target=y).loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("saving", "loading"), [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("steps", [0, 1], ids=["before the first step", "before the first step of one layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_that_was_not_saved_goes(tmp_path: Path, kind: str, steps: int, saving: int, loading: int) -> None:
    """A checkpoint was saved before the optimizer, or a parameter in it, had state. Loading it left the moments of later steps,
    which the next update used: a run that had gone back went on otherwise than one that began there."""
    place = tmp_path / "checkpoint"

    def save(transport: LocalTransport) -> None:
        pipe, optimizer = make(transport, kind)
        train(pipe, optimizer, range(steps), late=False)
        pipe.save(place, optimizer=optimizer)

    def go_on(transport: LocalTransport, used: int) -> Any:
        pipe, optimizer = make(transport, kind)
        train(pipe, optimizer, range(10, 10 + used), late=True)
        pipe.load(place, optimizer=optimizer)
        state = {name: dict(optimizer.state[p]) for name, p in pipe.named_parameters() if p in optimizer.state}
        groups = [{key for key in group if key != "params"} for group in optimizer.param_groups]
        return train(pipe, optimizer, range(20, 23), late=True), {n: sorted(s) for n, s in state.items()}, groups

    LocalWorld(saving).run(save)
    assert LocalWorld(loading).run(go_on, 2) == LocalWorld(loading).run(go_on, 0)


def test_an_older_one_without_state_leaves_none(tmp_path: Path) -> None:
    """The same by way of or_older: the newest is damaged, the one before it is of the beginning."""
    place = tmp_path / "checkpoint"

    def run(transport: LocalTransport) -> None:
        pipe, optimizer = make(transport, "adam")
        pipe.save(place, optimizer=optimizer, keep=2)
        train(pipe, optimizer, range(1), late=True)
        pipe.save(place, optimizer=optimizer, keep=2)
        (place / "__0_0.distcp").write_bytes(b"nothing")
        with pytest.warns(UserWarning, match="trying the older checkpoint"):
            pipe.load(place, optimizer=optimizer, or_older=True)
        assert not optimizer.state

    LocalWorld(1).run(run)


def test_what_a_scheduler_put_into_a_group_stays(tmp_path: Path) -> None:
    """What is not of the optimizer's own: a schedule made anew, for a checkpoint that was saved without one, goes on."""
    place = tmp_path / "checkpoint"

    def run(transport: LocalTransport) -> None:
        pipe, optimizer = make(transport, "adam")
        pipe.save(place, optimizer=optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
        pipe.load(place, optimizer=optimizer)
        train(pipe, optimizer, range(1), late=True)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]

    LocalWorld(1).run(run)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())  # type: ignore[no-any-return]


def sharded(folder: str, kind: str, ranks: int) -> list[Any]:
    """Losses after going back to the beginning, of a pipeline that was used and of one that was not."""
    found = []
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("dp", "pp"))
    for used in (0, 2):
        torch.manual_seed(0)
        pipe = penstock.Pipeline(
            Tied(), (torch.ones(4, WIDTH),), loss_fn=nn.functional.mse_loss, schedule="loopedbfs" if ranks == 1 else "1f1b",
            microbatches=2, profile=False, mesh=mesh, data_parallel="fsdp", stages=3 if ranks == 1 else 2,
        )  # fmt: skip
        optimizer = KINDS[kind](pipe.parameters())
        if not used:
            pipe.save(folder, optimizer=optimizer)
        train(pipe, optimizer, range(10, 10 + used), late=True)
        pipe.load(folder, optimizer=optimizer)
        found.append(train(pipe, optimizer, range(20, 23), late=True))
    return found


@pytest.mark.processes
@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(("kind", "ranks"), [("adam", 2), ("counting", 1)])
def test_sharded_state_that_was_not_saved_goes(gloo_pool: GlooPool, tmp_path: Path, kind: str, ranks: int) -> None:
    """The same under FSDP; with one rank a weight that two stages share is sharded twice, and both have state."""
    for fresh, used in gloo_pool.run(2 * ranks, sharded, str(tmp_path / "checkpoint"), kind, ranks):
        assert fresh == used
