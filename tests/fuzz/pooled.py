"""Run cases in the shared pool of processes, so that one which hangs or dies is an outcome like any other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

from tests.fuzz.cases import Case
from tests.fuzz.run_processes import PatientOutcomes, merged, play_rank
from tests.fuzz.run_threads import run_threads
from tests.fuzz.verdict import HUNG, Verdict
from tests.gloo_pool import GlooPool

TIMEOUT = 120.0  # seconds for one case
FRESH = 40  # cases after which new processes are started: groups that are gone leave descriptors open


def threads_in_worker(text: str) -> tuple[str, str, str]:
    """The verdict on a case whose ranks are threads of this process."""
    verdict = run_threads(Case.loads(text))
    return verdict.kind, verdict.reason, verdict.details


def runner(pool: GlooPool) -> Callable[[Case], Verdict]:
    """Each case in a process of its own, or, with a mesh, in as many as it has ranks."""

    count = 0

    def run(case: Case) -> Verdict:
        nonlocal count
        count += bool(case.mesh)
        if case.mesh and count % FRESH == 0:
            pool.close()
        if case.mesh:
            return run_processes(case, pool.outcomes)
        (outcome,) = pool.outcomes(1, threads_in_worker, case.dumps(), timeout=TIMEOUT)
        if not outcome.ok:
            return Verdict(HUNG, f"{outcome.error} {outcome.exit_code}", outcome.details)
        return Verdict(*outcome.value)

    return run


def run_processes(case: Case, outcomes: PatientOutcomes) -> Verdict:
    """The verdict on a case whose ranks are processes of the pool."""
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        found = outcomes(case.world_size, play_rank, case.dumps(), folder, timeout=TIMEOUT, group_timeout=60.0)
    return merged(found)
