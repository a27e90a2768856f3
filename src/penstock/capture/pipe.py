"""A model in stages.

pipe = pipeline(model, (x,), split_spec={"layers.4": SplitPoint.BEGINNING})
pipe(x)                          # all stages in this process: what model(x) returns
pipe.get_stage_module(1)         # one stage, a module
stage = pipe.build_stage(rank, device)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from penstock.capture.pipe_info import PipeInfo, StageRoutes
from penstock.capture.stage_module import StageModule
from penstock.errors import CaptureError
from penstock.misfits import takes
from penstock.nest import Value
from penstock.stage.pipeline_stage import Group, PipelineStage


@takes(CaptureError)
class CapturedStage(PipelineStage):
    """A stage around a captured module: it reads what its wires say, not all that the stage before returns.

    stage = pipe.build_stage(rank, device)  # of pipe = penstock.pipeline(model, (x,))
    """

    routes: StageRoutes

    def __init__(
        self,
        stage_module: StageModule,
        stage_index: int,
        pipe_info: PipeInfo,
        device: torch.device | str,
        group: Group = None,
    ) -> None:
        super().__init__(stage_module.to(device), stage_index, pipe_info.num_stages, device, group=group)
        self.routes = StageRoutes(pipe_info, stage_index)
        self.pipe_info = pipe_info


@takes(CaptureError)
def build_stage(
    stage_module: StageModule, stage_index: int, pipe_info: PipeInfo, device: torch.device | str, group: Group = None
) -> CapturedStage:
    """A stage for a schedule, around a captured module that is moved to `device`.

    stage = build_stage(pipe.get_stage_module(0), 0, pipe.info(), "cpu")
    """
    return CapturedStage(stage_module, stage_index, pipe_info, device, group)


class MultiUseParameterConfig(Enum):
    """What happens to a parameter that several stages use.

    pipeline(model, (x,), multi_use_param_spec=MultiUseParameterConfig.TRANSMIT)
    """

    TRANSMIT = 1  # one stage holds it and sends its value to the others, as an activation
    REPLICATE = 2  # every stage that uses it holds it; their gradients are summed


@takes(CaptureError)
class Pipe(nn.Module):
    """The stages of a captured model, together.

    pipe = penstock.pipeline(model, (x,), num_stages=2)
    stage = pipe.build_stage(rank, device)
    """

    def __init__(self, stages: Sequence[StageModule], info: PipeInfo) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._info = info
        self.training = any(stage.training for stage in stages)

    @classmethod
    def from_tracing(
        cls,
        mod: nn.Module,
        example_args: tuple[Value, ...],
        example_kwargs: Mapping[str, Value] | None = None,
        split_policy: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> Pipe:
        """Capture a model with marks in its code, or with a policy that sets them."""
        from penstock.capture.capture_model import pipeline

        found = pipeline(mod, example_args, example_kwargs, split_policy=split_policy, **options)
        return cls([found.get_stage_module(k) for k in range(found.num_stages)], found.info())

    @property
    def num_stages(self) -> int:
        return self._info.num_stages

    def info(self) -> PipeInfo:
        """The wires, arguments, outputs and shared parameters of the stages."""
        return self._info

    def get_stage_module(self, stage_idx: int) -> StageModule:
        """One stage as a module."""
        if not 0 <= stage_idx < self.num_stages:
            raise CaptureError(f"there is no stage {stage_idx}: this model has stages 0 to {self.num_stages - 1}")
        stage = self.stages[stage_idx]
        assert isinstance(stage, StageModule)
        return stage

    def build_stage(self, stage_index: int, device: torch.device | str, group: Group = None) -> Any:
        """One stage for a schedule, on `device`."""
        return build_stage(self.get_stage_module(stage_index), stage_index, self._info, device, group)

    def forward(self, *args: Value, **kwargs: Value) -> Value:
        """All stages, one after the other, in this process: returns what the model returns."""
        values: dict[str, Value] = {}
        arguments = self._info.inputs.bind(args, kwargs)
        for k in range(self.num_stages):
            stage = self.get_stage_module(k)
            given = [arguments[w.name] if w.source is None else values[w.name] for w in stage.inputs]
            if k == self.num_stages - 1:
                return stage.model_output(given)
            values |= zip([w.name for w in stage.outputs], stage.run(given), strict=True)
        raise AssertionError("a pipe has at least one stage")

    def state_dict(self, *args: Value, **kwargs: Value) -> dict[str, Any]:  # type: ignore[override]
        """The tensors of all stages, under the names of the user's model."""
        found: dict[str, Any] = {}
        for stage in self.stages:
            found |= stage.state_dict(*args, **kwargs)
        return found

    def load_state_dict(self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False) -> Any:
        """Load by the names of the user's model."""
        missing: list[str] = []
        known: set[str] = set()
        for stage in self.stages:
            own = {name: value for name, value in state_dict.items() if name in stage.state_dict()}
            known |= set(own)
            missing += stage.load_state_dict(own, strict=False, assign=assign).missing_keys
        unexpected = [name for name in state_dict if name not in known]
        if strict and (missing or unexpected):
            raise CaptureError(f"state dict does not fit: missing {missing}, unexpected {unexpected}")
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def print_readable(self, print_output: bool = True) -> str:
        """All stages as text: wires, parameters, code."""
        import sys

        text = "\n\n".join(self.get_stage_module(k).print_readable() for k in range(self.num_stages))
        if print_output:
            sys.stdout.write(text + "\n")
        return text

    def __str__(self) -> str:
        lines = [f"Pipe of {self.num_stages} stages"]
        for k in range(self.num_stages):
            stage = self.get_stage_module(k)
            count = sum(p.numel() for p in stage.parameters())
            wires = ", ".join(map(str, stage.inputs))
            lines.append(f"  stage {k}: {count:,} parameters, takes {wires}")
        if self._info.cuts is not None:
            lines += [f"cut by {self._info.cut_by}:", str(self._info.cuts)]
        if self._info.uneven:
            lines.append(self._info.uneven)
        return "\n".join(lines)


class LossWrapper(nn.Module):
    """A model and its loss; a subclass says in ``forward`` how they go together.

        class WithLoss(LossWrapper):
            def forward(self, x, target):
                return self.loss_fn(self.module(x), target)

    ``loss_spec`` says which part of what ``forward`` returns is the loss: True for all of it, or the same structure
    with True at its place.
    """

    loss_spec: Any = None

    def __init__(self, module: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Value, **kwargs: Value) -> Value:
        raise NotImplementedError(
            f"{type(self).__name__} must say how the model and its loss go together: define forward, "
            "or use TrivialLossWrapper for loss_fn(module(x), targets)"
        )


class TrivialLossWrapper(LossWrapper):
    """``loss_fn(module(x), targets)``."""

    loss_spec = True

    def forward(self, x: Value, targets: Value) -> torch.Tensor:
        return self.loss_fn(self.module(x), targets)
