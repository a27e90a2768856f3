"""Frames over one connection."""

from __future__ import annotations

import socket

import pytest

from penstock.health.links import FrameKind, HealthLink


def test_frames_that_came_before_a_reset_count() -> None:
    """A process that ends with unread bytes resets its connections. The reason that it had sent before was thrown away."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    one, other = HealthLink(first, "a", heartbeat=0), HealthLink(second, "b", heartbeat=0)
    other.send(FrameKind.STATE, b"unread")
    one.send(FrameKind.BYE, b"reason")
    first.close()  # which resets the connection, since bytes are unread
    frames = other.frames()
    assert next(frames) == (FrameKind.BYE, b"reason")
    with pytest.raises((EOFError, OSError)):
        next(frames)
    second.close()
