"""``pipeline``: a model, an example of one microbatch and the wanted cuts, into a ``Pipe``. ``profile``: what its layers cost.

    pipe = penstock.pipeline(model, (tokens,), num_stages=4)
    profile = penstock.profile(model, (tokens,))
    profile.save("profile.json")
    print(penstock.balance.balance(profile, 4))

A layer in a profile is what lies between two places where the model can be cut with little crossing. Each is run alone, on a
copy of its tensors: forward, then the input pass and the weight pass of its backward, as a stage runs them. Layers that
are alike are measured once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from penstock.balance import Profile
from penstock.capture import cost_cuts
from penstock.capture.arguments import InputTable, batch_dims, given_dims
from penstock.capture.by_modules import difference, split_modules
from penstock.capture.cutter import Cut
from penstock.capture.export import (
    Example,
    Traced,
    device_of,
    has_no_data,
    skeleton_of,
    with_second_way,
    without_values,
)
from penstock.capture.layer_costs import profile_layers
from penstock.capture.marks import Mark, SplitPoint, points_of
from penstock.capture.one_layer import LayerSetting
from penstock.capture.pipe import MultiUseParameterConfig, Pipe, PipeInfo, find_loss
from penstock.capture.retrace import Retracer
from penstock.capture.stage_module import StageModule
from penstock.capture.stage_state import StateNames, assign, find_shared, named_state
from penstock.checks import check_types
from penstock.errors import CaptureError, UnverifiedSplit
from penstock.nest import Value, leaf_names, map_tensors, tensors_in
from penstock.stage.digest import model_digest
from penstock.stage.inference import refuse_inference_mode

SplitPolicy = Callable[[fx.GraphModule], object]
ChooseCuts = Callable[[Traced, int], Sequence[int]]
ENOUGH = 0.3  # seconds for one layer


def pipeline(
    module: nn.Module,
    mb_args: tuple[Value, ...] = (),
    mb_kwargs: Mapping[str, Value] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
    *,
    num_stages: int | None = None,
    profile: Profile | str | Path | None = None,
    dynamic_shapes: Mapping[str, object] | None = None,
    multi_use_param_spec: MultiUseParameterConfig | None = None,
    output_loss_value_spec: object = None,
    choose_cuts: ChooseCuts | None = None,
    arguments_from_first: bool = False,
) -> Pipe:
    """Capture a model and cut it into stages. The model itself is not changed.

    pipe = pipeline(model, (x,), {"mask": m}, split_spec={"layers.4": SplitPoint.BEGINNING})
    pipe = pipeline(model, (x,), num_stages=4)

    `mb_args` and `mb_kwargs` are an example of one microbatch. The cuts come from `split_spec`, from ``pipe_split()`` in
    the model's code and ``annotate_split_points``, from a `split_policy`, or, with `num_stages`, from the costs, so that
    the slowest stage is as fast as can be: the layers are run with the example, a few times each, and all ranks get
    the same answer; a model without values is judged by the work in its graph. A `profile` (or its file) says the costs
    instead. ``pipe.info().cuts`` shows them. The size of the first dimension may change from call to call;
    `dynamic_shapes` says the same of others, by argument: ``{"x": {1: torch.export.Dim.AUTO}}``; with ``{}`` every size
    stays fixed.

    A cache in the output crosses like everything else; to leave it out, say so to the model:
    ``mb_kwargs={"use_cache": False}``.

    A later stage that reads an argument of the model takes it from the call on its own rank; with `arguments_from_first`
    from the first stage, which sends it on, so that the other ranks need not have it.
    """
    check_types("pipeline", CaptureError, module=(module, nn.Module), mb_args=(mb_args, tuple | list))
    check_types(
        "pipeline", CaptureError, mb_kwargs=(mb_kwargs, Mapping | None), split_spec=(split_spec, Mapping | None)
    )
    check_types(
        "pipeline", CaptureError, split_policy=(split_policy, Callable | None), num_stages=(num_stages, int | None)
    )
    check_types("pipeline", CaptureError, profile=(profile, Profile | str | Path | None))
    check_types("pipeline", CaptureError, dynamic_shapes=(dynamic_shapes, Mapping | None))
    if num_stages is not None and split_spec:
        raise CaptureError("give either num_stages= (cut by cost) or split_spec= (cut where it says), not both")
    if num_stages is not None and num_stages < 1:
        raise CaptureError(f"num_stages={num_stages}; expected at least 1")
    if num_stages is None and profile is not None:
        raise CaptureError("profile= says what layers cost, and num_stages= is missing: into how many stages?")
    refuse_inference_mode([module], (mb_args, mb_kwargs))
    known = Profile.load(profile) if isinstance(profile, str | Path) else profile
    mb_kwargs, facts = mb_kwargs or {}, dict[str, Value]()  # facts of the cuts
    if known is not None and num_stages is not None and known.metadata.get("places") is None:
        facts = cost_cuts.best_cuts(known, num_stages)  # costs of modules by their names: marks stand before these
        split_spec, num_stages = dict.fromkeys(facts["cuts"].names, SplitPoint.BEGINNING), None
    table, leaves = InputTable.of(module.forward, mb_args, mb_kwargs)
    dims, why = batch_dims(leaves) if dynamic_shapes is None else (given_dims(table, leaves, dynamic_shapes), "")
    device = device_of((*module.parameters(), *module.buffers(), *leaves))
    source = Retracer(
        skeleton=skeleton_of(module, device),
        example=Example(table, list(map(without_values, leaves)), dims, device),
        fall_back=dynamic_shapes is None,
        points={} if num_stages is not None else points_of(module, split_spec or {}),
        names=StateNames.of(module),
        transmit=multi_use_param_spec is MultiUseParameterConfig.TRANSMIT,
        carry=arguments_from_first,
        policy=split_policy,
        why_static=why,
    )
    marked = isinstance(output_loss_value_spec, torch.Tensor) or output_loss_value_spec  # the former is refused below
    loss_spec = output_loss_value_spec if marked else getattr(module, "loss_spec", None)

    def measure(flat: Traced, where: cost_cuts.Where) -> Profile:
        marks = [Mark(place, f"operator {place}") for place, _ in where]
        cut = replace(source, carry=False).cut_at(flat.copied(), marks)
        layers = _assembled(source, cut, module, loss_spec=loss_spec, again=False)
        args, kwargs = map_tensors(Tensor.clone, (mb_args, dict(mb_kwargs)))
        setting = LayerSetting(args, kwargs, device_of(module.parameters()), enough=ENOUGH)
        return profile_layers(layers, where, setting, progress=False)

    def by_cost(flat: Traced, count: int) -> Sequence[int]:
        if count == 1:
            return []
        why_not = cost_cuts.why_not_measured(module, (mb_args, mb_kwargs))
        costs = known or cost_cuts.agreed_profile(flat, count, source.names, measure=measure, why_not=why_not)
        facts.update(cost_cuts.best_cuts(costs, count))
        boundaries, places = facts["cuts"].boundaries, costs.metadata["places"]
        cost_cuts.warn_if_uneven(costs, boundaries)
        return cost_cuts.cuts_at([tuple(places[boundary - 1]) for boundary in boundaries])(flat, count)

    chooser = choose_cuts or by_cost
    try:
        cut = source.first(lambda flat: None if num_stages is None else chooser(flat, num_stages))
    except CaptureError as error:
        if not error.modules:
            raise
        raise with_second_way(error, _not_its_modules(module, error.modules, mb_args, mb_kwargs)) from error.__cause__
    return _assembled(source, cut, module, loss_spec=loss_spec, **facts)


def _not_its_modules(model: nn.Module, names: Sequence[str], args: Sequence[Value], kwargs: Mapping[str, Value]) -> str:
    """Why these submodules, called in order, are not the model; "" if they are, or if there are no values to try with."""
    if any(map(has_no_data, (*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))))):
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnverifiedSplit)
            stages = split_modules(model, names, 1)
        return difference(model, stages, args, kwargs)
    except Exception as error:  # noqa: BLE001  the model itself may fail with the example
        return (str(error).splitlines() or [type(error).__name__])[0]


def _assembled(
    source: Retracer, cut: Cut, module: nn.Module, *, loss_spec: object, again: bool = True, **facts: Value
) -> Pipe:
    """The stages of a cut, with the tensors of the model in them; `again`: they can be traced in other modes and sizes."""
    count, last = len(cut.pieces), cut.pieces[-1]
    stages = [StageModule(k, count, piece=piece, source=source, again=again) for k, piece in enumerate(cut.pieces)]
    held = assign(source.names, [piece.states for piece in cut.pieces])
    tensors = named_state(module)
    for stage, own in zip(stages, held, strict=True):
        stage.hold_state({name: tensors[name] for name in own}, source.names)
    info = PipeInfo(
        num_stages=count,
        inputs=source.example.table,
        stage_inputs=tuple(p.inputs for p in cut.pieces),
        stage_outputs=tuple(p.outputs for p in cut.pieces),
        shared=find_shared(source.names, held),
        output_paths=tuple(leaf_names(last.recipe)),
        loss_index=find_loss(last, loss_spec),
        model=model_digest(stages),
        **facts,
    )
    return Pipe(stages, info)


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
    check_types(
        "profile", CaptureError, model=(model, nn.Module), example=(example, tuple | list), repeats=(repeats, int)
    )
    check_types("profile", CaptureError, example_kwargs=(example_kwargs, Mapping | None), num_stages=(num_stages, int))
    check_types("profile", CaptureError, loss_fn=(loss_fn, Callable | None), device=(device, torch.device | str | None))
    check_types("profile", CaptureError, progress=(progress, bool | int | None))
    if repeats < 1:
        raise CaptureError(f"repeats={repeats}; expected at least 1")
    there = device_of(p for p in model.parameters() if not has_no_data(p)) if device is None else device
    setting = LayerSetting(example, example_kwargs or {}, torch.device(there), loss_fn, target, repeats)
    if isinstance(model, Pipe):
        return profile_layers(model, None, setting, progress=progress)
    layers, where = capture_layers(model, example, example_kwargs, num_stages=num_stages, **options)
    return profile_layers(layers, where, setting, progress=progress)


def capture_layers(
    model: torch.nn.Module,
    example: tuple[Value, ...],
    example_kwargs: Mapping[str, Value] | None,
    *,
    num_stages: int,
    **options: Value,
) -> tuple[Pipe, tuple[tuple[int, str], ...]]:
    """The model cut at every good place, and the places: (position, name of the operator there).

    layers, places = capture_layers(model, (x,))
    """
    check_types("capture_layers", CaptureError, num_stages=(num_stages, int))
    found: list[tuple[int, str]] = []

    def everywhere(flat: Traced, _: int) -> list[int]:
        chosen = cost_cuts.cut_places(flat, num_stages)
        found[:] = [(place, flat.nodes[place].name) for place in chosen]
        return chosen

    pipe = pipeline(model, example, example_kwargs, num_stages=num_stages, choose_cuts=everywhere, **options)
    return pipe, tuple(found)
