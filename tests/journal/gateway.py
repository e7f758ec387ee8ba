"""A broker's HTTP gateway on loopback, whose responses can be made to fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Event, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

NOT_YET = "OFFSET_NOT_YET_AVAILABLE"


class Gateway(ThreadingHTTPServer):
    """
    Appends and reads as the gateway of Gazette does.

    Attributes:
        data: The bytes of each journal.
        begins: First offset that is kept, by journal, if not 0.
        faults: Faults of the next requests of a method, one each: a status and its
            text; ``lost`` performs the request and drops the connection; ``dropped``
            drops the connection at once; ``late`` holds the request until the end; a
            number sends that many bytes of the body and cuts the connection; another
            text is the trailer.
        requests: Method and path of each request.

    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.data: dict[str, bytearray] = {}
        self.begins: dict[str, int] = {}
        self.faults: dict[str, deque[Any]] = {"GET": deque(), "PUT": deque()}
        self.requests: list[str] = []
        self.plain = False
        self.changed = Condition()
        self.ended = Event()

    @property
    def url(self) -> str:
        """The address of journals ``orders/part-000`` and so on."""
        return f"http://127.0.0.1:{self.server_port}/orders/"

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Don't log that a client has disconnected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""

    def _begin(self) -> tuple[str, bytearray, Any]:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        journal = parts.path[1:]
        self.server.requests.append(f"{self.command} {self.path}")
        blocks = self.query.get("block") == ["true"]
        faults = self.server.faults[self.command]
        fault = faults.popleft() if faults and not blocks else None
        if fault == "late":
            self.server.ended.wait()
        if fault in ("late", "dropped"):
            raise ConnectionAbortedError
        if journal not in self.server.data:
            fault = 404, "JOURNAL_NOT_FOUND"
        return journal, self.server.data.get(journal, bytearray()), fault

    def _refuse(self, status: int, text: str) -> None:
        self.send_response(status)
        body = f"{text}\n".encode()
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        """Append the body to a journal."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        _, data, fault = self._begin()
        if isinstance(fault, tuple):
            self._refuse(*fault)
            return
        with self.server.changed:
            begin = len(data)
            data += body
            self.server.changed.notify_all()
        if fault == "lost":
            raise ConnectionAbortedError
        total = (
            "00" * 20
            if fault == "other"
            else sha1(body, usedforsecurity=False).hexdigest()
        )
        self.send_response(204)
        self.send_header("X-Commit-Begin", str(begin))
        self.send_header("X-Commit-End", str(begin + len(body)))
        self.send_header("X-Commit-Sha1-Sum", total)
        self.send_header("X-Write-Head", str(begin + len(body)))
        self.end_headers()

    def do_GET(self) -> None:
        """Send what a journal has from the offset on; wait for more if asked to."""
        journal, data, fault = self._begin()
        if isinstance(fault, tuple):
            self._refuse(*fault)
            return
        offset = int(self.query["offset"][0])
        with self.server.changed:
            if self.query["block"] == ["true"]:
                self.server.changed.wait_for(
                    lambda: len(data) > offset or self.server.ended.is_set()
                )
        if len(data) <= offset and fault is None and data:
            self._refuse(416, NOT_YET)
            return
        offset = max(offset, self.server.begins.get(journal, 0))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {offset}-{2**63 - 1}/{2**63 - 1}")
        self.send_header("X-Fragment-Name", f"{offset:016x}-{len(data):016x}-0.raw")
        self.send_header("X-Write-Head", str(len(data)))
        body = bytes(data[offset:])
        if self.server.plain:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: fault if isinstance(fault, int) else None])
            self.close_connection = True
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Trailer", "X-Close-Error")
        self.end_headers()
        # The chunks don't coincide with frames; a fault may cut one in its middle.
        left = fault if isinstance(fault, int) else len(body)
        for at in range(0, len(body), 50):
            piece = body[at : at + 50]
            self.wfile.write(b"%x\r\n" % len(piece) + piece[: max(left, 0)])
            left -= len(piece)
            if left < 0:
                raise ConnectionAbortedError
            self.wfile.write(b"\r\n")
        closing = fault if isinstance(fault, str) else NOT_YET
        self.wfile.write(f"0\r\nX-Close-Error: {closing}\r\n\r\n".encode())


@contextmanager
def running(*journals: str) -> Iterator[Gateway]:
    """Run a gateway that has these journals."""
    with Gateway() as server:
        for journal in journals:
            server.data[journal] = bytearray()
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            with server.changed:
                server.ended.set()
                server.changed.notify_all()
            server.shutdown()
            thread.join()
