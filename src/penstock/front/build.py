"""From a model to the stages of this rank: profile, choose, capture, build, wrap."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from penstock.balance import Profile
from penstock.batch import batch_size_of
from penstock.capture import (
    Pipe,
    cuts_at,
    pipeline,
    warn_if_uneven,
)
from penstock.capture.load_state import to_materialise
from penstock.errors import CaptureError, PlanError, RanksDisagree
from penstock.front.byte_sizes import state_of
from penstock.front.candidates import Wishes
from penstock.front.choice import Choice
from penstock.front.choose import choose
from penstock.front.copy_speed import copy_bandwidth
from penstock.front.ends import Ends
from penstock.front.machine import measure_machine, together
from penstock.front.model_profile import estimated_profile, measured_profile, with_budgets_of
from penstock.front.request import Built, Request
from penstock.front.stage_costs import Machine
from penstock.plan import Plan
from penstock.schedules import Recipe, get_schedule
from penstock.stage.digest import operators_of
from penstock.stage.elsewhere import elsewhere


def build(request: Request, ends: Ends) -> Built:
    """Capture, decide on the first rank, and build what belongs on this one."""
    request = _with_profile(request, ends)
    machine = Machine() if request.of_cut.profile is False else measure_machine(ends)
    offloads = request.of_steps.offload is not False or _may_offload(request, ends)
    if request.of_cut.profile is not False and offloads:
        machine = replace(machine, copy_bandwidth=_copy_bandwidth(request, ends))
    pipes: list[Pipe] = []
    if _is_measured(request):
        profile = together(ends, lambda barrier: measured_profile(request, ends, barrier))
    else:
        profile = partial(estimated_profile, request, ends, pipes)
    text = ends.decide(
        "profiling the model and choosing a schedule", lambda: _decide(request, ends, machine, profile).dumps()
    )
    choice = Choice.loads(text)
    if ends.rank == 0:
        warn_if_uneven(choice.profile, choice.boundaries)

    def capture() -> dict[str, str]:
        if not pipes:
            pipes.append(cut(request, choice))
        return stage_facts(pipes[0], request)

    same_everywhere("the stages of the model", ends.agree("capturing the model", capture))
    pipe = pipes[0]
    here = choice.plan.placement.stages_of(ends.rank)
    modules = [pipe.get_stage_module(k) for k in here]
    pending: list[Callable[[], None]] = []
    ends.agree("the values of the model", lambda: pending.extend(values_to_fill(modules, request, ends.device)))
    ends.agree("giving the model its values", lambda: [fill() for fill in pending])
    return Built([pipe.build_stage(k, ends.device, ends.group) for k in here], choice.plan, pipe.info(), choice)


def _with_profile(request: Request, ends: Ends) -> Request:
    """The file of a profile is read first of all, by the rank that decides: it may be on no other host."""
    file = request.of_cut.profile
    if not isinstance(file, str | Path):
        return request
    text = ends.decide(f"reading the profile {file}", lambda: Profile.load(file).dumps())
    return replace(request, of_cut=replace(request.of_cut, profile=Profile.loads(text)))


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


def same_everywhere(what: str, everyone: Sequence[Mapping[str, str]]) -> None:
    """Raise on every rank if the facts of one differ; the text shows which, and on which ranks."""
    names = [name for name in everyone[0] if len({facts[name] for facts in everyone}) > 1]
    if names:
        rows = "\n".join(
            f"  rank {number}: " + ", ".join(f"{name} {facts[name]}" for name in names)
            for number, facts in enumerate(everyone)
        )
        raise RanksDisagree(
            f"{what} differ between the ranks:\n{rows}\nBuild the same model with the same example on every rank"
        )


def _may_offload(request: Request, ends: Ends) -> bool:
    """Whether stages may be offloaded to keep to the limit: off an accelerator, or to where the user says."""
    limited = request.of_cut.memory_limit is not None
    return limited and (ends.device.type != "cpu" or request.of_steps.offload_to is not None)


def _copy_bandwidth(request: Request, ends: Ends) -> float:
    """How fast the slowest rank copies, while all do."""
    ends.gather("about to measure copies", None)
    place = elsewhere(request.of_steps.offload_to)
    return float(min(ends.agree("how fast each rank copies", lambda: copy_bandwidth(ends.device, place))))


def _decide(request: Request, ends: Ends, machine: Machine, profile: Callable[[], Profile]) -> Choice:
    of_cut = request.of_cut
    wishes = Wishes(
        num_ranks=ends.num_ranks,
        num_microbatches=request.microbatches,
        schedule=_schedule_name(request.schedule),
        plan=request.schedule if isinstance(request.schedule, Plan) else None,
        num_stages=of_cut.count,
        placement=of_cut.placement,
        memory_limit=of_cut.memory_limit,
        optimizer_bytes=optimizer_bytes(request),
        machine=machine,
        offload=_may_offload(request, ends),
        budgets=of_cut.may_have_budgets,
        microbatches=_sizes(request),
    )
    _check(wishes)
    given = of_cut.profile if isinstance(of_cut.profile, Profile) else None
    found = given or profile()
    times = found.metadata.get("rank_times")
    if times is not None and len(times) == wishes.num_ranks:
        wishes = replace(wishes, machine=replace(wishes.machine, ranks=tuple(times)))
    if given is not None:
        return _with_budgets(choose(given, wishes), request, ends, wishes)
    if of_cut.split_spec is not None or of_cut.split_policy is not None:
        wishes = _with_stages(wishes, len(found.layers))
    return _with_budgets(choose(found, wishes), request, ends, wishes)


def _with_budgets(choice: Choice, request: Request, ends: Ends, wishes: Wishes) -> Choice:
    """Choose again where stages have to hold less and are compiled: a budget for some of them may cost less."""
    known = choice.profile.metadata.get("budgets", {})
    if (
        not wishes.budgets
        or request.of_cut.profile is False
        or all(choice.key(one.stage) in known for one in choice.spared)
    ):
        return choice
    return choose(with_budgets_of(choice, request, ends), wishes)


def _sizes(request: Request) -> tuple[float, ...] | None:
    """How large the microbatches of the example are beside one another, where rows are grouped by their lengths."""
    rows, count = request.of_steps.group_rows, batch_size_of(request.args, request.kwargs)
    if rows is None or count is None or count < request.microbatches:
        return None
    costs = rows.grouped(request.microbatches, request.args, request.kwargs).costs
    mean = sum(costs) / len(costs)
    return tuple(cost / mean for cost in costs) if mean and len(set(costs)) > 1 else None


def _is_measured(request: Request) -> bool:
    """Whether the ranks measure the layers; they do unless a profile is given or none is wanted."""
    return not isinstance(request.of_cut.profile, Profile) and request.of_cut.profile is not False


def optimizer_bytes(request: Request) -> float:
    """State of the optimizer for each byte of parameters: measured where the optimizer is given, else as the option says."""
    make = request.of_cut.optimizer
    dtype = next((p.dtype for p in request.model.parameters() if p.is_floating_point()), torch.float32)
    return request.of_cut.optimizer_bytes if make is None else state_of(make, dtype)


def _schedule_name(schedule: str | Plan | Recipe) -> str:
    match schedule:
        case str():
            return schedule if schedule in ("auto", "search") else get_schedule(schedule).name
        case Recipe():
            return schedule.name
        case Plan():
            return schedule.name or "a plan"


def _check(wishes: Wishes) -> None:
    plan = wishes.plan
    if plan is not None and (plan.num_ranks, plan.num_microbatches) != (wishes.num_ranks, wishes.num_microbatches):
        raise PlanError(
            f"the plan is for {plan.num_ranks} ranks and {plan.num_microbatches} microbatches, but there are "
            f"{wishes.num_ranks} ranks and microbatches={wishes.num_microbatches}"
        )


def _with_stages(wishes: Wishes, num_stages: int) -> Wishes:
    if wishes.num_stages not in (None, num_stages):
        raise CaptureError(f"split_spec makes {num_stages} stages, num_stages={wishes.num_stages} were asked for")
    return replace(wishes, num_stages=num_stages)


def cut(request: Request, choice: Choice) -> Pipe:
    """Capture the model and cut it where the choice says."""
    where = choice.profile.metadata.get("places")
    if where is None:
        return pipeline(request.model, request.args, request.kwargs, **request.of_cut.of_capture)
    chosen = [tuple(where[boundary - 1]) for boundary in choice.boundaries]
    return pipeline(
        request.model,
        request.args,
        request.kwargs,
        num_stages=choice.num_stages,
        choose_cuts=cuts_at(chosen),
        **request.of_cut.of_capture,
    )


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


def device_of(model: nn.Module | None, given: torch.device | str | None) -> torch.device:
    if given is not None:
        return torch.device(given)
    found = () if model is None else (p.device for p in model.parameters() if not p.is_meta)
    return next(iter(found), torch.device("cpu"))
