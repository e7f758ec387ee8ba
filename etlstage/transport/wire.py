"""
A conversation over a socket, before and after the worker has connected.

Who connects, and to which of these wires, ``listener.py`` finds out.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio

from etlstage.transport.loop import Puller

if TYPE_CHECKING:
    from etlstage.transport.listener import Listener

__all__ = ("SocketWire",)

_BUFFER: Final = 1024 * 1024  # bytes; the kernel may give less
_NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)


class SocketWire:
    """
    The conversation with a worker that connects to us, before and after it does.

    Until then nothing is to be read, and there is no room to write.

    Args:
        listener: Where it connects.
        token: What it is told to call itself there.

    """

    def __init__(self, listener: Listener, token: str) -> None:
        self.token = token
        self._listener: Listener | None = listener
        self._bell = listener.bell()
        self._socket: socket.socket | None = None
        self._said = b""  # read already
        self._connected = anyio.Event()  # or never
        self._ended = False  # we write no more
        self._gone = False  # the worker does not connect, or is no more
        self._reset = False  # and left something unread
        self._last = 0  # bytes that the last write took
        self._puller = Puller()
        self._mistaken = False  # somebody came under a name that nobody has

    @property
    def endpoint(self) -> str:
        """Where it connects."""
        assert self._listener is not None, "it is not closed"
        return self._listener.endpoint

    def connect(self, connection: socket.socket, said: bytes) -> None:
        """Be connected to a worker that has said this."""
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._said = said
        self._mistaken = False
        self._wake()

    def read(self, size: int, /) -> bytes | None:
        """Return what is there, ``b""`` at the end, None when reading would block."""
        self._look()
        if self._socket is None or self._gone:
            return b"" if self._gone else None
        if self._said:
            said, self._said = self._said[:size], self._said[size:]
            return said
        try:
            data = self._socket.recv(size)
        except BlockingIOError:
            return None
        except OSError:
            # So the end of one looks that had not read everything.
            self._reset = True
            data = b""
        self._gone = not data
        return data

    async def readable(self) -> None:
        """Wait until reading would not block, or :meth:`stop_waiting`."""
        self._look()
        if self._gone or self._said:
            return
        waited = self._bell if self._socket is None else self._socket.fileno()
        with suppress(anyio.ClosedResourceError):
            await anyio.wait_readable(waited)
        self._look()

    async def pull(self, take: Callable[[], bool], /) -> None:
        """Wait likewise; where the loop can, it calls ``take`` instead, until False."""
        if self._socket is None:
            await self.readable()
        else:
            await self._puller.run(self._socket.fileno(), take)

    def stop_waiting(self) -> None:
        """Wake who waits to read; safe once it is closed."""
        self._puller.stop()
        if self._listener is not None:
            own = self._socket.fileno() if self._socket is not None else self._bell
            anyio.notify_closing(own)

    def write(self, data: memoryview | bytes, /) -> int:
        """
        Write as much as there is room for and return how many bytes that were.

        Raises:
            BrokenPipeError: If the worker, or we, closed this direction.

        """
        if self._ended or self._gone:
            raise BrokenPipeError
        if self._socket is None:
            return 0
        try:
            written = self._socket.send(data, _NO_SIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise BrokenPipeError from error
        self._last = written
        return written

    async def writable(self) -> None:
        """
        Wait until there is room, or until writing would fail.

        It lets nobody in: for that, somebody has to wait to read.
        """
        await self._connected.wait()
        if self._socket is not None and not (self._ended or self._gone):
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_writable(self._socket.fileno())

    def close_write(self) -> None:
        """Tell the worker that no more comes; one that has not come is not admitted."""
        if self._ended:
            return
        self._look()  # it may have come, said all, and gone
        self._ended = True
        if self._socket is None:
            self._give_up()
        else:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def unread(self) -> int:
        """
        Return how many bytes wait for the worker, at least; 0 when that can't be told.

        The kernel tells that there are some, and not how many: the last to be written
        are among them. What waits in TCP it does not tell.
        """
        if self._socket is None:
            return 0
        return self._last if self._reset or self._queued(self._socket) else 0

    def missed(self) -> str:
        """Say who came in place of a worker that has not connected, if anybody did."""
        return "somebody connected under another name" if self._mistaken else ""

    def mistake(self) -> None:
        """Take note that somebody came under a name that nobody has, or has any more."""
        self._mistaken = True

    def close(self) -> None:
        """Close both directions; call it when nobody waits any more."""
        if self._listener is None:
            return
        if self._socket is not None:
            self._socket.close()
        self._give_up()
        os.close(self._bell)
        listener, self._listener = self._listener, None
        listener.release()

    def _look(self) -> None:
        if self._socket is None and not self._gone and self._listener is not None:
            self._listener.serve()

    def _give_up(self) -> None:
        assert self._listener is not None, "it is not closed"
        self._ended = self._gone = True
        self._listener.forget(self.token)
        self._wake()

    def _wake(self) -> None:
        self._connected.set()
        anyio.notify_closing(self._bell)

    @staticmethod
    def _queued(connection: socket.socket) -> int:
        with suppress(OSError):
            answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4)
            return int.from_bytes(answer, sys.byteorder)
        return 0
