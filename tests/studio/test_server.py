"""The server of `penstock studio`: it serves the page to this machine, and nothing to anybody else."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlparse

import pytest

from penstock.studio.server import Studio

QUESTION = json.dumps({"kind": "compare", "question": {"ranks": 2, "microbatches": 2}})


@pytest.fixture(scope="module")
def studio() -> Iterator[Studio]:
    with Studio() as made:
        thread = threading.Thread(target=made.serve)
        thread.start()
        yield made
        made.stop()
        thread.join(60)
        assert not thread.is_alive()


def ask(
    studio: Studio, method: str, path: str, body: str | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    place = urlparse(studio.address)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), dict(reply.getheaders())
    finally:
        connection.close()


def test_it_hands_out_the_page_and_what_lies_beside_it(studio: Studio) -> None:
    status, text, headers = ask(studio, "GET", "/")
    assert status == 200
    assert studio.token in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    for name in ("show.js", "studio.js", "studio.css"):
        assert ask(studio, "GET", f"/{name}")[0] == 200
    for name in ("answers.py", "../server.py", "etc/passwd"):
        assert ask(studio, "GET", f"/{name}")[0] == 404


def test_it_answers_the_page(studio: Studio) -> None:
    status, text, _ = ask(studio, "POST", "/ask", QUESTION, X_Penstock_Token=studio.token)
    assert status == 200
    assert json.loads(text)["rows"]


@pytest.mark.parametrize("token", ["", "guess", "ünïcode"])
def test_a_question_without_the_token_is_refused(studio: Studio, token: str) -> None:
    status, text, _ = ask(studio, "POST", "/ask", QUESTION, X_Penstock_Token=token.encode().decode("latin-1"))
    assert status == 403
    assert "rows" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:80", ""])
def test_a_name_from_elsewhere_that_leads_here_is_refused(studio: Studio, host: str) -> None:
    """DNS rebinding: a page of that name has the browser ask this server, and would read the token out of the page."""
    status, text, _ = ask(studio, "GET", "/", Host=host)
    assert status == 403
    assert studio.token not in text


def test_a_question_that_is_too_long_is_refused(studio: Studio) -> None:
    assert ask(studio, "POST", "/ask", "x" * 70_000, X_Penstock_Token=studio.token)[0] == 400
    assert ask(studio, "POST", "/elsewhere", QUESTION, X_Penstock_Token=studio.token)[0] == 400


def test_it_listens_on_this_machine_alone(studio: Studio) -> None:
    assert urlparse(studio.address).hostname == "127.0.0.1"


def raw(studio: Studio, request: bytes, *, end: bool = True) -> bytes:
    """What the server says to bytes that no browser sends."""
    place = urlparse(studio.address)
    assert place.hostname is not None
    assert place.port is not None
    with socket.create_connection((place.hostname, place.port), timeout=30) as line:
        with suppress(ConnectionError):
            line.sendall(request)
            with suppress(OSError):  # it may have been closed by now
                if end:
                    line.shutdown(socket.SHUT_WR)
        said = bytearray()
        with suppress(ConnectionError):
            while part := line.recv(65536):
                said += part
        return bytes(said)


MALFORMED = [
    *(b"", b"\r\n\r\n", b"\0" * 1000, b"GET", b"GET /\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/x\r\n\r\n"),
    *(b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n"),
    *(b"GET / HTTP/1.1\r\nHost: " + b"x" * 70_000 + b"\r\n\r\n", b"BREW / HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n"),
    *(
        b"POST /ask HTTP/1.1\r\nHost: 127.0.0.1:1\r\nContent-Length: " + length + b"\r\n\r\n{}"
        for length in (b"-1", b"x", b"1e3", b"9" * 30, b"9" * 5000, b"0x10", b"", b"\xb2", b"+5", b"1_0", b"65537")
    ),
    b"POST /ask HTTP/1.1\r\nHost: 127.0.0.1:1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
    *(
        b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n"
        for path in (
            b"/../server.py",
            b"/..%2fserver.py",
            b"//etc/passwd",
            b"/%00",
            b"/\xff",
            b"http://x/",
            b"/show.js/../x.py",
        )
    ),
]


def test_requests_that_are_none(studio: Studio, capfd: pytest.CaptureFixture[str]) -> None:
    """A length of 5,000 digits was a ValueError, and its traceback went to the terminal, as did a connection that was reset."""
    for request in MALFORMED:
        said = raw(studio, request)
        assert studio.token.encode() not in said, request[:80]
        words = (
            b"HTTP/1.0 4",
            b"HTTP/1.0 5",
            b"<",
            b"this server answers to",
        )  # the last two in HTTP of 1991, without a status
        assert not said or said.startswith(words), (request[:80], said[:80])
    place = urlparse(studio.address)
    reset = socket.create_connection((place.hostname, place.port), timeout=30)
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.sendall(
        b"POST /ask HTTP/1.1\r\nHost: 127.0.0.1:1\r\nContent-Length: 9\r\nX-Penstock-Token: " + studio.token.encode()
    )
    reset.sendall(b"\r\n\r\n{")
    reset.close()
    assert ask(studio, "GET", "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_many_connections_that_say_nothing() -> None:
    """Each was a thread for 30 seconds, as many as anybody on the host liked to open."""
    with Studio(patience=0.3) as made:
        thread = threading.Thread(target=made.serve)
        thread.start()
        place = urlparse(made.address)
        before = threading.active_count()
        silent = [socket.create_connection((place.hostname, place.port), timeout=30) for _ in range(120)]
        for line in silent[80:]:
            with suppress(ConnectionError):
                line.recv(1)  # beyond the most that are heard it ends at once, else after the patience
        assert threading.active_count() - before <= 64
        for line in silent:
            line.close()
        made.stop()
        thread.join(10)
