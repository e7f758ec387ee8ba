"""
What stands between a supervisor and a worker, in three interfaces.

``Wire`` is the conversation, ``Child`` the process, ``Launch`` makes both. Nothing
above ``etlstage.transport`` knows whether there are pipes, a socket or only memory
between the two; nothing in here knows what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Protocol, runtime_checkable

from etlstage.messages import StageKind
from etlstage.protocol.base import Dialect
from etlstage.protocol.registry import default_dialect
from etlstage.transport.launcher import LaunchTerms

__all__ = (
    "Child",
    "ClosableReadable",
    "Launch",
    "LaunchRequest",
    "Pulled",
    "Readable",
    "Wire",
    "describe_status",
)


class Readable(Protocol):
    """What can be read without blocking, and waited for."""

    def read(self, size: int, /) -> bytes | None:
        """Return what is there, ``b""`` at the end, None when reading would block."""

    async def readable(self) -> None:
        """Wait until reading would not block, or :meth:`stop_waiting`."""

    def stop_waiting(self) -> None:
        """Wake the tasks that wait: the process is gone, though the end may stay open."""


@runtime_checkable
class Pulled(Protocol):
    """What calls its reader, where the event loop can do that: no task need wake."""

    async def pull(self, take: Callable[[], bool], /) -> None:
        """Wait as :meth:`Readable.readable`, or call ``take`` until that is False."""


class ClosableReadable(Readable, Protocol):
    """The same, closed by its owner."""

    def close(self) -> None:
        """Close it; no task may be waiting."""


class Wire(Readable, Protocol):
    """The conversation with a worker: a stream of bytes each way."""

    def write(self, data: memoryview | bytes, /) -> int:
        """
        Write as much as there is room for and return how many bytes that were.

        Raises:
            BrokenPipeError: If the worker, or we, closed this direction.

        """

    async def writable(self) -> None:
        """Wait until there is room, or until writing would fail."""

    def close_write(self) -> None:
        """Send the worker an end of input; safe to call twice."""

    def unread(self) -> int:
        """Return how many bytes wait for the worker, or 0 if that is unknown."""

    def mismatch_hint(self) -> str:
        """Return why a worker may not have connected, if it has not."""

    def close(self) -> None:
        """Close both directions; no task may be waiting."""


class Child(Protocol):
    """The process at the other end of a wire."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> int | None:
        """Exit status once it is gone, negative for a signal, else None."""

    @property
    def stderr(self) -> Readable:
        """Its diagnostics."""

    @property
    def status(self) -> Readable | None:
        """Where it reports that it is ready, and alive; None if it was given no such."""

    def signal(self, number: Signals, /) -> None:
        """Send a signal to it and to what it started in its group; SIGKILL to all."""

    async def wait(self) -> int:
        """Return the exit status; what it has left in its group and session lives."""

    async def deserted(self) -> None:
        """Wait, behind its exit, until nothing is left of its group and session."""

    def kill(self) -> int:
        """Kill it and its session, reap it; return how many others that killed."""

    def kill_heirs(self) -> int:
        """Kill what it has left behind elsewhere, once it is gone; return how many."""

    def close(self) -> None:
        """Close stderr and status; no task may be waiting."""


@dataclass(frozen=True)
class LaunchRequest:
    """What is to be started: plain data, whatever starts it."""

    command: tuple[str, ...]
    """Program, looked for on the PATH of ``env``, and arguments."""
    env: Mapping[str, str]
    """Its environment; what marks it as ours is added."""
    cwd: Path | None = None
    """Its working directory."""
    stdin: bool = True
    """Whether it is given any."""
    status: bool = False
    """Whether it can report that it is ready, and alive."""
    terms: LaunchTerms = field(default_factory=LaunchTerms)
    """Limits and identity."""
    stage: str = ""
    """Name of the stage."""
    kind: StageKind = StageKind.TRANSFORM
    """What the stage does with messages."""
    dialect: Dialect = field(default_factory=default_dialect)
    """What is spoken, for a launch that listens; to others bytes are bytes."""
    worker: str = ""
    """Name of the worker, such as ``clean-1``."""
    start: int = 1
    """How often this worker was started, this time included."""


class Launch(Protocol):
    """Starts workers, one a call."""

    def __call__(self, request: LaunchRequest, /) -> tuple[Wire, Child]:
        """
        Start a worker, and return how to talk to it and how to end it.

        Raises:
            OSError: If it can't be started.

        """


def describe_status(status: int) -> str:
    """Return what became of a process, as a part of a sentence."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
