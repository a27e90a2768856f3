"""Heartbeats that were not heard."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

from penstock.comm.beat import MAC, PULSE

FEW_FILES = """
import resource
from penstock.comm import beat

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
beat.main()
"""
WITHOUT_IPV6 = """
import errno, socket
from penstock.comm import beat

class OldSocket(socket.socket):
    def __init__(self, family, kind):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, kind)

beat.socket.socket = OldSocket
beat.main()
"""


def test_the_heart_of_a_rank_beats_on_a_host_without_ipv6() -> None:
    """It opened a socket of each kind before it looked which of them its peers need. Where the kernel has no IPv6 it ended
    at once, and nobody heard that the rank was stopped or its host gone. A peer
    that cannot be reached keeps none from the others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind(("127.0.0.1", 0))
        ear.settimeout(60.0)
        task = {"rank": 3, "seconds": 0.1, "peers": [["::1", 9, "00" * 32], [*ear.getsockname(), "00" * 32]]}
        heart = subprocess.Popen([sys.executable, "-c", WITHOUT_IPV6], stdin=subprocess.PIPE)
        assert heart.stdin is not None
        heart.stdin.write(json.dumps(task).encode() + b"\n")
        heart.stdin.flush()
        heard = ear.recv(256)
        heart.communicate(timeout=60.0)
    assert PULSE.unpack(heard[:-MAC])[0] == 3
    assert heart.returncode == 0


def test_a_heart_beats_for_more_hosts_than_a_process_may_open_files() -> None:
    """It opened a socket for each address. Where replicas were on more hosts than it could open, the last ones heard nothing of
    a rank that was well."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind(("127.0.0.1", 0))
        ear.settimeout(60.0)
        others = [[f"127.0.1.{number}", 9, "00" * 32] for number in range(1, 101)]
        task = {"rank": 3, "seconds": 0.1, "peers": [*others, [*ear.getsockname(), "00" * 32]]}
        heart = subprocess.Popen([sys.executable, "-c", FEW_FILES], stdin=subprocess.PIPE)
        assert heart.stdin is not None
        heart.stdin.write(json.dumps(task).encode() + b"\n")
        heart.stdin.flush()
        try:
            assert PULSE.unpack(ear.recv(256)[:-MAC])[0] == 3
        finally:
            heart.communicate(timeout=60.0)
