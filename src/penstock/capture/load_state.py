"""Stages of a model that fits no host: traced on the meta device or under fake tensors, given memory and values stage by stage.

    with torch.device("meta"):
        model = Llama(config)
    pipe = pipeline(model, (ids,), num_stages=8)
    report = materialise(pipe.get_stage_module(rank), "checkpoint/", device="cuda")
    report.missing                       # names of the stage that the files do not have

Only the tensors of the given stages are read from files. A tied tensor is found under any of its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from penstock.capture.export import has_no_data, without_values
from penstock.capture.stage_module import StageModule
from penstock.capture.stage_state import transient_names
from penstock.checkpoint.weight_files import Source, check_values, open_weights, put
from penstock.checks import check_types
from penstock.errors import CaptureError

Fill = Callable[[str, torch.Tensor], object]
Stages = nn.Module | Iterable[nn.Module]


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
    together go on sharing it. Nothing is changed before all of it has been read and checked.
    """
    check_types(
        "materialise", CaptureError, stages=(stages, nn.Module | Iterable[nn.Module]), strict=(strict, bool | int)
    )
    check_types("materialise", CaptureError, device=(device, torch.device | str), fill=(fill, Callable | None))
    report, change = to_materialise(stages, source, device=device, fill=fill, strict=strict)
    change()
    return report


def to_materialise(
    stages: Stages, source: Source | None, *, device: torch.device | str, fill: Fill | None, strict: bool = True
) -> tuple[LoadReport, Callable[[], None]]:
    """The same with all that can be wrong found out, and nothing changed: the function that comes back does that."""
    modules = _stage_modules(stages)
    empty: dict[torch.Tensor, list[str]] = {}  # tensors without values, and their names
    for name, _, _, value in _entries(modules):
        if has_no_data(value):
            empty.setdefault(value, []).append(name)
    weights: Mapping[str, torch.Tensor] = {} if source is None else open_weights(source)
    report, spelled = (LoadReport((), (), ()), {}) if source is None else _checked(modules, weights)
    left = {tensor: names for tensor, names in empty.items() if not set(names) & set(report.loaded)}
    if strict and source is not None and left and fill is None:
        listed = sorted(name for names in left.values() for name in names)
        raise CaptureError(
            f"no value for {', '.join(listed[:8])}{' ...' if len(listed) > 8 else ''}: on the meta device, and not in the "
            "source. Pass fill=lambda name, tensor: ... to set it (init= of a Pipeline), or strict=False to leave it as it is"
        )

    def change() -> None:
        fresh = {tensor: _with_memory(tensor, device) for tensor in empty}
        for _, owner, leaf, value in [*_entries(modules)]:
            if value in fresh:
                setattr(owner, leaf, fresh[value])
        for stage in modules:
            stage.to(device)
        _copy(modules, weights, spelled)
        if fill is not None:
            with torch.no_grad():
                for tensor, names in left.items():
                    fill(names[0], fresh[tensor])

    return report, change


def _with_memory(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """One like it that has memory on a device, and no values yet."""
    made = without_values(tensor, device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def load(stages: nn.Module | Iterable[nn.Module], source: Source) -> LoadReport:
    """Copy values by name from a state dict, a file of safetensors or torch, several, a folder of them, or a checkpoint.

    report = penstock.capture.load(pipe, "folder/with/safetensors")

    Nothing is changed before all of it has been read and checked.
    """
    check_types("load", CaptureError, stages=(stages, nn.Module | Iterable[nn.Module]))
    modules, weights = _stage_modules(stages), open_weights(source)
    report, spelled = _checked(modules, weights)
    _copy(modules, weights, spelled)
    return report


def _checked(modules: Sequence[StageModule], weights: Mapping[str, torch.Tensor]) -> tuple[LoadReport, dict[str, str]]:
    """What would become of every name, and under which of its names the weights have what is loaded. Nothing is changed: each
    tensor is read, held against the model, and let go."""
    spelled: dict[str, str] = {}
    missing: dict[str, None] = {}
    transient = {name for stage in modules for name in transient_names(stage)}
    aliases = {name: others for stage in modules for name, others in stage.aliases.items()}
    for name, _, _, value in _entries(modules):
        found = next((n for n in (name, *aliases.get(name, ())) if n in weights), None)
        if found is not None:
            new = weights[found]
            check_values(name, new)
            if value.shape != new.shape:
                raise CaptureError(f"{name} is {tuple(value.shape)} in the model and {tuple(new.shape)} in the source")
            spelled[name] = found
        elif name not in transient or has_no_data(value):  # checkpoints leave those out
            missing[name] = None
    unexpected = tuple(sorted(map(str, weights.keys() - frozenset().union(*(stage.model_names for stage in modules)))))
    return LoadReport(tuple(spelled), tuple(missing), unexpected), spelled


def _copy(modules: Sequence[StageModule], weights: Mapping[str, torch.Tensor], spelled: Mapping[str, str]) -> None:
    """One tensor after the other: a stage may be as large as the memory."""
    with torch.no_grad():
        for name, _, _, value in _entries(modules):
            if name in spelled:
                put(value, weights[spelled[name]])


def _stage_modules(stages: Stages) -> list[StageModule]:
    given = [stages] if isinstance(stages, nn.Module) else stages
    found = [m for stage in given for m in stage.modules() if isinstance(m, StageModule)]
    if not found:
        raise CaptureError(
            "materialise and load take stages of a captured model: pipe, pipe.get_stage_module(k), or a list of them"
        )
    return found


def _entries(stages: Iterable[StageModule]) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """What stages hold of the model: name in the model, submodule, name there, tensor."""
    for stage in stages:
        for prefix, owner in stage.named_modules():
            for leaf, value in (*owner._parameters.items(), *owner._buffers.items()):
                name = f"{prefix}.{leaf}".removeprefix(".")
                if value is not None and name in stage.model_names:
                    yield name, owner, leaf, value
