"""
What a worker writes to stderr: always read, logged, and its end kept.

A worker whose stderr nobody reads stops for ever after 64 KiB of warnings.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Final

import anyio.lowlevel
import structlog

from etlstage.transport import Process

__all__ = ("StderrLog",)

_CHUNK: Final = 8192  # bytes a read; logging them takes longer than reading them
_AT_ONCE: Final = 65536  # bytes that are read while everybody waits
_LINE: Final = 8192  # bytes of a line; a longer one is logged in pieces
_TAIL: Final = 10  # lines kept for error messages

_log = structlog.get_logger("etlstage")


class StderrLog:
    """Reads one worker's stderr to its end."""

    def __init__(self, process: Process, *, stage: str, worker: str) -> None:
        self._process = process
        self._log = _log.bind(stage=stage, worker=worker, pid=process.pid)
        self._rest = b""
        self.tail: deque[str] = deque(maxlen=_TAIL)
        """The last lines."""

    async def run(self) -> None:
        """Read until the end of the stream."""
        while True:
            data = self._process.read_stderr(_CHUNK)
            if data is None:
                await self._process.stderr_readable()
            elif not data:
                break
            else:
                self._take(data)
                # A worker can write faster than we log.
                await anyio.lowlevel.checkpoint()
        self.finish()

    def drain(self) -> None:
        """Read what is there, or some of it, without waiting."""
        for _ in range(_AT_ONCE // _CHUNK):
            data = self._process.read_stderr(_CHUNK)
            if not data:
                self.finish()
                return
            self._take(data)

    def finish(self) -> None:
        """Log what has no line end."""
        if self._rest:
            self._line(self._rest)
            self._rest = b""

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            for at in range(0, len(line), _LINE):
                self._line(line[at : at + _LINE])

    def _line(self, line: bytes) -> None:
        text = line.decode("utf-8", "backslashreplace").rstrip("\r")
        self.tail.append(text)
        # Where the host logs to may be gone; the worker's stderr is read all the same.
        with suppress(OSError, ValueError):
            self._log.info("worker wrote to stderr", line=text)
