"""The soak until each kind of fault has come; `make soak SECONDS=3600` is the same for longer, and prints what it did."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.comm import LocalWorld
from tests.gloo_pool import GlooPool, Outcome
from tests.soak.episode import Told
from tests.soak.script import LAST, SURVIVED, Script
from tests.soak.soak import Soak, Wrong

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.xdist_group("gloo")]


def test_steps_with_faults_and_recoveries(gloo_pool: GlooPool) -> None:
    soak = Soak(seed=int(os.environ.get("SEED", "3")), num_steps=20)
    soak.run(float(os.environ.get("SECONDS", "5")), pool=gloo_pool)
    assert {*SURVIVED, *LAST} <= soak.faults.keys()
    assert "network" in soak.faults or soak.uncut
    assert soak.recovered
    assert soak.steps > 10


def test_a_script_follows_from_its_seed() -> None:
    """Every rank makes it for itself, and `--episode` makes it again."""
    one, again, other = (Script.of(seed, num_ranks=2, num_steps=30) for seed in (7, 7, 8))
    assert one == again
    assert one != other


@pytest.mark.parametrize("name", ["threads", "descriptors", "memory"])
def test_a_process_that_grows_is_noticed(name: str) -> None:
    soak = Soak(seed=0)
    soak.history[1] = [Told(1, **{name: number * (1 << 26)}) for number in range(12)]
    with pytest.raises(Wrong, match=f"process 1: {name} grew"):
        soak.check_growth()


def test_a_wrong_gradient_would_be_noticed(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """The plain loop has other values than the pipeline: the soak must say so."""
    script = Script.of(5, num_ranks=2, num_steps=2, deadly=False)
    told = gloo_pool.run(2, _with_other_twins, script, str(tmp_path), store="tcp")
    assert all("is not that of the plain loop" in one.wrong[0] for one in told), told
    wrong = Soak(seed=0, num_steps=2).faults_of(script, [Outcome(rank, one) for rank, one in enumerate(told)])
    assert any("is not that of the plain loop" in text for text in wrong)


def _with_other_twins(script: Script, folder: str) -> Told:
    from tests.soak.episode import Episode

    episode = Episode(script, folder)
    for twin in episode.twins:
        for parameter in twin.parameters():
            parameter.data += 1.0
    return episode.run()


def test_failures_leave_no_keys_in_the_store() -> None:
    """Each failed step left its record there for as long as the job ran."""

    def rank(transport: object) -> int:
        from penstock.comm import FailureRecord, LocalTransport

        assert isinstance(transport, LocalTransport)
        for _ in range(20):
            transport.begin_step()
            transport.report_failure(FailureRecord(transport.rank, cause="on purpose"))
            transport.collectives.all_bytes("all have posted", b"")
            transport.end_step(fine=False)
        transport.begin_step()
        transport.collectives.all_bytes("all are here", b"")
        transport.end_step()
        return sum(transport.store.check(f"failure/{epoch}") for epoch in range(22))

    assert LocalWorld(2).run(rank) == [0, 0]
