"""Shapes: found in band, once for each signature, without running the model; checked where the user gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Schedule
from penstock.comm import LocalTransport, LocalWorld
from penstock.run import Schedule1F1B
from penstock.schedules import get_schedule
from penstock.stage.pipeline_stage import PipelineStage
from tests.run.pipes import batch, close, grads_of, loop_grads, make_modules, on_ranks


def messages_of(name: str, num_ranks: int, calls: list[tuple[str, int]], **options: Any) -> list[int]:
    """How many messages each call sends, over all ranks."""
    modules = make_modules(num_ranks)
    counted = [0]
    found: list[int] = []
    plan = get_schedule(name)(num_ranks, 2)

    def count(source: int, destination: int, number: int) -> None:
        counted[0] += 1

    def rank(transport: LocalTransport) -> None:
        stage = PipelineStage(modules[transport.rank], transport.rank, num_ranks, "cpu", group=transport)
        schedule = Schedule.from_plan(plan, stage, loss_fn=nn.functional.mse_loss, **options)
        for kind, rows in calls:
            x, y = batch(rows)
            schedule.step(x, target=y) if kind == "step" else schedule.eval(x, target=y)
            transport.collectives.all_bytes("all are done", b"")
            if transport.rank == 0:
                found.append(counted[0])
                counted[0] = 0
            transport.collectives.all_bytes("and counted", b"")

    LocalWorld(num_ranks, on_message=count).run(rank)
    return found


def test_a_warm_step_sends_tensors_and_nothing_else() -> None:
    """Two ranks, two microbatches: a preamble, 2 + 2 tensors, 2 for the verdict; cold messages take three times as many."""
    calls = [("step", 4), ("step", 4), ("eval", 4), ("eval", 4), ("step", 4), ("eval", 4), ("step", 6), ("step", 4)]
    cold, warm, cold_eval, warm_eval = 1 + 12 + 2, 1 + 4 + 2, 1 + 6 + 2, 1 + 2 + 2
    assert messages_of("1f1b", 2, calls) == [cold, warm, cold_eval, warm_eval, warm, warm_eval, cold, warm]


def test_a_dynamic_schedule_describes_every_message() -> None:
    assert messages_of("1f1b", 2, [("step", 4)] * 3, dynamic=True) == [15, 15, 15]


def test_more_shapes_than_are_remembered() -> None:
    """Every number of rows from 2 to 101, twice: the old ones are forgotten, on all ranks alike."""
    modules = make_modules(2)

    def rank(schedule: Schedule, rank: int) -> int:
        for _ in range(2):
            for rows in range(2, 102):
                x, _ = batch(rows)
                schedule.eval(x)
        x, y = batch(40)
        modules[rank].zero_grad()
        schedule.step(x, target=y)
        return max(len(program.saved) for program in schedule._programs.bound.values())

    assert max(on_ranks("1f1b", 2, 2, rank, modules=modules)) <= 64
    assert close(grads_of(modules), loop_grads(modules, *batch(40), 2))


class Cropping(nn.Module):
    """Its output changes for reasons that no input shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.cut = 4

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, : self.cut]


class Padding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.pad(x, (0, 4 - x.shape[1])))


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_output_that_changes_by_itself(dynamic: bool) -> None:
    """Refused with the difference, and what to write; after that the new shape is the known one."""
    torch.manual_seed(0)
    modules = [Cropping(), Padding()]
    x, y = batch(4)

    def rank(schedule: Schedule, rank: int) -> str:
        schedule.step(x, target=y)
        if rank == 0:
            modules[0].cut = 3
        text = ""
        if not dynamic:
            with pytest.raises(RuntimeError) as caught:
                schedule.step(x, target=y)
            text = str(caught.value)
        modules[rank].zero_grad()
        schedule.step(x, target=y)
        return text

    texts = on_ranks("1f1b", 2, 2, rank, modules=list(modules), dynamic=dynamic)
    assert close(grads_of(list(modules)), loop_grads(list(modules), x, y, 2))
    for text in texts if not dynamic else ():
        assert "output of stage 0 for microbatch 0 is (float64[2, 3] with gradient)" in text
        assert "gave (float64[2, 4] with gradient)" in text
        assert "dynamic=True" in text


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_layers_of_the_first_rank_unfrozen_and_frozen_again(name: str) -> None:
    """It knows before the step begins, so the step begins afresh; afterwards both ways are known."""
    x, y = batch(4)
    modules = make_modules(4 if name == "zbv" else 2)
    modules[0].requires_grad_(False)

    def rank(schedule: Schedule, rank: int) -> None:
        for frozen in (True, False, True, False):
            for stage in schedule.stages:
                if stage.stage_index == 0:
                    stage.submod.requires_grad_(not frozen)
                stage.submod.zero_grad()
            schedule.step(x, target=y)
        if rank == 0:
            assert len(schedule._programs.get(0).signatures) == 2

    on_ranks(name, 2, 2, rank, modules=modules)
    assert close(grads_of(modules), loop_grads(modules, x, y, 2))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_layers_of_a_later_rank_unfrozen(name: str) -> None:
    """The ranks before it are at work when it notices: the step fails, says what to do, and the next one is right."""
    modules = make_modules(3)
    modules[0].requires_grad_(False)
    modules[1].requires_grad_(False)
    x, y = batch(4)

    def rank(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)
        schedule.step(x, target=y)
        if rank == 1:
            modules[1].requires_grad_(True)
        with pytest.raises(RuntimeError, match="frozen or unfrozen, call step again"):
            schedule.step(x, target=y)
        modules[rank].zero_grad()
        schedule.step(x, target=y)

    on_ranks(name, 3, 2, rank, modules=modules)
    assert close(grads_of(modules), loop_grads(modules, x, y, 2))


def _given(**options: Any) -> list[str]:
    x, y = batch(4)
    modules = make_modules(2)

    def rank(transport: LocalTransport) -> str:
        mine = options if transport.rank == 1 else {}
        stage = PipelineStage(modules[transport.rank], transport.rank, 2, "cpu", group=transport, **mine)
        schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
        try:
            schedule.step(x, target=y)
            schedule.step(x, target=y)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return LocalWorld(2).run(rank)


def test_given_shapes_that_are_right() -> None:
    right = torch.zeros(2, 4, dtype=torch.float64, device="meta")
    assert _given(input_args=right, output_args=right) == ["", ""]
    assert _given(input_args=(right,), output_args=(right,)) == ["", ""]


@pytest.mark.parametrize("which", ["input_args", "output_args"])
def test_given_shapes_that_are_wrong(which: str) -> None:
    wrong = torch.zeros(4, 4, dtype=torch.float64)
    first, second = _given(**{which: (wrong,)})
    words = f"microbatch 0, stage 1: {which} says (float64[4, 4]), but there is (float64[2, 4])"
    assert second.startswith("ShapeError")
    assert words in second
    assert first.startswith("PeerFailed")
    assert words in first


class Taken(torch.autograd.Function):
    """Has no gradient, though its result requires one."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        Taken.calls += 1


def test_an_input_without_a_gradient() -> None:
    """Cold and warm: nothing is sent, and the stage before has no gradient."""
    modules = make_modules(2)
    x, y = batch(4)
    Taken.calls = 0

    def take(module: nn.Module, args: tuple[Tensor]) -> Tensor:
        made: Tensor = Taken.apply(args[0])  # type: ignore[no-untyped-call]
        return made

    def rank(schedule: Schedule, rank: int) -> None:
        if rank == 1:
            modules[1].register_forward_pre_hook(take)
        schedule.step(x, target=y)
        schedule.step(x, target=y)

    on_ranks("1f1b", 2, 2, rank, modules=modules)
    assert Taken.calls == 4
    assert grads_of(modules[:1]) == []


def test_discovery_touches_neither_random_state_nor_buffers() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(4).double(), nn.Dropout(0.5)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.drop(self.norm(x))

    modules = [Norm(), Norm()]
    x, y = batch(4)

    def rank(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)

    torch.manual_seed(3)
    state = torch.get_rng_state()
    on_ranks("gpipe", 2, 2, rank, modules=list(modules))
    assert [module.calls for module in modules] == [2, 2]
    assert [int(module.norm.num_batches_tracked) for module in modules] == [2, 2]
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    for _ in range(4):
        nn.functional.dropout(torch.ones(2, 4, dtype=torch.float64), 0.5)
    assert torch.equal(torch.get_rng_state(), after)
