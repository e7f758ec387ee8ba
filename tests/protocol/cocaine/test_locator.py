from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etlstage.errors import RemoteProtocolError
from etlstage.protocol.cocaine.locator import Locator


def answers(*frames: object) -> tuple[list[Any], bytes]:
    """Return the answers to frames, and the lines that are logged."""
    locator = Locator("127.0.0.1", 4711)
    said = locator.receive_data(b"".join(map(msgpack.packb, frames)))
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(said)
    return list(unpacker), locator.lines()


def test_logging_is_found() -> None:
    """At the same address, with its methods; the bytes are those of old msgpack."""
    locator = Locator("127.0.0.1", 4711)
    said = locator.receive_data(b"\x93\x05\x00\x91\xa7logging")
    assert said == (
        b"\x93\x05\x00\x93\x91\x92\xa9127.0.0.1\xcd\x12\x67\x01\x82"
        b"\x00\x93\xa4emit\x80\x80"
        b"\x01\x93\xa9verbosity\x80\x82\x00\x92\xa5value\x80\x01\x92\xa5error\x80"
    )


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ([1, 0, ["storage"]], "no service 'storage' here: a stage has only 'logging'"),
        ([1, 0, [b"\xff"], []], "no service '\\\\xff' here"),
        ([1, 2, ["x"]], "only resolve is supported here"),
    ],
    ids=["unknown", "no text", "method"],
)
def test_anything_else_is_refused_in_words(frame: list[object], text: str) -> None:
    """So that no worker waits for an answer forever."""
    [[channel, kind, [code, reason]]], lines = answers(frame)
    assert (channel, kind, code) == (1, 1, [10, 1])
    assert text in reason
    assert not lines


def test_version_0_is_refused_in_its_own_frames() -> None:
    """With an error, and the end of the session."""
    error, choke = answers([0, 3, ["logging"]])[0]
    assert error == [
        5,
        3,
        [1, "services are only available in version 1 of the protocol"],
    ]
    assert choke == [6, 3, []]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([0, "app", "a"], b"DEBUG app: a\n"),
        ([9, "app", "a\nb\r\nc"], b"ERROR app: a b c\n"),
        ([-1, "app", "a", [["n", 1], ["s", "t"], "x"]], b"DEBUG app: a n=1 s=t\n"),
        ([2, "app", "a", 7], b"WARNING app: a\n"),
    ],
)
def test_what_is_emitted_is_one_line(arguments: list[object], line: bytes) -> None:
    """With its level first and its attributes last; nothing is answered."""
    assert answers([1, 0, arguments]) == ([], line)


def test_everything_is_worth_logging() -> None:
    """A worker that asks for the level is answered: debug and above."""
    assert answers([4, 1, []]) == ([[4, 0, [0]]], b"")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.recursive(st.integers() | st.binary(max_size=9), st.lists), max_size=5)
)
def test_nothing_asked_breaks_it(frames: list[object]) -> None:
    """Each request is answered or logged, or it ends the connection."""
    locator = Locator("127.0.0.1", 1)
    for frame in frames:
        try:
            locator.receive_data(msgpack.packb(frame))
        except (RemoteProtocolError, OverflowError):
            return


def test_what_is_no_frame_is_reported() -> None:
    """One generic line: a line for each frame would tell no more."""
    assert answers("x")[1] == b"WARNING locator: received a malformed request\n"


def test_nonsense_ends_the_connection() -> None:
    """Bytes that are not msgpack."""
    with pytest.raises(RemoteProtocolError):
        Locator("127.0.0.1", 1).receive_data(b"\xc1")
