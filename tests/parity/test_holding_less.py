"""Recomputing and offloading change what is held, and nothing else: every case of the parity tests again, with each."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.backward.offload_targets import HostMemory
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PenstockError, StageError
from penstock.plan import Op
from penstock.run import Schedule
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.parity.cases import CASES
from tests.parity.harness import Case, Sizes, compare

SCHEDULES = {"1f1b": Sizes(2, 1, 5), "zbv": Sizes(2, 2, 4)}
WAYS: dict[str, Any] = {
    "recompute": lambda: {"recompute": True},
    "offload": lambda: {"offload": True, "offload_to": HostMemory(threshold=0)},
}
# A graph with torch's non-reentrant checkpoints that is dropped without a backward is found by the garbage collector alone.
LEAVES_CYCLES = ("checkpointed", "dropout_by_microbatch_checkpointed")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_the_same_training(name: str, schedule: str, way: str) -> None:
    def make(sizes: Sizes) -> Case:
        case = CASES[name](sizes)
        case.options |= WAYS[way]()
        case.watched = case.watched and not (way == "recompute" and name in LEAVES_CYCLES)
        return case

    compare(get_schedule(schedule), SCHEDULES[schedule], make)


class Stage(nn.Module):
    """Draws from the global random state, counts its batches, and is looked at by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.layer(x)), 0.5) + x


def train(
    modules: list[nn.Module], x: Tensor, *, schedule: str = "1f1b", steps: int = 2, **options: Any
) -> list[Tensor]:
    """Losses of some steps over two ranks as threads, with the gradients adding up."""

    def rank(transport: LocalTransport) -> list[Tensor]:
        plan = get_schedule(schedule)(2, 4, stages_per_rank=len(modules) // 2)
        own = plan.placement.stages_of(transport.rank)
        stages = [PipelineStage(modules[i], i, len(modules), "cpu", group=transport) for i in own]
        runner = Schedule.from_plan(plan, stages, **{"loss_fn": nn.functional.mse_loss, **options})
        found: list[Tensor] = []
        for _ in range(steps):
            losses: list[Tensor] = []
            runner.step(x, target=torch.zeros_like(x), losses=losses)
            found += losses
        return found

    return LocalWorld(2).run(rank)[-1]


def made(kind: type[nn.Module] = Stage) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind() for _ in range(2)]


def state(modules: list[nn.Module]) -> list[Tensor]:
    return [t.clone() for m in modules for t in (*(p.grad for p in m.parameters()), *m.buffers())]  # type: ignore[union-attr]


def test_random_numbers_and_buffers_are_those_of_the_first_forward() -> None:
    """Ranks as threads take turns, so the global random state is drawn from in the same order with and without an R."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    plain, again = made(), made()
    torch.manual_seed(5)
    expected = train(plain, x)
    torch.manual_seed(5)
    found = train(again, x, recompute=True)
    assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, state(plain), state(again)))
    assert again[0].norm.num_batches_tracked == 8  # type: ignore[comparison-overlap,union-attr]


def test_hooks_are_called_in_both_runs() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    seen: list[str] = []

    def watched() -> list[nn.Module]:
        torch.manual_seed(0)
        modules = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        for module in modules:
            module[0].register_forward_hook(lambda *_: seen.append("after"))
            module[1].register_forward_pre_hook(lambda *_: seen.append("before"))
            module[0].register_forward_hook(lambda module, args, output: output * 2)
        return modules

    plain, again = watched(), watched()
    expected = train(plain, x)
    count = len(seen)
    found = train(again, x, recompute=True)
    assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, state(plain), state(again)))
    assert len(seen) == 2 * count + count // 2  # the last stage of 1f1b runs no forward again
    assert [len(module[0]._forward_hooks) for module in again] == [2, 2]  # type: ignore[union-attr]


class Moody(nn.Module):
    """Gives another shape every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = itertools.count(1)  # of which no copy is made

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).repeat(1 + next(self.calls) // 5, 1)


def test_a_rerun_that_gives_another_shape_is_refused() -> None:
    with pytest.raises(PenstockError, match=r"gave float32.* and when it was run again float32") as caught:
        train(made(Moody), torch.randn(8, 4), steps=1, schedule="gpipe", recompute=[0])
    assert isinstance(caught.value, StageError) or "StageError" in str(caught.value)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_what_is_offloaded_is_away_until_it_is_needed(schedule: str, tmp_path: Path) -> None:
    """Files without a name: none can be seen, and nothing is left."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8192), nn.Linear(8192, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.up(x))
            watched.append(weakref.ref(hidden.untyped_storage()))
            return self.down(hidden)

    watched: list[Any] = []
    alive: list[int] = []

    def modules() -> list[nn.Module]:
        torch.manual_seed(0)
        made = [Wide(), Wide()]
        made[0].register_forward_pre_hook(lambda *_: alive.append(sum(ref() is not None for ref in watched)))
        return made  # type: ignore[return-value]

    x = torch.randn(8, 4)
    plain = modules()
    expected = train(plain, x, schedule=schedule, steps=1)
    most = max(alive)
    watched.clear(), alive.clear()
    moved = modules()
    gc.collect()
    found = train(moved, x, schedule=schedule, steps=1, offload=[0], offload_to=tmp_path)
    assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, state(plain), state(moved)))
    assert list(tmp_path.iterdir()) == []
    assert max(alive) < most


def test_a_folder_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(StageError, match="there is no such folder"):
        train(made(), torch.randn(8, 4), offload=True, offload_to="/nowhere/at/all")


def test_options_become_actions_of_the_plan() -> None:
    def rank(transport: LocalTransport) -> list[str]:
        stage = PipelineStage(nn.Linear(4, 4), transport.rank, 2, "cpu", group=transport)
        plan = get_schedule("gpipe")(2, 3)
        schedule = Schedule.from_plan(plan, stage, loss_fn=nn.functional.mse_loss, recompute={0: [1]}, offload=[1])
        return [
            action.op.name
            for action in schedule.lowered_plan().actions(transport.rank)
            if action.op in (Op.R, Op.O, Op.L)
        ]

    first, second = LocalWorld(2).run(rank)
    assert first == ["R"]
    assert second.count("O") == second.count("L") > 0
