"""Threads of which only one runs at a time: it hands the baton on when it must wait.

So a run is deterministic, and "everybody waits" is known at once instead of after a timeout.
"""

from __future__ import annotations

import contextvars
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from penstock.errors import PeerFailed, PenstockError, RunError, StepTimeout

Result = TypeVar("Result")

_STRAGGLERS = 10.0  # seconds that a thread may compute on after the run was interrupted


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a rank waits for: until ``ready``, which ``peer`` (if it is known) can bring about."""

    ready: Callable[[], bool]
    peer: int | None
    what: str


class Baton:
    """Hands the turn from rank to rank, round and round, or as the dice of a seed fall.

    ``loosen`` is asked when nobody can go on; it may make something ready (by letting go of a message held back), and
    says whether it did. When it did not, every waiting rank raises.
    """

    def __init__(self, num_ranks: int, loosen: Callable[[], bool], *, seed: int | None = None) -> None:
        self.num_ranks = num_ranks
        self._loosen = loosen
        self._dice = None if seed is None else random.Random(seed)
        self._gates = [threading.Lock() for _ in range(num_ranks)]
        for gate in self._gates:
            gate.acquire()
        self._waiting: list[Waiting | None] = [None] * num_ranks
        self._left = [False] * num_ranks
        self._errors: list[PenstockError | None] = [None] * num_ranks
        self._stopped: PenstockError | None = None
        self._finished = threading.Event()

    def run(self, function: Callable[[int], Result]) -> tuple[list[Result], dict[int, BaseException]]:
        """Call ``function(rank)`` in a thread for each rank: what they return; and what they raise, by rank, the first first."""
        ranks = range(self.num_ranks)
        grad = torch.is_grad_enabled()  # the mode belongs to a thread: the ranks take over the caller's
        results: dict[int, Result] = {}
        raised: dict[int, BaseException] = {}

        def live(rank: int) -> None:
            self._gates[rank].acquire()  # until its first turn
            try:
                with torch.set_grad_enabled(grad):
                    results[rank] = function(rank)
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                raised[rank] = error
            finally:
                self._leave(rank)

        context = contextvars.copy_context()
        threads = [
            threading.Thread(target=context.copy().run, args=(live, rank), name=f"rank {rank}", daemon=True)
            for rank in ranks
        ]
        for thread in threads:
            thread.start()
        try:
            self._pass_on(self.num_ranks - 1)  # rank 0 begins, or whoever the dice say
            self._finished.wait()
        except BaseException:
            # Every rank raises at its next wait; those that wait now raise when their turn comes.
            self._stopped = RunError("the run was interrupted")
            raise
        finally:
            for thread in threads:
                thread.join(timeout=_STRAGGLERS)
        return [results[rank] for rank in ranks if rank in results], raised

    def wait(self, rank: int, waiting: Waiting) -> None:
        """Let others run until ``waiting.ready()``. Raises when that can never be."""
        if self._stopped is not None:
            raise self._stopped
        if waiting.ready():
            return
        self._waiting[rank] = waiting
        self._pass_on(rank)
        self._gates[rank].acquire()
        self._waiting[rank] = None
        error, self._errors[rank] = self._errors[rank] or self._stopped, None
        if error is not None:
            raise error

    def _leave(self, rank: int) -> None:
        """This rank's function is over; the others go on."""
        self._left[rank] = True
        if all(self._left):
            self._finished.set()
        else:
            self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        able = self._able(rank)
        while not able and self._loosen():
            able = self._able(rank)
        if not able:
            self._despair()
            able = self._able(rank)
        chosen = able[0] if self._dice is None else self._dice.choice(able)
        self._gates[chosen].release()

    def _able(self, rank: int) -> list[int]:
        """The ranks that can run now, beginning with the one after ``rank``."""
        order = [(rank + 1 + step) % self.num_ranks for step in range(self.num_ranks)]
        return [other for other in order if not self._left[other] and self._can_run(other)]

    def _can_run(self, rank: int) -> bool:
        waiting = self._waiting[rank]
        return waiting is None or (self._stopped or self._errors[rank]) is not None or waiting.ready()

    def _despair(self) -> None:
        everyone = "; ".join(
            f"rank {rank} " + ("has left" if waiting is None else f"waits for {waiting.what}")
            for rank, waiting in enumerate(self._waiting)
        )
        for rank, waiting in enumerate(self._waiting):
            if waiting is None:  # it has left
                continue
            if (gone := self._gone(rank)) is not None:
                self._errors[rank] = PeerFailed(gone, None, None, None, f"it has left; {everyone}")
            else:
                self._errors[rank] = StepTimeout(f"every rank waits, and nothing is on its way: {everyone}")

    def _gone(self, rank: int) -> int | None:
        """The rank that has left and that this one waits for, through others or directly."""
        seen: set[int] = set()
        current: int | None = rank
        while current is not None and current not in seen:
            if self._left[current]:
                return current
            seen.add(current)
            waiting = self._waiting[current]
            current = None if waiting is None else waiting.peer
        return None
