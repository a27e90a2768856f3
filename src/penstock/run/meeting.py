"""Before steps: how the ranks of a schedule talk, and what they compare before the first one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from penstock import __version__
from penstock.comm.distributed import DistributedTransport
from penstock.comm.local import LocalWorld
from penstock.comm.messages import kind_of
from penstock.comm.transport import Transport
from penstock.errors import RanksDisagree
from penstock.parallel import unwrap
from penstock.plan import Plan, dumps
from penstock.plan.actions import text
from penstock.run.call_arguments import tensors_given
from penstock.run.ties import Ties
from penstock.stage.buffers import accelerators
from penstock.stage.pipeline_stage import Group, PipelineStage, RankGroup, place_in

Boundary: TypeAlias = tuple[int, str, list[str]]  # the stage that comes after it, who says it, and what it says
_ALONE: WeakKeyDictionary[PipelineStage, Transport] = WeakKeyDictionary()  # of a stage that is on the only rank


def transport_of(group: Group, device: torch.device, stage: PipelineStage | None = None) -> Transport:
    """The transport of a stage's group: one that was handed over, the process group's, or one rank alone.

    All schedules over a stage have the same one, so that a second thread is refused by whichever it calls.
    """
    if isinstance(group, Transport):
        return group
    if place_in(group)[1] > 1:
        assert not isinstance(group, RankGroup), "what has ranks of its own is a transport"
        return DistributedTransport.of(group, device=device)
    alone = LocalWorld(1).transports[0]
    if accelerators(device, ()):  # else the host does the work, or a stage without data does none
        alone.device = device  # by which its actions are timed, and its memory is counted
    return alone if stage is None else _ALONE.setdefault(stage, alone)


def digest_of(plan: Plan) -> str:
    """A plan in a few characters."""
    # All ranks' lists; of a family's plan its name and sizes, from which they follow, and the first list.
    told = f"{plan.family.name}\n{','.join(map(text, plan.codes[0]))}" if plan.family else dumps(plan)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def facts_of(plan: Plan, stages: Sequence[PipelineStage], ties: Ties, *, loss: bool) -> dict[str, str]:
    """What must be the same on every rank."""
    stage = stages[0]
    return {
        "plan": digest_of(plan),
        "microbatches": str(plan.num_microbatches),
        "model": _model_of(stage),
        "wires": "those of a chain" if stage.routes is None else stage.routes.wires,
        "placement": str(plan.placement.ranks),
        "loss": "with loss" if loss else "without loss",
        "tied parameters": ", ".join(group.holders for group in ties.known),
        "kind of device": stage.device.type,
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "penstock": __version__,
        "torch": torch.__version__,
    }


def _model_of(stage: PipelineStage) -> str:
    """The whole model in a few words, where the stage knows it: capture and `split_modules` have seen all of it."""
    if stage.routes is not None:
        return stage.routes.model
    said = getattr(unwrap(stage.submod), "cut_from", "")
    return said if isinstance(said, str) and said else "made by hand"


def boundaries_of(stages: Iterable[PipelineStage]) -> list[Boundary]:
    """What hand-made stages say of the messages at their ends, where it was given."""
    return [
        (stage.stage_index + after, name, list(map(kind_of, tensors_given(given))))
        for stage in stages
        for after, name in enumerate(("input_args", "output_args"))
        if stage.routes is None and (given := getattr(stage, name)) is not None
    ]


def meet(transport: Transport, stages: Sequence[PipelineStage], look: Callable[[dict[str, str]], bool]) -> bool:
    """Before the first step: find out whether all ranks are about to run the same, and can.

    `look` writes down what must be the same on every rank, and says whether this one has a compiled stage; whether any has
    comes back. What it raises is raised here when the other ranks know of it.
    """
    facts: dict[str, str] = {}
    compiles, problem = False, None
    try:
        compiles = look(facts)
    except Exception as error:  # noqa: BLE001  the other ranks wait for this one, and must hear of it
        problem = error
    facts["can run it"] = "yes" if problem is None else f"{type(problem).__name__}: {problem}"
    everyone: list[tuple[list[Boundary], bool]] = []  # what each rank tells besides, which may differ
    try:
        transport.collectives.same("the first step of a schedule", facts)
        everyone = transport.collectives.all_gather("the ends of the stages", (boundaries_of(stages), compiles))
        check_boundaries([boundaries for boundaries, _ in everyone])
    except RanksDisagree:
        if problem is None:
            raise
    if problem is not None:
        raise problem
    return any(compiles for _, compiles in everyone)


def check_boundaries(everyone: Iterable[Iterable[Boundary]]) -> None:
    """Raise, on every rank alike, if a stage was made for other inputs than the stage before it was made to give."""
    said = {(stage, name): shapes for boundaries in everyone for stage, name, shapes in boundaries}
    for (stage, name), given in said.items():
        expected = said.get((stage, "input_args"), given)
        if name == "output_args" and expected != given:
            raise RanksDisagree(
                f"output_args of stage {stage - 1} say ({', '.join(given)}), input_args of stage {stage} say "
                f"({', '.join(expected)}). Cut both stages from the same model, and give the shapes of one microbatch"
            )
