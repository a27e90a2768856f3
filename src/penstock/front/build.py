"""Making a pipeline: the ranks meet, and a model (profiled, captured and cut as was chosen) or stages made by hand become the
stages of this rank: spread, compiled and wrapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from penstock.backward.compile_stage import compile_in_place
from penstock.backward.offload_targets import offload_target
from penstock.balance import Profile
from penstock.batch import batch_size_of
from penstock.capture import Pipe, cuts_at, pipeline, warn_if_uneven
from penstock.capture.load_state import to_materialise
from penstock.comm.collectives import same_everywhere
from penstock.errors import CaptureError, PlanError, StageError
from penstock.front.candidates import Wishes, plans
from penstock.front.choice import Built, Choice, Machine
from penstock.front.choose import choose
from penstock.front.compared import compare
from penstock.front.dimensions import spread
from penstock.front.machine import copy_bandwidth, measure_machine
from penstock.front.mesh import PipelineMesh
from penstock.front.model_profile import captured, estimated_profile, measured_profile, together
from penstock.front.pipeline_options import RankOptions, Request
from penstock.lower import InTurn
from penstock.parallel import wrap
from penstock.plan import Placement, Plan
from penstock.run.planning import sparing
from penstock.simulate import simulate
from penstock.stage.digest import operators_of
from penstock.stage.inference import refuse_inference_mode

_PROBED = 4096  # numbers in the parameter that an optimizer is tried on


def assemble(model: nn.Module | None, request: Request, of_ranks: RankOptions) -> tuple[Built, PipelineMesh]:
    """The stages of this rank, spread, compiled and wrapped, and its place among the ranks. `request` is without the model."""
    of_cut, of_steps, made = request.of_cut, request.of_steps, request.of_cut.made
    group, device = of_ranks.group, of_ranks.device
    if made:
        device = made[0].device
        group = made[0].group if group is None and of_ranks.mesh is None else group
    elif not isinstance(model, nn.Module):
        raise StageError(f"Pipeline takes an nn.Module and an example, or stages=[...]; got {type(model).__name__}")
    elif device is None:
        device = next((p.device for p in model.parameters() if not p.is_meta), "cpu")
    ends = PipelineMesh.of(group, of_ranks.mesh, torch.device(device), beside=of_ranks.parallelize is not None)
    compare(request.options(model, of_ranks), ends)
    given = [stage.submod for stage in made] if model is None else [model]
    example = (request.args, request.of_model.example_kwargs)
    ends.ranks.together("looking at the tensors of the model", lambda: refuse_inference_mode(given, example))
    if isinstance(of_steps.receives, InTurn):  # before anything is measured over other communicators
        ends.transport.arrange(of_steps.receives.queues)
    built = build(replace(request, model=model), ends) if model is not None and not made else adopt(request, ends)

    def finish() -> None:
        spread(built.stages, of_ranks.parallelize, of_ranks.mesh)
        for stage in built.stages:
            compile_in_place(stage.submod, of_cut.compile)
            stage.submod = wrap(stage.submod, of_ranks.data_parallel, ends.data)

    ends.ranks.together("spreading, compiling and wrapping the stages", finish)
    return built.with_plan(sparing(built.plan, of_steps.recompute, of_steps.offload)), ends


def adopt(request: Request, ends: PipelineMesh) -> Built:
    """A plan for stages that the user made: the quickest that places them where they are."""
    made = request.of_cut.made
    if isinstance(request.schedule, Plan):
        return Built(made, request.schedule)
    everyone = ends.own.all_gather("the stages of each rank", [stage.stage_index for stage in made])
    rank_of = {index: rank for rank, held in enumerate(everyone) for index in held}
    placement = Placement.of([rank_of.get(index, 0) for index in range(made[0].num_stages)])
    count, ranks = placement.num_stages, placement.num_ranks
    wishes = Wishes(ranks, request.microbatches, request.schedule, num_stages=count, placement=placement)
    timelines = [simulate(plan) for plan in plans(wishes, count)]
    if not timelines:
        raise PlanError(
            f"no schedule {request.schedule!r} for stages placed as {placement.ranks}; schedules place them round the ranks "
            f"(loop: {Placement.loop(ranks, count // ranks).ranks}) or there and back "
            f"(v: {Placement.v(ranks, count // ranks).ranks})"
        )
    return Built(made, min(timelines, key=lambda one: (one.makespan, max(one.peak_memory))).plan)


def build(request: Request, ends: PipelineMesh) -> Built:
    """Capture, decide on the first rank, and build what belongs on this one."""
    given = request.of_cut.profile
    if isinstance(file := given, str | Path):  # read first of all, by the rank that decides: it may be on no other host
        given = Profile.loads(ends.ranks.broadcast(f"reading the profile {file}", lambda: Profile.load(file).dumps()))
    machine = Machine() if given is False else _measured(request, ends)
    known = given if isinstance(given, Profile) else None
    # All ranks measure at the same time, before the first one decides.
    found = together(ends, partial(measured_profile, request, ends)) if given is None else None

    def decide() -> str:
        profile = known or (found() if found is not None else estimated_profile(request, ends))
        return _decide(request, ends, machine, profile).dumps()

    choice = Choice.loads(ends.ranks.broadcast("profiling the model and choosing a schedule", decide))
    if ends.rank == 0:
        warn_if_uneven(choice.profile, choice.boundaries)

    pipe = ends.ranks.together("capturing the model", lambda: cut(request, choice))
    everyone = dict(enumerate(ends.ranks.try_all("comparing the stages", lambda: stage_facts(pipe, request))))
    same_everywhere("the stages", everyone, "Build the same model with the same example on every rank")
    here = choice.plan.placement.stages_of(ends.rank)
    modules = [pipe.get_stage_module(k) for k in here]
    pending = ends.ranks.together("the values of the model", lambda: values_to_fill(modules, request, ends.device))
    ends.ranks.together("giving the model its values", lambda: [fill() for fill in pending])
    return Built([pipe.build_stage(k, ends.device, ends.group) for k in here], choice.plan, pipe.info(), choice)


def stage_facts(pipe: Pipe, request: Request) -> dict[str, str]:
    """What must be the same on every rank of the stages, of which each rank will hold only some."""
    modules = [pipe.get_stage_module(k) for k in range(pipe.num_stages)]
    info = pipe.info()
    parts = {
        "parameters": [[[n, list(p.shape), str(p.dtype)] for n, p in m.named_parameters()] for m in modules],
        "buffers": [[[n, list(b.shape), str(b.dtype)] for n, b in m.named_buffers()] for m in modules],
        "operators": [operators_of(m) for m in modules],
        "shared parameters": sorted(str(shared.holders) for shared in info.shared.values()),
        "wires": [[str(wire) for wire in wires] for wires in (*info.stage_inputs, *info.stage_outputs)],
    }
    count = sum(p.numel() for p in {id(p): p for m in modules for p in m.parameters()}.values())
    return {
        "stages": str(pipe.num_stages),
        "number of parameters": f"{count:,}",
        "rows of the example": str(batch_size_of(request.args, request.kwargs)),
        **{name: hashlib.sha256(json.dumps(part).encode()).hexdigest()[:12] for name, part in parts.items()},
    }


def _may_offload(request: Request, ends: PipelineMesh) -> bool:
    """Whether stages may be offloaded to keep to the limit: off an accelerator, or to where the user says."""
    limited = request.of_cut.memory_limit is not None
    return limited and (ends.device.type != "cpu" or request.of_steps.offload_to is not None)


def _measured(request: Request, ends: PipelineMesh) -> Machine:
    """What actions and messages cost; and, where stages may be offloaded, how fast the slowest rank copies while all do."""
    machine = measure_machine(ends)
    if request.of_steps.offload is False and not _may_offload(request, ends):
        return machine
    ends.own.barrier("about to measure copies")
    place = offload_target(request.of_steps.offload_to)
    found = ends.ranks.try_all("how fast each rank copies", lambda: copy_bandwidth(ends.device, place))
    return replace(machine, copy_bandwidth=float(min(found)))


def _decide(request: Request, ends: PipelineMesh, machine: Machine, profile: Profile) -> Choice:
    of_cut, plan = request.of_cut, request.schedule
    if isinstance(plan, Plan) and (plan.num_ranks, plan.num_microbatches) != (ends.num_ranks, request.microbatches):
        raise PlanError(
            f"the plan is for {plan.num_ranks} ranks and {plan.num_microbatches} microbatches, but there are "
            f"{ends.num_ranks} ranks and microbatches={request.microbatches}"
        )
    count, times = of_cut.count, profile.metadata.get("rank_times")
    if of_cut.is_split and of_cut.profile in (None, False):
        if count not in (None, len(profile.layers)):
            raise CaptureError(f"split_spec makes {len(profile.layers)} stages, num_stages={count} were asked for")
        count = len(profile.layers)
    if times is not None and len(times) == ends.num_ranks:
        machine = replace(machine, ranks=tuple(times))
    dtype = next((p.dtype for p in request.model.parameters() if p.is_floating_point()), torch.float32)
    wishes = Wishes(
        num_ranks=ends.num_ranks,
        num_microbatches=request.microbatches,
        schedule=plan,
        num_stages=count,
        placement=of_cut.placement,
        memory_limit=of_cut.memory_limit,
        optimizer_bytes=of_cut.optimizer_bytes if of_cut.optimizer is None else state_of(of_cut.optimizer, dtype),
        machine=machine,
        offload=_may_offload(request, ends),
        microbatches=_sizes(request),
    )
    return choose(profile, wishes)


def _sizes(request: Request) -> tuple[float, ...] | None:
    """How large the microbatches of the example are beside one another, where rows are grouped by their lengths."""
    rows, count = request.of_steps.group_rows, batch_size_of(request.args, request.kwargs)
    if rows is None or count is None or count < request.microbatches:
        return None
    costs = rows.grouped(request.microbatches, request.args, request.kwargs).costs
    mean = sum(costs) / len(costs)
    return tuple(cost / mean for cost in costs) if mean and len(set(costs)) > 1 else None


def state_of(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype) -> float:
    """Bytes of state that an optimizer keeps for each byte of parameters: it takes one step on a small one.

    >>> state_of(torch.optim.AdamW, torch.float32), state_of(lambda p: torch.optim.SGD(p, lr=0.1), torch.float32)
    (2.0, 0.0)
    """
    parameter = torch.nn.Parameter(torch.zeros(_PROBED, dtype=dtype))
    optimizer = make([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state.get(parameter, {})
    sizes = [value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and value.numel() >= _PROBED]
    return sum(sizes) / parameter.nbytes


def cut(request: Request, choice: Choice) -> Pipe:
    """Capture the model and cut it where the choice says."""
    options, where = request.of_cut.of_capture, choice.profile.metadata.get("places")
    if where is not None:
        chosen = [tuple(where[boundary - 1]) for boundary in choice.boundaries]
        options |= {"num_stages": choice.num_stages, "choose_cuts": cuts_at(chosen)}
    return captured(request, lambda args, kwargs: (pipeline(request.model, args, kwargs, **options), None))[0]


def values_to_fill(modules: Sequence[nn.Module], request: Request, device: torch.device) -> list[Callable[[], None]]:
    """What gives stages of a model without data their memory and values, and others the values that were given for them.

    All that can be wrong with these is found out before anything is changed.
    """
    weights, init = request.of_model.weights, request.of_model.init
    empty = any(tensor.is_meta for module in modules for tensor in (*module.parameters(), *module.buffers()))
    if weights is None and not empty:
        return []
    if weights is None and init is None:
        raise CaptureError(
            "the model is on the meta device and has no values; give weights= (a state dict, files of safetensors or of "
            "torch, a folder of them, a checkpoint) or init=lambda name, tensor: ..."
        )
    report, change = to_materialise(modules, weights, device=device, fill=init)
    if report.missing and init is None:
        listed = ", ".join(report.missing[:6]) + (" ..." if len(report.missing) > 6 else "")
        raise CaptureError(
            f"weights= has no value for {listed}; give init=lambda name, tensor: ... for what is to be set otherwise"
        )
    return [change]
