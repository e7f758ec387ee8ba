from __future__ import annotations

from collections import deque

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etlstage.transport import Wire
from etlstage.transport.memory import MemoryPipe, memory_wire
from tests.patience import HANG

pytestmark = pytest.mark.core

PARTS = st.lists(st.binary(max_size=20), max_size=30)
STEPS = st.lists(st.integers(1, 30), min_size=1, max_size=10)


def ends(size: int = 65536) -> tuple[Wire, Wire]:
    """Return the two ends of a wire, as the layer above sees them."""
    return memory_wire(size)


async def test_each_end_reads_what_the_other_writes() -> None:
    """An end does not read what it wrote itself."""
    ours, theirs = ends()
    assert ours.write(b"question") == 8
    assert theirs.write(b"answer") == 6
    assert (ours.read(99), theirs.read(99)) == (b"answer", b"question")
    assert (ours.read(99), theirs.read(99)) == (None, None)


async def test_full_wire_takes_a_part_and_then_nothing() -> None:
    """As a pipe does."""
    ours, theirs = ends(5)
    assert ours.write(memoryview(b"1234567")) == 5
    assert ours.write(b"67") == 0
    assert ours.unread() == 5
    assert theirs.read(2) == b"12"
    assert ours.write(b"67") == 2
    assert theirs.read(99) == b"34567"
    assert ours.unread() == 0


async def test_reader_waits_for_bytes() -> None:
    """A reader is woken by new bytes, and does not wait if there are some."""
    ours, theirs = ends()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(theirs.readable)
        await anyio.wait_all_tasks_blocked()
        ours.write(b"x")
    await theirs.readable()


async def test_writer_waits_for_room() -> None:
    """One free byte is enough; waking the other end does not wake the writer."""
    ours, theirs = ends(2)
    ours.write(b"xx")
    there = anyio.Event()

    async def wait() -> None:
        await ours.writable()
        there.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        theirs.stop_waiting()
        await anyio.wait_all_tasks_blocked()
        assert not there.is_set()
        assert theirs.read(1) == b"x"
    await ours.writable()


async def test_half_close_leaves_the_other_half_open() -> None:
    """Bytes written before can be read, and are followed by the end."""
    ours, theirs = ends()
    ours.write(b"last")
    ours.close_write()
    ours.close_write()
    with pytest.raises(BrokenPipeError):
        ours.write(b"x")
    await ours.writable()
    assert theirs.read(99) == b"last"
    assert theirs.read(99) == b""
    await theirs.readable()
    assert theirs.write(b"answer") == 6
    assert ours.read(99) == b"answer"


async def test_end_wakes_who_waits_for_bytes() -> None:
    """The reader then finds the end."""
    ours, theirs = ends()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(theirs.readable)
        await anyio.wait_all_tasks_blocked()
        ours.close_write()
    assert theirs.read(9) == b""


async def test_wire_is_broken_once_no_one_reads() -> None:
    """A writer that waits for room is woken; unread bytes are still counted."""
    ours, theirs = memory_wire(3)
    ours.write(b"xyz")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.writable)
        await anyio.wait_all_tasks_blocked()
        theirs.close_read()
    with pytest.raises(BrokenPipeError):
        ours.write(b"x")
    assert ours.unread() == 3
    assert theirs.read(9) == b""
    assert theirs.write(b"still") == 3


async def test_close_is_for_both_directions() -> None:
    """Closing twice is safe; later reads find the end, without an error."""
    ours, theirs = ends()
    theirs.write(b"never read")
    ours.close()
    ours.close()
    assert ours.read(9) == b""
    assert theirs.read(9) == b""
    for end in (ours, theirs):
        with pytest.raises(BrokenPipeError):
            end.write(b"x")


async def test_who_waits_can_be_woken() -> None:
    """It returns although nothing has arrived."""
    ours, _theirs = ends()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.readable)
        await anyio.wait_all_tasks_blocked()
        ours.stop_waiting()
    assert ours.read(9) is None


def test_wire_without_room_is_refused() -> None:
    """Nothing could ever pass."""
    with pytest.raises(ValueError, match="size must be 1 or more, got 0"):
        memory_wire(0)


@given(PARTS, STEPS, STEPS, st.integers(1, 40))
def test_all_that_is_written_is_read_in_order(
    parts: list[bytes], reads: list[int], naps: list[int], size: int
) -> None:
    """Whatever the sizes, and whichever end is slower; no more waits than fits."""
    for backend in ("asyncio", "trio"):
        got = anyio.run(pass_on, parts, reads, naps, size, backend=backend)
        assert got == b"".join(parts)


async def pass_on(
    parts: list[bytes], reads: list[int], naps: list[int], size: int
) -> bytes:
    """Return what comes out of a wire into which these parts go."""
    ours, theirs = ends(size)
    steps, pauses = deque(reads), deque(naps)

    async def write() -> None:
        for part in parts:
            rest = part
            while rest:
                taken = ours.write(rest)
                assert ours.unread() <= size
                rest = rest[taken:]
                if rest:
                    await ours.writable()
            pauses.rotate()
            if pauses[0] % 2:
                await anyio.lowlevel.checkpoint()
        ours.close_write()

    got = b""
    with anyio.fail_after(HANG):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            while (data := theirs.read(steps[0])) != b"":
                if data is None:
                    await theirs.readable()
                    continue
                assert len(data) <= steps[0]
                got += data
                steps.rotate()
    return got


class Pipe(RuleBasedStateMachine):
    """Compares a pipe with a queue of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.pipe = MemoryPipe(8)
        self.model = b""
        self.ended = self.deserted = False

    @rule(data=st.binary(max_size=12))
    def write(self, data: bytes) -> None:
        """It takes what fits, or is broken."""
        if self.ended or self.deserted:
            with pytest.raises(BrokenPipeError):
                self.pipe.write(data)
        else:
            taken = self.pipe.write(data)
            assert taken == min(len(data), 8 - len(self.model))
            self.model += data[:taken]

    @rule(size=st.integers(1, 10))
    def read(self, size: int) -> None:
        """It gives the oldest bytes, and an end only where one was made."""
        data = self.pipe.read(size)
        if self.deserted:
            assert data == b""
        elif self.model:
            assert data == self.model[:size]
            self.model = self.model[size:]
        else:
            assert data == (b"" if self.ended else None)

    @precondition(lambda self: not self.ended)
    @rule()
    def end(self) -> None:
        """No more is written."""
        self.pipe.end()
        self.ended = True

    @precondition(lambda self: not self.deserted)
    @rule()
    def desert(self) -> None:
        """No more is read."""
        self.pipe.desert()
        self.deserted = True

    @invariant()
    def holds_what_was_not_read(self) -> None:
        """Unread bytes count even if they will never be read."""
        assert len(self.pipe) == len(self.model)


TestPipe = Pipe.TestCase
