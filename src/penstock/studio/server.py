"""The small local server behind `penstock studio`: it hands out the page, and answers its questions.

It listens on 127.0.0.1 alone. A page from elsewhere that a browser has open could still send requests there, under a name
that leads to this address; so a request must name this host, and a question must carry the token that only the page knows.
"""

from __future__ import annotations

import hmac
import secrets
import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from typing import Any, Final

from penstock.studio import page
from penstock.studio.answers import answer_json

_KINDS: Final = {"js": "text/javascript", "css": "text/css"}  # all else is the page
_LONGEST: Final = 64 * 1024  # bytes of a question
_PATIENCE: Final = 30.0  # seconds for a request to arrive
_CONNECTIONS: Final = 64  # at once; a page has a handful
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Studio(ThreadingHTTPServer):
    """The server, in a process of its own or beside other work: a thread for each connection, and no more than a page can want.

    with Studio(port=0) as studio:      # 0: any free port
        print(studio.address)
        studio.serve()                  # until `studio.stop()` from another thread, or Ctrl-C
    """

    request_queue_size = 2 * _CONNECTIONS  # with a short one the kernel leaves callers waiting for many seconds
    stop = BaseServer.shutdown

    def __init__(self, *, port: int = 0, patience: float = _PATIENCE) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.patience = patience  # seconds for a request to arrive
        self.token = secrets.token_urlsafe(24)
        self.files = {f"/{name}": text for name, text in page.files().items()} | {"/": page.index(token=self.token)}
        self._connected: list[threading.Thread] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def serve(self) -> None:
        self.serve_forever(poll_interval=0.1)

    def verify_request(self, request: object, client_address: object) -> bool:
        self._connected = [thread for thread in self._connected if thread.is_alive()]
        return len(self._connected) < _CONNECTIONS

    def process_request(self, request: Any, client_address: object) -> None:
        answering = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        answering.start()
        self._connected.append(answering)

    def handle_error(self, request: Any, client_address: object) -> None:
        """Of whoever went away in the middle of a request nothing is said."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Studio
    server_version, sys_version = "penstock", ""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.patience)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in self.server.files:
            self._reply(HTTPStatus.OK, self.server.files[path], _KINDS.get(path.rpartition(".")[2], "text/html"))
        else:
            self._reply(HTTPStatus.NOT_FOUND, "there is only the page itself")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        known = length.isascii() and length.isdecimal() and len(length) < 8
        token = self.headers.get("X-Penstock-Token", "")
        if self.path != "/ask" or not known or int(length) > _LONGEST:
            self._reply(HTTPStatus.BAD_REQUEST, f"a question goes to /ask and has at most {_LONGEST} bytes")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._reply(HTTPStatus.FORBIDDEN, "the question does not come from the page; load it again")
        else:
            asked = self.rfile.read(int(length)).decode("utf-8", "replace")
            self._reply(HTTPStatus.OK, answer_json(asked), "application/json")

    def parse_request(self) -> bool:
        """Nothing is done for a request that does not name this host: a name from elsewhere that leads here does not."""
        if not super().parse_request():
            return False
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host in ("127.0.0.1", "localhost"):
            return True
        self._reply(HTTPStatus.FORBIDDEN, "this server answers to 127.0.0.1 and localhost only")
        return False

    def _reply(self, status: HTTPStatus, text: str, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in (own | _HEADERS).items():
            self.send_header(name, value)
        with suppress(ConnectionError):  # the page was closed, or asked something else meanwhile
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing is logged: the command prints its address, and that is all there is to say."""
