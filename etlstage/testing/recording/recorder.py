"""
A launch that wraps another and notes what passes: bytes, cuts, times, the end.

What is noted goes where ``begin`` has it, one :class:`Notes` for each start of a worker;
nothing is changed on the way::

    folder = RecordingFolder(Path("recordings"))
    AsyncSupervisor(stage, launch=RecordedLaunch(launch_worker, folder))

"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import Final, Protocol

import anyio

from etlstage.pipeline.secret import Secrets
from etlstage.testing.recording.recording import Recording, RecordingFile
from etlstage.testing.transcript import Channel, Entry
from etlstage.transport import Child, Launch, LaunchRequest, Readable, Wire

__all__ = ("Notes", "RecordedLaunch", "RecordingFolder")

_LIMIT: Final = 256 * 1024 * 1024  # bytes of one conversation


class Notes(Protocol):
    """Where a conversation is noted; it may fail by itself, never the conversation."""

    def add(self, entry: Entry, /) -> None:
        """Note what one read or write has moved."""
        ...

    def end(self, exit_: int | None, /, *, stopped: bool) -> None:
        """Note how the worker ended; nothing comes behind that."""
        ...


class RecordedLaunch:
    """
    Starts workers, and has their conversations noted.

    Args:
        launch: What starts them.
        begin: Returns where to note the conversation with the worker of a request.

    """

    def __init__(self, launch: Launch, begin: Callable[[LaunchRequest], Notes]) -> None:
        self._launch = launch
        self._begin = begin

    def __call__(self, request: LaunchRequest, /) -> tuple[Wire, Child]:
        """Start a worker."""
        wire, child = self._launch(request)
        clerk = _Clerk(self._begin(request))
        return _RecordedWire(wire, clerk), _RecordedChild(child, clerk)


class _Clerk:
    """Notes what is sent in one conversation, with the time."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._began = anyio.current_time()
        self._ended: set[Channel] = set()

    def note(self, channel: Channel, data: bytes, ahead: int = 0) -> None:
        # Who reads at the end may do it again.
        if channel in self._ended:
            return
        if not data:
            self._ended.add(channel)
        at = anyio.current_time() - self._began
        self._notes.add(Entry(channel, data, at, ahead))

    def end(self, status: int | None, *, stopped: bool) -> None:
        self._notes.end(status, stopped=stopped)


class _RecordedReadable:
    def __init__(self, inner: Readable, clerk: _Clerk, channel: Channel) -> None:
        self._inner = inner
        self._clerk = clerk
        self._channel = channel
        self.readable = inner.readable
        self.stop_waiting = inner.stop_waiting

    def read(self, size: int, /) -> bytes | None:
        data = self._inner.read(size)
        if data is not None:
            self._clerk.note(self._channel, data)
        return data


class _RecordedWire(_RecordedReadable):
    def __init__(self, wire: Wire, clerk: _Clerk) -> None:
        super().__init__(wire, clerk, Channel.STDOUT)
        self._wire = wire
        self.writable = wire.writable
        self.unread = wire.unread
        self.mismatch_hint = wire.mismatch_hint
        self.close = wire.close

    def write(self, data: memoryview | bytes, /) -> int:
        ahead = self._wire.unread()
        taken = self._wire.write(data)
        if taken:
            self._clerk.note(Channel.STDIN, bytes(data[:taken]), ahead)
        return taken

    def close_write(self) -> None:
        self._clerk.note(Channel.STDIN, b"", self._wire.unread())
        self._wire.close_write()


class _RecordedChild:
    def __init__(self, child: Child, clerk: _Clerk) -> None:
        self._child = child
        self._clerk = clerk
        self._stopped = False
        self.stderr = _RecordedReadable(child.stderr, clerk, Channel.STDERR)
        self.status = (
            None
            if child.status is None
            else _RecordedReadable(child.status, clerk, Channel.STATUS)
        )
        self.pid = child.pid
        self.wait = child.wait
        self.deserted = child.deserted
        self.kill_heirs = child.kill_heirs

    def __repr__(self) -> str:
        return repr(self._child)

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    def signal(self, number: Signals, /) -> None:
        self._stopped = self._stopped or self.returncode is None
        self._child.signal(number)

    def kill(self) -> int:
        self._stopped = self._stopped or self.returncode is None
        return self._child.kill()

    def close(self) -> None:
        self._child.close()
        # All that it has written has been read, or never will be.
        self._clerk.end(self._child.returncode, stopped=self._stopped)


class RecordingFolder:
    """
    Where the conversations of some stages go: a file for each start of a worker.

    A file is named after the worker, and how often it was started: ``clean-1.1.rec``.
    When one can't be written any more, what comes is left out, and the conversation
    goes on.

    Args:
        path: The folder; it is made if it is not there, for us alone.
        limit: Bytes of a conversation that are kept; what comes behind is left out.

    Attributes:
        path: The folder.
        secrets: What is not to be in the command that a file names.
        problems: What could not be written, and why.

    Raises:
        OSError: If the folder can't be made.

    """

    def __init__(self, path: Path, *, limit: int = _LIMIT) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.secrets: Secrets = Secrets()
        self.problems: list[str] = []
        self.path: Path = path
        self._limit = limit
        self._starts: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """How many conversations there were."""
        return self._starts.total()

    def __call__(self, request: LaunchRequest, /) -> Notes:
        """Begin a recording."""
        self._starts[request.worker] += 1
        name = f"{request.worker}.{self._starts[request.worker]}.rec"
        header = Recording(
            stage=request.stage,
            kind=request.kind,
            dialect=request.dialect,
            command=tuple(map(self.secrets.conceal, request.command)),
            worker=request.worker,
            start=request.start,
        )
        return _Kept(self.path / name, header, self._limit, self.problems)


class _Kept:
    """The notes of one conversation, in a file as long as that can be written."""

    def __init__(
        self, path: Path, header: Recording, room: int, problems: list[str]
    ) -> None:
        self._room = room
        self._problems = problems
        self._file: RecordingFile | None = None
        try:
            self._file = RecordingFile(path, header)
        except OSError as error:
            self._fail(error)

    def add(self, entry: Entry, /) -> None:
        if self._file is None:
            return
        self._room -= len(entry.data)
        if self._room < 0:
            self.end(None, stopped=False, cut="the rest was left out for its size")
            return
        try:
            self._file.add(entry)
        except OSError as error:
            self._fail(error)

    def end(self, exit_: int | None, /, *, stopped: bool, cut: str = "") -> None:
        if self._file is None:
            return
        try:
            with self._file as file:
                file.end(exit_, stopped=stopped, cut=cut)
            self._file = None
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._problems.append(f"a recording is not complete: {error}")
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
