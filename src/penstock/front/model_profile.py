"""What layers cost, for a Pipeline: measured by all ranks with a microbatch of its example, or told by their sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import torch

from penstock.balance import LayerCost, Profile
from penstock.batch import batch_size_of, split_batch, split_target
from penstock.capture import LayerSetting, Pipe, capture_layers, layer_names, pipeline, profile_layers
from penstock.capture.wires import misfit
from penstock.comm import LocalTransport
from penstock.errors import CaptureError
from penstock.front.machine import NoWork
from penstock.front.mesh import PipelineMesh
from penstock.front.pipeline_options import Request
from penstock.nest import Value
from penstock.plan import Plan

_SLOWER = 1.25  # so many times what the others take is a rank of its own kind
_AT_LEAST = 0.1  # of what was measured for a layer counts, whatever the calls take
_TIMES = ("forward", "backward_input", "backward_weight")
Found = TypeVar("Found", bound=tuple[Pipe, object])
Places: TypeAlias = tuple[tuple[int, str], ...]  # where a model was cut: position, and name of the operator there


def estimated_profile(request: Request, ends: PipelineMesh) -> Profile:
    """A profile by size: a layer costs what its parameters weigh, in the forward and in both parts of the backward."""
    layers, where = _layers(request, ends)
    modules = [layers.get_stage_module(k) for k in range(layers.num_stages)]
    rows = []
    for name, module in zip(layer_names(modules), modules, strict=True):
        weight = 1.0 + sum(p.numel() for p in module.parameters())
        rows.append(LayerCost(name, weight, weight, weight, parameter_bytes=sum(p.nbytes for p in module.parameters())))
    places = None if where is None else [list(place) for place in where]  # as they come back from a file
    return Profile(tuple(rows), metadata={"unit": "", "estimated": "the number of parameters", "places": places})


def _layers(request: Request, ends: PipelineMesh) -> tuple[Pipe, Places | None]:
    """The model in its smallest pieces, and where they lie in it; in the user's own pieces, None."""
    of_cut, plan = request.of_cut, request.schedule if isinstance(request.schedule, Plan) else None
    most = of_cut.count or (plan.num_stages if plan else 4 * ends.num_ranks)

    def capture(args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> tuple[Pipe, Places | None]:
        if of_cut.is_split:
            return pipeline(request.model, args, kwargs, **of_cut.of_capture), None
        return capture_layers(request.model, args, kwargs, num_stages=most, **of_cut.of_capture)

    return captured(request, capture)


def measured_profile(request: Request, ends: PipelineMesh, barrier: Callable[[], None]) -> Profile:
    """What the layers cost on this rank, while the others measure theirs: `barrier` waits for them."""
    args, kwargs = microbatch_of(request)
    layers, where = _layers(request, ends)
    barrier()
    setting = LayerSetting(args, kwargs, ends.device, request.loss_fn, _target_of(request))
    try:
        measured = profile_layers(layers, where, setting)
    except CaptureError:  # traced anew for a microbatch of one row, some of so many layers may have nothing to do
        whole = replace(setting, args=request.args, kwargs=request.kwargs, target=request.of_model.example_target)
        measured = profile_layers(layers, where, whole)
    return without_calls(measured, ends.device)


def together(ends: PipelineMesh, measure: Callable[[Callable[[], None]], Profile]) -> Callable[[], Profile]:
    """What layers cost while all ranks are at work: all measure at the same time, and the median over the ranks counts.

    `measure` is handed a barrier, to call when it is about to begin. The first rank asks for the outcome, and gets its own error
    if it had one; a rank that cannot measure is left out. Ranks that are threads of one process take turns anyway: the first
    one measures for all.
    """
    if isinstance(ends.transport, LocalTransport):
        return lambda: measure(lambda: None)
    met = False

    def barrier() -> None:
        nonlocal met
        if not met:  # the ranks meet here once, also if that fails: the others go on to what follows
            met = True
            ends.own.barrier("about to measure the layers")

    mine: Profile | Exception
    try:
        mine = measure(barrier)
    except Exception as error:  # noqa: BLE001  the other ranks wait for this one
        mine = error
    barrier()
    texts = ends.own.all_gather(
        "what the layers cost on each rank", mine.dumps() if isinstance(mine, Profile) else None
    )

    def outcome() -> Profile:
        if isinstance(mine, Exception):
            raise mine
        return typical(mine, [Profile.loads(text) for text in texts if text is not None])

    return outcome


def typical(mine: Profile, everyone: Sequence[Profile]) -> Profile:
    """The profile with the median times of all ranks that measured the same layers."""
    names = [layer.name for layer in mine.layers]
    alike = [profile for profile in everyone if [layer.name for layer in profile.layers] == names]
    if len(alike) < 2:
        return mine
    unlike = rank_times([[layer.forward + layer.backward_input for layer in p.layers] for p in alike])
    known = {} if unlike is None or len(alike) < len(everyone) else {"rank_times": unlike}
    return _retimed(
        mine, lambda k, name: statistics.median(_time(p, k, name) for p in alike), ranks=len(alike), **known
    )


def rank_times(times: Sequence[Sequence[float]]) -> list[float] | None:
    """How many times as long each rank takes as they do at the median, if one is slower with nearly all its layers.

    Noise slows some layers on a rank, a slow device all of them: three quarters must be slower by a quarter.

    >>> rank_times([[1.0, 1.0, 2.0, 1.0], [1.1, 0.9, 1.0, 1.0], [2.0, 2.2, 1.9, 2.0]])
    [1.0, 1.0, 1.909]
    >>> rank_times([[1.0, 1.0, 2.0, 1.0], [1.1, 0.9, 1.0, 1.0]])
    """
    usual = [statistics.median_low(column) or 1e-12 for column in zip(*times, strict=True)]
    ratios = [sorted(time / typical for time, typical in zip(row, usual, strict=True)) for row in times]
    if not any(row[len(row) // 4] > _SLOWER for row in ratios):
        return None
    return [round(statistics.median(row), 3) if row[len(row) // 4] > _SLOWER else 1.0 for row in ratios]


def without_calls(profile: Profile, device: torch.device) -> Profile:
    """What the layers cost inside a stage. Each was measured alone, and the calls around it are made once a stage.

    These calls are an action's overhead, which `measure_machine` finds; here they are taken off, as a layer that does
    nothing has them.
    """
    x = torch.ones(1, 1, device=device, requires_grad=True)
    with torch.enable_grad():
        setting = LayerSetting((x,), {}, device)
        empty = profile_layers(pipeline(NoWork(device), (x,)), None, setting, progress=False)

    def less(number: int, name: str) -> float:
        """What is left, and never nothing: the calls are not known that well."""
        measured = _time(profile, number, name)
        return max(measured - _time(empty, 0, name), _AT_LEAST * measured)

    return _retimed(profile, less, calls="taken off")


def _time(profile: Profile, number: int, name: str) -> float:
    """What a layer takes; its backward in one piece stands beside the layers."""
    found: float = profile.metadata[name][number] if name == "backward" else getattr(profile.layers[number], name)
    return found


def _retimed(profile: Profile, time: Callable[[int, str], Value], **facts: object) -> Profile:
    """The profile with other times, each by the number of the layer and the name of the time, and with these facts."""
    layers = tuple(replace(layer, **{name: time(k, name) for name in _TIMES}) for k, layer in enumerate(profile.layers))
    backward = [time(k, "backward") for k in range(len(layers))]
    return replace(profile, layers=layers, metadata={**profile.metadata, "backward": backward, **facts})


def captured(request: Request, capture: Callable[[tuple[Value, ...], Mapping[str, Value]], Found]) -> Found:
    """Capture with the example; or with one microbatch of it, if the whole example cannot be captured or the model then takes no
    other number of rows, as one whose code goes through them row by row."""
    args, kwargs = microbatch_of(request)
    if batch_size_of(args, kwargs) == batch_size_of(request.args, request.kwargs):
        return capture(request.args, request.kwargs)
    failed: CaptureError | None = None
    try:
        found = capture(request.args, request.kwargs)
        info = found[0].info()
        leaves = info.inputs.bind(args, kwargs)
        wires = [wire for wires in info.stage_inputs for wire in wires if wire.source is None]
        if not misfit(wires, [leaves[wire.name] for wire in wires], {}):
            return found
    except CaptureError as error:
        failed = error
    try:
        return capture(args, kwargs)
    except CaptureError as error:
        raise failed or error from None


def microbatch_of(request: Request) -> tuple[tuple[Value, ...], dict[str, Value]]:
    """One microbatch of the example; an example too small to be cut is taken for one."""
    size = batch_size_of(request.args, request.kwargs)
    if size is None or size < request.microbatches:
        return request.args, dict(request.kwargs)
    args, kwargs = split_batch(request.args, request.kwargs, request.microbatches, **request.of_steps.batch_specs)
    return args[0], kwargs[0]


def _target_of(request: Request) -> Value:
    target = request.of_model.example_target
    size = None if target is None else batch_size_of((target,))
    return target if size is None or size < request.microbatches else split_target(target, request.microbatches)[0]
