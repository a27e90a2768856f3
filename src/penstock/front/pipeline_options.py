"""What a Pipeline is asked for: its options in four groups, each checked before any work is done.

of_model, of_cut, of_ranks, of_steps = sorted_options({"profile": False, "seed": 3})

docs/guides/options.md has the table of all of them; a test holds it against the fields here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType

import torch
from torch.distributed.device_mesh import DeviceMesh

from penstock.balance import Profile
from penstock.batch.group_rows import GroupRows
from penstock.checkpoint.weight_files import Source
from penstock.errors import PlanError, StageError, UnknownNameError
from penstock.front.dimensions import Parallelize
from penstock.lower import ReceivePolicy
from penstock.nest import Value
from penstock.plan import Placement, Plan
from penstock.run.planning import Place, Sparing, check_flags, check_sparing
from penstock.run.ties import Holders, Tied, holders_of
from penstock.schedules import Recipe, get_schedule
from penstock.stage.compile_options import CompileOptions, check_compile_options
from penstock.stage.pipeline_stage import Group, PipelineStage

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}iB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")}
_UNITS |= {f"{letter}B": 1000 ** (power + 1) for power, letter in enumerate(("k", "M", "G", "T"))}
_FUNCTION = ("__call__",)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


@dataclass(frozen=True)
class ModelOptions:
    """What the model is called with, and where its values come from."""

    example_kwargs: Mapping[str, Value] | None = None  # keyword arguments of the example
    example_target: Value = None  # lets the profile include the loss
    # A state dict; safetensors, .pt or .bin files; a folder of them; a checkpoint of torch's.
    weights: Source | None = None
    init: Callable[[str, torch.Tensor], None] | None = None  # sets what has no value yet: init(name, tensor)

    def __post_init__(self) -> None:
        _is(self, "example_kwargs", Mapping, "a dictionary of arguments")
        _is(self, "init", _FUNCTION, "init(name, tensor)")


@dataclass(frozen=True)
class CutOptions:
    """Into which stages, on which ranks, by what costs."""

    stages: int | Sequence[PipelineStage] | None = None  # how many, or those of this rank, made by hand
    num_stages: int | None = None  # says the same as a number of `stages`
    placement: Placement | str | None = None  # "loop", "v", or one of your own
    memory_limit: Value = None  # of a rank, or of each: bytes, or "6GiB"
    optimizer_bytes: float = 2.0  # state of the optimizer for each byte of parameters, for memory_limit
    # A function of parameters that makes the optimizer: its state is measured instead.
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    profile: Profile | str | Path | bool | None = None  # measured before, or its file; False: cut by size
    split_spec: Mapping[str, object] | None = None
    split_policy: Callable[..., object] | None = None
    dynamic_shapes: Mapping[str, object] | None = None
    output_loss_value_spec: object = None
    multi_use_param_spec: object = None
    compile: CompileOptions = False  # True, or options of torch.compile: compiles each stage in place

    def __post_init__(self) -> None:
        made = self.stages
        if isinstance(made, Sequence) and (not made or any(not isinstance(one, PipelineStage) for one in made)):
            raise StageError("stages takes the PipelineStages of this rank, or a number of stages")
        for name, count in (("stages", None if isinstance(made, Sequence) else made), ("num_stages", self.num_stages)):
            if count is not None:
                _is_count(name, count)
        if isinstance(made, int) and self.num_stages not in (None, made):
            raise StageError(f"stages={made} and num_stages={self.num_stages}; give one of them")
        if self.placement not in ("loop", "v", None) and not isinstance(self.placement, Placement):
            raise PlanError(f'placement={self.placement!r}; expected "loop", "v" or a Placement')
        if self.memory_limit is not None:
            object.__setattr__(self, "memory_limit", byte_limits(self.memory_limit))
        _is(self, "optimizer", _FUNCTION, "optimizer(parameters), such as torch.optim.AdamW")
        number = isinstance(self.optimizer_bytes, int | float) and not isinstance(self.optimizer_bytes, bool)
        if not number or not 0 <= self.optimizer_bytes < float("inf"):
            raise PlanError(
                f"optimizer_bytes={self.optimizer_bytes!r}; expected a number from 0: 2 for Adam, 0 for SGD"
            )
        _is(self, "profile", Profile | str | Path | bool, "a Profile, its file, or False")
        if self.profile is True:
            raise PlanError("profile=True; leave it out to measure, or give a Profile, its file, or False")
        _is(self, "split_spec", Mapping, "{name of a module: SplitPoint}")
        _is(self, "split_policy", _FUNCTION, "a function of the captured module")
        check_compile_options(self.compile)

    @property
    def count(self) -> int | None:
        return self.stages if isinstance(self.stages, int) else self.num_stages

    @property
    def is_split(self) -> bool:
        """Whether the user says where to cut."""
        return self.split_spec is not None or self.split_policy is not None

    @property
    def made(self) -> list[PipelineStage]:
        """Stages made by hand."""
        return list(self.stages) if isinstance(self.stages, Sequence) else []

    @property
    def of_capture(self) -> dict[str, Value]:
        """The options that `pipeline` takes."""
        names = ("split_spec", "split_policy", "dynamic_shapes", "output_loss_value_spec", "multi_use_param_spec")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class RankOptions:
    """Who takes part, and where."""

    group: Group = None  # a process group, or a transport of LocalWorld; else all processes
    # With the dimensions "dp" and "pp", and those that `parallelize` spreads a stage over.
    mesh: DeviceMesh | None = None
    parallelize: Parallelize | None = None  # parallelize(module, mesh) spreads the module of a stage
    data_parallel: str = "ddp"  # or "fsdp": what the replicas of a mesh are
    device: torch.device | str | None = None  # else that of the model's parameters

    def __post_init__(self) -> None:
        if self.data_parallel not in ("ddp", "fsdp"):
            raise StageError(f'data_parallel={self.data_parallel!r}; expected "ddp" or "fsdp"')
        _is(self, "group", ("rank",), "a process group, or a transport of LocalWorld")
        _is(self, "parallelize", _FUNCTION, "parallelize(module, mesh)")
        _is(self, "mesh", ("mesh_dim_names",), "init_device_mesh(..., mesh_dim_names=(...))")
        if self.device is not None:
            try:
                torch.device(self.device)
            except (RuntimeError, TypeError, ValueError) as error:
                raise StageError(f"device={self.device!r}: {error}") from error


# What a Schedule does not have.
_OWN = (
    "collect_every",
    "few_rows",
    "loss_weight",
    "loss_scale",
    "run_folder",
    "share_loss",
    "group_rows",
    "replan",
)


@dataclass(frozen=True)
class StepOptions:
    """How a step goes. All but the first eight are those of a `Schedule`."""

    loss_scale: Value = None  # a GradScaler: all ranks skip a step whose gradients overflow on one
    loss_weight: Callable[..., Value] | None = None  # what a microbatch counts, by its target; else by its loss or rows
    run_folder: str | Path | None = None  # where each rank writes what it does, for `penstock top`
    collect_every: int | None = None  # Python's garbage is collected after so many steps, on all ranks at once
    share_loss: bool = True  # False: no broadcast at the end of a step; the loss is on the last stage's rank alone
    # A batch of fewer rows than microbatches is cut into fewer; then every rank has to give the batch.
    few_rows: bool = False
    group_rows: Value = None  # GroupRows, or the function of a step's arguments that gives the lengths of its rows
    replan: float | None = None  # take another plan when measured steps say that it saves this share of a step
    scale_grads: bool = True
    seed: int = 0
    rng: str | None = None  # "per-microbatch": random numbers by seed, stage, microbatch and step
    recompute: Sparing = False  # stages whose forward is run again: True, a list, or {stage: [microbatches]}
    offload: Sparing = False  # stages of which what a forward saved is moved away and back; "host", "disk": all
    offload_to: Place = None  # a folder; else the memory of the host
    ties: Iterable[Tied | Holders] = ()
    dynamic: bool = False
    receives: ReceivePolicy | None = None
    args_chunk_spec: object = None
    kwargs_chunk_spec: object = None
    target_chunk_spec: object = None
    output_merge_spec: object = None

    def __post_init__(self) -> None:
        if self.rng not in (None, "per-microbatch"):
            raise StageError(f'rng={self.rng!r}; expected "per-microbatch", or nothing')
        check_sparing(self.recompute, self.offload, self.offload_to)
        check_flags(self, "share_loss", "few_rows", "scale_grads", "dynamic")
        if self.collect_every is not None:
            _is_count("collect_every", self.collect_every)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise StageError(f"seed={self.seed!r}; expected a whole number")
        _is(self, "loss_scale", ("scale", "step", "update"), "a torch.amp.GradScaler")
        _is(self, "loss_weight", _FUNCTION, "loss_weight(target), which says how much a microbatch counts")
        if self.loss_weight is not None and not self.scale_grads:
            raise StageError(
                "loss_weight with scale_grads=False, which takes each loss as it is; leave one of them out"
            )
        _is(self, "run_folder", str | Path, "a folder")
        if self.run_folder == "":
            raise StageError('run_folder=""; expected the name of a folder ("." is the one where you are), or nothing')
        specs = (self.args_chunk_spec, self.kwargs_chunk_spec, self.target_chunk_spec, self.output_merge_spec)
        if self.group_rows is not None and any(spec is not None for spec in specs):
            raise StageError(
                "group_rows with a chunk or merge spec; rows are grouped along dimension 0, so leave one out"
            )
        if callable(self.group_rows):
            object.__setattr__(self, "group_rows", GroupRows(self.group_rows))
        _is(
            self, "group_rows", GroupRows, "a function of the arguments that gives the length of each row, or GroupRows"
        )
        if self.replan is not None and (type(self.replan) not in (int, float) or not 0 < self.replan < 1):
            raise StageError(f"replan={self.replan!r}; expected a share of a step, such as 0.05")
        object.__setattr__(self, "ties", holders_of(self.ties))

    @property
    def batch_specs(self) -> dict[str, Value]:
        """How the arguments of a batch are cut, where the user says so."""
        return {"args_spec": self.args_chunk_spec, "kwargs_spec": self.kwargs_chunk_spec}

    @property
    def cuts_rows(self) -> bool:
        """Whether outputs and targets are cut along their first dimension, for all that is said here."""
        return self.target_chunk_spec is None and self.output_merge_spec is None

    def of_schedule(self, loss_fn: object) -> dict[str, object]:
        """The options that `Schedule` takes; what `recompute` and `offload` ask for is in the plan that it is given."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*_OWN, "recompute", "offload")}
        return {**given, "loss_fn": loss_fn}


@dataclass(frozen=True)
class Request:
    """What a Pipeline was asked for."""

    model: torch.nn.Module
    args: tuple[Value, ...]
    loss_fn: Callable[..., torch.Tensor] | None
    schedule: str | Plan | Recipe
    microbatches: int
    of_model: ModelOptions
    of_cut: CutOptions
    of_steps: StepOptions = field(default_factory=StepOptions)

    @property
    def kwargs(self) -> Mapping[str, Value]:
        return self.of_model.example_kwargs or {}

    def options(self, model: torch.nn.Module | None, of_ranks: RankOptions) -> dict[str, Value]:
        """All options by name; a number of stages under both of its names."""
        groups = (self.of_model, self.of_cut, of_ranks, self.of_steps)
        found = {f.name: getattr(group, f.name) for group in groups for f in fields(group)}
        if not self.of_cut.made:
            found["stages"] = found["num_stages"] = self.of_cut.count
        named = (model, self.args, self.loss_fn, self.schedule, self.microbatches)
        return {**found, **dict(zip(FIRST, named, strict=True))}


GROUPS = (ModelOptions, CutOptions, RankOptions, StepOptions)
FIRST = ("model", "example", "loss_fn", "schedule", "microbatches")  # the named parameters of Pipeline


def sorted_options(given: Mapping[str, object]) -> tuple[ModelOptions, CutOptions, RankOptions, StepOptions]:
    """The options in their groups; one that does not exist is an error that names the nearest."""
    known = {f.name: group for group in GROUPS for f in fields(group)}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, [*FIRST, *known], n=1, cutoff=0.5)
            meant = f"did you mean {near[0]}=?" if near else "docs/guides/options.md has them all"
            raise UnknownNameError(f"Pipeline has no option {name}=; {meant}")
    groups: dict[type, dict[str, Value]] = {group: {} for group in GROUPS}
    for name, value in given.items():
        groups[known[name]][name] = value
    of_model, of_cut, of_ranks, of_steps = groups.values()
    return ModelOptions(**of_model), CutOptions(**of_cut), RankOptions(**of_ranks), StepOptions(**of_steps)


def check_named(example: object, loss_fn: object, schedule: object, microbatches: object) -> None:
    """Check the parameters that have a name in Pipeline itself."""
    if not isinstance(example, tuple | list):
        raise StageError(
            f"example is a {type(example).__name__}; expected a tuple of the model's arguments: example=(x,)"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise StageError(f"loss_fn is a {type(loss_fn).__name__}; expected a function: loss_fn(output, target)")
    if isinstance(schedule, str):
        if schedule not in ("auto", "search"):
            get_schedule(schedule)
    elif not isinstance(schedule, Plan | Recipe):
        raise PlanError(f'schedule={schedule!r}; expected "auto", "search", the name of a schedule, a Plan or a Recipe')
    _is_count("microbatches", microbatches)


def byte_limits(given: object) -> int | tuple[int, ...]:
    """A limit of a rank, or of each.

    >>> byte_limits("1.5 GiB"), byte_limits(["6GB", 100])
    (1610612736, (6000000000, 100))
    """
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(_bytes(one, given) for one in given)
    return _bytes(given, given)


def _bytes(size: object, given: object) -> int:
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match and match[2] in _UNITS:
            size = float(match[1]) * _UNITS[match[2]]
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < float("inf"):
        units = ", ".join(unit for unit in _UNITS if unit)
        raise PlanError(
            f'memory_limit={given!r}; expected bytes of a rank (6_000_000_000, or "6GiB"; units {units}), or a list with '
            "those of each"
        )
    return round(size)


def _is_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}={value!r}; expected a whole number from 1")


def _is(options: object, name: str, kind: type | UnionType | tuple[str, ...], expected: str) -> None:
    """Whether an option, if it is given, is of this kind, or has these attributes."""
    value = getattr(options, name)
    right = all(hasattr(value, one) for one in kind) if isinstance(kind, tuple) else isinstance(value, kind)
    if value is not None and not right:
        raise StageError(f"{name} is a {type(value).__name__}; expected {expected}")
