"""One data-parallel replica of a pipeline fails: every rank of every replica says which, and soon.

The stories: a replica that was given a wrong batch never met the others, who waited for it, and then took the gradients of its
next step for those of this one. One that was stopped kept them waiting for the timeout of the process group, 30 minutes. One
that was killed showed as gloo's own error.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fragile import SOON
from tests.faults.replicas import CPU, die, in_trouble, outside_a_step, stop
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]
KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp"])


@KINDS
def test_a_replica_with_a_wrong_batch_fails_the_step_on_all_and_the_next_one_works(
    gloo_pool: GlooPool, kind: str
) -> None:
    told = gloo_pool.run(4, in_trouble, CPU, kind, 3, None)
    texts = [found[1] for found, _ in told]
    assert "SplitError" in texts[3], texts
    assert texts[2].startswith("PeerFailed: rank 1 failed"), texts
    for text in texts[:2]:
        assert "ReplicaFailed" in text, texts
        assert "ranks 2" in text or "rank 2 of the job" in text or "rank 3 of the job" in text, texts
    for found, seconds in told:
        assert found[0] == found[2] == found[3] == ""
        assert seconds < SOON


@KINDS
@pytest.mark.parametrize("act", [stop, die])
def test_a_replica_that_is_stopped_or_killed_is_named_on_all_ranks(gloo_pool: GlooPool, kind: str, act: Any) -> None:
    outcomes = gloo_pool.outcomes(4, in_trouble, CPU, kind, 3, act)
    assert act is stop or outcomes[3].exit_code == -signal.SIGKILL
    for rank in range(3):
        assert outcomes[rank].ok, outcomes[rank].details
        found, seconds = outcomes[rank].value
        assert found[0] == ""
        named = "PeerFailed: rank 1 failed" if rank == 2 else "of the job"
        assert named in found[1], found
        assert all(found[2:]), found
        assert "tart the job again" in found[3] or "rank 1 failed" in found[3], found
        assert seconds < SOON


@pytest.mark.parametrize("where", ["loss", "clip", "any", "save"])
def test_a_replica_that_is_killed_outside_a_step_is_named_on_all_ranks(
    gloo_pool: GlooPool, tmp_path: Path, where: str
) -> None:
    """The replicas meet there too, and nobody watched."""
    outcomes = gloo_pool.outcomes(4, outside_a_step, where, (2, 2), die, str(tmp_path))
    assert outcomes[3].exit_code == -signal.SIGKILL
    for outcome in outcomes[:3]:
        assert outcome.ok, outcome.details
    first, second, third = (outcome.value for outcome in outcomes[:3])
    assert first[0].startswith(("ReplicaFailed: rank 2 of the job", "PeerFailed: rank 1 failed")), first
    assert second[0].startswith(("ReplicaFailed: rank 3 of the job", "PeerFailed: rank 0 failed")), second
    assert third[0].startswith("PeerFailed: rank 1 failed"), third
    for told in (first, second, third):
        assert told[1], told
        assert told[2] < SOON


@pytest.mark.parametrize("where", ["loss", "clip"])
def test_a_replica_that_is_stopped_outside_a_step_is_named(gloo_pool: GlooPool, tmp_path: Path, where: str) -> None:
    found, after, seconds = gloo_pool.outcomes(2, outside_a_step, where, (2, 1), stop, str(tmp_path))[0].value
    assert found.startswith("ReplicaFailed: rank 1 of the job"), found
    assert "its process has been stopped" in found
    assert "tart the job again" in after
    assert seconds < SOON
