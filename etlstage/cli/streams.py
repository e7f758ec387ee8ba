"""
Stdout and stderr of a command, and how errors of writing to them are handled.

All output is treated alike, whatever code prints it: characters that a stream can't
encode are escaped; a full disk is one clear error on stdout; a reader that is gone has
seen enough, which ends a command that only prints; stderr falls silent, as the disk of
a log is no reason to fail.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any, Final, TextIO

from etlstage.errors import ConfigError, EtlstageError, os_reason

__all__ = (
    "ReaderGone",
    "check_stdin",
    "check_stdout",
    "flush_streams",
    "guard_streams",
)


STDIN: Final = 0
STDERR: Final = 2


class ReaderGone(Exception):
    """Raised when the pipe that is stdout has no reader."""


def guard_streams() -> None:
    """
    Replace the streams of ``sys`` with guarded ones.

    The descriptors of closed ones are opened, and lead nowhere; reading stdin fails.
    """
    # They would become those of other files, to which output would go.
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
        if number == STDIN:
            import socket  # few commands need it

            # It can't be opened as /dev/stdin either, which would be an empty input.
            with socket.socket(socket.AF_UNIX) as unconnected:
                os.dup2(unconnected.fileno(), STDIN)
    os.close(number)
    if sys.stderr is None:  # stdout would take its place
        sys.stderr = open(STDERR, "w", closefd=False)  # noqa: SIM115 - stays open
    sys.stdout, sys.stderr = _guarded(sys.stdout), _guarded(sys.stderr)


def check_stdin(instead: str = "") -> None:
    """
    Check that there is a stdin.

    Args:
        instead: What else can be done, as in ``name a FILE``.

    Raises:
        ConfigError: If it was closed when the command was started.

    """
    if sys.stdin is None:
        other = f", or {instead}" if instead else ", as in <FILE"
        raise ConfigError(f"stdin is closed; redirect it{other}")


def check_stdout() -> None:
    """
    Check that there is a stdout, for messages.

    Raises:
        ConfigError: If it was closed when the command was started.

    """
    if sys.stdout is None:
        raise ConfigError("stdout is closed; redirect it, as in >/dev/null")


def flush_streams() -> None:
    """Write what other code has left in buffers, if it can be written."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(EtlstageError, ReaderGone):
                stream.flush()


def _guarded(stream: TextIO) -> TextIO:
    if stream is None:  # it is closed
        return None
    assert isinstance(stream, io.TextIOWrapper)
    return io.TextIOWrapper(
        _Output(io.FileIO(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering or stream.write_through,
    )


class _Output(io.BufferedWriter):
    # The raw file is not subclassed: an interrupt after it has written, but before our
    # own function returns, would make the buffer write the same data twice.

    def write(self, data: Any) -> int:  # noqa: ANN401 - whatever has bytes
        try:
            return super().write(data)
        except OSError as error:
            self._give_up(error)
            return memoryview(data).nbytes

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # Errors occur once: what is still in a buffer is written to nowhere later.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if self.fileno() == STDERR:
            return
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from None
        text = f"stdout can't be written: {os_reason(error)}"
        raise EtlstageError(text) from None
