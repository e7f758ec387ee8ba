"""
A child process that connects to a socket of ours: for dialects in which workers do.

One listener, in a private folder, serves all workers of an event loop that speak the
same dialect as the same user; so each task of Spark, which has a loop of its own, has a
folder of its own. It lives as long as a wire of it does.

Which connection is whose only the dialect knows. The seam is two methods of its
``connection``: :meth:`~etlstage.protocol.base.Connector.arguments` has how a worker is
given a token, and :meth:`~etlstage.protocol.base.Connector.identity` finds that in
the first bytes of a connection. Those are then handed on, for the session to read like
all others: here nothing is known of frames.

Where a worker asks for services is a server of its own, on the loopback interface, for
one worker alone: so its lines are known to be that worker's, and come out between those
that it writes to stderr. What is asked and answered is a matter of the dialect; see
:meth:`~etlstage.protocol.base.Connector.services`.

Nothing runs here by itself. A task that waits for one worker to connect accepts all
connections; one that reads a worker's stderr serves its locator.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import socket
import termios
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Self
from uuid import uuid4

import anyio
from anyio.lowlevel import RunVar

from etlstage.errors import ProtocolError
from etlstage.protocol.base import Connector, Services
from etlstage.transport.base import Child, Launch, LaunchRequest, Wire
from etlstage.transport.process import (
    PipeChild,
    PipeReader,
    Puller,
    launch_over_pipes,
    start_program,
)
from etlstage.transport.watchdog import discard_scratch, make_scratch

__all__ = (
    "Listener",
    "LocatorServer",
    "SocketWire",
    "launch_over_socket",
    "launch_worker",
)

_LOG: Final = logging.getLogger("etlstage")
_IDENTITY: Final = 64 * 1024  # bytes in which a worker identifies itself
_UNIDENTIFIED: Final = 64  # connections that have not identified themselves
_NAME: Final = "workers"
_LONGEST: Final = 100  # bytes of a path that any system takes for a socket
_BUFFER: Final = 1024 * 1024  # bytes; the kernel may give less
_NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)
_CLIENTS: Final = 16
_CHUNK: Final = 65536  # bytes a read
_HOST: Final = "127.0.0.1"


class SocketWire:
    """
    The conversation with a worker that connects to us, before and after it does.

    Until then nothing is to be read, and there is no room to write. By its ``token`` the
    worker identifies itself at the listener.
    """

    def __init__(self, listener: Listener, token: str) -> None:
        self.token = token
        self._listener: Listener | None = listener
        self._wakeup_fd = listener.wakeup_fd()
        self._socket: socket.socket | None = None
        self._received = b""  # read already
        self._connected = anyio.Event()  # or never
        self._ended = False  # we write no more
        self._gone = False  # the worker does not connect, or is no more
        self._reset = False  # and left something unread
        self._last = 0  # bytes that the last write took
        self._puller = Puller()
        self._mistaken = False  # a client came under an unknown name

    @property
    def endpoint(self) -> str:
        """Where it connects."""
        assert self._listener is not None, "it is not closed"
        return self._listener.endpoint

    def connect(self, connection: socket.socket, received: bytes) -> None:
        """Be connected to a worker that has sent this."""
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = connection
        self._received = received
        self._mistaken = False
        self._wake()

    def read(self, size: int, /) -> bytes | None:
        self._look()
        if self._socket is None or self._gone:
            return b"" if self._gone else None
        if self._received:
            received, self._received = self._received[:size], self._received[size:]
            return received
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
        self._look()
        if self._gone or self._received:
            return
        waited = self._wakeup_fd if self._socket is None else self._socket.fileno()
        with suppress(anyio.ClosedResourceError):
            await anyio.wait_readable(waited)
        self._look()

    async def pull(self, take: Callable[[], bool], /) -> None:
        if self._socket is None:
            await self.readable()
        else:
            await self._puller.run(self._socket.fileno(), take)

    def stop_waiting(self) -> None:
        """Wake who waits to read; safe once it is closed."""
        self._puller.stop()
        if self._listener is not None:
            own = self._socket.fileno() if self._socket is not None else self._wakeup_fd
            anyio.notify_closing(own)

    def write(self, data: memoryview | bytes, /) -> int:
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

        It accepts no connection: only waiting to read does.
        """
        await self._connected.wait()
        if self._socket is not None and not (self._ended or self._gone):
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_writable(self._socket.fileno())

    def close_write(self) -> None:
        """Send the worker an end of input; one that has not come is not admitted."""
        if self._ended:
            return
        self._look()  # it may have come, sent all, and gone
        self._ended = True
        if self._socket is None:
            self._give_up()
        else:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def unread(self) -> int:
        """
        Return how many bytes wait for the worker, at least; 0 if that is unknown.

        The kernel reports that there are some, and not how many: the last to be written
        are among them.
        """
        if self._socket is None:
            return 0
        queued = self._reset
        with suppress(OSError):
            fd = self._socket.fileno()
            queued = queued or any(fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0" * 4))
        return self._last if queued else 0

    def mismatch_hint(self) -> str:
        if self._mistaken:
            return "a client connected under another name"
        if self._socket is None:
            return "it never connected: leave dialect out if it reads its stdin"
        return ""

    def mistake(self) -> None:
        """Record that a client came under a name that no worker has, or has any more."""
        self._mistaken = True

    def close(self) -> None:
        if self._listener is None:
            return
        if self._socket is not None:
            self._socket.close()
        self._give_up()
        os.close(self._wakeup_fd)
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
        anyio.notify_closing(self._wakeup_fd)


class Listener:
    """
    Where workers connect.

    Args:
        connector: Of what they speak; its settings don't matter.
        user: Who they are, if not we.

    """

    def __init__(self, connector: Connector, *, user: int | None = None) -> None:
        self._identity = connector.identity
        self._expected: dict[str, SocketWire] = {}
        self._unidentified: dict[socket.socket, bytes] = {}
        self._wires = 0
        with ExitStack() as failed:
            self._socket = failed.enter_context(socket.socket(socket.AF_UNIX))
            self._socket.setblocking(False)
            self.folder: Path = _private_folder()
            failed.callback(discard_scratch, self.folder)
            self.endpoint: str = os.fspath(self.folder / _NAME)
            # The folder is ours alone; so at no moment is the socket open to others.
            self._socket.bind(self.endpoint)
            os.chmod(self.endpoint, 0o600)
            if user is not None:
                os.chown(self.endpoint, user, -1)
                os.chown(self.folder, user, -1)
            self._socket.listen(128)
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._socket, selectors.EVENT_READ)
            failed.pop_all()

    def __repr__(self) -> str:
        return f"<Listener {self.endpoint} wires={self._wires}>"

    @property
    def idle(self) -> bool:
        """Whether no wire needs it any more; it is closed then."""
        return not self._wires

    def expect(self) -> SocketWire:
        """Return the wire of a worker that is to connect."""
        wire = SocketWire(self, str(uuid4()))
        self._expected[wire.token] = wire
        self._wires += 1
        return wire

    def wakeup_fd(self) -> int:
        """Return a descriptor of one's own to wait for: reading rings for all."""
        return os.dup(self._selector.fileno())

    def serve(self) -> None:
        """Accept and read connections that are ready."""
        if self.idle:
            return
        for key, _ in self._selector.select(0):
            assert isinstance(key.fileobj, socket.socket), "that is all we register"
            if key.fileobj is self._socket:
                self._accept()
            else:
                self._hear(key.fileobj)

    def forget(self, token: str) -> None:
        """Expect a worker no more."""
        self._expected.pop(token, None)

    def release(self) -> None:
        """Let go of a wire that is closed; the last one takes all with it."""
        self._wires -= 1
        if self._wires:
            return
        for connection in list(self._unidentified):
            self._dismiss(connection)
        self._selector.close()
        self._socket.close()
        discard_scratch(self.folder)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:  # too many open files, or it has gone again
                _LOG.warning("can't take a worker's connection: %s", error)
                return
            connection.setblocking(False)
            if len(self._unidentified) == _UNIDENTIFIED:
                self._refuse(next(iter(self._unidentified)), "was silent for too long")
            self._unidentified[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)
            self._hear(connection)

    def _hear(self, connection: socket.socket) -> None:
        """Read the identity of a client."""
        try:
            data = connection.recv(_IDENTITY)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._dismiss(connection)
            return
        received = self._unidentified[connection] = (
            self._unidentified[connection] + data
        )
        try:
            token = self._identity(received)
        except ProtocolError as error:
            self._refuse(connection, str(error))
            return
        if token is not None:
            self._admit(connection, token, received)
        elif len(received) > _IDENTITY:
            self._refuse(
                connection, f"did not identify itself in {len(received)} bytes"
            )

    def _admit(self, connection: socket.socket, token: str, received: bytes) -> None:
        wire = self._expected.pop(token, None)
        if wire is None:
            # Not the token: it may be that of a worker which is connected.
            self._refuse(connection, "is no worker that we wait for")
            for waiting in self._expected.values():
                waiting.mistake()
            return
        self._selector.unregister(connection)
        del self._unidentified[connection]
        wire.connect(connection, received)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        _LOG.warning("refused a connection to %s: it %s", self.endpoint, reason)
        self._dismiss(connection)

    def _dismiss(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._unidentified[connection]
        connection.close()


class LocatorServer:
    """A worker's stderr, and what it sends to the services that it finds."""

    def __init__(self, connector: Connector) -> None:
        self._services = connector.services
        self._clients: dict[socket.socket, Services] = {}
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
        if self._pipe is not None and not self._lines:
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_readable(self._selector.fileno())

    def stop_waiting(self) -> None:
        """Wake who waits; safe once it is closed."""
        if self._pipe is not None:
            anyio.notify_closing(self._selector.fileno())

    def close(self) -> None:
        self._selector.close()
        self._socket.close()
        for client in self._clients:
            client.close()
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
            client, _ = self._socket.accept()
            client.setblocking(False)
            services = self._services(_HOST, self._port)
            if services is None or len(self._clients) == _CLIENTS:
                client.close()
                return
            self._clients[client] = services
            self._selector.register(client, selectors.EVENT_READ)

    def _hear(self, client: socket.socket) -> None:
        services = self._clients[client]
        try:
            data = client.recv(_CHUNK)
            answer = services.receive_data(data)
            # It is short; who does not read what he asks for has to do without.
            served = client.send(answer) == len(answer)
        except (OSError, ProtocolError):
            data, served = b"", False
        self._lines += services.lines()
        if not (data and served):
            self._selector.unregister(client)
            del self._clients[client]
            client.close()


_LISTENERS: Final[RunVar[dict[tuple[str, int | None], Listener]]] = RunVar("listeners")


def launch_over_socket(request: LaunchRequest, /) -> tuple[SocketWire, PipeChild]:
    """
    Start a program that connects to a socket of ours in a private folder.

    What it writes to stdout goes with what it writes to stderr; its stdin is empty. It
    is waited for to connect while its wire is waited for.
    """
    connector = request.dialect.connection
    assert connector is not None, f"workers of {request.dialect.name} have pipes"
    wire = _listener(request, connector).expect()
    with ExitStack() as failed:
        failed.callback(wire.close)
        locator = LocatorServer(connector)
        failed.callback(locator.close)
        arguments = connector.arguments(
            app=request.stage,
            identity=wire.token,
            endpoint=wire.endpoint,
            locator=locator.endpoint,
        )
        child = start_program(request, arguments, locator.join)
        failed.pop_all()
    return wire, child


def _listener(request: LaunchRequest, connector: Connector) -> Listener:
    user = request.terms.user
    listeners = _LISTENERS.get({})
    _LISTENERS.set(listeners)
    key = (request.dialect.name, user)
    found = listeners.get(key)
    if found is None or found.idle:
        found = listeners[key] = Listener(connector, user=user)
    return found


def _private_folder() -> Path:
    folder = make_scratch("socket")
    if len(os.fsencode(folder / _NAME)) <= _LONGEST:
        return folder
    discard_scratch(folder)
    return make_scratch("socket", Path("/tmp"))  # noqa: S108 - it is private in there, too


def launch_worker(request: LaunchRequest, /) -> tuple[Wire, Child]:
    """Start a worker as its dialect has it: on pipes, or to connect to a socket."""
    launch: Launch = launch_over_pipes
    if request.dialect.connection is not None:
        launch = launch_over_socket
    return launch(request)
