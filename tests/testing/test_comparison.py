from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Stage, Timeouts
from etlstage.testing import Fault, FaultKind, FaultPlan, hostile_worker
from etlstage.testing.recording.comparison import (
    Difference,
    differences,
    other_end,
    shrink,
)
from etlstage.testing.recording.recording import Recording
from etlstage.testing.transcript import Channel, Entry

EOB = b"\x17"
BNC = b"\x05"


def said(
    *turns: tuple[bytes, bytes], mode: Mode = Mode.SINGLE, **more: object
) -> Recording:
    """Return a recording of requests and their replies, each written when it can be."""
    entries: list[Entry] = []
    for request, reply in turns:
        entries += [Entry(Channel.STDIN, request), Entry(Channel.STDOUT, reply)]
    entries.append(Entry(Channel.STDIN, b""))
    recording = Recording(
        stage="t", dialect=MarkerDialect(mode=mode), entries=tuple(entries), exit=0
    )
    return replace(recording, **more)  # type: ignore[arg-type]


def answered(*messages: bytes) -> Recording:
    """Return a recording of a worker that says what it is told."""
    return said(*((message + b"\n", message + b"\n\0") for message in messages))


def echo(*faults: Fault, mode: Mode = Mode.SINGLE) -> Stage:
    """Return a stage that says what it is told, but for these faults."""
    return Stage(
        name="t",
        dialect=MarkerDialect(mode=mode),
        worker=hostile_worker(FaultPlan.of(*faults), mode=mode),
        timeout=Timeouts(stop=0.1),
    )


def written(recording: Recording) -> bytes:
    """Return what the worker reads."""
    return recording.written(Channel.STDIN)


def test_blank_replies_are_only_counted() -> None:
    """What they said nobody knows (issue 12)."""
    was = said((b"x\n", b"x\n\0"), (b"x\n", b"x\n\0"), blank=True)
    assert not [*differences(was, said((b"x\n", b"no\x15"), (b"x\n", b"\0")))]
    assert [*differences(was, said((b"x\n", b"X\n\0")))] == [
        Difference(2, b"x\n", b"x\n\0", b"")
    ]


def test_replies_are_compared_one_by_one() -> None:
    """However they are cut; those that are missing, or too many, differ from none."""
    was = said((b"a\n", b"A\n\0"), (b"b\n", b"B\n\0"), (b"c\n", b"\0"))
    now = said((b"a\nb\n", b"A\n\0b\n"), (b"c\n", b"\0\0"), (b"", b"D\n\0"))
    assert list(differences(was, now)) == [
        Difference(2, b"b\n", b"B\n\0", b"b\n\0"),
        Difference(4, b"", b"", b"D\n\0"),
    ]
    assert not list(differences(was, was))


def test_reply_that_is_not_complete_is_compared() -> None:
    """A worker that dies in the middle of it has said something."""
    was = said((b"a\n", b"A\n\0"), (b"b\n", b"B"))
    now = said((b"a\n", b"A\n\0"), (b"b\n", b"B\n\0"))
    assert list(differences(was, now)) == [Difference(2, b"b\n", b"B", b"B\n\0")]


def test_what_a_torn_recording_does_not_say_is_not_compared() -> None:
    """Its last reply may have been longer, and others may have come."""
    was = said((b"a\n", b"A\n\0"), (b"b\n", b"B"), cut="torn", exit=None)
    now = said((b"a\n", b"A\n\0"), (b"b\n", b"B\n\0"), exit=3)
    assert not list(differences(was, now))
    assert other_end(was, now) == ""


@pytest.mark.parametrize(
    ("was", "now", "text"),
    [
        ({}, {}, ""),
        (
            {},
            {"exit": -11},
            "the worker was killed by SIGSEGV; the recorded one exited",
        ),
        ({"exit": None}, {"exit": 3}, ""),
        ({"exit": -15, "stopped": True}, {"exit": 0}, ""),
        ({}, {"exit": -9, "cut": "the worker did not answer"}, "the worker did not"),
    ],
)
def test_ends_are_compared_if_they_are_known(
    was: dict[str, object], now: dict[str, object], text: str
) -> None:
    """And if they are the worker's own doing."""
    found = other_end(replace(answered(), **was), replace(answered(), **now))  # type: ignore[arg-type]
    assert found.startswith(text)
    assert bool(found) == bool(text)


async def test_smallest_part_is_one_message() -> None:
    """What all others said does not matter."""
    whole = answered(*(b"%d" % number for number in range(20)))
    fault = Fault(FaultKind.TWICE, equals=b"13")
    found = await shrink(whole, echo(fault))
    assert written(found) == b"13\n"
    assert list(found.entries) == [
        Entry(Channel.STDIN, b"13\n"),
        Entry(Channel.STDOUT, b"13\n\0"),
        Entry(Channel.STDIN, b""),
    ]


async def test_smallest_part_has_all_that_it_takes() -> None:
    """A crash at the third message takes two others, whichever they are."""
    whole = answered(*(b"%d" % number for number in range(9)))
    found = await shrink(whole, echo(Fault(FaultKind.SEGFAULT, message=3)))
    assert written(found).count(b"\n") == 3


async def test_message_is_cut_as_it_was() -> None:
    """That may be what the worker fails at."""
    program = (
        "import os\n"
        "while chunk := os.read(0, 99):\n"
        "    os.write(1, chunk.replace(b'\\n', b'\\n\\0').replace(b'w', b'W', chunk[-2:] == b'tw'))"
    )
    cut = [Entry(Channel.STDIN, b"one\ntw"), Entry(Channel.STDOUT, b"one\n\0")]
    cut += [Entry(Channel.STDIN, b"o\n"), Entry(Channel.STDOUT, b"two\n\0")]
    whole = replace(answered(), entries=(*cut, *answered(b"three").entries))
    stage = replace(echo(), worker=(sys.executable, "-c", program))
    found = await shrink(whole, stage)
    pieces = [entry.data for entry in found.entries if entry.channel is Channel.STDIN]
    assert pieces == [b"tw", b"o\n", b""]


async def test_batches_are_left_out_as_a_whole() -> None:
    """Of a worker that asks for more, too: else it would wait for what was left out."""
    driven, asked = Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER
    batches = [(b"%d" % n, b"%d" % (n + 1)) for n in range(0, 10, 2)]
    whole = said(
        *((a + b"\n" + b + b"\n" + EOB, a + b"\n" + b + b"\n\0") for a, b in batches),
        mode=driven,
    )
    fault = Fault(FaultKind.TWICE, equals=b"5")
    assert written(await shrink(whole, echo(fault, mode=driven))) == b"4\n5\n" + EOB
    turns: list[tuple[bytes, bytes]] = []
    for a, b in batches:
        turns += [(a + b"\n", BNC), (b + b"\n", BNC)]
        turns.append((EOB, a + b"\n" + b + b"\n\0"))
    found = await shrink(said(*turns, mode=asked), echo(fault, mode=asked))
    assert written(found) == b"4\n5\n" + EOB


async def test_recording_that_plays_equal_is_returned() -> None:
    """There is nothing to look for."""
    whole = answered(b"one", b"two")
    assert await shrink(whole, echo()) is whole
