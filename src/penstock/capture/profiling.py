"""What each layer of a model costs, measured.

    profile = penstock.profile(model, (tokens,))
    profile.save("profile.json")
    print(penstock.balance.balance(profile, 4))

A layer here is what lies between two places where the model can be cut with little crossing. Each is run alone, on a
copy of its tensors: forward, then the input pass and the weight pass of its backward, as a stage runs them. Layers that
are alike are measured once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from penstock.balance import Profile
from penstock.capture.capture_model import pipeline
from penstock.capture.cost_cuts import device_of
from penstock.capture.cut_places import cut_places
from penstock.capture.flat import Flat
from penstock.capture.layer_costs import kept_random_state, measure
from penstock.capture.one_layer import LayerSetting
from penstock.capture.pipe import Pipe
from penstock.errors import CaptureError
from penstock.misfits import takes
from penstock.nest import Value


@takes(CaptureError)
def profile(
    model: torch.nn.Module,
    example: tuple[object, ...] = (),
    *,
    example_kwargs: Mapping[str, object] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    target: object = None,
    num_stages: int = 8,
    repeats: int = 5,
    device: torch.device | str | None = None,
    progress: bool | None = None,
    **options: object,
) -> Profile:
    """Measure the layers of a model.

        profile = penstock.profile(model, (tokens,), loss_fn=loss, target=labels)

    `model` may be a captured one, a Pipe: then its stages are measured. `example` is one microbatch. With `loss_fn` and
    `target` the loss counts as a part of the last layer. `num_stages` is the largest number of stages that the profile
    must be good for: the model is looked at in finer pieces if need be. Times are medians of `repeats` runs after a
    warm-up, in seconds. A bar shows the progress on a terminal (`progress`: always or never). The model, its gradients
    and the random state stay as they are. `options` go to the capture.
    """
    if repeats < 1:
        raise CaptureError(f"repeats={repeats}; expected at least 1")
    if isinstance(model, Pipe):
        layers, where = model, None
    else:
        layers, where = capture_layers(model, example, example_kwargs, num_stages=num_stages, **options)
    there = torch.device(device) if device is not None else device_of(model)
    setting = LayerSetting(example, example_kwargs or {}, there, loss_fn, target, repeats)
    return profile_layers(layers, where, setting, progress=progress)


@takes(CaptureError)
def profile_layers(
    layers: Pipe, where: Sequence[tuple[int, str]] | None, setting: LayerSetting, *, progress: bool | None = None
) -> Profile:
    """Measure the stages of a captured model, each as one layer. `where` they were cut is kept beside the costs.

    profile_layers(*capture_layers(model, (x,), {}, num_stages=8), LayerSetting((x,), {}, torch.device("cpu")))
    """
    stages = [layers.get_stage_module(k) for k in range(layers.num_stages)]
    metadata = {"places": None if where is None else [list(place) for place in where]}
    with kept_random_state(setting.device), _bar(progress, layers.num_stages) as advance:
        return measure(stages, layers.info(), setting=setting, advance=advance, metadata=metadata)


def capture_layers(
    model: torch.nn.Module,
    example: tuple[Value, ...],
    example_kwargs: Mapping[str, Value] | None,
    *,
    num_stages: int,
    **options: Any,
) -> tuple[Pipe, tuple[tuple[int, str], ...]]:
    """The model cut at every good place, and the places: (position, name of the operator there).

    layers, places = capture_layers(model, (x,))
    """
    found: list[tuple[int, str]] = []

    def everywhere(flat: Flat, _: int) -> list[int]:
        chosen = cut_places(flat, num_stages)
        found[:] = [(place, flat.nodes[place].name) for place in chosen]
        return chosen

    pipe = pipeline(model, example, example_kwargs, num_stages=num_stages, choose_cuts=everywhere, **options)
    return pipe, tuple(found)


@contextmanager
def _bar(wanted: bool | None, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal; nothing anywhere else."""
    from rich.console import Console

    console = Console(stderr=True, force_terminal=wanted or None)
    if not (console.is_terminal if wanted is None else wanted):
        yield lambda name: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("profiling"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)
