"""
A child process that connects to our socket, for dialects in which workers do so.

One listener, in a private folder, serves all workers of an event loop that speak the
same dialect and run as the same user; so each Spark task, which has its own loop, has
its own folder. A listener lives as long as any of its wires.

Only the dialect knows which connection belongs to which worker. Two methods of its
``connection`` are used for that: :meth:`~etlstage.protocol.base.Connector.arguments`
passes a token to a worker, and :meth:`~etlstage.protocol.base.Connector.identity` finds
the token in the first bytes of a connection. Those bytes are then handed on, for the
session to read like all others: this module knows nothing of frames.

Each worker asks for services at its own server on the loopback interface. So lines that
are sent there are known to be that worker's, and are inserted between those that it
writes to stderr. The dialect decides what is asked and answered; see
:meth:`~etlstage.protocol.base.Connector.services`.

Nothing runs in the background. A task that waits for one worker to connect accepts all
connections; a task that reads a worker's stderr serves its locator.
"""

from __future__ import annotations

import fcntl
import logging
import math
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
from etlstage.transport.fork import close_in_fork
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
_IDENTITY: Final = 64 * 1024  # bytes within which a worker identifies itself
_UNIDENTIFIED: Final = 64  # most connections that have not identified themselves
_NAME: Final = "workers"
_LONGEST: Final = 100  # bytes of a socket's path that every system accepts
_BUFFER: Final = 1024 * 1024  # bytes; the kernel may give less
_NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)
_CLIENTS: Final = 16
_CHUNK: Final = 65536  # bytes per read
_HOST: Final = "127.0.0.1"
_PAUSE: Final = 0.1  # seconds until accepting is tried again after it has failed


class SocketWire:
    """
    The conversation with a worker that connects to us, before and after it does.

    Before that, there is nothing to read and no room to write. The worker identifies
    itself to the listener by its ``token``.
    """

    def __init__(self, listener: Listener, token: str) -> None:
        self.token = token
        self._listener: Listener | None = listener
        self._wakeup_fd = listener.wakeup_fd()
        self._socket: socket.socket | None = None
        self._received = b""  # read already
        self._connected = anyio.Event()  # connected, or given up
        self._ended = False  # we write no more
        self._gone = False  # the worker never connects, or has disconnected
        self._reset = False  # it disconnected and left something unread
        self._last = 0  # bytes that the last write took
        self._puller = Puller()
        self._mistaken = False  # a client connected under an unknown name

    @property
    def endpoint(self) -> str:
        """The path of the socket to connect to."""
        assert self._listener is not None, "it is not closed"
        return self._listener.endpoint

    def connect(self, connection: socket.socket, received: bytes) -> None:
        """Use the worker's connection, from which ``received`` was already read."""
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
            # The connection of a worker ends like this if it had not read everything.
            self._reset = True
            data = b""
        self._gone = not data
        return data

    async def readable(self) -> None:
        self._look()
        if self._gone or self._received:
            return
        with suppress(anyio.ClosedResourceError):
            if self._socket is not None:
                await anyio.wait_readable(self._socket.fileno())
            else:
                assert self._listener is not None, "once it is closed, it is gone"
                with anyio.move_on_after(self._listener.delay):
                    await anyio.wait_readable(self._wakeup_fd)
        self._look()

    async def pull(self, take: Callable[[], bool], /) -> None:
        if self._socket is None:
            await self.readable()
        else:
            await self._puller.run(self._socket.fileno(), take)

    def stop_waiting(self) -> None:
        """Wake tasks that wait to read; safe to call after closing."""
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

        This accepts no connections: only waiting to read does.
        """
        await self._connected.wait()
        if self._socket is not None and not (self._ended or self._gone):
            with suppress(anyio.ClosedResourceError):
                await anyio.wait_writable(self._socket.fileno())

    def close_write(self) -> None:
        """Send the end of input; a worker that has not connected can't any more."""
        if self._ended:
            return
        self._look()  # it may have connected, sent everything and disconnected
        self._ended = True
        if self._socket is None:
            self._give_up()
        else:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def unread(self) -> int:
        """
        Return a lower bound of the bytes that wait for the worker; 0 if unknown.

        The kernel reports whether there are any, but not how many: at least those of
        the last write.
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
            return "it never connected: omit dialect if it reads its stdin"
        return ""

    def mistake(self) -> None:
        """Record that a client connected under a name that no awaited worker has."""
        self._mistaken = True

    def wait_anew(self) -> None:
        """Have a waiting task wait as long as the listener pauses, at most."""
        anyio.notify_closing(self._wakeup_fd)

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


class _Acceptor:
    """
    Accepts connections to a socket, whenever a selector finds some.

    With no descriptor left, that socket stays readable though nothing can be accepted:
    then it is not selected for a moment.
    """

    def __init__(
        self, listening: socket.socket, selector: selectors.BaseSelector
    ) -> None:
        self._socket = listening
        self._selector = selector
        self._resumes_at: float | None = None
        self._failing = False  # since a connection was accepted last
        listening.setblocking(False)
        selector.register(listening, selectors.EVENT_READ)

    @property
    def delay(self) -> float:
        """Seconds until accepting is tried again; infinite if it is not paused."""
        if self._resumes_at is None:
            return math.inf
        return max(0.0, self._resumes_at - anyio.current_time())

    def resume(self) -> None:
        """Have the socket selected again if its pause is over."""
        if not self.delay:
            self._resumes_at = None
            self._selector.register(self._socket, selectors.EVENT_READ)

    def accept(self) -> socket.socket | None:
        """Return a connection, or None if none waits or none can be accepted."""
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return None
        except OSError as error:  # too many open files, or it has disconnected
            if not self._failing:
                _LOG.warning(
                    "can't accept a worker's connection: %s; trying again every %g s",
                    error,
                    _PAUSE,
                )
            self._failing = True
            self._selector.unregister(self._socket)
            self._resumes_at = anyio.current_time() + _PAUSE
            return None
        self._failing = False
        close_in_fork(connection).setblocking(False)
        return connection


class Listener:
    """
    A listening socket to which workers connect.

    Args:
        connector: The connector of their dialect; its settings don't matter.
        user: The uid that they run as; None: our own.

    """

    def __init__(self, connector: Connector, *, user: int | None = None) -> None:
        self._identity = connector.identity
        self._expected: dict[str, SocketWire] = {}
        self._unidentified: dict[socket.socket, bytes] = {}
        self._wires = 0
        with ExitStack() as failed:
            self._socket = failed.enter_context(
                close_in_fork(socket.socket(socket.AF_UNIX))
            )
            self.folder: Path = _private_folder()
            failed.callback(discard_scratch, self.folder)
            self.endpoint: str = os.fspath(self.folder / _NAME)
            # The folder is private, so the socket is open to others at no moment.
            self._socket.bind(self.endpoint)
            os.chmod(self.endpoint, 0o600)
            if user is not None:
                os.chown(self.endpoint, user, -1)
                os.chown(self.folder, user, -1)
            self._socket.listen(128)
            self._selector = selectors.DefaultSelector()
            self._acceptor = _Acceptor(self._socket, self._selector)
            failed.pop_all()

    def __repr__(self) -> str:
        return f"<Listener {self.endpoint} wires={self._wires}>"

    @property
    def idle(self) -> bool:
        """Whether no wire needs it any more: it is closed then."""
        return not self._wires

    @property
    def delay(self) -> float:
        """Seconds until accepting is tried again; infinite if it is not paused."""
        return self._acceptor.delay

    def expect(self) -> SocketWire:
        """Return the wire for a worker that is going to connect."""
        wire = SocketWire(self, str(uuid4()))
        self._expected[wire.token] = wire
        self._wires += 1
        return wire

    def wakeup_fd(self) -> int:
        """Return a new descriptor, readable when any socket of the listener is."""
        return os.dup(self._selector.fileno())

    def serve(self) -> None:
        """Accept and read connections that are ready."""
        if self.idle:
            return
        self._acceptor.resume()
        for key, _ in self._selector.select(0):
            assert isinstance(key.fileobj, socket.socket), "only sockets are registered"
            if key.fileobj is self._socket:
                self._accept()
            else:
                self._hear(key.fileobj)

    def forget(self, token: str) -> None:
        """Stop expecting a worker."""
        self._expected.pop(token, None)

    def release(self) -> None:
        """Release a closed wire; the last one closes the listener."""
        self._wires -= 1
        if self._wires:
            return
        for connection in list(self._unidentified):
            self._dismiss(connection)
        self._selector.close()
        self._socket.close()
        discard_scratch(self.folder)

    def _accept(self) -> None:
        while (connection := self._acceptor.accept()) is not None:
            if len(self._unidentified) == _UNIDENTIFIED:
                self._refuse(
                    next(iter(self._unidentified)), "it was silent for too long"
                )
            self._unidentified[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)
            self._hear(connection)
        if self.delay < math.inf:
            for wire in self._expected.values():
                wire.wait_anew()

    def _hear(self, connection: socket.socket) -> None:
        """Read the identity of a client; admit it or refuse it."""
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
                connection, f"it did not identify itself in {len(received)} bytes"
            )

    def _admit(self, connection: socket.socket, token: str, received: bytes) -> None:
        wire = self._expected.pop(token, None)
        if wire is None:
            # Don't log the token: it may be that of a connected worker.
            self._refuse(connection, "it is not from an expected worker")
            for waiting in self._expected.values():
                waiting.mistake()
            return
        self._selector.unregister(connection)
        del self._unidentified[connection]
        wire.connect(connection, received)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        _LOG.warning("refused a connection to %s: %s", self.endpoint, reason)
        self._dismiss(connection)

    def _dismiss(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._unidentified[connection]
        connection.close()


class LocatorServer:
    """A worker's stderr, merged with the log lines that it sends to services."""

    def __init__(self, connector: Connector) -> None:
        self._services = connector.services
        self._clients: dict[socket.socket, Services] = {}
        self._pipe: PipeReader | None = None
        self._ended = False  # the pipe
        self._pidfd: int | None = None  # of the worker, while it runs
        self._lines = b""
        self._whole = True  # what was read last ended with a whole line
        self._selector = selectors.DefaultSelector()
        self._socket = close_in_fork(socket.create_server((_HOST, 0)))
        self._port: int = self._socket.getsockname()[1]
        self._acceptor = _Acceptor(self._socket, self._selector)

    @property
    def endpoint(self) -> str:
        """The address of the server."""
        return f"{_HOST}:{self._port}"

    def join(self, pipe: PipeReader, pidfd: int | None = None) -> Self:
        """
        Also read from a pipe, to its end and to the exit of the worker.

        Takes ownership of both descriptors, and returns the server.
        """
        self._pipe, self._pidfd = pipe, pidfd
        self._selector.register(pipe.fileno(), selectors.EVENT_READ)
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ)
        return self

    def read(self, size: int, /) -> bytes | None:
        if self._pipe is None:
            return b""
        self._serve()
        if self._lines:
            # The worker may have written a part of a line to stderr.
            lines = self._lines if self._whole else b"\n" + self._lines
            self._whole = True
            data, self._lines = lines[:size], lines[size:]
            return data
        piped = None if self._ended else self._pipe.read(size)
        if piped:
            self._whole = piped.endswith(b"\n")
        elif piped is not None:
            # It stays readable: waiting would return at once.
            self._selector.unregister(self._pipe.fileno())
            self._ended = True
        # A worker whose output goes elsewhere has a locator all the same.
        return b"" if self._ended and self._pidfd is None else piped or None

    async def readable(self) -> None:
        if self._pipe is not None and not self._lines:
            with (
                suppress(anyio.ClosedResourceError),
                anyio.move_on_after(self._acceptor.delay),
            ):
                await anyio.wait_readable(self._selector.fileno())

    def stop_waiting(self) -> None:
        """Wake waiting tasks; safe to call after closing."""
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
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)

    def _serve(self) -> None:
        self._acceptor.resume()
        for key, _ in self._selector.select(0):
            if key.fileobj is self._socket:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._hear(key.fileobj)
            elif key.fd == self._pidfd:
                self._selector.unregister(key.fd)  # it stays readable, too
                os.close(key.fd)
                self._pidfd = None

    def _accept(self) -> None:
        if (client := self._acceptor.accept()) is None:
            return
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
            # Answers are short; a client that does not read them is disconnected.
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
    Start a program that connects to our socket in a private folder.

    Its stdout is merged with its stderr; its stdin is empty. Its connection is accepted
    while a task waits for its wire.
    """
    connector = request.dialect.connection
    assert connector is not None, f"workers of dialect {request.dialect.name} use pipes"
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
    """Start a worker over pipes, or over a socket if its dialect has a connection."""
    launch: Launch = launch_over_pipes
    if request.dialect.connection is not None:
        launch = launch_over_socket
    return launch(request)
