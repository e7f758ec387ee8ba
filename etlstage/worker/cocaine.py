"""
SDK for workers of dialect ``cocaine``, which have many sessions at once.

::

    from etlstage.worker import cocaine

    def shout(request, response):
        for chunk in request:
            response.write(chunk.upper())

    cocaine.run({"transform": shout})

Each session runs its handler in a thread. One more thread moves bytes, and alone uses
the protocol object: it sends heartbeats, and notices missing answers, however busy the
handlers are. The module needs msgpack (``pip install 'etlstage[cocaine]'``) and nothing
else but the standard library.

How the threads keep out of each other's way: handlers put what they send into a queue,
and wake the other thread with a byte; it puts received chunks into a session's queue.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from etlstage.errors import ConfigError, LocalProtocolError
from etlstage.messages import check_code, cost_of
from etlstage.protocol import events
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.events import (
    Added,
    Alive,
    Ended,
    Event,
    Failed,
    Farewell,
    Opened,
    Ready,
)
from etlstage.worker.descriptors import complain
from etlstage.worker.function import expect_none
from etlstage.worker.refusal import Refuse, printable, text_of
from etlstage.worker.status import BEATS

if TYPE_CHECKING:
    from etlstage.protocol.cocaine import CocaineSession

__all__ = ("Handler", "Refuse", "Request", "Response", "SessionCancelled", "run")

_CATEGORY: Final = 42
"""Category of errors, the same in all frameworks."""
_RAISED: Final = 100
_UNKNOWN: Final = 200
_LOST: Final = 1  # exit status
_UNSENT: Final = 16 * 1024 * 1024  # bytes of memory of output: handlers wait
_CHUNK: Final = 256 * 1024  # bytes per read
# The supervisor decides how large a message may be.
_UNLIMITED = Limits(2**31, 2**31)


class SessionCancelled(Exception):
    """Raised by a request that the supervisor has cancelled."""


class Request:
    """
    The input of a session: an iterator over chunks, until the supervisor ends it.

    Attributes:
        event: The event that was invoked.
        headers: Names and values that came with it.

    Iterating raises :class:`SessionCancelled` if the session is cancelled.
    """

    def __init__(self, event: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.event = event
        self.headers = headers
        self._chunks: SimpleQueue[bytes | SessionCancelled | None] = SimpleQueue()
        self._ended: SessionCancelled | StopIteration | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._ended is not None:
            raise self._ended
        chunk = self._chunks.get()
        if isinstance(chunk, bytes):
            return chunk
        self._ended = StopIteration() if chunk is None else chunk
        raise self._ended

    def read(self) -> bytes:
        """Return all remaining chunks, joined."""
        return b"".join(self)

    def put(self, chunk: bytes | SessionCancelled | None) -> None:
        """Add a chunk; None: the end."""
        self._chunks.put(chunk)


class Response:
    """The output of a session: chunks, and an end, which is sent automatically."""

    def __init__(self, id_: int, send: Callable[[int, Event], None]) -> None:
        self._id = id_
        self._send = send
        self.closed: bool = False
        """Whether nothing more may be sent."""

    def write(self, chunk: bytes) -> None:
        """
        Send a chunk; wait while too many bytes are unsent.

        Raises:
            TypeError: If the chunk is not bytes.
            ValueError: If the response is closed.

        """
        # An event is encoded in the other thread, where an error ends the worker.
        if not isinstance(chunk, bytes):
            remedy = "; use .encode()" if isinstance(chunk, str) else ""
            raise TypeError(f"chunk is {_kind(chunk)}, expected bytes{remedy}")
        self._check()
        self._send(cost_of([chunk]), Added(self._id, [chunk]))

    def close(self) -> None:
        """End the response; safe to call twice."""
        if not self.closed:
            self.closed = True
            self._send(0, Ended(self._id, [()]))

    def error(self, code: int, reason: str) -> None:
        """
        Refuse the request, and end the response.

        Args:
            code: Number of the error, of 64 bits with a sign.
            reason: Text of the error; it is sent as one line of at most 1000
                characters, with spaces in place of unprintable ones.

        Raises:
            TypeError: If the code is not an integer, or the reason is not a text.
            ValueError: If the code is out of range, or the response is closed.

        """
        number = check_code(code)
        if not isinstance(reason, str):
            raise TypeError(f"reason is {_kind(reason)}, expected str")
        self._check()
        self.closed = True
        text = printable(reason)
        self._send(0, Ended.refused(self._id, number, text, _CATEGORY))

    def _check(self) -> None:
        if self.closed:
            raise ValueError("the response is closed")


def _kind(value: object) -> str:
    return type(value).__name__


Handler = Callable[[Request, Response], None]
"""Answers one session by calls of ``response.write()``; an exception, or a result other
than None, refuses it, and ``sys.exit()`` ends the process."""


def run(
    handlers: Mapping[str, Handler],
    *,
    threads: int = 64,
    arguments: Sequence[str] | None = None,
) -> None:
    """
    Run as a worker until the supervisor terminates it.

    The process then exits with status 0, or with 1 if the supervisor is lost. If a
    handler calls ``sys.exit()``, it exits with that status, after the answers so far.

    Args:
        handlers: Handlers by the events that they handle.
        threads: Sessions that may run at once; others wait.
        arguments: The worker's arguments; by default those of the program.

    """
    options = _options(sys.argv[1:] if arguments is None else arguments)
    try:
        worker = _Worker(dict(handlers), threads, options)
    except (ConfigError, OSError) as error:
        complain(f"can't start as a worker: {error}")
        sys.exit(2)
    # A thread that a handler blocks could keep the process alive, so end the process
    # without waiting for threads.
    status = worker.serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the worker's options; other arguments are for the author's own use."""
    names = ("--uuid", "--endpoint", "--protocol", "--app", "--locator")
    options = {name: value for name, value in pairwise(arguments) if name in names}
    return {"--protocol": "0", **options}


def _connected(endpoint: str) -> socket.socket:
    if os.sep in endpoint:
        wire = socket.socket(socket.AF_UNIX)
        try:
            wire.connect(endpoint)
        except BaseException:
            wire.close()
            raise
        return wire
    host, _, port = endpoint.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)))


def _session(version: str) -> CocaineSession:
    from etlstage.protocol.cocaine import CocaineSession, CocaineVersion, Deadlines

    spoken = CocaineVersion.ONE if version == "1" else CocaineVersion.ZERO
    deadlines = Deadlines()
    deadlines = deadlines._replace(beat=min(deadlines.beat, _allowed() / BEATS))
    return CocaineSession(Side.WORKER, spoken, limits=_UNLIMITED, deadlines=deadlines)


def _allowed() -> float:
    """Return the seconds within which the supervisor wants a heartbeat."""
    heartbeat = os.environ.pop("ETLSTAGE_HEARTBEAT", "inf")
    try:
        return float(heartbeat)
    except ValueError:
        raise ConfigError(
            f"ETLSTAGE_HEARTBEAT is {heartbeat!r}, expected seconds"
        ) from None


class _Worker:
    """The thread that moves bytes, and its queues with the handlers."""

    def __init__(
        self, handlers: dict[str, Handler], threads: int, options: Mapping[str, str]
    ) -> None:
        missing = [name for name in ("--uuid", "--endpoint") if name not in options]
        if missing:
            raise ConfigError(
                f"{missing[0]} is missing: a supervisor has to start this program"
            )
        self._handlers = handlers
        self._session = _session(options["--protocol"])
        self._wire = _connected(options["--endpoint"])
        self._wire.setblocking(False)
        self._ears, self._bell = os.pipe()
        os.set_blocking(self._ears, False)
        os.set_blocking(self._bell, False)
        self._outgoing: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        self._room = Condition(Lock())  # guards the next two
        self._queued = 0  # bytes in the queue
        self._left = 0  # bytes behind it, which the socket has not taken
        self._jobs: SimpleQueue[tuple[int, Request]] = SimpleQueue()
        self._started = 0  # threads
        self._idle = 0  # threads without a session, less the sessions that wait
        self._door = Lock()  # guards it
        self._threads = threads
        self._open: dict[int, Request] = {}
        self._unsent = bytearray()
        self._leaving: Farewell | None = None
        self._status: int | None = None  # with which a handler ends the process
        self._session.send(Ready(options["--uuid"]), monotonic())

    def serve(self) -> int:
        """Move bytes until the connection ends; return the exit status."""
        try:
            while (status := self._turn()) is None:
                pass
        except OSError:
            return _LOST
        return status

    def _turn(self) -> int | None:
        """Wait for something to do, and do it; return the exit status at the end."""
        session, wire = self._session, self._wire.fileno()
        status = self._status
        heard = self._hear_handlers()
        if self._leaving is not None and not self._open:
            session.send(self._leaving, monotonic())
            self._leaving = None
        self._write()
        self._make_room(heard)
        timer = session.get_timer()
        wait = None if timer is None else max(0.0, timer - monotonic())
        writing = [wire] if self._unsent else []
        if status is not None and not self._unsent:
            return status
        if session.state.name == "ENDED" and not self._unsent:
            return 0
        ready, _, _ = select.select([wire, self._ears], writing, [], wait)
        now = monotonic()
        if self._ears in ready:
            os.read(self._ears, 65536)
        if wire in ready:
            data = self._wire.recv(_CHUNK)
            if not data:
                return 0 if self._leaving is not None else _LOST
            session.receive_data(data, now)
        session.handle_timer(now)
        for event in session.events_received():
            if isinstance(event, Failed):
                complain(f"the supervisor is lost: {event.error}")
                return _LOST
            self._take(event)
        return None

    def _take(self, event: Event) -> None:
        match event:
            case Opened(id_, messages, event=asked, headers=headers):
                self._open[id_] = request = Request(asked, headers)
                for message in messages:
                    request.put(message)
                self._begin(id_, request)
            case Added(id_, messages, ended) if id_ in self._open:
                for message in messages:
                    self._open[id_].put(message)
                if ended:
                    self._open[id_].put(None)
            case events.Cancelled(id_, code, reason) if id_ in self._open:
                self._open[id_].put(SessionCancelled(f"{reason} (code {code})"))
            case Farewell():
                # Open sessions are ended first, not dropped.
                self._leaving = event
            case Alive():
                pass

    def _begin(self, id_: int, request: Request) -> None:
        self._jobs.put((id_, request))
        if self._freed(-1) < 0 and self._started < self._threads:
            self._started += 1
            self._freed(1)
            Thread(target=self._handle_all, daemon=True).start()

    def _freed(self, threads: int) -> int:
        """Add to the number of idle threads; return it."""
        with self._door:
            self._idle += threads
            return self._idle

    def _write(self) -> None:
        # The session returns a part at a time, and is asked for more once that is
        # written: so an answer to a heartbeat waits only for one part.
        while self._unsent or self._ask():
            try:
                del self._unsent[: self._wire.send(self._unsent)]
            except BlockingIOError:
                break

    def _make_room(self, heard: int) -> None:
        """Let handlers go on if little is unsent, after ``heard`` bytes of theirs."""
        with self._room:
            self._queued -= heard
            self._left = self._session.unsent + len(self._unsent)
            if not self._full:
                self._room.notify_all()

    @property
    def _full(self) -> bool:
        return self._queued + self._left >= _UNSENT

    def _ask(self) -> bool:
        """Get the bytes that the session has to send; return whether there are any."""
        self._unsent += b"".join(self._session.data_to_send())
        return bool(self._unsent)

    def _hear_handlers(self) -> int:
        """Send what handlers have queued; return its size in bytes."""
        heard = 0
        while not self._outgoing.empty():
            size, event = self._outgoing.get()
            heard += size
            try:
                self._session.send(event, monotonic())
            except LocalProtocolError:
                continue  # cancelled meanwhile
            finally:
                if isinstance(event, Ended):
                    self._open.pop(event.first, None)
        return heard

    # --- in other threads -----------------------------------------------------

    def _send(self, size: int, event: Event) -> None:
        """Queue an event of ``size`` bytes; wait while there is no room for it."""
        if size:
            with self._room:
                while self._full:
                    self._room.wait()
                self._queued += size
        self._outgoing.put((size, event))
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it will wake already
            os.write(self._bell, b"x")

    def _handle_all(self) -> None:
        while self._status is None:
            id_, request = self._jobs.get()
            try:
                self._handle(Response(id_, self._send), request)
            except BaseException as error:
                self._status = _status_of(error)
                self._wake()
            self._freed(1)

    def _handle(self, response: Response, request: Request) -> None:
        handler: Callable[..., Any] | None = self._handlers.get(request.event)
        if handler is None:
            text = f"there is no handler for event {request.event!r}"
            response.error(_UNKNOWN, text)
            return
        try:
            expect_none(
                f"handler for event {request.event!r}",
                handler(request, response),
                "call response.write()",
            )
        except SessionCancelled:
            pass
        except Exception as error:
            if not isinstance(error, Refuse):
                traceback.print_exc()
            _refuse(response, text_of(error))
        response.close()


def _status_of(error: BaseException) -> int:
    """Return the exit status after an error, and print it, as Python does at exit."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1


def _refuse(response: Response, reason: str) -> None:
    if not response.closed:
        response.error(_RAISED, reason)
