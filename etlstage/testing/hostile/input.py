"""What the worker reads: messages, and where the supervisor closes a batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from .markers import MarkerBytes
from .system import wait

__all__ = ("Input",)

_CHUNK: Final = 1024 * 1024  # bytes


class Input:
    """
    Our stdin.

    Args:
        markers: Those of the stage.
        batches: Whether EOB may come.

    Attributes:
        closed: Whether it is closed: nothing comes any more, and no end either.

    """

    def __init__(self, markers: MarkerBytes, *, batches: bool) -> None:
        self.closed = False
        self._markers = markers
        self._batches = batches
        self._buffer = bytearray()

    @property
    def clean(self) -> bool:
        """Whether no part of a message has come."""
        return not self._buffer

    def read(self) -> Iterator[bytes | None] | None:
        """
        Wait for more input; return the messages that are whole now.

        Among them None stands where the supervisor closes a batch; instead of them at
        the end of the input.
        """
        if self.closed:
            wait()
        chunk = os.read(0, _CHUNK)
        if not chunk:
            return None
        self._buffer += chunk
        return self._take() if self._batches else self._split(len(chunk))

    def _split(self, new: int) -> Iterator[bytes]:
        eom, buffer = self._markers.eom, self._buffer
        if buffer.find(eom, max(0, len(buffer) - new - len(eom))) >= 0:
            *messages, rest = bytes(buffer).split(eom)
            self._buffer = bytearray(rest)
            yield from messages

    def _take(self) -> Iterator[bytes | None]:
        eom, eob, buffer = self._markers.eom, self._markers.eob, self._buffer
        at = 0
        try:
            while True:
                # EOB stands where a message would begin, and no EOM follows it.
                if buffer.startswith(eob, at):
                    at += len(eob)
                    yield None
                elif (end := buffer.find(eom, at)) >= 0:
                    message = bytes(buffer[at:end])
                    at = end + len(eom)
                    yield message
                else:
                    break
        finally:
            del buffer[:at]
