from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.transport.memory import memory_wire
from etlstage.transport.write_buffer import WriteBuffer
from tests.patience import HANG

pytestmark = pytest.mark.core


@given(
    st.lists(st.lists(st.binary(min_size=1, max_size=20), max_size=3), max_size=8),
    st.integers(1, 30),
    st.lists(st.integers(1, 30), min_size=1),
)
async def test_all_is_written_once_and_in_order_whatever_room_there_is(
    parts: list[list[bytes]], size: int, reads: list[int]
) -> None:
    """The end of input follows, and the bytes that were accepted are counted."""
    ours, theirs = memory_wire(size)
    outgoing, received = WriteBuffer(ours), bytearray()
    for chunks in parts:
        outgoing.queue(chunks)
        assert outgoing.flush() is not bool(outgoing.unsent)
        assert outgoing.written == outgoing.unread()
    outgoing.queue([b""])
    outgoing.flush()
    everything = b"".join(chunk for chunks in parts for chunk in chunks)
    assert outgoing.end == len(everything)
    turn = 0
    while (data := theirs.read(reads[turn % len(reads)])) != b"":
        received += data or b""
        outgoing.flush()
        turn += 1
    assert received == everything
    assert (outgoing.written, outgoing.end) == (len(everything), len(everything))


async def test_room_is_waited_for_where_some_was_missing() -> None:
    """A waiter may even come before anything is queued."""
    ours, theirs = memory_wire(4)
    outgoing, rooms = WriteBuffer(ours), 0

    async def write() -> None:
        nonlocal rooms
        while True:
            await outgoing.room()
            rooms += 1
            if outgoing.flush():
                return

    with anyio.fail_after(HANG):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            await anyio.wait_all_tasks_blocked()
            outgoing.queue([b"1234", b"5678", b"9"])
            assert not outgoing.flush()
            for part in (b"1234", b"5678"):
                await anyio.wait_all_tasks_blocked()
                assert theirs.read(9) == part
        assert (rooms, theirs.read(9), outgoing.end) == (2, b"9", 9)
        # With nothing unsent, a waiter waits until something is.
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            await anyio.wait_all_tasks_blocked()
            assert rooms == 2
            tasks.cancel_scope.cancel()


async def test_what_the_worker_never_reads_is_counted_as_unread() -> None:
    """They are bytes in its pipe at its exit, and bytes for which there was no room."""
    ours, theirs = memory_wire(4)
    outgoing = WriteBuffer(ours)
    outgoing.queue([b"123456"])
    assert not outgoing.flush()
    assert theirs.read(1) == b"1"
    outgoing.exited()
    theirs.close_read()
    with pytest.raises(BrokenPipeError):
        outgoing.flush()
    ours.close_write()
    assert (outgoing.unread(), outgoing.written, len(outgoing.unsent)) == (5, 4, 0)
    assert outgoing.flush(), "nothing is left to write"
