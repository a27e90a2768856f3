"""Captured stages under real schedules, ranks as threads: skips, an argument of the last stage, the model's own loss."""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from penstock.batch import Microbatches
from penstock.capture import SplitPoint, TrivialLossWrapper, pipeline
from penstock.comm.local import LocalWorld
from penstock.errors import PenstockError
from penstock.run.classes import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from penstock.stage.pipeline_stage import PipelineStage
from tests.capture import toys
from tests.capture.chain import assert_same_grads

MICROBATCHES = 4


def _placement(schedule: type, num_stages: int) -> list[list[int]]:
    if schedule is Schedule1F1B:
        return [[k] for k in range(num_stages)]
    half = num_stages // 2
    if schedule is ScheduleZBVZeroBubble:
        return [[k, num_stages - 1 - k] for k in range(half)]
    return [[k, k + half] for k in range(half)]


@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble])
def test_skips_and_the_models_own_loss(schedule: type) -> None:
    torch.manual_seed(0)
    model = TrivialLossWrapper(toys.Skips(), nn.MSELoss())
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (x[:2], y[:2]))
    ranks = _placement(schedule, 4)

    def work(transport: Any) -> None:
        stages = [pipe.build_stage(k, "cpu", transport) for k in ranks[transport.rank]]
        runner = schedule(stages[0] if schedule is Schedule1F1B else stages, MICROBATCHES)
        runner.step(x, y)

    LocalWorld(len(ranks)).run(work)
    for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        (reference(a, b) / MICROBATCHES).backward()
    assert_same_grads(model, reference)


def test_microbatches_that_take_different_branches() -> None:
    """Seven rows are cut into four and three, and the model does something else with three."""

    class Branch(toys.Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * 2 if x.shape[0] > 3 else x.cos())

    torch.manual_seed(0)
    model, x = Branch(2, dropout=0), torch.randn(7, 4)
    reference = copy.deepcopy(model)
    pipe = pipeline(model, (x[:4],))

    def work(transport: Any) -> Any:
        stage = pipe.build_stage(transport.rank, "cpu", transport)
        return Schedule1F1B(stage, 2, loss_fn=lambda y, _: y.square().mean()).step(x, target=x)

    output = LocalWorld(2).run(work)[1]
    parts = [reference(part) for part in x.tensor_split(2)]
    assert torch.equal(output, torch.cat(parts))
    sum(part.square().mean() * len(part) / 7 for part in parts).backward()
    assert_same_grads(model, reference)


class Nested(nn.Module):
    """Tensors by position, in a dict and in **kwargs, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, batch: dict[str, torch.Tensor], scale: float = 1.0, **more: Any) -> torch.Tensor:
        h = self.first(x * scale) + batch["ids"]
        return self.second(h) + more["late"]


def test_each_microbatch_gets_its_own_tensors_however_they_are_given() -> None:
    """The arguments of a step are bound at its beginning, the first microbatch with all checks."""
    torch.manual_seed(0)
    model, rows = Nested(), [torch.randn(6, 4) for _ in range(3)]
    call = ((rows[0], {"ids": rows[1]}), {"scale": 2.0, "late": rows[2]})
    small = ((rows[0][:2], {"ids": rows[1][:2]}), {"scale": 2.0, "late": rows[2][:2]})
    pipe = pipeline(model, *small, split_spec={"second": SplitPoint.BEGINNING})

    def work(transport: Any) -> Any:
        return ScheduleGPipe(pipe.build_stage(transport.rank, "cpu", transport), 3).step(*call[0], **call[1])

    torch.testing.assert_close(LocalWorld(2).run(work)[1], model(*call[0], **call[1]))


def test_a_constant_that_differs_in_a_later_microbatch_is_refused() -> None:
    x = torch.randn(2, 4)
    pipe = pipeline(Nested(), (x, {"ids": x}), {"scale": 2.0, "late": x}, split_spec={"second": SplitPoint.BEGINNING})
    first, last = (((x, {"ids": x}), {"scale": scale, "late": x}) for scale in (2.0, 3.0))

    def work(transport: Any) -> Any:
        stage = pipe.build_stage(transport.rank, "cpu", transport)
        return ScheduleGPipe(stage, 2).step(Microbatches([first, last]))

    with pytest.raises(PenstockError, match=r"scale was 2.0 when the model was captured, and is 3.0 now"):
        LocalWorld(2).run(work)


def test_captured_stages_cost_the_calls_of_stages_made_by_hand() -> None:
    """Within a tenth: with small layers that is what a step costs. `benchmarks/step.py --calls` counts between processes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)))
    x = torch.randn(16, 4)
    pipe = pipeline(model, (x[:2],), split_spec={str(k): SplitPoint.BEGINNING for k in (1, 2, 3)})

    def calls_of_a_step(transport: Any, *, captured: bool) -> int:
        made = [
            pipe.build_stage(k, "cpu", transport)
            if captured
            else PipelineStage(copy.deepcopy(model[k]), k, 4, "cpu", group=transport)
            for k in (transport.rank, transport.rank + 2)
        ]
        schedule = ScheduleInterleaved1F1B(made, 8, loss_fn=nn.MSELoss())
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        for _ in range(2):
            schedule.step(x, target=x, return_outputs=False)
        sys.setprofile(note)
        try:
            schedule.step(x, target=x, return_outputs=False)
        finally:
            sys.setprofile(None)
        return count

    by_hand, captured = (
        sum(LocalWorld(2).run(partial(calls_of_a_step, captured=captured))) for captured in (False, True)
    )
    assert captured < 1.1 * by_hand
