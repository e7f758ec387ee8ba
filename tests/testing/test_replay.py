from __future__ import annotations

import sys
from dataclasses import replace
from signal import SIGKILL, SIGTERM

import anyio
import pytest

from etlstage.errors import WorkerStartFailed
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage, Timeouts
from etlstage.testing import Fault, FaultKind, FaultPlan, Moment, hostile_worker
from etlstage.testing.recording.recording import Recording
from etlstage.testing.recording.replay import play
from etlstage.testing.transcript import Channel, Entry

SINGLE = MarkerDialect()


def asked(*pieces: bytes) -> Recording:
    """Return a recording of a worker that started slowly and answered with ``ok``."""
    entries: list[Entry] = []
    for piece in pieces:
        at = 30.0 if entries else 0.0
        entries.append(Entry(Channel.STDIN, piece, at))
        *whole, _ = piece.split(b"\n")
        entries += [Entry(Channel.STDOUT, b"ok\n\0", 30.0)] * len(whole)
    entries.append(Entry(Channel.STDIN, b"", 30.0))
    return Recording(stage="t", dialect=SINGLE, entries=tuple(entries), exit=0)


def quick(command: tuple[str, ...]) -> Stage:
    """Return a stage whose worker is killed soon."""
    return Stage(name="t", worker=command, timeout=Timeouts(stop=0.1))


def python(program: str) -> tuple[str, ...]:
    """Return the command of a program."""
    return sys.executable, "-c", program


CHUNKS = """
import os
while chunk := os.read(0, 9999):
    os.write(1, repr(chunk).encode() + b"\\n" + b"\\0" * chunk.count(b"\\n"))
"""
"""A worker that replies with what each of its reads returned."""


async def test_input_is_cut_as_it_was() -> None:
    """The worker reads the pieces that the recorded worker has read."""
    played = await play(asked(b"o", b"n", b"e\ntw", b"o\n"), python(CHUNKS))
    assert played.written(Channel.STDOUT) == (b"b'o'\nb'n'\nb'e\\ntw'\n\0b'o\\n'\n\0")
    assert (played.exit, played.stopped, played.cut) == (0, False, "")


async def test_what_was_written_ahead_is_written_ahead() -> None:
    """A worker that reads two messages before it answers one does not hang."""
    program = "a, b = input(), input(); print(a, end='\\n\\0'); print(b, end='\\n\\0')"
    entries = asked(b"one\n").entries
    first, reply, end = entries
    ahead = Entry(Channel.STDIN, b"two\n", ahead=4)
    recording = replace(asked(), entries=(first, ahead, reply, reply, end))
    played = await play(recording, python(program))
    assert played.written(Channel.STDOUT) == b"one\n\0two\n\0"


async def test_input_waits_for_replies() -> None:
    """A message is written after as many replies as when it was recorded."""
    played = await play(asked(b"one\n", b"two\n"), hostile_worker(FaultPlan()))
    wire = (Channel.STDIN, Channel.STDOUT)
    passed = [e.channel for e in played.entries if e.data and e.channel in wire]
    assert passed == [*wire, *wire]


@pytest.mark.parametrize(
    "kind", [FaultKind.SKIP, FaultKind.STALL, FaultKind.CLOSE_STDOUT]
)
async def test_waiting_for_a_reply_is_bounded(kind: FaultKind) -> None:
    """A worker that does not answer is stopped, and what it has written is kept."""
    recording = asked(b"one\n", b"two\n", b"three\n")
    command = hostile_worker(FaultPlan.of(Fault(kind, message=2)))
    played = await play(recording, quick(command), grace=0.5)
    assert played.written(Channel.STDOUT) == b"one\n\0"
    assert played.cut == "the worker did not answer within 0.5 s"
    assert played.stopped


async def test_waiting_for_a_reader_is_bounded() -> None:
    """A worker that reads nothing, however much there is for it, is stopped."""
    program = "import time; time.sleep(99)"
    for pieces in ([b"a", b"b\n"], [b"x" * 9_999_999]):
        entries = [replace(entry, at=0.0) for entry in asked(*pieces).entries]
        recording = replace(asked(), entries=tuple(entries))
        played = await play(recording, quick(python(program)), grace=0.2)
        assert played.cut == "the worker did not read its input within 0.2 s"
        assert played.exit == -SIGTERM


async def test_waiting_for_the_end_is_bounded() -> None:
    """A worker that does not exit, even on SIGTERM, is killed."""
    fault = Fault(FaultKind.STALL, at=Moment.END)
    command = hostile_worker(FaultPlan.of(Fault(FaultKind.IGNORE_SIGTERM), fault))
    played = await play(asked(b"one\n"), quick(command), grace=0.2)
    assert played.cut == "the worker did not exit within 0.2 s"
    assert played.exit == -SIGKILL


async def test_waiting_counts_what_the_recorded_worker_took() -> None:
    """What took a minute then may take a minute now."""
    first, *rest = asked(b"one\n").entries
    slow = [replace(entry, at=60.0) for entry in rest]
    recording = replace(asked(), entries=(first, *slow))
    fault = Fault(FaultKind.PAUSE, seconds=0.1)
    command = hostile_worker(FaultPlan.of(fault))
    played = await play(recording, quick(command), grace=0.0)
    assert played.written(Channel.STDOUT) == b"one\n\0"


async def test_reply_without_end_is_bounded() -> None:
    """Whatever a worker writes, we don't hold more than the stage allows."""
    fault = Fault(FaultKind.HUGE, size=100_000_000)
    stage = replace(quick(hostile_worker(FaultPlan.of(fault))), max_reply=1_000_000)
    played = await play(asked(b"one\n"), stage)
    assert played.cut == "the worker wrote over max_reply bytes more than recorded"
    assert len(played.written(Channel.STDOUT)) < 10_000_000


async def test_worker_that_dies_ends_it() -> None:
    """Later input is not written, and no more output is awaited."""
    fault = Fault(FaultKind.EXIT, message=2, status=7)
    played = await play(
        asked(b"one\n", b"two\n", b"three\n"), hostile_worker(FaultPlan.of(fault))
    )
    assert (played.exit, played.stopped, played.cut) == (7, False, "")
    assert played.written(Channel.STDIN) == b"one\ntwo\n"


async def test_worker_may_answer_where_the_recorded_one_died() -> None:
    """A recording of a crash shows whether the next version has mended it."""
    crashed = replace(asked(), entries=(Entry(Channel.STDIN, b"one\n"),), exit=-11)
    played = await play(crashed, hostile_worker(FaultPlan()))
    assert (played.written(Channel.STDOUT), played.exit) == (b"one\n\0", 0)


async def test_worker_that_is_fed_nothing_is_played_to_its_end() -> None:
    """A plain extraction has no input; its worker writes until it exits."""
    dialect = MarkerDialect(mode=Mode.PLAIN)
    recording = Recording(stage="t", kind=StageKind.EXTRACT, dialect=dialect)
    played = await play(recording, python("print('a'); print(repr(input()))"))
    assert played.written(Channel.STDOUT) == b"a\n"
    assert b"EOFError" in played.written(Channel.STDERR)
    assert played.exit == 1


async def test_grandchild_that_keeps_the_pipes_is_not_waited_for() -> None:
    """The worker has ended; what it has left behind is killed."""
    fault = Fault(FaultKind.GRANDCHILD, at=Moment.START)
    played = await play(asked(b"one\n"), hostile_worker(FaultPlan.of(fault)))
    assert (played.exit, played.cut) == (0, "")


async def test_worker_that_can_not_start_is_an_error() -> None:
    """The error is that of a supervisor."""
    with pytest.raises(WorkerStartFailed, match="there is no file"):
        await play(asked(), ["./no-such-worker"])


async def test_cancelled_player_leaves_nothing_behind() -> None:
    """The fixture ``_nothing_is_left`` checks that."""
    command = hostile_worker(FaultPlan.of(Fault(FaultKind.STALL)))
    with anyio.move_on_after(0.2) as scope:
        await play(asked(b"one\n"), command)
    assert scope.cancelled_caught
