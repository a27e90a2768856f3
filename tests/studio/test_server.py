"""The server of `penstock studio`: it serves the page to this machine, and nothing to anybody else."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
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
        thread.join(10)
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
