from __future__ import annotations

from dataclasses import replace

import pytest

from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.recording.recording import Recording
from etlstage.testing.recording.replay import (
    Difference,
    differences,
    other_end,
)
from etlstage.testing.transcript import Channel, Entry


def said(*turns: tuple[bytes, bytes], **more: object) -> Recording:
    """Return a recording of requests, each followed by its reply."""
    entries: list[Entry] = []
    for request, reply in turns:
        entries += [Entry(Channel.STDIN, request), Entry(Channel.STDOUT, reply)]
    entries.append(Entry(Channel.STDIN, b""))
    recording = Recording(
        stage="t", dialect=MarkerDialect(), entries=tuple(entries), exit=0
    )
    return replace(recording, **more)  # type: ignore[arg-type]


def answered(*messages: bytes) -> Recording:
    """Return a recording of a worker that echoes."""
    return said(*((message + b"\n", message + b"\n\0") for message in messages))


def test_replies_are_compared_one_by_one() -> None:
    """Cuts don't matter; a missing or surplus reply is compared with an empty one."""
    was = said((b"a\n", b"A\n\0"), (b"b\n", b"B\n\0"), (b"c\n", b"\0"))
    now = said((b"a\nb\n", b"A\n\0b\n"), (b"c\n", b"\0\0"), (b"", b"D\n\0"))
    assert list(differences(was, now)) == [
        Difference(2, b"b\n", b"B\n\0", b"b\n\0"),
        Difference(4, b"", b"", b"D\n\0"),
    ]
    assert not list(differences(was, was))


def test_reply_that_is_not_complete_is_compared() -> None:
    """A worker that died in the middle of it has written something."""
    was = said((b"a\n", b"A\n\0"), (b"b\n", b"B"))
    now = said((b"a\n", b"A\n\0"), (b"b\n", b"B\n\0"))
    assert list(differences(was, now)) == [Difference(2, b"b\n", b"B", b"B\n\0")]


def test_what_a_torn_recording_does_not_have_is_not_compared() -> None:
    """Its last reply may have been longer, and others may have followed."""
    was = said((b"a\n", b"A\n\0"), (b"b\n", b"B"), cut="torn", exit=None)
    now = said((b"a\n", b"A\n\0"), (b"b\n", b"B\n\0"), exit=3)
    assert not list(differences(was, now))
    assert other_end(was, now) == ""


@pytest.mark.parametrize("last", [b"B", b""])
def test_what_a_stopped_worker_did_not_come_to_is_not_compared(last: bytes) -> None:
    """What the supervisor did not wait for is unknown (issue 26)."""
    was = said((b"a\nb\nc\n", b"A\n\0" + last), stopped=True, exit=-15)
    now = said((b"a\nb\nc\n", b"A\n\0B\n\0C\n\0"))
    assert not list(differences(was, now))
    other = said((b"a\nb\nc\n", b"X\n\0B\n\0C\n\0"))
    assert list(differences(was, other)) == [Difference(1, b"a\n", b"A\n\0", b"X\n\0")]


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
        (
            {"exit": -15, "stopped": True},
            {"exit": -15, "stopped": True, "cut": "the worker did not answer"},
            "",
        ),
    ],
)
def test_ends_are_compared_if_they_are_known(
    was: dict[str, object], now: dict[str, object], text: str
) -> None:
    """They must also be the worker's own doing."""
    found = other_end(replace(answered(), **was), replace(answered(), **now))  # type: ignore[arg-type]
    assert found.startswith(text)
    assert bool(found) == bool(text)
