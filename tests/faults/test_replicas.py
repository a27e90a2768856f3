"""One data-parallel replica of a pipeline fails: every rank of every replica says which, and soon.

The stories: a replica that was given a wrong batch never met the others, who waited for it, and then took the gradients of its
next step for those of this one. One that was stopped kept them waiting for the timeout of the process group, 30 minutes. One
that was killed showed as gloo's own error.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from tests.faults.replicas import die, in_trouble, stop
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]
KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp"])
CPU = torch.device("cpu")


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
        assert seconds < 20.0


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
        assert seconds < 20.0
