"""What the layers of a model cost, for a Pipeline: measured with a microbatch of its example, or told by their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from penstock.balance import LayerCost, Profile
from penstock.batch import batch_size_of, split_batch, split_target
from penstock.capture import LayerSetting, Pipe, capture_layers, layer_names, pipeline, profile_layers
from penstock.capture.layer_costs import measured_budgets
from penstock.errors import CaptureError
from penstock.front.choice import Choice
from penstock.front.ends import Ends
from penstock.front.machine import without_calls
from penstock.front.request import Request
from penstock.nest import Value
from penstock.plan import Plan

Places: TypeAlias = tuple[tuple[int, str], ...]  # where a model was cut: position, and name of the operator there


def estimated_profile(request: Request, ends: Ends, pipes: list[Pipe]) -> Profile:
    """A profile without measuring. If the layers are the stages, `pipes` gets them, and there is no second capture."""
    layers, where = _layers(request, ends)
    pipes += [layers] if where is None else []
    return _unmeasured(layers, where)


def _layers(request: Request, ends: Ends) -> tuple[Pipe, Places | None]:
    """The model in its smallest pieces, and where they lie in it; in the user's own pieces, None."""
    of_cut, plan = request.of_cut, request.schedule if isinstance(request.schedule, Plan) else None
    if of_cut.split_spec is not None or of_cut.split_policy is not None:
        return pipeline(request.model, request.args, request.kwargs, **of_cut.of_capture), None
    most = of_cut.count or (plan.num_stages if plan else 4 * ends.num_ranks)
    return capture_layers(request.model, request.args, request.kwargs, num_stages=most, **of_cut.of_capture)


def measured_profile(request: Request, ends: Ends, barrier: Callable[[], None]) -> Profile:
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


def with_budgets_of(choice: Choice, request: Request, ends: Ends) -> Profile:
    """The profile of a choice, with what its stages that hold less would keep if they were compiled with budgets instead."""
    args, kwargs = microbatch_of(request)
    layers, _ = _layers(request, ends)
    setting = LayerSetting(args, kwargs, ends.device, repeats=3)
    stages = [layers.get_stage_module(k) for k in range(layers.num_stages)]
    bounds = [choice.bounds[stage] for stage in sorted({one.stage for one in choice.spared})]
    found = measured_budgets(stages, layers.info(), setting, bounds)
    known = choice.profile.metadata.get("budgets", {})
    return replace(choice.profile, metadata={**choice.profile.metadata, "budgets": {**known, **found}})


def microbatch_of(request: Request) -> tuple[tuple[object, ...], dict[str, object]]:
    """One microbatch of the example; an example too small to be cut is taken for one."""
    size = batch_size_of(request.args, request.kwargs)
    if size is None or size < request.microbatches:
        return request.args, dict(request.kwargs)
    steps = request.of_steps
    args, kwargs = split_batch(
        request.args,
        request.kwargs,
        request.microbatches,
        args_spec=steps.args_chunk_spec,
        kwargs_spec=steps.kwargs_chunk_spec,
    )
    return args[0], kwargs[0]


def _target_of(request: Request) -> Value:
    target = request.of_model.example_target
    size = None if target is None else batch_size_of((target,))
    return target if size is None or size < request.microbatches else split_target(target, request.microbatches)[0]


def _unmeasured(layers: Pipe, where: Places | None) -> Profile:
    """A profile by size: a layer costs what its parameters weigh, in the forward and in both parts of the backward."""
    modules = [layers.get_stage_module(k) for k in range(layers.num_stages)]
    rows = []
    for name, module in zip(layer_names(modules), modules, strict=True):
        weight = 1.0 + sum(p.numel() for p in module.parameters())
        rows.append(LayerCost(name, weight, weight, weight, parameter_bytes=sum(p.nbytes for p in module.parameters())))
    facts = {
        "unit": "",
        "estimated": "the number of parameters",
        "places": None if where is None else [list(w) for w in where],
    }
    return Profile(tuple(rows), metadata=facts)
