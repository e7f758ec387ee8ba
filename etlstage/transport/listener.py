"""
A child process that connects to a socket of ours: for dialects in which workers do.

One listener, in a private folder, serves all workers of an event loop that speak the
same dialect as the same user; so each task of Spark, which has a loop of its own, has a
folder of its own. It lives as long as a wire of it does.

Which connection is whose only the dialect can tell. The seam is two methods of it:
:meth:`~etlstage.protocol.base.Dialect.arguments` says how a worker is told a token, and
:meth:`~etlstage.protocol.base.Dialect.identity` finds that token in the first bytes of
a connection. Those are then handed on, for the session to read like all others: here
nothing is known of frames.

Nothing runs here by itself. Whoever waits for one of the workers waits for all that
are expected, and serves whoever comes.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from uuid import uuid4

from anyio.lowlevel import RunVar

from etlstage.errors import ProtocolError
from etlstage.protocol.base import Dialect
from etlstage.transport.base import Child, Launch, LaunchRequest, Wire
from etlstage.transport.desk import Desk
from etlstage.transport.pipe import PipeChild, launch_over_pipes, start_program
from etlstage.transport.scratch import discard, make
from etlstage.transport.wire import SocketWire

__all__ = ("Listener", "SocketLaunch", "launch_over_socket", "launch_worker")

_LOG: Final = logging.getLogger("etlstage")
_GREETING: Final = 64 * 1024  # bytes in which a worker says who it is
_STRANGERS: Final = 64  # connections that have not said who they are
_NAME: Final = "workers"
_LONGEST: Final = 100  # bytes of a path that any system takes for a socket


class Listener:
    """
    Where workers connect.

    Args:
        dialect: What they speak; its settings don't matter.
        tcp: Whether they come by TCP, on the loopback interface.
        user: Who they are, if not we.

    """

    def __init__(
        self, dialect: Dialect, *, tcp: bool = False, user: int | None = None
    ) -> None:
        self._dialect = dialect
        self._expected: dict[str, SocketWire] = {}
        self._strangers: dict[socket.socket, bytes] = {}
        self._wires = 0
        self.folder: Path | None = None
        """Where the socket is, unless it is one of TCP."""
        with ExitStack() as failed:
            self._socket = failed.enter_context(
                socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
            )
            self._socket.setblocking(False)
            if tcp:
                self._socket.bind(("127.0.0.1", 0))
                self.endpoint: str = "{}:{}".format(*self._socket.getsockname())
            else:
                self.folder = _private_folder()
                failed.callback(discard, self.folder)
                self.endpoint = os.fspath(self.folder / _NAME)
                self._bind(self.folder, user)
            self._socket.listen(128)
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._socket, selectors.EVENT_READ)
            failed.pop_all()

    def __repr__(self) -> str:
        return f"<Listener {self.endpoint} wires={self._wires}>"

    def _bind(self, folder: Path, user: int | None) -> None:
        # Nobody else gets into the folder; so there is no moment at which it is open.
        self._socket.bind(self.endpoint)
        os.chmod(self.endpoint, 0o600)
        if user is not None:
            os.chown(self.endpoint, user, -1)
            os.chown(folder, user, -1)

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

    def bell(self) -> int:
        """Return a descriptor of one's own to wait for: reading rings for all."""
        return os.dup(self._selector.fileno())

    def serve(self) -> None:
        """Take who has come."""
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
        """Take note that a wire is closed; the last one takes all with it."""
        self._wires -= 1
        if self._wires:
            return
        for stranger in list(self._strangers):
            self._dismiss(stranger)
        self._selector.close()
        self._socket.close()
        if self.folder is not None:
            discard(self.folder)

    def _accept(self) -> None:
        while True:
            try:
                stranger, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:  # too many open files, or it has gone again
                _LOG.warning("can't take a worker's connection: %s", error)
                return
            stranger.setblocking(False)
            if len(self._strangers) == _STRANGERS:
                self._refuse(next(iter(self._strangers)), "said nothing for too long")
            self._strangers[stranger] = b""
            self._selector.register(stranger, selectors.EVENT_READ)
            self._hear(stranger)

    def _hear(self, stranger: socket.socket) -> None:
        """Let somebody say who it is."""
        try:
            data = stranger.recv(_GREETING)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._dismiss(stranger)
            return
        said = self._strangers[stranger] = self._strangers[stranger] + data
        try:
            token = self._dialect.identity(said)
        except ProtocolError as error:
            self._refuse(stranger, str(error))
            return
        if token is not None:
            self._admit(stranger, token, said)
        elif len(said) > _GREETING:
            self._refuse(stranger, f"did not say who it is in {len(said)} bytes")

    def _admit(self, stranger: socket.socket, token: str, said: bytes) -> None:
        wire = self._expected.pop(token, None)
        if wire is None:
            # Not the token: it may be that of a worker which is connected.
            self._refuse(stranger, "is no worker that we wait for")
            for waiting in self._expected.values():
                waiting.mistake()
            return
        self._selector.unregister(stranger)
        del self._strangers[stranger]
        wire.connect(stranger, said)

    def _refuse(self, stranger: socket.socket, reason: str) -> None:
        _LOG.warning("refused a connection to %s: it %s", self.endpoint, reason)
        self._dismiss(stranger)

    def _dismiss(self, stranger: socket.socket) -> None:
        self._selector.unregister(stranger)
        del self._strangers[stranger]
        stranger.close()


class SocketLaunch:
    """
    Starts programs that connect to a socket of ours; a :class:`Launch`.

    What they write to stdout goes with what they write to stderr; their stdin is empty.

    Args:
        tcp: Whether they connect by TCP, on the loopback interface, where any user of
            the machine may try; else a socket in a private folder.

    """

    def __init__(self, *, tcp: bool = False) -> None:
        self._tcp = tcp

    def __call__(self, request: LaunchRequest, /) -> tuple[SocketWire, PipeChild]:
        """
        Start a program, and wait for it to connect while its wire is waited for.

        Raises:
            OSError: If the program can't be started; as :class:`subprocess.Popen`.
            TermsRefused: If it is not allowed to be started on these terms.

        """
        wire = self._listener(request).expect()
        with ExitStack() as failed:
            failed.callback(wire.close)
            desk = Desk(request.dialect)
            failed.callback(desk.close)
            told = request.dialect.arguments(
                app=request.stage,
                identity=wire.token,
                endpoint=wire.endpoint,
                locator=desk.endpoint,
            )
            child = start_program(request, told, desk.join)
            failed.pop_all()
        return wire, child

    def _listener(self, request: LaunchRequest) -> Listener:
        user = request.terms.user
        listeners = _LISTENERS.get({})
        _LISTENERS.set(listeners)
        key = (request.dialect.name, self._tcp, user)
        found = listeners.get(key)
        if found is None or found.idle:
            found = Listener(request.dialect, tcp=self._tcp, user=user)
            listeners[key] = found
        return found


launch_over_socket: Final = SocketLaunch()
"""Starts programs that connect to a socket in a private folder."""

_LISTENERS: Final[RunVar[dict[tuple[str, bool, int | None], Listener]]] = RunVar(
    "listeners"
)


def _private_folder() -> Path:
    folder = make("socket")
    if len(os.fsencode(folder / _NAME)) <= _LONGEST:
        return folder
    discard(folder)
    return make("socket", Path("/tmp"))  # noqa: S108 - it is private in there, too


def launch_worker(request: LaunchRequest, /) -> tuple[Wire, Child]:
    """
    Start a worker as its dialect has it: on pipes, or to connect to a socket.

    Raises:
        OSError: If the program can't be started; as :class:`subprocess.Popen`.
        TermsRefused: If it is not allowed to be started on these terms.

    """
    launch: Launch = launch_over_pipes
    if request.dialect.connects:
        launch = launch_over_socket
    return launch(request)
