"""
Three interfaces between a supervisor and a worker.

``Wire`` is the conversation, ``Child`` is the process, ``Launch`` makes both. No module
above ``etlstage.transport`` knows whether the two are connected by pipes, a socket or
only memory; no module in here knows what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Final, Protocol, runtime_checkable

from etlstage.messages import StageKind
from etlstage.protocol.base import Dialect
from etlstage.protocol.registry import default_dialect
from etlstage.transport.launcher import LaunchTerms

__all__ = (
    "UNKNOWN_STATUS",
    "Child",
    "ClosableReadable",
    "Launch",
    "LaunchRequest",
    "Pulled",
    "Readable",
    "Wire",
    "describe_status",
)

UNKNOWN_STATUS: Final = 256
"""In place of an exit status that the host has taken: no process exits with it."""


class Readable(Protocol):
    """A stream that can be read without blocking, and waited for."""

    def read(self, size: int, /) -> bytes | None:
        """Return what is there, ``b""`` at the end, None if reading would block."""

    async def readable(self) -> None:
        """Wait until reading would not block, or :meth:`stop_waiting`."""

    def stop_waiting(self) -> None:
        """Wake waiting tasks: the process is gone, though the stream may stay open."""


@runtime_checkable
class Pulled(Protocol):
    """A stream that calls its reader, if the event loop can: no task has to wake."""

    async def pull(self, take: Callable[[], bool], /) -> None:
        """Wait until readable, or call ``take`` when it is, until it returns False."""


class ClosableReadable(Readable, Protocol):
    """A readable stream that its owner closes."""

    def close(self) -> None:
        """Close it; no task may be waiting."""


class Wire(Readable, Protocol):
    """The conversation with a worker: a stream of bytes each way."""

    def write(self, data: memoryview | bytes, /) -> int:
        """
        Write as much as there is room for and return how many bytes that were.

        Raises:
            BrokenPipeError: If the worker, or the supervisor, closed this direction.

        """

    async def writable(self) -> None:
        """Wait until there is room, or until writing would fail."""

    def close_write(self) -> None:
        """Send the worker an end of input; safe to call twice."""

    def unread(self) -> int:
        """Return how many bytes the worker has not read, or 0 if that is unknown."""

    def mismatch_hint(self) -> str:
        """Return why a worker may not have connected, if it has not."""

    def close(self) -> None:
        """Close both directions; no task may be waiting."""


class Child(Protocol):
    """The process at the other end of a wire."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def returncode(self) -> int | None:
        """
        Exit status once it is gone, negative for a signal, else None.

        :data:`UNKNOWN_STATUS`: the host has reaped it.
        """

    @property
    def stderr(self) -> Readable:
        """The stream of its stderr."""

    @property
    def status(self) -> Readable | None:
        """The stream on which it reports that it is ready and alive, if it has one."""

    def signal(self, number: Signals, /) -> None:
        """Send a signal to its group; SIGKILL also to all others that it started."""

    async def wait(self) -> int:
        """Return the exit status; processes left in its group and session still run."""

    async def deserted(self) -> None:
        """Wait, after its exit, until nothing is left of its group and session."""

    def kill(self) -> int:
        """Kill it and its session, and reap it; return how many others were killed."""

    def kill_heirs(self) -> int:
        """Kill processes it left elsewhere, once it is gone; return how many."""

    def close(self) -> None:
        """Close stderr and status; no task may be waiting."""


@dataclass(frozen=True)
class LaunchRequest:
    """What is to be started, as plain data."""

    command: tuple[str, ...]
    """Program, looked up on the PATH of ``env``, and its arguments."""
    env: Mapping[str, str]
    """Its environment; variables that mark it as started by us are added."""
    cwd: Path | None = None
    """Its working directory."""
    stdin: bool = True
    """Whether it gets a pipe as its stdin."""
    status: bool = False
    """Whether it can report that it is ready and alive."""
    terms: LaunchTerms = field(default_factory=LaunchTerms)
    """Limits and identity."""
    stage: str = ""
    """Name of the stage."""
    kind: StageKind = StageKind.TRANSFORM
    """What the stage does with messages."""
    dialect: Dialect = field(default_factory=default_dialect)
    """The dialect of the worker, for a launch that needs to identify connections."""
    worker: str = ""
    """Name of the worker, such as ``clean-1``."""
    start: int = 1
    """How often this worker was started, this time included."""


class Launch(Protocol):
    """Starts one worker per call."""

    def __call__(self, request: LaunchRequest, /) -> tuple[Wire, Child]:
        """
        Start a worker, and return how to talk to it and how to end it.

        Raises:
            OSError: If it can't be started.

        """


def describe_status(status: int) -> str:
    """Return what became of a process, as a part of a sentence."""
    if status == UNKNOWN_STATUS:
        return "has ended (exit status unknown)"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
