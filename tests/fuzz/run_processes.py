"""Run a case with ranks as processes: replicas, sharded or not, and tensor parallel stages, against the plain loop."""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import penstock
from tests.fuzz.cases import Case
from tests.fuzz.compare import TOLERANCE, differences
from tests.fuzz.mesh_ranks import MeshRank
from tests.fuzz.oracle import Oracle
from tests.fuzz.verdict import ERROR, HUNG, INVALID, OTHERS, REFUSED, RIGHT, WRONG, Verdict, of_error, shortened

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
            told = isinstance(error, penstock.errors.PeerFailed | penstock.errors.ReplicaFailed)
            return OTHERS if told else verdict.kind, verdict.reason, verdict.details
    tolerance = MIXED if case.mesh["kind"] == "fsdp_mixed" else TOLERANCE
    for want in wanted:
        want.aliases = set(want.grads or {})  # that each is on some rank is seen by all of them together
    found = differences([lefts], wanted, tolerance=tolerance)
    return (WRONG, shortened(found[0].partition(": ")[2]), "\n".join(found)) if found else (RIGHT, "", "")


def in_new_processes(case: Case, *, timeout: float = 120.0) -> Verdict:
    """The verdict of processes that are started for this case alone, as a script of a finding does."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        lines = [context.Pipe(duplex=False) for _ in range(case.world_size)]
        processes = [
            context.Process(target=_join, args=(case.dumps(), folder, rank, end), daemon=True)
            for rank, (_, end) in enumerate(lines)
        ]
        for process in processes:
            process.start()
        told = [Verdict(*here.recv()) if here.poll(timeout) else Verdict(HUNG, "hung") for here, _ in lines]
        for process in processes:
            process.join(5.0)
            process.kill()
    return worst_of(told)


def _join(text: str, folder: str, rank: int, end: Any) -> None:
    import torch.distributed as dist

    size = Case.loads(text).world_size
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    end.send(play_rank(text, folder))
    dist.destroy_process_group()


def merged(outcomes: Sequence[Any]) -> Verdict:
    """What all ranks found out, the worst and most telling first."""
    told = []
    for outcome in outcomes:
        if outcome.ok:
            told.append(Verdict(*outcome.value))
        else:
            told.append(Verdict(HUNG, f"{outcome.error} {outcome.exit_code}", outcome.details))
    return worst_of(told)


def worst_of(told: list[Verdict]) -> Verdict:
    """The verdict of the rank that says most, with what the others say."""
    order = (ERROR, WRONG, HUNG, REFUSED, INVALID, OTHERS, RIGHT)
    told = sorted(told, key=lambda one: order.index(one.kind))
    kind = ERROR if told[0].kind == OTHERS else told[0].kind
    return Verdict(kind, told[0].reason, "\n\n".join(one.details for one in told if one.details))
