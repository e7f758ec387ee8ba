"""What is written, and in which order."""

from __future__ import annotations

import pytest

from etlstage.errors import LocalProtocolError
from etlstage.protocol.cocaine import Encoding
from etlstage.protocol.cocaine.frame import EARLY, ONE, ZERO, Words
from etlstage.protocol.cocaine.outgoing import Outgoing

ORDERS = {
    "930301 91 a165 930402 91 a178": ZERO,
    "930103 91 a165 930204 91 a178": EARLY,
    "930100 91 a165 930200 91 a178": ONE,
}


@pytest.mark.parametrize("frames", ORDERS)
def test_frames_are_in_the_order_of_their_version(frames: str) -> None:
    """The type comes first, or the session does."""
    out = Outgoing(ORDERS[frames], Encoding.RAW, packed=False)
    out.invoke(1, "e", ())
    out.chunks(2, [b"x"])

    assert b"".join(out.take()) == bytes.fromhex(frames)


@pytest.mark.parametrize("words", [ZERO, EARLY, ONE])
@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("packed", [False, True])
def test_whole_sessions_are_what_their_frames_are_one_by_one(
    words: Words, encoding: Encoding, packed: bool
) -> None:
    """Whatever their event is called, and however long numbers get (issue 15)."""
    at_once, one_by_one = (Outgoing(words, encoding, packed=packed) for _ in range(2))
    messages = [b"%d" % number * 100 for number in range(9)]
    for first in (2, 120, 65530):
        at_once.whole(first, "100 %b", messages)
        for number, message in enumerate(messages, first):
            one_by_one.invoke(number, "100 %b", ())
            one_by_one.chunks(number, [message])
            one_by_one.choke(number)

    assert at_once.take() == one_by_one.take()


def test_what_is_about_the_connection_overtakes_but_not_the_end() -> None:
    """A terminate is behind all that was said before."""
    out = Outgoing(ONE, Encoding.RAW, packed=False)
    out.chunks(2, [b"x"])
    out.terminate(1, "no")
    out.beat()

    beat, chunk, end = "93010090", "93020091a178", "930101" + "92" + "01" + "a26e6f"
    assert out.take() == [bytes.fromhex(beat + chunk + end)]
    assert out.take() == []


@pytest.mark.parametrize(
    ("words", "frames"),
    [(ZERO, "93050192f3a26e6f 93060190"), (ONE, "9301019292 2af3a26e6f")],
)
def test_error_ends_our_half(words: Words, frames: str) -> None:
    """With a choke, where it does not by itself."""
    out = Outgoing(words, Encoding.RAW, packed=False)
    out.error(1, 42, -13, "no")

    assert b"".join(out.take()) == bytes.fromhex(frames)


def test_what_was_not_taken_can_be_forgotten() -> None:
    """All of it, or that of sessions."""
    out = Outgoing(ONE, Encoding.RAW, packed=False)
    for forget, left in ((out.drop, 1), (out.clear, 0)):
        out.choke(2)
        out.beat()
        forget()
        assert len(out.take()) == left


def test_short_frames_are_one_piece_and_a_long_one_is_not_copied() -> None:
    """A piece is a system call."""
    out = Outgoing(ONE, Encoding.RAW, packed=False)
    out.chunks(2, [b"a", b"b", bytes(300_000), b"c"])

    assert [len(piece) for piece in out.take()] == [16, 300_005]
    assert [len(piece) for piece in out.take()] == [6]
    assert out.take() == []


def test_nothing_is_said_before_it_is_known_how() -> None:
    """It is found out from the first frames."""
    out = Outgoing(None, Encoding.RAW, packed=False)

    with pytest.raises(LocalProtocolError, match="has not said yet how it speaks"):
        out.beat()
