"""Who may knock: the sockets of lines let in nobody but the ranks that they are for, and nobody costs time.

The story: lines listened on abstract sockets, which every user of the host sees. A silent connection cost the victim two
seconds, and forty of them killed a job of somebody else.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.comm import switchboard as switching

Door = switching._Door


@pytest.fixture
def door() -> Any:
    with Door({0: 1}) as made:
        yield made


def knock(place: str, *hello: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(60.0)
    sock.connect(place)
    for part in hello:
        sock.send(part)
    return sock


def as_another_user(do: Callable[[], None]) -> int:
    """What the system says when a process of another user does something: 0, or the number of the error."""
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            do()
        except OSError as error:
            os._exit(error.errno or 255)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")
def test_another_user_cannot_reach_the_socket(door: Any) -> None:
    assert as_another_user(lambda: knock(door.place).close()) == 13  # EACCES


def test_the_directory_is_private_and_goes_with_the_door() -> None:
    with Door({0: 1}) as door:
        folder = Path(door.place).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_who_knows_the_secret_but_is_another_user_is_sent_away(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The secret stands in the store, which has no authentication: the kernel's word on who knocks counts as well."""
    users = iter([12345, os.getuid()])
    monkeypatch.setattr(switching, "_user_of", lambda sock: next(users))
    hello, said = switching._HELLO.pack(door.secret, 0, 1), list[bytes]()

    def knock_twice() -> None:
        for _ in range(2):
            with knock(door.place, hello) as one:
                said.append(one.recv(1))

    knocking = threading.Thread(target=knock_twice)
    knocking.start()
    found: dict[int, socket.socket | None] = {}
    door.answer(found, time.monotonic() + 60.0)
    assert said == [b""], "the first one, by then"
    friend = found[0]
    assert friend is not None
    friend.close()
    knocking.join(60.0)


def test_silent_and_wrong_knocks_cost_nothing(door: Any) -> None:
    hello = switching._HELLO.pack
    silent = [knock(door.place) for _ in range(40)]
    wrong = [
        knock(door.place, *parts)
        for parts in ([b"guess"], [hello(b"guess", 0, 1)], [hello(door.secret, 7, 1)], [hello(door.secret, 0, 9)])
    ]
    friend = threading.Timer(0.2, lambda: wrong.append(knock(door.place, hello(door.secret, 0, 1))))
    friend.start()
    found: dict[int, socket.socket | None] = {}
    end = time.monotonic() + 60.0
    door.answer(found, end)
    assert list(found) == [0]
    assert end - time.monotonic() > 50.0  # 40 silent ones took 80 seconds before
    friend.join(60.0)  # it has been heard, but perhaps not yet put into the list
    for sock in [*silent, *wrong, *found.values()]:
        assert sock is not None
        sock.close()
