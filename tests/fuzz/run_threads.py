"""Run a case with ranks as threads of this process, against the plain loop."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch

import penstock
from tests.fuzz.cases import Case
from tests.fuzz.compare import differences
from tests.fuzz.oracle import Left, Oracle
from tests.fuzz.ranks import Rank
from tests.fuzz.verdict import INVALID, RIGHT, WRONG, Verdict, of_error, shortened


def run_threads(case: Case) -> Verdict:
    """What becomes of a case. A loop that fails itself makes it invalid: then nothing is said of penstock."""
    if "compile" in case.options or "compiled" in case.traits:
        torch._dynamo.reset()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        warnings.simplefilter("ignore")  # of torch's compiler, of uneven cuts, of weight work that cannot be put off
        try:
            wanted = Oracle(case).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, there is nothing to compare with
            return Verdict(INVALID, shortened(f"{type(error).__name__}: {error}"), of_error(error, built=False).details)
        return against(case, wanted, Path(folder))


def against(case: Case, wanted: list[Left], folder: Path) -> Verdict:
    ranks: dict[int, Rank] = {}
    world = penstock.LocalWorld(case.ranks)

    def play(transport: penstock.comm.LocalTransport) -> list[Left]:
        ranks[transport.rank] = Rank(case, group=transport, folder=folder)
        return ranks[transport.rank].run()

    try:
        lefts = world.run(play)
    except Exception as error:  # noqa: BLE001 - judged below
        raised = [one for one in world.errors if isinstance(one, Exception)]
        causes = [one for one in raised if not isinstance(one, penstock.errors.PeerFailed)]
        return of_error((causes or raised or [error])[0], built=any(rank.built for rank in ranks.values()))
    found = differences(lefts, wanted)
    return Verdict(WRONG, shortened(found[0].partition(": ")[2]), "\n".join(found)) if found else Verdict(RIGHT)
