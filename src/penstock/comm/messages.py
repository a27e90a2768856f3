"""Messages between ranks: what a step sends and receives, whatever carries it.

The hot path costs no Python frame: ``sender``, ``receiver`` and ``waiter`` are resolved once, before the first step,
and are C callables over torch.distributed.

    send, recv, wait = messages.sender(1), messages.receiver(1), messages.waiter()
    posted = recv([buffer]), send([tensor])
    for work in posted:
        if work is not None:
            wait(work)                 # raises what the backend raises ...
    messages.explain(error, ...)       # ... which becomes PeerFailed, StepTimeout or TransportError here, when needed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.dtypes import dtype_name
from penstock.errors import PenstockError, ShapeError


class Work(Protocol):
    """A message on its way. It is waited for exactly once.

    transport.irecv(buffer, 1).wait()
    """

    def wait(self, timeout: timedelta = ..., /) -> object: ...


Send: TypeAlias = "Callable[[list[Tensor]], Work | None]"
"""Sends its only tensor, which is contiguous. None: there is nothing to wait for, and the tensor may be changed."""
Receive: TypeAlias = "Callable[[list[Tensor]], Work]"
"""Receives into its only tensor, which is contiguous and has the shape and type of what comes."""


class Messages(ABC):
    """One rank's end of the messages between ``num_ranks`` ranks.

    Messages of one ordered pair of ranks arrive in the order in which they are sent, and the k-th send meets the k-th
    receive. Tensors are contiguous, and a buffer has the shape and the type of what arrives in it.

    ``device``   where the tensors are.
    ``timeout``  seconds that any single wait may take; waiters taken before it is set keep their bound.
    """

    rank: int
    num_ranks: int
    device: torch.device
    timeout: float
    awaited: int | None = None  # whose message was waited for last in this step; whoever waits notes it

    @abstractmethod
    def sender(self, peer: int) -> Send:
        """The call that sends a tensor to ``peer``."""

    @abstractmethod
    def receiver(self, peer: int) -> Receive:
        """The call that receives a tensor from ``peer``."""

    @abstractmethod
    def waiter(self) -> Callable[[Work], object]:
        """The call that waits for a message, at most ``timeout`` seconds."""

    @abstractmethod
    def explain(self, error: Exception, *, peer: int, what: str) -> PenstockError:
        """What an error of a posted or awaited message means: PeerFailed, StepTimeout or TransportError.

        ``what`` says what was waited for ("the input of 3F0"). The failure is posted, so that the others hear of it.
        """

    def peer(self, number: int) -> int:
        """The number of another rank, checked."""
        if not 0 <= number < self.num_ranks or number == self.rank:
            raise ValueError(f"rank {self.rank} of {self.num_ranks} has no peer {number}")
        return number

    def isend(self, tensor: Tensor, peer: int) -> Work:
        """Send, with every error explained; for code that does not count microseconds."""
        return self._checked(self.sender(peer), tensor, peer, what=f"a send of {kind_of(tensor)}")

    def irecv(self, tensor: Tensor, peer: int) -> Work:
        """Receive, with every error explained; for code that does not count microseconds."""
        return self._checked(self.receiver(peer), tensor, peer, what=f"a receive of {kind_of(tensor)}")

    def _checked(self, post: Send | Receive, tensor: Tensor, peer: int, *, what: str) -> Work:
        if not tensor.is_contiguous():
            raise ShapeError(f"{what}, which is not contiguous; write tensor.contiguous()")
        if tensor.is_conj() or tensor.is_neg():
            raise ShapeError(
                f"{what}, which is a conjugated or negated view; write tensor.resolve_conj().resolve_neg()"
            )
        if tensor.device.type != self.device.type:
            raise ShapeError(f"{what} on {tensor.device}; expected a tensor on {self.device}")
        try:
            work = post([tensor])
        except (RuntimeError, ValueError) as error:
            raise self.explain(error, peer=peer, what=what) from error
        return _CheckedWork(self, work, peer, what=what)


class _CheckedWork:
    """A message whose wait explains its errors."""

    __slots__ = ("_messages", "_peer", "_what", "_work")

    def __init__(self, messages: Messages, work: Work | None, peer: int, *, what: str) -> None:
        self._messages, self._work, self._peer, self._what = messages, work, peer, what

    def wait(self, timeout: timedelta | None = None, /) -> None:
        if self._work is None:
            return
        self._messages.awaited = self._peer
        try:
            self._messages.waiter()(self._work) if timeout is None else self._work.wait(timeout)
        except RuntimeError as error:
            raise self._messages.explain(error, peer=self._peer, what=self._what) from error


def kind_of(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
