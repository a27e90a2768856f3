"""PipelineStage: a module, its place in the pipeline, and its wires to other stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from penstock.checks import check_types
from penstock.errors import PlaceError, StageError
from penstock.nest import Value
from penstock.stage.compile_options import CompileOptions, check_compile_options
from penstock.stage.dtensors import MeshGetter


@runtime_checkable
class RankGroup(Protocol):
    """A transport, as much of it as a stage looks at."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...


Group: TypeAlias = "dist.ProcessGroup | RankGroup | None"
"""The ranks of a pipeline: of a process group, of a transport; None: of the default group."""


class Routes(Protocol):
    """What a captured stage knows of the whole model. A hand-made stage has none: it reads all that the one before gives."""

    @property
    def edges(self) -> Iterable[tuple[int, int]]:
        """(producer, consumer) for every pair of stages between which something travels."""

    @property
    def wires(self) -> str:
        """All that travels, in one line that ranks compare before their first step."""

    @property
    def model(self) -> str:
        """What all stages of the model hold, in a few words that ranks compare before their first step."""

    @property
    def has_loss(self) -> bool:
        """Whether the model returns its own loss."""

    def loss_of(self, output: object) -> Value:
        """The model's own loss, out of what the model returned."""

    @property
    def ties(self) -> Iterable[Sequence[tuple[int, str]]]:
        """The holders, (stage, name), of each parameter that several stages use, the owner first."""

    def wanted_on(self, producer: int, consumers: Iterable[int]) -> tuple[int, ...]:
        """Which of the producer's outputs these stages read, by their place, in order."""

    @property
    def sources(self) -> Sequence[tuple[int | None, int]]:
        """Where each argument of this stage's module comes from: (producer, which of its outputs), or (None, 0) for an
        argument of the model."""

    def bind(
        self, args: Sequence[tuple[object, ...]] | None, kwargs: Sequence[dict[str, object]], num_microbatches: int
    ) -> Sequence[Sequence[Value]]:
        """For each microbatch the arguments of this stage's module, with None where another stage's value goes."""


class PipelineStage:
    """One stage of a pipeline.

        stage = PipelineStage(module, stage_index=0, num_stages=2, device=torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)

    `group` is a process group, or None for the default one; ranks as threads (`penstock.comm.LocalWorld`) pass their
    transport. `input_args` and `output_args` (tensors, or what has their shape and dtype) are optional: penstock finds
    shapes by itself; given, they are checked. `dw_builder` makes the weight work of a split backward by hand.
    `get_mesh(names, layout)` names the mesh on which arriving DTensors are put, where no parameter shows it.
    `compile`, True or options of torch.compile (``{"mode": "max-autotune"}``, and `memory_budget`), compiles it in place,
    before the first step.
    """

    _compile: CompileOptions = False  # what `compile_once` has still to do
    routes: Routes | None = None  # set by capture; a hand-made stage reads all that the stage before it returns

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,  # from 0
        num_stages: int,  # of the whole pipeline
        device: torch.device | str,
        input_args: Value = None,
        output_args: Value = None,
        *,
        group: Group = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: MeshGetter | None = None,
        compile: CompileOptions = False,  # noqa: A002  the word of torch and of everybody
    ) -> None:
        if not isinstance(submodule, nn.Module):
            raise StageError(f"a stage needs an nn.Module, got {type(submodule).__name__}")
        check_types("PipelineStage", StageError, stage_index=(stage_index, int), num_stages=(num_stages, int))
        if not 0 <= stage_index < num_stages:
            raise PlaceError(f"stage_index={stage_index} with num_stages={num_stages}; expected 0 to {num_stages - 1}")
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise StageError(f"device={device!r}: {error}") from error
        self.input_args = input_args
        self.output_args = output_args
        self.group = group
        self.dw_builder = dw_builder
        self.get_mesh = get_mesh
        self.group_rank, self.group_size = place_in(group)
        if self.group_size > num_stages:
            raise StageError(f"{self.group_size} ranks for {num_stages} stages; expected at least one stage a rank")
        check_compile_options(compile)
        self._compile = compile

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def __repr__(self) -> str:
        return f"PipelineStage({self.stage_index} of {self.num_stages}, {type(self.submod).__name__}, rank {self.group_rank})"


def place_in(group: Group) -> tuple[int, int]:
    """This rank and the number of ranks: of a process group, of a transport, of the default group, or one rank alone."""
    if isinstance(group, RankGroup):
        return group.rank, group.num_ranks
    if group is not None and not hasattr(group, "rank"):
        raise StageError(f"group is a {type(group).__name__}; expected a process group, or a transport of LocalWorld")
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def accepted_keywords(module: nn.Module) -> frozenset[str] | None:
    """The keyword arguments that a module's forward takes; None: any."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
