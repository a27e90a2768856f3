"""The threads of one run of ranks in this process: each waits for its turn, and none stays behind."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import torch

from penstock.comm.baton import Baton
from penstock.errors import RunError

Result = TypeVar("Result")

_STRAGGLERS = 10.0  # seconds that a thread may compute on after the run was interrupted


class Crew(Generic[Result]):
    """Calls ``function(rank)`` in a thread for each rank. ``errors`` and ``first`` tell afterwards who raised what."""

    def __init__(self, baton: Baton, function: Callable[[int], Result]) -> None:
        self._baton, self._function = baton, function
        self._results: list[Result | None] = [None] * baton.num_ranks
        self._grad = torch.is_grad_enabled()  # the mode belongs to a thread: the ranks take over the caller's
        self.errors: list[BaseException | None] = [None] * baton.num_ranks
        self.first: tuple[int, BaseException] | None = None

    def run(self) -> list[Result]:
        context = contextvars.copy_context()
        threads = [
            threading.Thread(target=context.copy().run, args=(self._live, rank), name=f"rank {rank}", daemon=True)
            for rank in range(self._baton.num_ranks)
        ]
        for thread in threads:
            thread.start()
        try:
            self._baton.start()
            self._baton.finished.wait()
        except BaseException:
            self._baton.stop(RunError("the run was interrupted"))
            raise
        finally:
            for thread in threads:
                thread.join(timeout=_STRAGGLERS)
        return cast("list[Result]", self._results)

    def _live(self, rank: int) -> None:
        self._baton.enter(rank)
        try:
            with torch.set_grad_enabled(self._grad):
                self._results[rank] = self._function(rank)
        except BaseException as error:  # noqa: BLE001 - handed to the caller of run
            self.errors[rank] = error
            if self.first is None:
                self.first = (rank, error)
        finally:
            self._baton.leave(rank)
