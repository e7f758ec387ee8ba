"""
Reads and logs what a worker writes to stderr, and keeps its last lines.

It is always read: a worker whose stderr is not read blocks forever after 64 KiB of
warnings. ``diagnostic.py`` decides what is logged and how. Output between replies that
means nothing in the worker's dialect is logged in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import anyio
import anyio.lowlevel

from etlstage.supervisor.diagnostic import (
    Diagnostic,
    DiagnosticReader,
    LineWritten,
    Throttle,
)
from etlstage.telemetry.log import Log
from etlstage.transport import Readable

__all__ = ("LineLog", "StderrLog")

_CHUNK: Final = 8192  # bytes per read; logging them takes longer than reading them
_AT_ONCE: Final = 65536  # bytes that are read while the event loop waits
_PAUSE: Final = 1.0  # seconds of silence before the number of dropped lines is logged

_log = Log()


class LineLog:
    """
    Logs lines that a worker writes, within a rate limit, and counts all of them.

    Args:
        event: The log's event for a line.
        what: Begins the log's event for lines that come too fast.
        rate: Lines per second that are logged in the long run.
        burst: Lines that are logged at once after a time of silence.
        counted: Called with numbers of lines, logged or not.
        clock: Returns the time, in seconds.

    """

    def __init__(
        self,
        event: str,
        what: str,
        *,
        stage: str,
        worker: str,
        pid: int,
        rate: float = 100.0,
        burst: float = 1000.0,
        counted: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._event = event
        self._dropped = f"{what} rate limit reached"
        self._log = _log.bind(stage=stage, worker=worker, pid=pid)
        self._reader = DiagnosticReader(Throttle(rate=rate, burst=burst))
        self._reported = 0
        self._counted = counted
        self._clock = clock

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, logged or not, without control characters."""
        return self._reader.tail

    @property
    def owing(self) -> bool:
        """Whether lines were dropped, or held back, and not logged yet."""
        return self._reader.owing

    def take(self, data: bytes) -> None:
        """Log the lines that end in ``data``."""
        self._write(self._reader.receive(data, self._clock()))

    def settle(self) -> None:
        """Log lines held back, and how much was dropped."""
        self._write(self._reader.settle())

    def finish(self) -> None:
        """Log the last, incomplete line, lines held back, and how much was dropped."""
        self._write(self._reader.finish(self._clock()))

    def _write(self, diagnostics: Iterable[Diagnostic]) -> None:
        for diagnostic in diagnostics:
            # The host's log may be unwritable; the pipe is read all the same.
            with suppress(Exception):
                if isinstance(diagnostic, LineWritten):
                    log = getattr(self._log, diagnostic.level)
                    log(self._event, line=diagnostic.text)
                else:
                    self._log.warning(
                        self._dropped,
                        dropped_lines=diagnostic.lines,
                        dropped_bytes=diagnostic.bytes,
                    )
        new, self._reported = self._reader.lines - self._reported, self._reader.lines
        if new and self._counted is not None:
            self._counted(new)


class StderrLog(LineLog):
    """Reads one worker's stderr to its end."""

    def __init__(
        self,
        stderr: Readable,
        **of_log: Any,  # noqa: ANN401 - as LineLog takes it
    ) -> None:
        super().__init__("worker wrote to stderr", "stderr", **of_log)
        self._stderr = stderr

    async def run(self) -> None:
        """Read until the end of the stream."""
        while True:
            data = self._stderr.read(_CHUNK)
            if data is None:
                await self._wait()
            elif not data:
                break
            else:
                self.take(data)
                # A worker can write faster than we log.
                await anyio.lowlevel.checkpoint()
        self.finish()

    def catch_up(self) -> None:
        """Read some of what a running worker has written, without waiting."""
        if data := self._stderr.read(_CHUNK):
            self.take(data)

    def drain(self) -> None:
        """Read and log what is there, up to a limit, without waiting."""
        for _ in range(_AT_ONCE // _CHUNK):
            data = self._stderr.read(_CHUNK)
            if not data:
                self.finish()
                return
            self.take(data)
        self.settle()

    async def _wait(self) -> None:
        if self.owing:
            with anyio.move_on_after(_PAUSE):
                await self._stderr.readable()
                return
            self.settle()
        else:
            await self._stderr.readable()
