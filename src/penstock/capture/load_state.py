"""Stages of a model that fits no host: traced on the meta device or under fake tensors, given memory and values stage by stage.

    with torch.device("meta"):
        model = Llama(config)
    pipe = pipeline(model, (ids,), num_stages=8)
    report = materialise(pipe.get_stage_module(rank), "checkpoint/", device="cuda")
    report.missing                       # names of the stage that the files do not have

Only the tensors of the given stages are read from files. A tied tensor is found under any of its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from penstock.capture.stage_module import StageModule
from penstock.checkpoint.weight_files import Source, check_values, open_weights
from penstock.errors import CaptureError
from penstock.misfits import takes

Fill = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class LoadReport:
    """What became of every name.

    print(penstock.capture.load(stage, "model.safetensors"))
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]  # of these stages, and not in the source
    unexpected: tuple[str, ...]  # in the source, and of no stage of the model

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} loaded, {len(self.missing)} missing, {len(self.unexpected)} unexpected"]
        lines += [f"  missing     {name}" for name in self.missing]
        lines += [f"  unexpected  {name}" for name in self.unexpected]
        return "\n".join(lines)


@takes(CaptureError)
def materialise(
    stages: nn.Module | Iterable[nn.Module],
    source: Source | None = None,
    *,
    device: torch.device | str = "cpu",
    fill: Fill | None = None,
    strict: bool = True,
) -> LoadReport:
    """Give stages memory on `device` and, from `source`, their values.

    `fill(name, tensor)` sets, in place, what the source does not have (buffers that checkpoints leave out, say). With
    `strict`, anything on the meta device that gets no value is an error. Stages that share a parameter and are given
    together go on sharing it.
    """
    modules = _stage_modules(stages)
    fresh: dict[int, torch.Tensor] = {}
    without_value: dict[int, set[str]] = {}
    for stage in modules:
        for name, owner, leaf, value in _entries(stage):
            if has_no_data(value):
                made = fresh.setdefault(id(value), _empty(value, device))
                without_value.setdefault(id(made), set()).add(name)
                if isinstance(made, nn.Parameter):
                    owner._parameters[leaf] = made
                else:
                    owner._buffers[leaf] = made
        stage.to(device)
    blank = frozenset(name for names in without_value.values() for name in names)
    report = _loaded(modules, source, blank) if source is not None else LoadReport((), (), ())
    for stage in modules:
        for name, _, _, value in _entries(stage):
            if id(value) not in without_value or name in report.loaded:
                without_value.pop(id(value), None)
            elif fill is not None:
                with torch.no_grad():
                    fill(name, value)
                without_value.pop(id(value))
    left = sorted(name for names in without_value.values() for name in names)
    if strict and source is not None and left:
        raise CaptureError(
            f"no value for {', '.join(left[:8])}{' ...' if len(left) > 8 else ''}: on the meta device, and not in the "
            "source. Pass fill=lambda name, tensor: ... to set it, or strict=False to leave it as it is"
        )
    return report


def has_no_data(tensor: torch.Tensor) -> bool:
    """On the meta device, or made under fake tensors."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@takes(CaptureError)
def load(stages: nn.Module | Iterable[nn.Module], source: Source) -> LoadReport:
    """Copy values by name from a state dict, a file of safetensors or torch, several, a folder of them, or a checkpoint.

    report = penstock.capture.load(pipe, "folder/with/safetensors")
    """
    return _loaded(_stage_modules(stages), source, frozenset())


def _loaded(modules: Sequence[StageModule], source: Source, blank: frozenset[str]) -> LoadReport:
    """`blank`: names that have no value yet, so that they count as missing even if checkpoints leave them out."""
    weights = open_weights(source)
    loaded: dict[str, None] = {}
    missing: dict[str, None] = {}
    known: set[str] = set()
    for stage in modules:
        known |= stage.model_names
        transient = _transient(stage)
        for name, _, _, value in _entries(stage):
            found = next((n for n in (name, *stage.aliases.get(name, ())) if n in weights), None)
            if found is None:
                if name not in transient or name in blank or has_no_data(value):
                    missing[name] = None
                continue
            _copy(name, value, weights[found])
            loaded[name] = None
    unexpected = tuple(sorted(weights.keys() - known))
    return LoadReport(tuple(loaded), tuple(missing), unexpected)


def _stage_modules(stages: nn.Module | Iterable[nn.Module]) -> list[StageModule]:
    if isinstance(stages, nn.Module):
        found = [m for m in stages.modules() if isinstance(m, StageModule)]
    else:
        found = [m for stage in stages for m in stage.modules() if isinstance(m, StageModule)]
    if not found:
        raise CaptureError(
            "materialise and load take stages of a captured model: pipe, pipe.get_stage_module(k), or a list of them"
        )
    return found


def _entries(stage: StageModule) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    found = []
    for prefix, owner in stage.named_modules():
        for leaf, value in (*owner._parameters.items(), *owner._buffers.items()):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if value is not None and name in stage.model_names:
                found.append((name, owner, leaf, value))
    return found


def _transient(stage: StageModule) -> set[str]:
    return {
        f"{prefix}.{leaf}" if prefix else leaf
        for prefix, owner in stage.named_modules()
        for leaf in owner._non_persistent_buffers_set
    }


def _empty(value: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return nn.Parameter(made, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else made


def _copy(name: str, value: torch.Tensor, new: torch.Tensor) -> None:
    check_values(name, new)
    if value.shape != new.shape:
        raise CaptureError(f"{name} is {tuple(value.shape)} in the model and {tuple(new.shape)} in the source")
    with torch.no_grad():
        value.copy_(new)
