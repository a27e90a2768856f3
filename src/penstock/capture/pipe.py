"""A model in stages, and what everybody may know about it.

pipe = pipeline(model, (x,), split_spec={"layers.4": SplitPoint.BEGINNING})
pipe(x)                          # all stages in this process: what model(x) returns
pipe.get_stage_module(1)         # one stage, a module
stage = pipe.build_stage(rank, device)

info = pipe.info()
info.num_stages, info.inputs.names, info.edges          # 4, ("x", "mask"), {(0, 1), (1, 2), (0, 2)}
info.shared["wte.weight"].holders                       # ((0, "wte.weight"), (3, "lm_head.weight"))
info.cut_by, print(info.cuts)                           # with num_stages=: "costs measured on cpu", and their table
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Self

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from penstock.balance import Cuts
from penstock.capture.arguments import InputTable
from penstock.capture.cutter import StagePiece
from penstock.capture.model_values import model_values
from penstock.capture.stage_module import StageModule, run_stages
from penstock.capture.stage_state import Shared
from penstock.capture.wires import Wire
from penstock.checks import check_types
from penstock.errors import CaptureError
from penstock.nest import Nesting, Value, leaf_names, named
from penstock.stage.pipeline_stage import Group, PipelineStage


@dataclass(frozen=True)
class PipeInfo:
    """The captured model without its tensors. Plain data: it can be compared, printed and saved.

    pipe.info().num_stages
    """

    num_stages: int
    inputs: InputTable
    stage_inputs: tuple[tuple[Wire, ...], ...]
    stage_outputs: tuple[tuple[Wire, ...], ...]  # of the last stage: the leaves of the model's output
    shared: Mapping[str, Shared]
    output_paths: tuple[str, ...]  # of the output leaves, tensors and traced sizes, as a user would write them
    loss_index: int | None  # which tensor of the output is the model's own loss
    model: str = ""  # names, shapes and types of what all stages hold, in a few words, which ranks compare
    cuts: Cuts | None = None  # with num_stages=: the table of the stages and what each costs
    cut_by: str = ""  # what these costs are: measured where, estimated how and why
    uneven: str = ""  # which stage takes more than 1.5 times the mean, and where it could be cut

    @property
    def has_loss(self) -> bool:
        return self.loss_index is not None

    @property
    def edges(self) -> frozenset[tuple[int, int]]:
        """(producer, user) for every pair of stages between which something travels."""
        inputs = enumerate(self.stage_inputs)
        return frozenset((w.source, k) for k, wires in inputs for w in wires if w.source is not None)

    def loss_of(self, output: object) -> Value:
        """The model's own loss, out of what the model returned."""
        if self.loss_index is None:
            raise CaptureError(
                f"the model returns no loss that can be told from its other outputs ({', '.join(self.output_paths)}); "
                "capture with output_loss_value_spec={'loss': True}, or give the schedule a loss_fn"
            )
        return model_values.flatten(output)[0][self.loss_index]


STEPS_OWN = ("target", "outputs", "losses", "return_outputs", "loss_kwargs")
"""Names that `step` takes for itself. A model may have arguments of the same names."""


def find_loss(last: StagePiece, spec: object) -> int | None:
    """Which tensor of the output is the loss: the one that `spec` marks with True, else a single number called "loss"."""
    if isinstance(spec, torch.Tensor):
        raise CaptureError(
            "output_loss_value_spec is a Tensor; expected the form of the model's output with True where the loss is, for "
            "example {'loss': True}"
        )
    paths = leaf_names(last.recipe)
    tensors = [(path, wire) for path, wire in zip(paths, last.outputs, strict=True) if wire.kind == "tensor"]
    if spec is not None:
        marked = [path for path, part in named(Nesting().flatten(spec)[1]) if part.data is True]
        whole = marked == [""] and len(paths) == 1
        wanted = [number for number, (path, _) in enumerate(tensors) if path in marked or whole]
        if len(wanted) != 1:
            raise CaptureError(
                f"output_loss_value_spec={spec!r} marks {len(wanted)} of the model's outputs ({', '.join(paths)}); it "
                "must mark exactly one with True, for example {'loss': True}"
            )
        return wanted[0]
    losses = (i for i, (path, wire) in enumerate(tensors) if wire.shape == () and path.rpartition(".")[2] == "loss")
    return next(losses, None)


@dataclass(frozen=True)
class StageRoutes(PipeInfo):
    """The captured model as one of its stages sees it, and the runtime asks for it (``penstock.stage.pipeline_stage.Routes``)."""

    stage: int = 0

    @classmethod
    def of(cls, info: PipeInfo, stage: int) -> Self:
        return cls(**{field.name: getattr(info, field.name) for field in fields(PipeInfo)}, stage=stage)

    @property
    def wires(self) -> str:
        """All that travels, in one line: the same on ranks that cut the same model at the same places."""
        inputs = enumerate(self.stage_inputs)
        return ", ".join(f"{w.source}>{k} {w.name}" for k, wires in inputs for w in wires if w.source is not None)

    @property
    def ties(self) -> list[tuple[tuple[int, str], ...]]:
        """The holders of each parameter that several stages use."""
        return [shared.holders for shared in self.shared.values() if shared.is_parameter]

    def wanted_on(self, producer: int, consumers: Iterable[int]) -> tuple[int, ...]:
        """Which outputs of `producer` these stages read, by their place: each crosses once, however many read it."""
        wanted = set(consumers)
        outputs = self.stage_outputs[producer]
        return tuple(place for place, wire in enumerate(outputs) if wanted & set(wire.stages))

    def bind(
        self, args: Sequence[tuple[object, ...]] | None, kwargs: Sequence[dict[str, object]], num_microbatches: int
    ) -> Sequence[Sequence[Value]]:
        """For each microbatch the inputs of the stage, with None where another stage's value goes.

        A rank may leave out arguments of the model that its stages do not read.
        """
        names = [wire.name if wire.source is None else "" for wire in self.stage_inputs[self.stage]]
        if not any(names):
            return [[None] * len(names)] * num_microbatches
        calls = [(args[m] if args else (), kwargs[m] if kwargs else {}) for m in range(num_microbatches)]
        each = self.inputs.bind_each(calls)
        if missing := [name for name in names if name and name not in each[0]]:
            own = next((name for name in missing if name in STEPS_OWN), "")
            instead = own and f". {own}= is an argument of step itself: give the model's by its place"
            raise CaptureError(
                f"stage {self.stage} reads {', '.join(missing)}, and this rank's call does not give it; pass the same "
                f"arguments on every rank, or at least {', '.join(filter(None, names))} here{instead}"
            )
        return [[given[name] if name else None for name in names] for given in each]

    @cached_property
    def sources(self) -> tuple[tuple[int | None, int], ...]:
        """For each input the stage whose output it is, and which; (None, 0) for an argument of the model."""
        outputs = [[output.name for output in wires] for wires in self.stage_outputs]
        return tuple(
            (None, 0) if wire.source is None else (wire.source, outputs[wire.source].index(wire.name))
            for wire in self.stage_inputs[self.stage]
        )


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
        check_types(
            "CapturedStage", CaptureError, stage_module=(stage_module, StageModule), pipe_info=(pipe_info, PipeInfo)
        )
        check_types("CapturedStage", CaptureError, device=(device, torch.device | str))
        super().__init__(stage_module.to(device), stage_index, pipe_info.num_stages, device, group=group)
        self.routes = StageRoutes.of(pipe_info, stage_index)
        self.pipe_info = pipe_info


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


class Pipe(nn.Module):
    """The stages of a captured model, together.

    pipe = penstock.pipeline(model, (x,), num_stages=2)
    stage = pipe.build_stage(rank, device)
    """

    def __init__(self, stages: Sequence[StageModule], info: PipeInfo) -> None:
        check_types("Pipe", CaptureError, stages=(stages, Sequence[StageModule]), info=(info, PipeInfo))
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
        split_policy: Callable[[object], object] | None = None,
        **options: Value,
    ) -> Self:
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

    def build_stage(self, stage_index: int, device: torch.device | str, group: Group = None) -> CapturedStage:
        """One stage for a schedule, on `device`."""
        return build_stage(self.get_stage_module(stage_index), stage_index, self._info, device, group)

    def forward(self, *args: Value, **kwargs: Value) -> Value:
        """All stages, one after the other, in this process: returns what the model returns."""
        values = self._info.inputs.bind(args, kwargs)
        results = run_stages(map(self.get_stage_module, range(self.num_stages)), values)
        last = self.get_stage_module(self.num_stages - 1)
        return last.model_output([values[wire.name] for wire in last.inputs], results)

    def state_dict(self, *args: Value, **kwargs: Value) -> dict[str, Value]:  # type: ignore[override]
        """The tensors of all stages, under the names of the user's model."""
        return {name: value for stage in self.stages for name, value in stage.state_dict(*args, **kwargs).items()}

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load by the names of the user's model."""
        own = self.state_dict()
        missing, unexpected = [n for n in own if n not in state_dict], [n for n in state_dict if n not in own]
        if strict and (missing or unexpected):
            raise CaptureError(f"state dict does not fit: missing {missing}, unexpected {unexpected}")
        for stage in self.stages:
            known = {name: state_dict[name] for name in stage.state_dict() if name in state_dict}
            stage.load_state_dict(known, strict=False, assign=assign)
        return _IncompatibleKeys(missing, unexpected)

    def print_readable(self, print_output: bool = True) -> str:
        """All stages as text: wires, parameters, code."""
        import sys

        text = "\n\n".join(self.get_stage_module(k).print_readable() for k in range(self.num_stages))
        if print_output:
            sys.stdout.write(text + "\n")
        return text

    def __str__(self) -> str:
        lines = [f"Pipe of {self.num_stages} stages"]
        for k, stage in enumerate(map(self.get_stage_module, range(self.num_stages))):
            count, wires = sum(p.numel() for p in stage.parameters()), ", ".join(map(str, stage.inputs))
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

    loss_spec: object = None

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
