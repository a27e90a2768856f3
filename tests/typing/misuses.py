"""A program with one mistake a line. It is never run: mypy --strict and pyright reject each line, or complain that its comment
ignores nothing."""

from __future__ import annotations

from torch import Tensor, nn

import penstock
from penstock import errors


def mistakes(model: nn.Module, x: Tensor, pipe: penstock.Pipeline) -> None:
    penstock.Pipelin  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    penstock.Pipeline(model, (x,), few_row=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    penstock.Pipeline(model, (x,), rng="per-batch")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    penstock.Pipeline(model, (x,), data_parallel="zero")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    penstock.Pipeline(model, (x,), microbatches="8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    penstock.Pipeline(model, (x,), collect_every="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    penstock.Pipeline("model", (x,))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    pipe.step(x, outputs="everywhere")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    pipe.step(x).los  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    pipe.clip_grad_norm_("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    penstock.get_schedule(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    penstock.get_schedule("1f1b")("four", 8)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    penstock.PipelineStage(model, 0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    penstock.SplitPoint.MIDDLE  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    penstock.plan.loadd("plan.csv")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    errors.PlanErorr  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    penstock.PlanError  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
