"""
Sessions with a worker of dialect ``cocaine``, as Hypothesis draws them.

It needs the extra ``testing``.
"""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from etlstage.protocol.cocaine import Version
from etlstage.protocol.cocaine.frame import Encoding, Packer
from etlstage.protocol.events import (
    Event,
    ExchangeCancelled,
    ExchangeOpened,
    ExchangesEnded,
    OutputOf,
)

__all__ = ("chunks", "frames", "sessions")

_EVENT: Final = "transform"
_NUMBERS: Final = (0, 1, 2, 3, 127, 128, 65536, 2**32)


def chunks() -> st.SearchStrategy[bytes]:
    """Draw what a chunk holds: any bytes, also what looks like a frame."""
    return st.binary(max_size=8) | st.sampled_from([b"\x93\x01\x01\x90", b"\xc1", b"x"])


def frames(version: Version = Version.ONE) -> st.SearchStrategy[bytes]:
    """Draw a frame of a version, in its place or not, and not always in order."""
    words = version.words
    assert words is not None, "auto is what a worker begins with"
    number, kind = st.sampled_from(_NUMBERS), st.integers(0, 7)
    order = (number, kind) if words.channel_first else (kind, number)
    pair = st.tuples(st.integers(0, 50), st.integers(-20, 300))
    argument = chunks() | st.integers(-20, 300) | pair
    arguments = st.lists(argument, max_size=3).map(tuple)
    headers = st.lists(st.integers(1, 90), max_size=2).map(tuple)
    frame = st.tuples(*order, arguments) | st.tuples(*order, arguments, headers)
    return frame.map(Packer(Encoding.RAW).pack)


@st.composite
def sessions(
    draw: st.DrawFn,
    payloads: st.SearchStrategy[bytes] | None = None,
    *,
    max_sessions: int = 4,
) -> list[Event]:
    """
    Draw all that a supervisor says in some sessions, in an order in which it may.

    Each is ended, or cancelled; a dialect, of any version, makes frames of it.

    Args:
        draw: Is given by Hypothesis.
        payloads: Draws what a chunk holds.
        max_sessions: How many there are, at most.

    """
    payloads = chunks() if payloads is None else payloads
    count = draw(st.integers(1, max_sessions))
    waiting = [draw(_session(number, payloads)) for number in range(1, count + 1)]
    begun: list[list[Event]] = []
    said: list[Event] = []
    while waiting or begun:
        # Numbers rise: the next to begin is the first that waits.
        at = draw(st.integers(0, len(begun) - (not waiting)))
        if at == len(begun):
            begun.append(waiting.pop(0))
        said.append(begun[at].pop(0))
        begun = [session for session in begun if session]
    return said


@st.composite
def _session(
    draw: st.DrawFn, number: int, payloads: st.SearchStrategy[bytes]
) -> list[Event]:
    ends: list[Event] = [
        ExchangesEnded([(number, ())]),
        ExchangeCancelled(number, 7, "not wanted"),
    ]
    given = draw(st.lists(payloads, max_size=3))
    return [
        ExchangeOpened(number, [], _EVENT, ended=False),
        *(OutputOf(number, [chunk]) for chunk in given),
        draw(st.sampled_from(ends)),
    ]
