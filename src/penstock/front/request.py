"""What a Pipeline was asked for, and what was built of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from penstock.capture import PipeInfo
from penstock.front.choice import Choice
from penstock.front.pipeline_options import CutOptions, ModelOptions, StepOptions
from penstock.nest import Value
from penstock.plan import Plan
from penstock.schedules import Recipe
from penstock.stage.pipeline_stage import PipelineStage


@dataclass(frozen=True)
class Request:
    """What a Pipeline was asked for."""

    model: nn.Module
    args: tuple[Value, ...]
    loss_fn: Callable[..., Tensor] | None
    schedule: str | Plan | Recipe
    microbatches: int
    of_model: ModelOptions
    of_cut: CutOptions
    of_steps: StepOptions = field(default_factory=StepOptions)

    @property
    def kwargs(self) -> Mapping[str, Value]:
        return self.of_model.example_kwargs or {}


@dataclass(frozen=True)
class Built:
    """The stages of this rank, and what is known of all."""

    stages: list[PipelineStage]
    plan: Plan
    info: PipeInfo | None  # of a captured model
    choice: Choice | None  # with measured costs

    def with_plan(self, plan: Plan, **of_choice: Value) -> Built:
        """The same stages under another plan; `of_choice` is what else the choice says from now on."""
        choice = None if self.choice is None else replace(self.choice, plan=plan, **of_choice)
        return replace(self, plan=plan, choice=choice)
