"""
Sources and sinks on file descriptors, with a separator after each message.

A descriptor may be a pipe, a terminal or a file, and other processes may share it. So
its mode is left unchanged: a pipe or socket is read once it has data, anything else is
read in a thread, and all writes happen in a thread.
"""

from __future__ import annotations

import array
import fcntl
import os
import stat
import termios
from collections.abc import AsyncGenerator
from typing import Final

import anyio
import anyio.to_thread

from etlstage.errors import SinkFailed, SourceFailed, os_reason
from etlstage.messages import Position, Run, counted
from etlstage.pipeline.interfaces import Output, Sink, Source
from etlstage.telemetry.terminal import harmless

__all__ = ("DescriptorSink", "DescriptorSource", "Splitter")

_CHUNK: Final = 1 << 20  # bytes a read, at most


class Splitter:
    """
    Splits a stream of bytes into messages, however the reads were divided.

    Args:
        separator: The bytes after each message.

    Attributes:
        pending: Bytes so far of the message that has not ended.

    """

    def __init__(self, separator: bytes) -> None:
        self.pending: int = 0
        self._separator = separator
        self._parts: list[bytes] = []
        self._tail = b""  # the end of the parts, in which a separator may begin

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that have ended."""
        self._parts.append(data)
        self.pending += len(data)
        seen = self._tail + data
        if self._separator not in seen:
            self._tail = self._end_of(seen)
            return []
        messages = b"".join(self._parts).split(self._separator)
        self._begin(messages.pop())
        return messages

    def end(self) -> list[bytes]:
        """Return the last message, if there is one without a separator after it."""
        last = b"".join(self._parts)
        self._begin(b"")
        return [last] if last else []

    def _begin(self, rest: bytes) -> None:
        self._parts, self.pending = [rest], len(rest)
        self._tail = self._end_of(rest)

    def _end_of(self, data: bytes) -> bytes:
        return data[max(0, len(data) - len(self._separator) + 1) :]


class DescriptorSource(Source):
    """
    Reads messages from a file descriptor to its end; does not close it.

    Args:
        descriptor: The descriptor to read.
        separator: The bytes after each message; optional after the last.
        max_message: Maximum size of a message in bytes.
        name: Name of the stage in reports and errors.

    """

    def __init__(
        self,
        descriptor: int,
        separator: bytes = b"\n",
        *,
        max_message: int,
        name: str = "stdin",
    ) -> None:
        super().__init__(name)
        self._descriptor = descriptor
        self._separator = separator
        self._max_message = max_message

    @property
    def input(self) -> str:
        """The name of the descriptor."""
        return self.name

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """
        Yield the messages of each read.

        Raises:
            SourceFailed: If the descriptor can't be read, or a message is too long.

        """
        splitter, count = Splitter(self._separator), 0
        try:
            mode = os.fstat(self._descriptor).st_mode
            waits = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
            while data := await self._read(waits=waits):
                if messages := splitter.feed(data):
                    count += len(messages)
                    yield messages
                if splitter.pending > self._max_message:
                    raise SourceFailed(
                        f"{self.name}: message {count + 1} has"
                        f" {counted(splitter.pending, 'byte')} and no end yet, expected"
                        f" no more than {self._max_message}; see max_message",
                        stage=self.name,
                    )
        except OSError as error:
            raise SourceFailed(
                f"{self.name} can't be read: {os_reason(error)}", stage=self.name
            ) from error
        if messages := splitter.end():
            yield messages

    async def _read(self, *, waits: bool) -> bytes:
        if not waits:
            return await anyio.to_thread.run_sync(
                os.read, self._descriptor, _CHUNK, abandon_on_cancel=True
            )
        await anyio.wait_readable(self._descriptor)
        # Ask how many bytes are there: that is cheaper than allocating a whole chunk.
        there = array.array("i", [0])
        fcntl.ioctl(self._descriptor, termios.FIONREAD, there)
        return os.read(self._descriptor, min(max(there[0], 1), _CHUNK))


class DescriptorSink(Sink):
    """
    Writes messages to a file descriptor; does not close it.

    For a terminal, messages are escaped, so that nothing in them controls it.

    Args:
        descriptor: The descriptor to write.
        separator: The bytes to write after each message.
        exact: Whether the output must be readable as the same messages.
        name: Name of the stage in reports and errors.

    """

    def __init__(
        self,
        descriptor: int,
        separator: bytes = b"\n",
        *,
        exact: bool = True,
        name: str = "stdout",
    ) -> None:
        super().__init__(name)
        self._descriptor = descriptor
        self._separator = separator
        self._exact = exact

    async def write(self, run: Run) -> None:
        """
        Write a run; return when the descriptor has taken it.

        Raises:
            SinkFailed: If the descriptor can't be written, its reader is gone, or a
                message with the separator after it would not be read as that message.

        """
        self.account.received += len(run)
        if os.isatty(self._descriptor):
            run = [_escaped(message) for message in run]
        data = self._separator.join((*run, b""))
        if self._exact and (found := data.split(self._separator)) != [*run, b""]:
            place = next(i for i, m in enumerate(run) if m != found[i])
            what = "contains the separator {} and would be read as two"
            if self._separator not in run[place]:
                what = "ends as the separator {} begins and would be read cut"
            raise SinkFailed(
                f"{self.name}: message {self.account.done + place + 1}"
                f" {what.format(self._separator)}",
                stage=self.name,
            )
        try:
            await anyio.to_thread.run_sync(self._write, data)
        except BrokenPipeError as error:
            what = f"{self.name} was closed by its reader"
            done = counted(self.account.done, "message")
            raise SinkFailed(f"{what}, after {done}", stage=self.name) from error
        except OSError as error:
            raise SinkFailed(
                f"{self.name} can't be written: {os_reason(error)}", stage=self.name
            ) from error
        self.account.done += len(run)

    def landed(self) -> str:
        """Return how many messages were written."""
        return f"{counted(self.account.done, 'message')} written to {self.name}"

    def output(self) -> Output:
        """Return the descriptor."""
        return Output("descriptor", self.name)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]


def _escaped(message: bytes) -> bytes:
    return harmless(message.decode(errors="backslashreplace")).encode()
