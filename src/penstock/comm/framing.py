"""Frames: bytes whose number the receiver does not know. A header of two numbers goes ahead: a kind, and how many come.

>>> parts = frame(7, b"abc")                        # in host memory, for `transport.control`
>>> [part.tolist() for part in parts]
[[7, 3], [97, 98, 99]]
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from penstock.comm.messages import Receive, Work
from penstock.errors import TransportError

LONGEST = 1 << 28
"""Bytes of the longest frame that is believed: more than any description of a message, less than would hurt."""

Result = TypeVar("Result")
Receiving: TypeAlias = Generator[Work, None, Result]
"""Something being received: it hands out what to wait for. If Ctrl-C breaks in, it can go on later."""


def frame(kind: int, payload: bytes) -> list[Tensor]:
    """The messages to send, one after another; without a payload it is the header alone."""
    parts = [torch.tensor([kind, len(payload)], dtype=torch.int64)]
    if payload:
        parts.append(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    return parts


def receive_frame(receive: Receive) -> Receiving[tuple[int, bytes]]:
    """The kind and the payload of the next frame."""
    header = torch.zeros(2, dtype=torch.int64)
    yield receive([header])
    kind, length = header.tolist()
    if not 0 <= length <= LONGEST:
        raise TransportError(f"a frame of {length} bytes is announced; expected 0 to {LONGEST}")
    if not length:
        return kind, b""
    payload = torch.empty(length, dtype=torch.uint8)
    yield receive([payload])
    return kind, bytes(payload.tolist())


def complete(receiving: Receiving[Result]) -> Result:
    """Wait for all of it."""
    while True:
        try:
            next(receiving).wait()
        except StopIteration as end:
            result: Result = end.value
            return result
