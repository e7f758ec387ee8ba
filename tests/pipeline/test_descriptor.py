"""Sources and sinks that are file descriptors."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from etlstage.errors import SinkFailed, SourceFailed
from etlstage.pipeline.descriptor import DescriptorSink, DescriptorSource, Splitter

SEPARATORS = st.sampled_from(
    [b"\n", b"\0", b"\r\n", b"aab", b"aa", b"abab", b"\r\n\r\n", b"aabaaab"]
)
# Bytes of the separators, so that parts of them are in messages, too.
BYTES = st.lists(st.sampled_from(b"ab\r\n\0"), max_size=8).map(bytes)


@pytest.mark.core
@given(
    messages=st.lists(BYTES | st.binary(max_size=8)),
    separator=SEPARATORS,
    cuts=st.lists(st.integers(0, 120)),
    last=BYTES | st.binary(max_size=5),
)
@example(messages=[b""], separator=b"abab", cuts=[2], last=b"")
def test_reads_may_be_cut_anywhere(
    messages: list[bytes], separator: bytes, cuts: list[int], last: bytes
) -> None:
    """The messages are those of the input, and none is held back (issue 23)."""
    data = b"".join(m + separator for m in messages) + last
    whole = data.split(separator)
    rest = whole.pop()
    splitter, found = Splitter(separator), []
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in pairwise(places):
        found += splitter.feed(data[start:end])
        assert len(found) == data[:end].count(separator)
    assert splitter.pending == len(rest)
    assert found == whole
    assert splitter.end() == ([rest] if rest else [])
    assert splitter.end() == []


@pytest.fixture
def pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Give a pipe's two ends."""
    ends = os.pipe()
    with os.fdopen(ends[0], "rb", 0) as out, os.fdopen(ends[1], "wb", 0) as into:
        yield out, into


async def read(source: DescriptorSource) -> list[bytes]:
    """Return all messages."""
    async with aclosing(source.runs()) as runs:
        return [message async for run in _runs(runs) for message in run]


async def _runs(items: AsyncIterator[object]) -> AsyncIterator[list[bytes]]:
    async for item in items:
        assert isinstance(item, list)
        yield item


async def test_messages_come_as_they_are_written(
    pipe: tuple[BinaryIO, BinaryIO],
) -> None:
    """A line is passed on once it is complete; the last one needs no separator."""
    out, into = pipe
    source = DescriptorSource(out.fileno(), max_message=100)
    async with aclosing(source.runs()) as runs:
        into.write(b"one\ntw")
        assert await anext(runs) == [b"one"]
        into.write(b"o\n\nlast")
        assert await anext(runs) == [b"two", b""]
        into.close()
        assert await anext(runs) == [b"last"]
        with pytest.raises(StopAsyncIteration):
            await anext(runs)


async def test_file_is_read(tmp_path: Path) -> None:
    """A file is always ready, so the event loop can't wait for it."""
    path = tmp_path / "in.txt"
    path.write_bytes(b"a\0b\0")
    with path.open("rb") as file:
        source = DescriptorSource(file.fileno(), b"\0", max_message=9)
        assert await read(source) == [b"a", b"b"]


async def test_reading_can_be_cancelled(pipe: tuple[BinaryIO, BinaryIO]) -> None:
    """A draining run does not wait for input."""
    source = DescriptorSource(pipe[0].fileno(), max_message=100)
    with anyio.move_on_after(0) as scope:
        await read(source)
    assert scope.cancelled_caught


async def test_message_without_end_is_refused_in_time(
    pipe: tuple[BinaryIO, BinaryIO],
) -> None:
    """At the size limit, before memory is full."""
    out, into = pipe
    into.write(b"a\n" + b"x" * 11)
    source = DescriptorSource(out.fileno(), max_message=10)
    with pytest.raises(SourceFailed, match="message 2 has 11 bytes and no end yet"):
        await read(source)


async def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A folder, for example."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(SourceFailed, match="stdin can't be read: is a directory"):
            await read(DescriptorSource(descriptor, max_message=10))
    finally:
        os.close(descriptor)


async def test_messages_are_written_in_whole(pipe: tuple[BinaryIO, BinaryIO]) -> None:
    """Even if they don't fit into the pipe at once."""
    out, into = pipe
    sink = DescriptorSink(into.fileno())
    big = [b"x" * 100_000] * 3
    found = b""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sink.write, big)
        while len(found) < 300_003:
            found += await anyio.to_thread.run_sync(out.read, 65536)
    assert found == b"".join(message + b"\n" for message in big)
    assert (sink.account.received, sink.account.done) == (3, 3)
    assert sink.landed() == "3 messages written to stdout"
    assert sink.output() == ("descriptor", "stdout")


async def test_message_with_a_separator_is_not_written_as_two(
    pipe: tuple[BinaryIO, BinaryIO],
) -> None:
    """A worker's marker may differ, but the reader only has the separator."""
    sink = DescriptorSink(pipe[1].fileno())
    await sink.write([b"a"])
    with pytest.raises(SinkFailed, match=r"message 3 contains the separator b'\\n'"):
        await sink.write([b"b", b"c\nd"])
    assert (sink.account.received, sink.account.done) == (3, 1)


@pytest.mark.parametrize(
    ("separator", "messages", "end"),
    [
        (b"aa", [b"a", b"b"], 1),
        (b"\r\n\r\n", [b"b", b"a\r\n"], 2),
        (b"aa", [b"b", b"ba"], 2),
    ],
)
async def test_message_that_ends_as_the_separator_begins(
    pipe: tuple[BinaryIO, BinaryIO], separator: bytes, messages: list[bytes], end: int
) -> None:
    """The reader would find the separator too early (issue 23)."""
    sink = DescriptorSink(pipe[1].fileno(), separator)
    with pytest.raises(SinkFailed, match=f"message {end} ends as the separator b'"):
        await sink.write(messages)
    await sink.write([b"ab", b"\nb", b""])
    assert pipe[0].read(100) == separator.join([b"ab", b"\nb", b"", b""])


async def test_terminal_is_not_controlled_by_messages() -> None:
    """Control characters are removed or escaped, as are line ends in a message."""
    ours, theirs = os.openpty()
    try:
        await DescriptorSink(theirs).write([b"a\x1b[2Jb", b"c\nd\xff"])
        assert os.read(ours, 100) == b"ab\r\nc\\nd\\xff\r\n"
    finally:
        os.close(ours)
        os.close(theirs)


async def test_reader_that_is_gone_ends_the_run(
    pipe: tuple[BinaryIO, BinaryIO],
) -> None:
    """As with any filter in a shell, but with an error text."""
    out, into = pipe
    sink = DescriptorSink(into.fileno())
    await sink.write([b"a"])
    out.close()
    with pytest.raises(SinkFailed, match="stdout was closed by its reader, after 1"):
        await sink.write([b"b"])


async def test_full_disk_is_named() -> None:
    """With the system's error text."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(SinkFailed, match="out can't be written: no space left"):
            await DescriptorSink(full, name="out").write([b"a"])
    finally:
        os.close(full)
