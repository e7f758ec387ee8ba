"""
Where a worker asks for services, beside the socket that it works over.

A desk listens on the loopback interface, for one worker alone: so its lines are known
to be that worker's, and come out between those that it writes to stderr. What is asked
and answered is a matter of the dialect; see
:meth:`~etlstage.protocol.base.Dialect.services`. Whoever reads the worker's stderr
serves the desk; nothing runs here by itself.
"""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from typing import Final, Self

import anyio

from etlstage.errors import ProtocolError
from etlstage.protocol.base import Dialect, Services
from etlstage.transport.pipe import PipeReader

__all__ = ("Desk",)

_VISITORS: Final = 16
_CHUNK: Final = 65536  # bytes a read
_HOST: Final = "127.0.0.1"


class Desk:
    """
    A worker's stderr, and what it says to the services that it finds.

    Args:
        dialect: What the worker speaks.

    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._visitors: dict[socket.socket, Services] = {}
        self._pipe: PipeReader | None = None
        self._lines = b""
        self._whole = True  # what was read last ends a line
        self._selector = selectors.DefaultSelector()
        self._socket = socket.create_server((_HOST, 0))
        self._socket.setblocking(False)
        self._port: int = self._socket.getsockname()[1]
        self._selector.register(self._socket, selectors.EVENT_READ)

    @property
    def endpoint(self) -> str:
        """Where it is."""
        return f"{_HOST}:{self._port}"

    def join(self, pipe: PipeReader) -> Self:
        """Be read for what comes out of a pipe, too; the pipe becomes ours."""
        self._pipe = pipe
        self._selector.register(pipe.fileno(), selectors.EVENT_READ)
        return self

    def read(self, size: int, /) -> bytes | None:
        """Return what is there, ``b""`` at the end, None when reading would block."""
        if self._pipe is None:
            return b""
        self._serve()
        if self._lines:
            # The worker may be in the middle of one.
            lines = self._lines if self._whole else b"\n" + self._lines
            self._whole = True
            data, self._lines = lines[:size], lines[size:]
            return data
        piped = self._pipe.read(size)
        if piped:
            self._whole = piped.endswith(b"\n")
        return piped

    async def readable(self) -> None:
        """Wait until reading would not block, or :meth:`stop_waiting`."""
        if self._pipe is not None and not self._lines:
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_readable(self._selector.fileno())

    def stop_waiting(self) -> None:
        """Wake who waits; safe once it is closed."""
        if self._pipe is not None:
            anyio.notify_closing(self._selector.fileno())

    def close(self) -> None:
        """Close all; call it when nobody waits any more."""
        self._selector.close()
        self._socket.close()
        for visitor in self._visitors:
            visitor.close()
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    def _serve(self) -> None:
        for key, _ in self._selector.select(0):
            if key.fileobj is self._socket:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._hear(key.fileobj)

    def _accept(self) -> None:
        with suppress(OSError):
            visitor, _ = self._socket.accept()
            visitor.setblocking(False)
            services = self._dialect.services(_HOST, self._port)
            if services is None or len(self._visitors) == _VISITORS:
                visitor.close()
                return
            self._visitors[visitor] = services
            self._selector.register(visitor, selectors.EVENT_READ)

    def _hear(self, visitor: socket.socket) -> None:
        services = self._visitors[visitor]
        try:
            data = visitor.recv(_CHUNK)
            answer = services.receive_data(data)
            # It is short; who does not read what he asks for has to do without.
            served = visitor.send(answer) == len(answer)
        except (OSError, ProtocolError):
            data, served = b"", False
        self._lines += services.lines()
        if not (data and served):
            self._selector.unregister(visitor)
            del self._visitors[visitor]
            visitor.close()
