"""Making a pipeline: the ranks meet, and what was asked for becomes the stages of this one, spread, compiled and wrapped."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

from torch import nn

from penstock.errors import StageError
from penstock.front.build import build, device_of
from penstock.front.dimensions import spread
from penstock.front.ends import Ends
from penstock.front.made_by_hand import adopt
from penstock.front.own_stages import OwnStages
from penstock.front.pipeline_options import RankOptions
from penstock.front.publish import Origin
from penstock.front.request import Built, Request
from penstock.lower import InTurn
from penstock.parallel import wrap
from penstock.run.lookout import Lookout
from penstock.run.planning import sparing
from penstock.stage.twins import compile_in_place


def assemble(model: nn.Module | None, request: Request, of_ranks: RankOptions) -> tuple[Built, Ends, Origin]:
    """The stages of this rank, its place among the ranks, and what the model came from. `request` is without the model."""
    of_cut, of_steps = request.of_cut, request.of_steps
    made = of_cut.made
    if not made and not isinstance(model, nn.Module):
        raise StageError(f"Pipeline takes an nn.Module and an example, or stages=[...]; got {type(model).__name__}")
    group = made[0].group if of_ranks.group is None and made and of_ranks.mesh is None else of_ranks.group
    device = made[0].device if made else device_of(model, of_ranks.device)
    ends = Ends.of(group, of_ranks.mesh, device, beside=of_ranks.parallelize is not None)
    if isinstance(of_steps.receives, InTurn):  # before anything is measured over other communicators
        ends.transport.arrange(of_steps.receives.queues)
    if isinstance(model, nn.Module) and not made:
        built, origin = build(replace(request, model=model), ends), Origin.of(model)
    else:
        built, origin = adopt(made, request.schedule, request.microbatches, ends), Origin()
    spread(built.stages, of_ranks.parallelize, of_ranks.mesh)
    budgets = {} if built.choice is None else dict(built.choice.budgets)
    for stage in built.stages:
        compile_in_place(stage.submod, of_cut.compile_with(budgets.get(stage.stage_index)))
        stage.submod = wrap(stage.submod, of_ranks.data_parallel, ends.data)
    return built.with_plan(sparing(built.plan, of_steps.recompute, of_steps.offload)), ends, origin


def look_out(pipe: OwnStages, folder: str | Path) -> None:
    """Write where this rank is into the folder of the run, as long as the pipeline lives."""

    def start() -> None:
        place = Path(folder) / f"replica-{pipe.replica}" if pipe.replica else folder
        weakref.finalize(pipe, Lookout(pipe.transport, place).close)

    pipe.agree(f"writing to the folder of the run, {folder}", start)
