"""
What a pipeline needs at its two ends.

The stages in the middle are supervisors; the ends are whatever fulfils these two
protocols: a DataFrame, or a worker of kind E or L.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from types import TracebackType
from typing import Protocol

from etlstage.messages import Position, Run
from etlstage.pipeline.dead_letter.record import DeadLetter

__all__ = ("DeadLetterSink", "Landing", "Sink", "Source")


class Source(Protocol):
    """Where messages come from."""

    name: str
    """As reports and errors call it."""

    def runs(self) -> AsyncGenerator[Run | Position, None]:
        """
        Yield runs of messages and, where reading can resume, positions.

        A run is bounded (thousands of messages or about a megabyte), never empty.

        Raises:
            SourceFailed: If the input can't be read, now or further on.

        """
        ...

    def drain(self) -> bool:
        """
        Let :meth:`runs` end at the next point from which reading can go on.

        Returns:
            False if all points are alike, so that it may be cancelled right away.

        """
        ...

    async def acknowledge(self, position: Position) -> None:
        """Store ``position``: everything before it is durable downstream."""
        ...

    async def aclose(self) -> None:
        """Release what the source holds; safe to call twice and at any time."""
        ...


class Landing(Protocol):
    """What is known of where messages end."""

    name: str
    """As reports and errors call it."""

    received: int
    """Messages taken."""
    loaded: int
    """Messages that are durable."""
    dead: int
    """Messages that the destination refused and that were dead-lettered. All before the
    first ``loaded + dead`` messages are dealt with."""
    failed: int
    """Messages that the destination refused."""

    def landed(self) -> str:
        """Return, in one line for a human, what was loaded and what was not."""
        ...


class Sink(Landing, Protocol):
    """Where messages end."""

    async def __aenter__(self) -> object:
        """Start, and find out now what would fail later; raises as :meth:`write`."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release what the sink holds; what was not flushed is dropped."""
        ...

    async def write(self, run: Run) -> None:
        """
        Take a run; it may be kept in memory until enough has come together.

        Raises:
            SinkFailed: If the destination can't be written, or refuses a message.

        """
        ...

    async def flush(self) -> None:
        """Return when all that was written is durable; raises as :meth:`write`."""
        ...

    async def finish(self) -> None:
        """Flush, then mark the output as whole; raises as :meth:`write`."""
        ...


class DeadLetterSink(Protocol):
    """Who else is given the dead letters of a run, beside their files."""

    async def write(self, letters: Iterator[DeadLetter]) -> None:
        """
        Take the letters, once; they come from files, and their iterator blocks.

        Raises:
            SinkFailed: If they can't be written.

        """
        ...

    async def aclose(self) -> None:
        """Release what the sink holds; safe to call twice and at any time."""
        ...
