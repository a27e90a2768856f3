"""Several may watch the same steps: the limit of memory, a recording, the measuring of calibrate() and of replan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipeline, recompute
from penstock.comm import LocalTransport, LocalWorld
from penstock.front import memory_view
from penstock.observe.recording import Recording
from penstock.plan import Op
from penstock.run import Schedule
from penstock.schedules import get_schedule
from tests.run.pipes import batch, make_modules, stages_for

X, Y = torch.ones(8, 4), torch.zeros(8, 4)


def on_ranks(body: Any, **options: Any) -> list[Any]:
    def rank(transport: LocalTransport) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        settings = {"schedule": "1f1b", "microbatches": 4, "profile": False, "memory_limit": "1GiB", **options}
        return body(Pipeline(model, (X,), loss_fn=nn.functional.mse_loss, group=transport, **settings))

    return LocalWorld(2).run(rank)


def test_a_recording_under_a_limit_of_memory() -> None:
    def recorded(pipe: Pipeline) -> Any:
        with pipe.record() as recording:
            pipe.step(X, target=Y)
        with pipe.record() as again, pipe.watch_memory() as watch, pipe.schedule.watch() as recorder:
            pipe.step(X, target=Y)
        with pipe.record() as last:
            pipe.step(X, target=Y)
        assert pipe.schedule._observers == []
        return recording.timeline, again.timeline, last.timeline, watch, recorder.busy, pipe.memory()

    for first, second, third, watch, busy, memory in on_ranks(recorded):
        for timeline in (first, second, third):
            assert timeline.plan == watch.plan
            assert timeline.makespan > 0
        assert busy > 0
        assert all(one.measured_peak > 0 for one in memory.ranks)


def test_calibrate_under_a_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is counted, as it is on accelerators."""
    monkeypatch.setattr(memory_view, "_COUNTED", 100)

    def measured(pipe: Pipeline) -> Any:
        found = pipe.calibrate(X, target=Y, rounds=1).calibrated
        assert found is not None
        return found.forward

    assert all(time > 0 for times in on_ranks(measured) for time in times)


def test_replan_under_a_limit_of_memory_and_a_recording() -> None:
    """A shape of batch that is new when the steps are measured: its first two are counted too."""

    def replanned(pipe: Pipeline) -> Any:
        for _ in range(4):
            pipe.step(X, target=Y)
        for _ in range(3):
            with pipe.record() as recording:
                pipe.step(X[:4], target=Y[:4])
        assert pipe._replanner is not None
        return pipe._replanner.costs, recording.timeline.makespan

    for costs, makespan in on_ranks(replanned, replan=0.9):
        assert costs is not None
        assert makespan > 0


class Counting(Recording):
    """A recorder that also counts what it sees waited for."""

    waits = 0

    def waited(self) -> None:
        super().waited()
        self.waits += 1


def test_two_recorders_see_the_same_waits() -> None:
    """What waits for a message is part of no action, whoever else is timing it."""

    def rank(transport: LocalTransport) -> tuple[int, int]:
        plan = get_schedule("gpipe")(2, 4)
        stages = stages_for(plan, transport, make_modules(2))
        schedule = Schedule.from_plan(plan, stages, loss_fn=nn.functional.mse_loss)
        x, y = batch(8)
        with schedule.observe(Counting(transport)) as outer, schedule.observe(Counting(transport)) as inner:
            schedule.step(x, target=y)
        return outer.waits, inner.waits

    for outer, inner in LocalWorld(2).run(rank):
        assert outer == inner > 0


def test_a_recording_goes_on_when_the_plan_changes() -> None:
    def changed(pipe: Pipeline) -> Any:
        with pipe.record() as recording:
            pipe.step(X, target=Y)
            pipe.run_plan(recompute(pipe.plan))
            pipe.step(X, target=Y)
        return recording.timeline

    assert all(timeline.plan.has(Op.R) for timeline in on_ranks(changed))
