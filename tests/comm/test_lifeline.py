"""Lines between hosts that carry nothing: who is gone is named, who is there is not, and strangers change nothing."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.comm import LocalWorld
from penstock.comm.lifeline import Lifelines
from penstock.errors import TransportError

ANYWHERE = "0.0.0.0"  # a host of its own as far as the lines know, and reached without a network


def pair() -> tuple[Lifelines, Lifelines, Any]:
    """Two ranks, of which the second reaches the first, and the store."""
    world = LocalWorld(2)
    first, second = (Lifelines(rank, world.transports[rank].store, ANYWHERE, patience=2.0) for rank in range(2))
    second.reach(0)
    return first, second, world.transports[0].store


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def are_joined(first: Lifelines, second: Lifelines) -> bool:
    assert [*first.ended(), *second.ended()] == []
    return 1 in first._lines and 0 in second._lines and not second._lines[0].hello


def test_who_is_gone_is_named_at_either_end() -> None:
    for gone, left, rank in ((1, 0, 1), (0, 1, 0)):
        both = pair()[:2]
        until(lambda both=both: are_joined(*both))
        both[gone].close()
        until(lambda both=both, left=left: bool(list(both[left].ended())))
        assert list(both[left].ended()) == [(rank, "its process has ended")]
        both[left].close()


def test_who_says_late_where_it_is_is_called_then() -> None:
    """It had a process by then, but no place yet, and was never asked again; its own call says nothing while it computes."""
    world = LocalWorld(2)
    first = Lifelines(0, world.transports[0].store, ANYWHERE, patience=2.0)
    first.reach(1)
    assert list(first.ended()) == []
    second = Lifelines(1, world.transports[1].store, ANYWHERE, patience=2.0)
    second.reach(0)
    first.reach(1)
    until(lambda: list(first.ended()) == [] and not first._lines[1].hello)
    second.close()
    until(lambda: bool(list(first.ended())))
    assert list(first.ended()) == [(1, "its process has ended")]
    first.close()


def test_who_goes_before_it_was_let_in_is_named() -> None:
    """A rank that computes for long lets nobody in; the kernel keeps what the caller said, and that it hung up."""
    first, second, _ = pair()
    until(lambda: list(second.ended()) == [] and not second._lines[0].hello)
    second.close()
    until(lambda: bool(list(first.ended())))
    assert list(first.ended()) == [(1, "its process has ended")]
    first.close()


def test_a_line_that_breaks_though_both_live_is_made_anew() -> None:
    first, second, _ = pair()
    until(lambda: are_joined(first, second))
    second._lines.pop(0).end.close()

    def are_joined_again() -> bool:
        assert list(first.ended()) == list(second.ended()) == []
        return 0 in second._lines and not first._lines[1].hello if 1 in first._lines else False

    until(are_joined_again)
    first.close()
    second.close()


def test_strangers_change_nothing() -> None:
    first, second, store = pair()
    address, port, _ = json.loads(store.get("lifeline/0", 1.0))
    strangers = [socket.create_connection((address, port), timeout=30) for _ in range(40)]
    for number, one in enumerate(strangers):
        if number % 2:
            one.sendall(os.urandom(20 if number % 4 == 1 else 4096))
    until(lambda: are_joined(first, second))
    assert len(first._lines) == 1
    for one in strangers:
        one.close()
    assert list(first.ended()) == []
    second.close()
    first.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"3",
        b"[1, 2, 3]",
        b'["a", 1, "00"]',
        b'["10.0.0.1", -1, "00"]',
        b'["10.0.0.1", 1e99, "00"]',
        b"\xff",
        b'["10.0.0.1", 70000, "00"]',
        b'["10.0.0.1", 1, "x"]',
        json.dumps(["10.0.0.1", 1, "00" * 100]).encode(),
        b"[" * 9999,
    ],
)
def test_places_that_make_no_sense_are_refused(said: bytes) -> None:
    store = LocalWorld(2).transports[0].store
    lines = Lifelines(0, store, ANYWHERE, patience=2.0)
    store.set("lifeline/1", said)
    with pytest.raises(TransportError, match="where rank 1 can be reached"):
        lines.reach(1)
    assert list(lines.ended()) == []
    lines.close()


@pytest.mark.parametrize("address", [None, "127.0.0.1", "::1", "no address"])
def test_on_one_host_nobody_listens(address: str | None) -> None:
    store = LocalWorld(2).transports[0].store
    lines = Lifelines(0, store, address, patience=2.0)
    assert store.get("lifeline/0", 1.0) == b"[]"
    lines.reach(1)
    assert list(lines.ended()) == []
