"""Run a case with ranks as processes: replicas, sharded or not, and tensor parallel stages, against the plain loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import penstock
from tests.fuzz.cases import Case
from tests.fuzz.compare import TOLERANCE, differences
from tests.fuzz.mesh_ranks import MeshRank
from tests.fuzz.oracle import Oracle
from tests.fuzz.verdict import HUNG, INVALID, RIGHT, WRONG, Verdict, of_error, shortened

PatientOutcomes = Callable[..., Sequence[Any]]
MIXED = 1e-4  # what parameters in float32 leave of float64


def play_rank(text: str, folder: str) -> tuple[str, str, str]:
    """What one rank of a process group finds out: it runs the loop too, and compares what is its own."""
    from torch.distributed.device_mesh import init_device_mesh

    case = Case.loads(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = Oracle(case).run()
        except Exception as error:  # noqa: BLE001 - there is nothing to compare with
            return INVALID, shortened(f"{type(error).__name__}: {error}"), ""
        names, sizes = ("dp", "pp", "tp"), (case.replicas, case.ranks, int(case.mesh.get("tp", 1)))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        rank = MeshRank(case, mesh=mesh, folder=Path(folder))
        try:
            lefts = rank.run()
        except Exception as error:  # noqa: BLE001 - judged
            verdict = of_error(error, built=rank.built)
            told = isinstance(error, penstock.PeerFailed | penstock.ReplicaFailed)
            return f"{verdict.kind} of another" if told else verdict.kind, verdict.reason, verdict.details
    tolerance = MIXED if case.mesh["kind"] == "fsdp_mixed" else TOLERANCE
    for want in wanted:
        want.aliases = set(want.grads or {})  # that each is on some rank is seen by all of them together
    found = differences([lefts], wanted, tolerance=tolerance)
    return (WRONG, shortened(found[0].partition(": ")[2]), "\n".join(found)) if found else (RIGHT, "", "")


def merged(outcomes: Sequence[Any]) -> Verdict:
    """What all ranks found out, the worst and most telling first."""
    told = []
    for outcome in outcomes:
        if outcome.ok:
            told.append(Verdict(*outcome.value))
        else:
            told.append(Verdict(HUNG, f"{outcome.error} {outcome.exit_code}", outcome.details))
    order = ("error", WRONG, HUNG, "refused", INVALID, "error of another", RIGHT)
    told.sort(key=lambda one: order.index(one.kind))
    worst = told[0]
    kind = "error" if worst.kind == "error of another" else worst.kind
    return Verdict(kind, worst.reason, "\n\n".join(one.details for one in told if one.details))
