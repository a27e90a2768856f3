"""A rank that is killed while a checkpoint is written beside the steps: the others need not wait for its part.

The story: the first rank waited a minute for a part that nobody would write, in a thread that kept its process from ending. A job
that was to go on with the ranks that were left found it there, killed it, and had one rank fewer than it needed.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.front import saving
from tests.faults.fragile import SOON
from tests.gloo_pool import GlooPool

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("gloo")]


def half_a_save(place: str) -> tuple[str, bool]:
    x = torch.ones(4, 4)
    pipe = penstock.Pipeline(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        (x,),
        loss_fn=nn.functional.mse_loss,
        schedule="1f1b",
        microbatches=2,
        profile=False,
    )
    pipe.step(x, target=x)
    if pipe.rank == 1:

        def die(*_: Any, **__: Any) -> Any:
            pipe.transport.store.get("all have begun", SOON)
            os.kill(os.getpid(), signal.SIGKILL)

        saving.write_parts = die
    made = pipe.save(place, wait=False)
    assert made is not None
    pipe.transport.store.set("all have begun", b"")
    start = time.monotonic()
    while not made.done and time.monotonic() < start + 30.0:
        time.sleep(0.05)
    try:
        made._outcome()
    except penstock.errors.PenstockError as error:
        return str(error), made.done
    return "", made.done


def test_the_first_rank_does_not_wait_for_the_part_of_one_that_is_gone(gloo_pool: GlooPool, tmp_path: Path) -> None:
    first, second = gloo_pool.outcomes(2, half_a_save, str(tmp_path / "checkpoint"))
    assert second.exit_code == -signal.SIGKILL
    assert first.ok, first.details
    said, done = first.value
    assert done
    assert said == "rank 1 is gone before its part of the checkpoint was written: its process has ended"
    assert not (tmp_path / "checkpoint").exists()
