"""Around steps: how the ranks of a schedule talk, what they compare before the first one, what begins and ends with each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock import __version__
from penstock.comm.distributed import DistributedTransport
from penstock.comm.local import LocalWorld
from penstock.comm.transport import Transport
from penstock.parallel import DataParallel
from penstock.plan import Plan, dumps
from penstock.plan.actions import text
from penstock.run.ties import Ties
from penstock.stage.stage import PipelineStage, place_in


def transport_of(group: Any, device: torch.device) -> Transport:
    """The transport of a stage's group: one that was handed over, the process group's, or one rank alone."""
    if isinstance(group, Transport):
        return group
    if place_in(group)[1] == 1:
        return LocalWorld(1).transports[0]
    return DistributedTransport.of(group, device=device)


def facts_of(plan: Plan, stage: PipelineStage, ties: Ties, *, loss: bool) -> dict[str, str]:
    """What must be the same on every rank."""
    return {
        "plan": digest_of(plan),
        "microbatches": str(plan.num_microbatches),
        "wires": "those of a chain" if stage.routes is None else stage.routes.wires,
        "placement": str(plan.placement.ranks),
        "loss": "with loss" if loss else "without loss",
        "tied parameters": ", ".join(group.name for group in ties.known),
        "kind of device": stage.device.type,
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "penstock": __version__,
        "torch": torch.__version__,
    }


def digest_of(plan: Plan) -> str:
    """Of all ranks' lists; of a family its name and sizes, from which they follow, and the list of the first rank."""
    told = f"{plan.family}\n{','.join(map(text, plan.codes[0]))}" if plan.is_share else dumps(plan)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


@contextmanager
def tended(adapters: Iterable[DataParallel], ties: Ties | None) -> Iterator[None]:
    """Around a step: however it ends, data parallelism goes on as before, and `.grad` of a failed step is what it was."""
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed and ties is not None:
            ties.restore()
        for adapter in adapters:
            adapter.end(failed=failed)
    if ties is not None:
        ties.finish()
