r"""
A recorded conversation with one worker, its file, and the launch that records it.

The file is plain text, with one JSON object per line, so that the author of a worker
can read it in any language or editor, unlike Arrow. Bytes are text there, one character
each, as in Latin-1 (``\u00e9`` is the byte 0xe9). The first line describes the file and
the worker, the last line how the worker ended, and each line between is the data of one
read or write::

    {"format": "etlstage-recording", "version": 1, "stage": "clean", ...}
    {"at": 0.041, "stdin": "one\n", "crc": "c7a3f0be"}
    {"at": 0.042, "stdout": "ONE\n\u0000", "crc": "2a1e77d0"}
    {"at": 0.043, "stdin": "", "crc": "93c1b2aa"}
    {"exit": 0, "crc": "5f0c6d11"}

``at`` is in seconds since the start; empty text is the end of that stream. ``ahead``
beside ``stdin`` counts the bytes written earlier that the worker had not read. ``crc``
is the CRC-32 of the bytes of the line before ``, "crc"``. A torn line at the end of a
file is ignored, and :attr:`Recording.cut` is set; a damaged one elsewhere is an error.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from sys import float_info
from types import UnionType
from typing import Any, Final, Protocol, Self

import anyio

from etlstage.errors import ConfigError, EtlstageError
from etlstage.messages import StageKind
from etlstage.pipeline.secret import Secrets
from etlstage.protocol.base import Dialect
from etlstage.protocol.registry import dialect_from_plain
from etlstage.stage import Stage
from etlstage.testing.transcript import Channel, Entry
from etlstage.transport import Child, Launch, LaunchRequest, Readable, Wire

__all__ = ("Notes", "RecordedLaunch", "Recording", "RecordingFile", "RecordingFolder")

_FORMAT: Final = "etlstage-recording"
_VERSION: Final = 1
_CRC: Final = b', "crc": "'


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One conversation with one worker, byte for byte in both directions."""

    stage: str
    """Name of the stage."""
    kind: StageKind = StageKind.TRANSFORM
    """Kind of the stage."""
    dialect: Dialect
    """The dialect, with its settings."""
    command: tuple[str, ...] = ()
    """Command of the worker; secrets are concealed."""
    worker: str = ""
    """Name of the worker, such as ``clean-1``."""
    start: int = 1
    """How often this worker was started, this time included."""
    entries: tuple[Entry, ...] = ()
    """All reads and writes, in order of time."""
    exit: int | None = None
    """Exit status, negative for a signal; None: unknown."""
    stopped: bool = False
    """Whether we sent it a signal, so that its exit status is not its own."""
    cut: str = ""
    """Why the recording ends before the worker did; empty: it is complete."""

    def written(self, channel: Channel) -> bytes:
        """Return all bytes of a channel."""
        return b"".join(
            entry.data for entry in self.entries if entry.channel is channel
        )

    def stage_of(self, command: Sequence[str]) -> Stage:
        """Return a stage like the recorded one, with another worker command."""
        return Stage(
            name=self.stage,
            kind=self.kind,
            dialect=self.dialect,
            worker=command,
        )

    def save(self, path: Path) -> None:
        """
        Write the recording to a new file that only our user can read.

        Raises:
            OSError: If the file can't be written, or exists already.

        """
        with RecordingFile(path, self) as file:
            for entry in self.entries:
                file.add(entry)
            file.end(self.exit, stopped=self.stopped, cut=self.cut)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """
        Read a recording from a file.

        Raises:
            ConfigError: If the file is not a recording, or damaged.
            OSError: If it can't be read.

        """
        lines, torn = _read_lines(path)
        if not lines:
            what = "it ends within its first line" if torn else "it is empty"
            raise ConfigError(f"{path} is not a recording: {what}")
        try:
            return _recording(lines, torn=torn)
        except (LookupError, TypeError, ValueError, EtlstageError) as error:
            why = repr(error) if isinstance(error, LookupError) else error
            raise ConfigError(f"{path} is not a recording: {why}") from None


class RecordingFile:
    """
    Writes a recording, each line immediately; a context manager.

    Args:
        path: The file, which must not exist. Only our user can read it.
        header: Describes the worker; its entries and end are ignored.

    Raises:
        OSError: If the file can't be written.

    """

    def __init__(self, path: Path, header: Recording) -> None:
        self.path = path
        self._file = open(path, "xb", 0, opener=_private)  # noqa: SIM115 - by close()
        try:
            self._write(_header(header))
        except OSError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, entry: Entry) -> None:
        """Write one read or write."""
        data = entry.data.decode("latin-1")
        ahead = {"ahead": entry.ahead} if entry.ahead else {}
        self._write({"at": round(entry.at, 6), entry.channel.value: data, **ahead})

    def end(self, exit_: int | None, *, stopped: bool = False, cut: str = "") -> None:
        """Write how the worker ended, or why the recording is cut."""
        more = {"stopped": stopped, "cut": cut}
        self._write({"exit": exit_, **{name: v for name, v in more.items() if v}})

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        text = json.dumps(line)[:-1].encode()
        rest = memoryview(b'%s%s%08x"}\n' % (text, _CRC, zlib.crc32(text)))
        while rest:
            rest = rest[self._file.write(rest) :]


def _header(recording: Recording) -> dict[str, object]:
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "stage": recording.stage,
        "kind": recording.kind.value,
        "worker": recording.worker,
        "start": recording.start,
        "command": recording.command,
        "dialect": recording.dialect.plain(),
    }


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the content of a file's lines, and whether its last line is torn."""
    *lines, rest = path.read_bytes().split(b"\n")
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        text, _, crc = line.rpartition(_CRC)
        if crc != b'%08x"}' % zlib.crc32(text):
            if found and number == len(lines) and not rest:
                return found, True
            what = (
                "the checksum does not match"
                if text
                else "is not a line of a recording"
            )
            raise ConfigError(f"{path}:{number}: {what}")
        found.append(json.loads(text + b"}"))
    return found, bool(rest)


def _recording(lines: Sequence[dict[str, Any]], *, torn: bool) -> Recording:
    header, *rest = lines
    if (header["format"], header["version"]) != (_FORMAT, _VERSION):
        raise ValueError(
            f"format {header['format']} {header['version']}, expected {_FORMAT}"
            f" {_VERSION}"
        )
    _check_types(header, _HEADER)
    end = rest.pop() if rest and "exit" in rest[-1] else None
    _check_types(end or {}, _END)
    cut = (
        "the file ends within a line"
        if torn
        else "the file ends before the worker's exit"
    )
    return Recording(
        stage=header["stage"],
        kind=StageKind(header["kind"]),
        worker=header["worker"],
        start=header["start"],
        command=tuple(header["command"]),
        dialect=dialect_from_plain(header["dialect"]),
        entries=tuple(map(_entry, rest)),
        exit=end["exit"] if end else None,
        stopped=end.get("stopped", False) if end else False,
        cut=end.get("cut", "") if end else cut,
    )


_HEADER: Final = {
    "stage": (str, "text"),
    "worker": (str, "text"),
    "start": (int, "a whole number"),
    "command": (list, "a list"),
    "dialect": (dict, "a mapping"),
}
"""Types of the first line's values, and how errors name them."""
_END: Final = {"exit": (int | None, "a status or None"), "cut": (str, "text")}
"""The same of the last line."""


def _check_types(
    line: Mapping[str, Any], types: Mapping[str, tuple[type | UnionType, str]]
) -> None:
    for name, (type_, expected) in types.items():
        if name in line and not isinstance(line[name], type_):
            raise TypeError(f"{name} is {line[name]!r}, expected {expected}")


def _entry(line: Mapping[str, Any]) -> Entry:
    (channel,) = (channel for channel in Channel if channel.value in line)
    data, at, ahead = line[channel.value], line["at"], line.get("ahead", 0)
    if not isinstance(data, str):
        raise TypeError(f"{channel.value} is {data!r}, expected text")
    # An integer may be larger than any float.
    if (
        isinstance(at, bool)
        or not isinstance(at, int | float)
        or not abs(at) <= float_info.max
    ):
        raise ValueError(f"at is {at!r}, expected a number of seconds")
    if not isinstance(ahead, int):
        raise TypeError(f"ahead is {ahead!r}, expected a number of bytes")
    return Entry(channel, data.encode("latin-1"), at, ahead)


_LIMIT: Final = 256 * 1024 * 1024  # bytes of one conversation


class Notes(Protocol):
    """Records a conversation; its own failures must never affect the conversation."""

    def add(self, entry: Entry, /) -> None:
        """Record one read or write."""
        ...

    def end(self, exit_: int | None, /, *, stopped: bool) -> None:
        """Record how the worker ended; the last call."""
        ...


class RecordedLaunch:
    """
    Starts workers, and records their conversations.

    Args:
        launch: Starts the workers.
        begin: Returns the :class:`Notes` for the worker of a request.

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
    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._began = anyio.current_time()
        self._ended: set[Channel] = set()

    def note(self, channel: Channel, data: bytes, ahead: int = 0) -> None:
        # The end of a stream may be read more than once.
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
        # No more of its output will be read.
        self._clerk.end(self._child.returncode, stopped=self._stopped)


class RecordingFolder:
    """
    Records the conversations of stages, in a file for each start of a worker.

    A file is named after the worker, and how often it was started: ``clean-1.1.rec``.
    When a file can't be written any more, the rest is left out of it, and the
    conversation continues.

    Args:
        path: The folder; created, accessible only to our user, if it does not exist.
        limit: Maximum number of bytes recorded of a conversation; the rest is left out.

    Attributes:
        path: The folder.
        secrets: Secrets to conceal in recorded commands.
        problems: Descriptions of write errors.

    Raises:
        OSError: If the folder can't be created.

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
        """Number of conversations so far."""
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
    """Records one conversation to a file, for as long as that can be written."""

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
            self.end(
                None, stopped=False, cut="the rest was omitted because of its size"
            )
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
