"""A program that uses the public names as the docs do. It is never run: mypy --strict and pyright accept every line."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import penstock
from penstock.errors import OutOfMemory, PenstockError


def plan_and_check() -> None:
    plan = penstock.get_schedule("1f1b")(4, 8)
    assert_type(plan, penstock.Plan)
    penstock.check(plan)
    penstock.check(penstock.recompute(plan, [0]))
    timeline = penstock.simulate.simulate(plan, penstock.Costs.unit(plan))
    assert_type(timeline, penstock.Timeline)
    penstock.plan.dump(plan, Path("plan.csv"))
    assert_type(penstock.plan.load("plan.csv"), penstock.Plan)


def train(model: nn.Module, x: Tensor, y: Tensor) -> float | None:
    pipe = penstock.Pipeline(
        model,
        example=(x,),
        loss_fn=nn.functional.mse_loss,
        schedule="auto",
        microbatches=4,
        stages=4,
        placement="v",
        memory_limit=["6GiB", 8_000_000_000],
        optimizer=torch.optim.AdamW,
        profile=False,
        split_spec={"layers.3": penstock.SplitPoint.BEGINNING},
        compile={"backend": "inductor"},
        data_parallel="fsdp",
        device="cpu",
        loss_scale=torch.amp.GradScaler("cpu"),
        few_rows=True,
        group_rows=lambda rows: (rows != 0).sum(1),
        replan=0.05,
        seed=3,
        rng="per-microbatch",
        recompute={0: [1, 3]},
        offload=[1],
        offload_to="/tmp/offload",
        receives=penstock.lower.Early(),
        args_chunk_spec=(penstock.TensorChunkSpec(0),),
    )
    optimizer = torch.optim.AdamW(pipe.parameters())
    try:
        result = pipe.step(x, target=y, outputs="last")
    except OutOfMemory as error:
        if error.remedy is not None:
            pipe.run_plan(error.remedy)
        raise
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    pipe.save("checkpoint", optimizer=optimizer)
    assert_type(result, penstock.Result)
    assert_type(pipe.evaluate(x, target=y).loss, float | None)
    assert_type(pipe.plan, penstock.Plan)
    return result.loss


def stages_by_hand(module: nn.Module, x: Tensor, y: Tensor) -> None:
    stage = penstock.PipelineStage(module, 0, 2, torch.device("cpu"))
    schedule = penstock.ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    losses: list[Tensor] = []
    schedule.step(x, target=y, losses=losses)
    try:
        penstock.Schedule([stage], 4, scale_grads=False)
    except PenstockError as error:
        raise SystemExit(str(error)) from error


def capture(model: nn.Module, x: Tensor) -> None:
    pipe = penstock.pipeline(model, (x,), split_spec={"1": penstock.SplitPoint.BEGINNING})
    assert_type(pipe, penstock.Pipe)
    assert_type(pipe.info(), penstock.PipeInfo)
    stage: penstock.PipelineStage = pipe.build_stage(0, torch.device("cpu"))
    penstock.Schedule1F1B(stage, 4).eval(x)
