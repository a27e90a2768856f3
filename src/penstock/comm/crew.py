"""The threads of one run of ranks in this process: each waits for its turn, and none stays behind."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from penstock.comm.baton import Baton
from penstock.errors import RunError

Result = TypeVar("Result")

_STRAGGLERS = 10.0  # seconds that a thread may compute on after the run was interrupted


def run_all(baton: Baton, function: Callable[[int], Result]) -> tuple[list[Result], dict[int, BaseException]]:
    """Call ``function(rank)`` in a thread for each rank: what they return, and what they raise, by rank, the first one first."""
    ranks, grad = (
        range(baton.num_ranks),
        torch.is_grad_enabled(),
    )  # the mode belongs to a thread: the ranks take it over
    results: dict[int, Result] = {}
    raised: dict[int, BaseException] = {}

    def live(rank: int) -> None:
        baton.enter(rank)
        try:
            with torch.set_grad_enabled(grad):
                results[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            raised[rank] = error
        finally:
            baton.leave(rank)

    context = contextvars.copy_context()
    threads = [
        threading.Thread(target=context.copy().run, args=(live, rank), name=f"rank {rank}", daemon=True)
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    try:
        baton.start()
        baton.finished.wait()
    except BaseException:
        baton.stop(RunError("the run was interrupted"))
        raise
    finally:
        for thread in threads:
            thread.join(timeout=_STRAGGLERS)
    return [results[rank] for rank in ranks if rank in results], raised
