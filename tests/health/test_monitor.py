"""Monitors over real sockets: a failure reaches all, who is gone is named, strangers change nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import TransportError
from penstock.health.failure import FailureKind, FailureRecord
from penstock.health.links import Endpoint, FrameKind, Listener, dial
from penstock.health.monitor import HealthMonitor
from penstock.health.position import Whereabouts
from penstock.health.rendezvous import neighbours, own_address, posted

LOOPBACK = "127.0.0.1"


class Values:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls = 0

    def set(self, key: str, value: bytes) -> None:
        self.calls += 1
        self.values[key] = value

    def first(self, key: str, value: bytes) -> bytes:
        self.calls += 1
        return self.values.setdefault(key, value)

    def check(self, key: str) -> bool:
        self.calls += 1
        return key in self.values

    def get(self, key: str, timeout: float) -> bytes:
        self.calls += 1
        return self.values[key]


class Member:
    """What a monitor needs of a transport."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.epoch = self.meetings = 0
        self.awaited: int | None = None
        self.failed: FailureRecord | None = None
        self.aborted: list[FailureRecord] = []
        self.gone = False

    def break_connections(self, record: FailureRecord) -> None:
        self.aborted.append(record)

    def where(self) -> Whereabouts:
        return Whereabouts(self.rank, self.epoch, doing="waits")

    def is_gone(self) -> bool:
        return self.gone


def until(found: Callable[[], object]) -> None:
    end = time.monotonic() + 30.0
    while not found():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@contextmanager
def job(num_ranks: int, *, heartbeat: float = 10.0) -> Iterator[tuple[list[HealthMonitor], list[Member], Values]]:
    """Ranks of one group, each with a monitor of its own, in their first step."""
    store = Values()
    members = [Member(rank, num_ranks) for rank in range(num_ranks)]
    with ExitStack() as ends:
        monitors = [HealthMonitor(LOOPBACK, heartbeat=heartbeat) for _ in members]
        for monitor, member in zip(monitors, members, strict=True):
            ends.callback(monitor.close)
            monitor.join(member, "group", store)
        until(lambda: all(are_joined(monitor, member) for monitor, member in zip(monitors, members, strict=True)))
        for monitor, member in zip(monitors, members, strict=True):
            begin(monitor, member)
        yield monitors, members, store


def begin(monitor: HealthMonitor, member: Member) -> None:
    member.epoch += 1
    member.failed = None
    monitor.begin(member)


def are_joined(monitor: HealthMonitor, member: Member) -> bool:
    ranks = {rank for peer in monitor._peers if peer.links for rank in peer.ranks.values()}
    return ranks == {*neighbours(member.rank, member.num_ranks)}


def test_a_failure_reaches_every_rank_and_counts_in_its_step_alone() -> None:
    with job(9) as (monitors, members, _):
        record = FailureRecord(3, cause="ValueError: no")
        assert monitors[3].report(members[3], record) == record
        until(lambda: all(member.failed == record for member in members if member.rank != 3))
        assert members[3].failed is None
        assert [member.aborted for member in members] == [[]] * 9, "its process lives: the others drain"
        for monitor, member in zip(monitors, members, strict=True):
            monitor.end(member)
            begin(monitor, member)
        assert [member.failed for member in members] == [None] * 9


def test_a_process_that_ends_is_named_and_waits_for_it_are_ended() -> None:
    with job(5) as (monitors, members, _):
        began = time.monotonic()
        monitors[2].close()
        others = [member for member in members if member.rank != 2]
        until(lambda: all(member.aborted for member in others))
        assert time.monotonic() - began < 2.0 + 1.0, "a second for a busy machine"
        for monitor, member in zip(monitors, members, strict=True):
            if member.rank != 2:
                expected = FailureRecord(2, cause="its process has ended", kind=FailureKind.ENDED)
                assert member.aborted == [expected]
                assert monitor.lost(member) == [expected]


def test_the_cause_of_a_lost_connection_is_known_soon() -> None:
    with job(3) as (monitors, members, _):
        assert monitors[0].cause(members[0], 0.0) is None
        monitors[1].close()
        found = monitors[0].cause(members[0], 30.0)
        assert found is not None
        assert (found.rank, found.kind) == (1, FailureKind.ENDED)


def test_a_rank_that_leaves_is_named_where_it_is_waited_for() -> None:
    """One that is still in the last step is not disturbed."""
    with job(4) as (monitors, members, _):
        monitors[3].end(members[3])
        monitors[3].leave(members[3], steps=1, cause="it left after step 1: ValueError: no")
        time.sleep(0.5)
        assert [member.failed for member in members] == [None] * 4
        for monitor, member in zip(monitors[:3], members[:3], strict=True):
            monitor.end(member)
            begin(monitor, member)
        until(lambda: all(member.failed is not None for member in members[:3]))
        assert (
            str(members[1].failed and members[1].failed.error())
            == "rank 3 failed: it left after step 1: ValueError: no"
        )


def test_a_rank_that_left_before_another_joined_is_named_there() -> None:
    """Its process lives on, and once knew nobody to take leave of."""
    store, early, late = Values(), Member(1, 2), Member(0, 2)
    with ExitStack() as ends:
        monitors = [HealthMonitor(LOOPBACK, heartbeat=10.0) for _ in range(2)]
        for monitor in monitors:
            ends.callback(monitor.close)
        monitors[1].join(early, "group", store)
        begin(monitors[1], early)
        monitors[1].end(early)
        monitors[1].leave(early, steps=1, cause="it left after step 1")
        monitors[0].join(late, "group", store)
        late.epoch = 1
        begin(monitors[0], late)
        until(lambda: late.aborted)
        assert late.aborted == [FailureRecord(1, cause="it left after step 1", kind=FailureKind.LEFT)]


def test_a_rank_whose_group_was_destroyed_or_dropped_has_left() -> None:
    for how in ("destroyed", "dropped"):
        with job(3) as (monitors, members, _):
            monitors[1].end(members[1])
            if how == "destroyed":
                members[1].gone = True
            else:
                members[1] = Member(9, 9)
            for rank in (0, 2):
                monitors[rank].end(members[rank])
                begin(monitors[rank], members[rank])
            until(lambda members=members: members[0].failed and members[2].failed)
            assert str(members[0].failed and members[0].failed.cause).startswith("it left after step 1")


def test_positions_come_from_all_ranks() -> None:
    with job(7) as (monitors, members, _):
        found = monitors[5].positions(members[5], timeout=30.0)
        assert {position.rank for position in found} == {0, 1, 2, 3, 4, 6}


def test_ranks_that_part_ways_are_both_told() -> None:
    with job(2) as (monitors, members, _):
        monitors[1].end(members[1])
        members[1].meetings = 1
        monitors[1].begin(members[1], "'evaluate'")
        members[0].epoch = 2
        monitors[0].begin(members[0])
        until(lambda: members[0].failed and members[1].aborted)
        assert members[0].failed is not None
        assert members[0].failed.cause == "after step 1 it went to 'evaluate'"
        assert members[1].aborted[0].cause == "it is in step 2 instead of 'evaluate'"


def test_a_broken_link_is_made_again() -> None:
    with job(2) as (monitors, members, _):
        (peer,) = monitors[0]._peers
        peer.links[0].socket.shutdown(socket.SHUT_RDWR)
        until(lambda: all(peer.links for monitor in monitors for peer in monitor._peers))
        time.sleep(1.5)
        assert [member.failed for member in members] == [None, None]
        assert monitors[1].report(members[1], FailureRecord(1, cause="later"))
        until(lambda: members[0].failed)


def test_strangers_change_nothing() -> None:
    with job(2) as (monitors, members, _):
        place = monitors[0].endpoint.address, monitors[0].endpoint.port
        strangers = [socket.create_connection(place, timeout=30) for _ in range(100)]
        for number, one in enumerate(strangers):
            if number % 2:
                one.sendall(os.urandom(37 if number % 4 == 1 else 4096))
        forged = replace(monitors[0].endpoint, key="00" * 32)
        link = dial(forged, monitors[1].endpoint, heartbeat=2.0)
        link.send(FrameKind.FAILURE, b"anything")
        until(lambda: not monitors[0]._peers._strangers)
        assert monitors[1].report(members[1], FailureRecord(1, cause="all the same"))
        until(lambda: members[0].failed)
        for one in strangers:
            one.close()
        link.close()


@pytest.mark.parametrize("payload", [b"", b"[]", b"[1, 2, 3, 4]", b"\xff", b"[" * 9999, b'["group", 0, 1, 2, 3, 4]'])
@pytest.mark.parametrize("kind", [*FrameKind][1:])
def test_frames_that_make_no_sense_end_their_link_alone(kind: FrameKind, payload: bytes) -> None:
    listener = Listener(LOOPBACK, heartbeat=2.0)
    monitor, member = HealthMonitor(LOOPBACK, heartbeat=2.0), Member(0, 2)
    try:
        monitor.join(member, "group", Values())
        begin(monitor, member)
        link = dial(monitor.endpoint, listener.endpoint, heartbeat=2.0)
        link.send(kind, payload)
        link.socket.settimeout(30.0)
        assert link.socket.recv(1) == b""
        link.close()
        assert member.failed is None
    finally:
        monitor.close()
        listener.socket.close()


@pytest.mark.parametrize(
    "change", [{"address": "a name"}, {"port": 0}, {"port": 70000}, {"token": "00"}, {"key": "x"}, {"process": -1}]
)
def test_endpoints_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    good = Endpoint("00" * 16, "10.0.0.1", 1, "00" * 32)
    assert Endpoint.decode(good.encode(), "rank 1") == good
    store = Values()
    store.set("endpoint/1", replace(good, **change).encode())
    with pytest.raises(TransportError, match="the endpoint of rank 1"):
        posted(store, 1)


RANK = """
import os, sys, time
from tests.health.test_monitor import LOOPBACK, Folder, Member, begin
from penstock.health.monitor import HealthMonitor

monitor, member = HealthMonitor(LOOPBACK, heartbeat=10.0), Member(1, 2)
monitor.join(member, "group", Folder(sys.argv[1]))
begin(monitor, member)
child = os.fork() if sys.argv[2] == "with a child" else -1
if child > 0:
    print(child, flush=True)
time.sleep(60)
"""


class Folder:
    """A store in files."""

    def __init__(self, place: str) -> None:
        self.place = Path(place)

    def set(self, key: str, value: bytes) -> None:
        fresh = self.place / f"{os.getpid()}.new"
        fresh.write_bytes(value)
        fresh.replace(self.place / key.replace("/", "-"))

    def first(self, key: str, value: bytes) -> bytes:
        return b"the only one"

    def check(self, key: str) -> bool:
        return (self.place / key.replace("/", "-")).exists()

    def get(self, key: str, timeout: float) -> bytes:
        return (self.place / key.replace("/", "-")).read_bytes()


@contextmanager
def rank_one(tmp_path: Path, child: str, heartbeat: float) -> Iterator[tuple[HealthMonitor, Member, Any]]:
    """Rank 0 here, rank 1 in another process."""
    monitor, member = HealthMonitor(LOOPBACK, heartbeat=heartbeat), Member(0, 2)
    other = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), child], stdout=subprocess.PIPE, text=True)
    try:
        monitor.join(member, "group", Folder(str(tmp_path)))
        until(lambda: are_joined(monitor, member))
        begin(monitor, member)
        yield monitor, member, other
    finally:
        monitor.close()
        other.kill()
        other.wait(30)
        if other.stdout is not None:
            other.stdout.close()


def test_a_killed_process_is_named_though_its_forked_child_lives(tmp_path: Path) -> None:
    with rank_one(tmp_path, "with a child", 10.0) as (_, member, other):
        child = int(other.stdout.readline())
        try:
            other.kill()
            began = time.monotonic()
            until(lambda: member.aborted)
            assert time.monotonic() - began < 2.0 + 1.0
            os.kill(child, 0)
            assert member.aborted[0].kind == FailureKind.ENDED
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_stopped_process_is_named_after_the_heartbeat(tmp_path: Path) -> None:
    with rank_one(tmp_path, "", 1.0) as (_, member, other):
        began = time.monotonic()
        other.send_signal(signal.SIGSTOP)
        until(lambda: member.aborted)
        assert time.monotonic() - began > 0.9
        assert member.aborted[0].cause.startswith("its process has been stopped for 1 s")


def test_the_address_of_an_interface_and_of_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address("10.0.0.1", 29500) == LOOPBACK
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert own_address(LOOPBACK, 29500) == LOOPBACK
    assert own_address("name.invalid", 29500) == LOOPBACK
