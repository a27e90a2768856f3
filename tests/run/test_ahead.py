"""Compiled stages are compiled on all ranks before the first microbatch, from shapes that travel ahead of the data."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import penstock
from penstock.backward.compile_stage import compile_in_place
from penstock.comm import LocalTransport, LocalWorld
from penstock.errors import PenstockError
from penstock.run import Schedule
from penstock.run.compiled_costs import compiled_costs
from penstock.schedules import get_schedule
from penstock.simulate import Costs, simulate
from penstock.stage.pipeline_stage import PipelineStage
from tests.run.pipes import WIDTH, batch, close, grads_of, loop_grads, make_modules

Events = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def noting(events: Events) -> Callable[..., Any]:
    """A backend that notes, with the rank's thread, when it compiles and when what it compiled runs."""

    def backend(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        events.append((threading.current_thread().name, "compiles"))

        def run(*args: Any) -> Any:
            if not any(isinstance(arg, Tensor) and arg.isnan().any() for arg in args):  # else it has no data
                events.append((threading.current_thread().name, "runs"))
            return graph.forward(*args)

        return run

    return backend


def run_ranks(
    name: str, modules: list[nn.Module], function: Callable[[Schedule, int], Any], *, microbatches: int = 3
) -> list[Any]:
    plan = get_schedule(name)(2, microbatches)

    def rank(transport: LocalTransport) -> Any:
        stages = [
            PipelineStage(modules[i], i, plan.num_stages, "cpu", group=transport)
            for i in plan.placement.stages_of(transport.rank)
        ]
        return function(Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss), transport.rank)

    return LocalWorld(2).run(rank)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_every_rank_compiles_all_of_it_before_anything_runs(name: str) -> None:
    events: Events = []
    modules = make_modules(2 if name == "1f1b" else 4)
    x, y = batch(6)
    want = loop_grads(modules, x, y, 3)
    for module in modules:
        compile_in_place(module, {"backend": noting(events)})

    def steps(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)

    run_ranks(name, modules, steps)
    assert close(grads_of(modules), want)
    for rank in {thread for thread, _ in events}:
        kinds = [kind for thread, kind in events if thread == rank]
        assert kinds == sorted(kinds)  # "compiles" before "runs"
    # The forward and two parts of the backward of each stage; the first stage has no gradient to give, and so one part.
    assert [kind for _, kind in events].count("compiles") == 3 * len(modules) - 1


def test_a_second_step_compiles_nothing() -> None:
    events: Events = []
    modules = make_modules(2)
    for module in modules:
        compile_in_place(module, {"backend": noting(events)})
    x, y = batch(6)

    def steps(schedule: Schedule, rank: int) -> int:
        schedule.step(x, target=y)
        before = [kind for _, kind in events].count("compiles")
        schedule.step(x, target=y)
        return before

    before = max(run_ranks("1f1b", modules, steps))
    assert [kind for _, kind in events].count("compiles") == before


def test_parts_of_an_eager_stage_are_compiled_ahead_too() -> None:
    events: Events = []
    modules: list[nn.Module] = [nn.Sequential(*make_modules(2), nn.Tanh()) for _ in range(2)]
    x, y = batch(6)
    want = loop_grads(modules, x, y, 3)
    for module in modules:
        module[1] = torch.compile(module[1], backend=noting(events))  # type: ignore[index,operator]
    run_ranks("1f1b", modules, lambda schedule, rank: schedule.step(x, target=y))
    got = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    assert close(got, want)
    for rank in {thread for thread, _ in events}:
        kinds = [kind for thread, kind in events if thread == rank]
        assert kinds == sorted(kinds)


class Counting(nn.Module):
    """What a run without data must leave alone: a batch norm's statistics, random numbers, hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x)))


def test_it_leaves_buffers_random_numbers_and_hooks_alone() -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Counting().double() for _ in range(2)]
    eager = copy.deepcopy(modules)
    fired: list[str] = []
    for module in modules:
        module.register_forward_hook(lambda *_: fired.append("forward"))
        compile_in_place(module, {"backend": "aot_eager"})
    x, y = batch(6)

    def steps(schedule: Schedule, rank: int) -> list[Tensor]:
        losses: list[Tensor] = []
        schedule.step(x, target=y, losses=losses)
        return losses

    torch.manual_seed(3)
    found = run_ranks("1f1b", modules, steps)[1]
    torch.manual_seed(3)
    expected = run_ranks("1f1b", eager, steps)[1]
    assert all(map(torch.equal, found, expected))
    for one, other in zip(modules, eager, strict=True):
        assert all(map(torch.equal, one.buffers(), other.buffers()))
    assert len(fired) == 2 * 3


class Choosing(nn.Module):
    """It looks at a value, which a run without data does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum().item() > 1e9 else self.layer(x).tanh()


@pytest.mark.parametrize("at", [0, 1])
def test_a_stage_that_cannot_run_without_data_compiles_with_its_first_microbatch(at: int) -> None:
    torch.manual_seed(0)
    modules = make_modules(2)
    modules[at] = Choosing().double()
    x, y = batch(6)
    want = loop_grads(modules, x, y, 3)
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})
    run_ranks("1f1b", modules, lambda schedule, rank: schedule.step(x, target=y))
    assert close(grads_of(modules), want)


class Tallying(nn.Module):
    """What it gives depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


def test_a_module_that_counts_its_calls_counts_microbatches() -> None:
    torch.manual_seed(0)
    modules = [make_modules(1)[0], Tallying().double()]
    x, y = batch(6)
    want = loop_grads(modules, x, y, 3)
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})
    run_ranks("1f1b", modules, lambda schedule, rank: schedule.step(x, target=y))
    assert modules[1].calls == 3
    assert close(grads_of(modules), want)


class Hidden(nn.Module):
    """torch.compile does not look into it, and it does not run without data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum().item() < 1e9 else x


def test_a_stage_without_a_graph_that_is_not_rehearsed_says_why_too() -> None:
    modules = [make_modules(1)[0], Hidden().double()]
    x, y = batch(6)
    want = loop_grads(modules, x, y, 3)
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})

    def steps(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)
        schedule.step(x, target=y)

    with pytest.warns(penstock.errors.NotCompiled, match=r"runs eagerly, .*disable") as told:
        run_ranks("1f1b", modules, steps)
    assert len([warning for warning in told if warning.category is penstock.errors.NotCompiled]) == 1
    assert close([grad / 2 for grad in grads_of(modules)], want)


class Awkward(nn.Module):
    """It refuses what placeholders are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise TypeError("only numbers")
        return self.layer(x)


@pytest.mark.parametrize(("kind", "told"), [(Choosing, False), (Awkward, True)])
def test_what_is_not_expected_of_a_run_without_data_is_told_with_its_stage(
    kind: type[nn.Module], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A branch on a value is expected; both run once there is data."""
    torch.manual_seed(0)
    modules = [make_modules(1)[0], kind().double()]
    x, y = batch(6)
    want = loop_grads(modules, x, y, 3)
    compile_in_place(modules[0], {"backend": "aot_eager"})

    def steps(schedule: Schedule, rank: int) -> None:
        schedule.step(x, target=y)

    run_ranks("1f1b", modules, steps)
    assert close(grads_of(modules), want)
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    expected = "stage 1 could not be run on placeholders, and is compiled when its first microbatch comes: TypeError: "
    assert [text.removesuffix("only numbers") for text in warned] == ([expected] if told else [])


class Switching(nn.Module):
    """Its code depends on something that torch.compile guards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.doubles = False

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2 if self.doubles else self.layer(x)


def test_a_guard_that_fails_retraces_on_its_rank_alone() -> None:
    torch.manual_seed(0)
    events: Events = []
    modules: list[nn.Module] = [Switching().double() for _ in range(2)]
    x, y = batch(6)
    want = loop_grads(modules, x, y, 3)
    other = copy.deepcopy(modules)
    other[1].doubles = True  # type: ignore[assignment]
    want = [one + two for one, two in zip(want, loop_grads(other, x, y, 3), strict=True)]
    for module in modules:
        compile_in_place(module, {"backend": noting(events)})

    def steps(schedule: Schedule, rank: int) -> tuple[int, int]:
        def compiled() -> int:
            return events.count((threading.current_thread().name, "compiles"))

        schedule.step(x, target=y)
        before = compiled()
        if rank == 1:
            modules[1].doubles = True  # type: ignore[assignment]
        schedule.step(x, target=y)
        return before, compiled()

    assert run_ranks("1f1b", modules, steps) == [(2, 2), (3, 6)]
    assert close(grads_of(modules), want)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_it_has_told_leaves_nobody_waiting(failing: int) -> None:
    modules = make_modules(2)
    x, y = batch(6)
    want = loop_grads(modules, x, y, 3)
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})

    def steps(schedule: Schedule, rank: int) -> None:
        with pytest.raises((PenstockError, TypeError)):
            schedule.step(*(["no tensor"] if rank == failing else [x]), target=None if rank == failing else y)
        schedule.step(x, target=y)

    run_ranks("1f1b", modules, steps)
    assert close(grads_of(modules), want)


def test_progress_is_told_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    modules = make_modules(2)
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})
    x, y = batch(6)
    with caplog.at_level(logging.INFO, "penstock"):
        run_ranks("1f1b", modules, lambda schedule, rank: schedule.step(x, target=y))
    told = [record.getMessage() for record in caplog.records if record.name == "penstock"]
    assert sorted(text.split(" in ")[0] for text in told) == [
        "rank 0 compiles stage 0",
        "rank 0 has compiled stage 0",
        "rank 1 compiles stage 1",
        "rank 1 has compiled stage 1",
    ]


def test_what_compiled_stages_hold_is_in_the_memory_of_the_plan() -> None:
    """A linear layer and a tanh: input and output are saved; input and gradient of the layer's output wait for W.

    The first stage has no input gradients to hurry for: all of its backward waits, with the gradient of its output. Its input
    is a part of the batch, which is there anyway.
    """
    modules = make_modules(2)
    for module in modules:
        compile_in_place(module, {"backend": "aot_eager"})
    x, y = batch(6)
    plan = get_schedule("1f1b")(2, 3)

    def steps(schedule: Schedule, rank: int) -> Costs:
        schedule.step(x, target=y)
        return compiled_costs(schedule, Costs.unit(plan))

    first, second = run_ranks("1f1b", modules, steps)
    piece = float(2 * WIDTH * 8)  # of a microbatch of two rows
    assert first == second
    assert first.held_to_input == (piece, 2 * piece)
    assert first.held_to_weight == (3 * piece, 2 * piece)
    assert max(simulate(plan, first).peak_memory) == 2 * piece
