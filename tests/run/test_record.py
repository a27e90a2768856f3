"""Measured timelines and profiler ranges: all ranks, one clock, the plan that ran."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Op, Schedule
from penstock.errors import RunError
from penstock.run import Recording
from penstock.simulate import Timeline
from tests.run.pipes import batch, make_modules, on_ranks

X, Y = batch(8)


def record(name: str, num_ranks: int, modules: list[nn.Module], **options: Any) -> list[Timeline]:
    def rank(schedule: Schedule, rank: int) -> Timeline:
        schedule.step(X, target=Y)
        with schedule.record() as recording:
            schedule.step(X, target=Y)
            schedule.step(X, target=Y)
        assert recording.timeline.plan == schedule.lowered_plan()
        return recording.timeline

    return on_ranks(name, num_ranks, 4, rank, modules=modules, **options)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_a_timeline_of_all_ranks_on_every_rank(name: str) -> None:
    modules = make_modules(3 if name == "1f1b" else 6)
    first, *others = record(name, 3, modules)
    assert all(other == first for other in others)
    assert first.measured
    assert first.unit == "s"
    for rank in range(3):
        spans = list(first.spans(rank))
        assert [span.action for span in spans] == list(first.plan.actions(rank))
        assert all(0.0 <= span.start <= span.end for span in spans)
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(spans))
    assert 0.0 < first.bubble_makespan < 1.0
    assert first.makespan > 0.0


def test_spans_are_as_long_as_the_work() -> None:
    """One stage sleeps in its forward; waiting for it is no part of anybody's work."""
    modules = make_modules(2)
    modules[0].register_forward_pre_hook(lambda *_: time.sleep(0.02))
    timeline, _ = record("gpipe", 2, modules)
    slow = [span.end - span.start for span in timeline.spans(0) if getattr(span.action, "op", None) is Op.F]
    assert min(slow) >= 0.02
    quick = [span for span in timeline.spans(1) if getattr(span.action, "op", None) is Op.F]
    assert min(span.end - span.start for span in quick) < 0.02  # each of them waited for that long
    forwards = [span for span in timeline.spans(0) if getattr(span.action, "op", None) is Op.F]
    for made, used in zip(forwards, quick, strict=True):
        assert used.start >= made.end
    assert timeline.processor is not None
    assert all(spent > 0.0 for spent in timeline.processor)
    assert timeline.kept_waiting >= 4 * 0.02 / 2 * 0.9, "who sleeps has no processor; one of the two ranks did"


def test_an_evaluation_is_measured_as_the_plan_that_it_is() -> None:
    def rank(schedule: Schedule, rank: int) -> Recording:
        with schedule.record() as recording:
            schedule.eval(X)
        assert recording.timeline.plan == schedule.lowered_plan(forward_only=True)
        return recording

    on_ranks("1f1b", 2, 4, rank)


def test_nothing_measured_is_said() -> None:
    def rank(schedule: Schedule, rank: int) -> None:
        with schedule.record() as recording:
            with pytest.raises(RunError, match="nothing is recorded yet"):
                recording.timeline  # noqa: B018 - it raises
        with pytest.raises(RunError, match="call step"):
            recording.timeline  # noqa: B018 - it raises

    on_ranks("1f1b", 2, 4, rank)


def test_a_step_that_fails_while_it_is_measured_leaves_nothing_behind() -> None:
    def rank(schedule: Schedule, rank: int) -> None:
        with pytest.raises(Exception, match="target"), schedule.record():
            schedule.step(X)
        schedule.step(X, target=Y)
        with schedule.record() as recording:
            schedule.step(X, target=Y)
        assert recording.timeline.makespan > 0

    on_ranks("1f1b", 2, 4, rank)


def test_profiler_ranges_are_named_by_action() -> None:
    from penstock.run import Schedule1F1B
    from penstock.stage.pipeline_stage import PipelineStage

    schedule = Schedule1F1B(PipelineStage(make_modules(1)[0], 0, 1, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    schedule.step(X, target=Y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        schedule.step(X, target=Y)
    names = {event.key for event in profile.key_averages()}
    assert {"penstock:0F0", "penstock:0B0", "penstock:0F1", "penstock:0B1"} <= names
