"""Two threads that step at once, and batches that differ between ranks: refused before anything is computed.

The stories: two threads of one process that called `step` at the same time hung, or raised `KeyError: 0`. A rank that was given
another number of rows than the first one computed a wrong loss, with a warning of torch's about broadcasting as the only sign.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn

import penstock
from penstock import Pipeline, compat
from penstock.comm import LocalTransport, LocalWorld, Transport
from penstock.compat.schedules import _Action
from penstock.errors import PenstockError, RanksDisagree, RunError
from penstock.front.saving import Saving
from penstock.plan import Placement, Plan
from penstock.run import Schedule1F1B, ScheduleGPipe
from penstock.stage.pipeline_stage import PipelineStage


def test_a_second_thread_is_refused_and_the_first_one_goes_on() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            entered.set()
            assert leave.wait(60.0)
            return super().forward(x)

    module = Slow(4, 4)
    schedule = ScheduleGPipe(PipelineStage(module, 0, 1, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(2, 4, 4)
    first = threading.Thread(target=schedule.step, args=(x,), kwargs={"target": y})
    first.start()
    assert entered.wait(60.0)
    with pytest.raises(RunError, match="while another thread of this process"):
        schedule.step(x, target=y)
    with pytest.raises(RunError, match="while another thread of this process"):
        schedule.eval(x)
    leave.set()
    first.join(60.0)
    assert module.weight.grad is not None
    module.zero_grad()
    schedule.step(x, target=y)
    assert module.weight.grad is not None


def test_a_step_inside_a_step_is_refused() -> None:
    module = nn.Linear(4, 4)
    schedule = ScheduleGPipe(PipelineStage(module, 0, 1, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(2, 4, 4)
    handle = module.register_forward_pre_hook(lambda *_: schedule.eval(x))
    with pytest.raises(RunError, match="or a hook in a step"):
        schedule.step(x, target=y)
    handle.remove()
    schedule.step(x, target=y)


def test_two_schedules_over_one_stage_are_one_pipeline_to_threads() -> None:
    """With one rank each had a transport of its own: both stepped at once, and what the stage held was mixed."""
    module = Halting()
    stage = PipelineStage(module, 0, 1, "cpu")
    one, other = (ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss) for _ in range(2))
    x, y = torch.randn(2, 4, 4)
    one.step(x, target=y)
    assert module.weight.grad is not None
    once = module.weight.grad.clone()
    other.step(x, target=y)  # one after the other they may
    module.halts = True
    first = threading.Thread(target=one.step, args=(x,), kwargs={"target": y})
    first.start()
    assert module.entered.wait(60.0)
    with pytest.raises(RunError, match="while another thread of this process"):
        other.step(x, target=y)
    module.leave.set()
    first.join(60.0)
    torch.testing.assert_close(module.weight.grad, 3 * once)


def step_with(transport: Transport, inputs: list[int | None], targets: list[int | None]) -> str:
    """A step in which each rank gives as many rows as stand at its place; what was raised, and whether the next one works."""
    torch.manual_seed(0)
    rank = transport.rank
    schedule = Schedule1F1B(
        PipelineStage(nn.Linear(4, 4), rank, transport.num_ranks, "cpu", group=transport),
        2,
        loss_fn=nn.functional.mse_loss,
    )
    args = [] if inputs[rank] is None else [torch.randn(inputs[rank] or 0, 4)]
    target = None if targets[rank] is None else torch.randn(targets[rank] or 0, 4)
    said = ""
    try:
        schedule.step(*args, target=target)
    except PenstockError as error:
        said = f"{type(error).__name__}: {error}"
    schedule.step(torch.randn(8, 4), target=torch.randn(8, 4))
    return said


@pytest.mark.parametrize(
    ("inputs", "targets", "text"),
    [
        ([8, 8, 4], [8, 8, 8], "rank 2: 4 rows of the input here, 8 there"),
        ([8, 8, 8], [8, 8, 4], "rank 2: 4 rows of the target here, 8 there"),
        ([8, 6, 8], [8, 8, 8], "rank 1: 6 rows of the input here, 8 there"),
        ([8, None, None], [None, None, 6], "rank 2: 6 rows of the target here, 8 rows of the input there"),
    ],
)
def test_batches_that_differ_are_refused_everywhere(
    inputs: list[int | None], targets: list[int | None], text: str
) -> None:
    said = LocalWorld(3).run(step_with, inputs, targets)
    assert all(text in each for each in said), said
    assert any(each.startswith(RanksDisagree.__name__) for each in said)


@pytest.mark.filterwarnings("ignore:Using a target size")  # torch's, which was the only sign
@pytest.mark.parametrize(("rows", "target_rows"), [(8, 4), (4, 8)])
@pytest.mark.parametrize("name", ["", "x"])
def test_a_row_of_a_target_on_the_last_rank_never_counts_for_several(rows: int, target_rows: int, name: str) -> None:
    """The rank with the target saw no input, the one with the input no target, and 8 are twice 4: a loss over broadcast rows."""

    class Named(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    def step(transport: Transport) -> str:
        stage = PipelineStage(Named(4, 4), transport.rank, 2, "cpu", group=transport)
        schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        x, y = torch.randn(rows, 4), torch.randn(target_rows, 4)
        given: dict[str, Any] = {"target": y} if transport.rank else {name: x} if name else {}
        with pytest.raises(PenstockError) as caught:
            schedule.step(*() if given else (x,), **given)
        return str(caught.value)

    for text in LocalWorld(2).run(step):
        assert f"an output of shape [{rows // 4}, 4] and a target of shape [{target_rows // 4}, 4]" in text


@pytest.mark.parametrize("targets", [[None, None, 8], [8, 8, 8]])
def test_batches_that_fit_are_accepted(targets: list[int | None]) -> None:
    assert LocalWorld(3).run(step_with, [8, None, None], targets) == ["", "", ""]


class Halting(nn.Linear):
    """Stops in its forward, once it is told to, until it may go on."""

    halts = False

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.modes: list[bool] = []  # those that it was set to
        self.entered, self.leave = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.halts:
            self.entered.set()
            assert self.leave.wait(60.0)
        return super().forward(x)

    def train(self, mode: bool = True) -> Self:
        self.modes.append(mode)
        return super().train(mode)


def calls_of(pipe: Pipeline, saving: Saving, folder: Path) -> dict[str, Callable[[], object]]:
    """Every public call of a pipeline and of its schedule that changes or reads what is trained."""
    x, y = torch.randn(2, 4, 4)
    plan, schedule = penstock.recompute(pipe.plan), pipe.schedule
    return {
        "step": lambda: pipe.step(x, target=y),
        "evaluate": lambda: pipe.evaluate(x, target=y),
        "predict": lambda: pipe.predict(x),
        "calibrate": lambda: pipe.calibrate(x, target=y),
        "recut": lambda: pipe.recut([]),
        "memory": pipe.memory,
        "clip_grad_norm_": lambda: pipe.clip_grad_norm_(1.0),
        "save": lambda: pipe.save(folder / "other"),
        "save wait=False": lambda: pipe.save(folder / "other", wait=False),
        "Saving.wait": saving.wait,
        "load": lambda: pipe.load(folder / "before"),
        "run_plan": lambda: pipe.run_plan(plan),
        "train": pipe.train,
        "eval": pipe.eval,
        "zero_grad": pipe.zero_grad,
        "state_dict": pipe.state_dict,
        "load_state_dict": lambda: pipe.load_state_dict({}),
        "save_pretrained": lambda: pipe.save_pretrained(folder / "published"),
        "decide": lambda: pipe.ranks.broadcast("it", lambda: (folder / "decided").write_text("x") and "x"),
        "agree": lambda: pipe.ranks.try_all("it", lambda: (folder / "agreed").write_text("x")),
        "meet": lambda: pipe.ranks.barrier("it"),
        "gather": lambda: pipe.ranks.all_gather("it", 1),
        "any": lambda: pipe.ranks.any(flag=True),
        "record": lambda: pipe.record().__enter__(),
        "watch_memory": lambda: pipe.watch_memory().__enter__(),
        "schedule.run_plan": lambda: schedule.run_plan(plan),
        "schedule.replan": lambda: schedule.replan(penstock.Costs.unit(schedule.plan)),
        "schedule.watch": lambda: schedule.watch().__enter__(),
        "schedule.lowered_plan": lambda: schedule.lowered_plan(forward_only=True),
    }


def refused_in_a_step(transport: LocalTransport | None, folder: Path) -> None:
    torch.manual_seed(0)
    module = Halting()
    rank, ranks = (0, 1) if transport is None else (transport.rank, transport.num_ranks)
    stage = PipelineStage(module, rank, ranks, "cpu", group=transport)
    pipe = Pipeline(stages=[stage], loss_fn=nn.functional.mse_loss, microbatches=2, schedule="gpipe")
    module.bias.requires_grad_(False)
    x, y = torch.arange(32.0).reshape(2, 4, 4).sin()  # on all ranks
    pipe.step(x, target=y)
    pipe.save(folder / "before")
    saving = pipe.save(folder / "beside", wait=False)
    assert saving is not None
    raised: dict[str, str] = {}

    def from_another_thread() -> None:
        assert module.entered.wait(60.0)
        module.modes.clear()
        for name, call in calls_of(pipe, saving, folder).items():
            try:
                call()
                raised[name] = "was accepted"
            except RunError as error:
                raised[name] = str(error)
        raised["modes"] = str(module.modes)
        raised["files"] = str(sorted(path.name for path in folder.iterdir() if not path.name.startswith(("b", "."))))
        module.leave.set()

    module.halts = rank == 0
    other = threading.Thread(target=from_another_thread)
    if rank == 0:
        other.start()
    before = None if module.weight.grad is None else module.weight.grad.clone()
    pipe.step(x, target=y)
    if rank == 0:
        other.join(60.0)
        assert raised.pop("modes") == "[]", "not even for a moment"
        assert raised.pop("files") == "[]"
        accepted = {name: said for name, said in raised.items() if "while another thread of this process" not in said}
        assert accepted == {}
    assert before is not None
    torch.testing.assert_close(module.weight.grad, 2 * before)  # the step went on as if nothing had happened
    module.halts = False
    saving.wait()
    pipe.load(folder / "beside")
    pipe.evaluate(x, target=y)


def test_another_thread_is_refused_by_every_call_of_one_rank(tmp_path: Path) -> None:
    """With one rank, save, load, clip_grad_norm_ and run_plan of a second thread were accepted during a step, and evaluate
    switched the modes of the modules before it was refused."""
    refused_in_a_step(None, tmp_path)


def test_another_thread_is_refused_by_every_call_of_ranks_as_threads(tmp_path: Path) -> None:
    LocalWorld(2).run(refused_in_a_step, tmp_path)


def test_a_hook_in_a_step_is_refused_by_every_call(tmp_path: Path) -> None:
    module = nn.Linear(4, 4)
    pipe = Pipeline(stages=[PipelineStage(module, 0, 1, "cpu")], loss_fn=nn.functional.mse_loss, schedule="gpipe")
    x, y = torch.randn(2, 8, 4)
    for call in (pipe.zero_grad, pipe.eval, lambda: pipe.save(tmp_path / "x"), lambda: pipe.clip_grad_norm_(1.0)):
        handle = module.register_forward_pre_hook(lambda *_, call=call: call() and None)
        with pytest.raises(RunError, match="or a hook in a step"):
            pipe.step(x, target=y)
        handle.remove()
    pipe.step(x, target=y)
    assert module.training
    assert list(tmp_path.iterdir()) == []


def test_a_second_thread_does_not_disturb_a_step_of_compat() -> None:
    """It cleared what the stages of the step in the first thread held, before it was refused."""
    module = Halting()
    module.halts = True
    stage = compat.PipelineStage(module, 0, 1, torch.device("cpu"), group=LocalWorld(1).transports[0])
    schedule = compat.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(2, 4, 4)
    losses: list[torch.Tensor] = []
    first = threading.Thread(target=schedule.step, args=(x,), kwargs={"target": y, "losses": losses})
    first.start()
    assert module.entered.wait(60.0)
    with pytest.raises(RunError, match="while another thread of this process"):
        schedule.step(x, target=y)
    module.leave.set()
    first.join(60.0)
    assert len(losses) == 2


def test_a_plan_that_does_not_fit_an_order_of_a_program_is_refused_at_once() -> None:
    stage = compat.PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"), group=LocalWorld(1).transports[0])
    schedule = compat.ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    order = {0: [_Action.from_str(text) for text in ("0F0", "0F1", "0B0", "0B1")]}
    schedule.pipeline_order = order
    x, y = torch.randn(2, 4, 4)
    schedule.step(x, target=y)
    with pytest.raises(PenstockError):
        schedule.run_plan(penstock.get_schedule("1f1b")(2, 2))
    assert schedule.pipeline_order is order
    schedule.step(x, target=y)
    schedule.run_plan(penstock.get_schedule("1f1b")(1, 4))
    schedule.step(x, target=y)


def test_a_plan_that_does_not_fit_is_refused_at_once() -> None:
    """`run_plan` took any plan, and the next step found out; the plan before was lost by then."""

    def rank(transport: LocalTransport) -> None:
        torch.manual_seed(0)
        stage = PipelineStage(nn.Linear(4, 4), transport.rank, 2, "cpu", group=transport)
        schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
        x, y = torch.randn(2, 8, 4)
        schedule.step(x, target=y)
        plan = schedule.plan
        wrong = plan.with_codes([codes[::-1] for codes in plan.codes])
        for other in (
            penstock.get_schedule("1f1b")(4, 2),
            penstock.get_schedule("interleaved1f1b")(2, 2, stages_per_rank=2),
            Plan(Placement((1, 0)), plan.graph, 2, plan.codes[::-1]),
            wrong,
            "1f1b",
        ):
            with pytest.raises(PenstockError):
                schedule.run_plan(other)  # type: ignore[arg-type]
            assert schedule.plan is plan
        schedule.step(x, target=y)
        schedule.run_plan(penstock.get_schedule("gpipe")(2, 4))
        schedule.step(x, target=y)
        assert schedule.num_microbatches == 4

    LocalWorld(2).run(rank)
