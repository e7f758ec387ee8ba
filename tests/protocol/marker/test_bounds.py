"""What is too big, and how it is told; where it is found, see the reader's tests."""

from __future__ import annotations

import pytest

from etlstage.errors import PayloadTooBig
from etlstage.protocol.base import Limits
from etlstage.protocol.buffer import ReceiveBuffer
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.bounds import Bounds

WORDS = Markers(b"EOM", b"EOP", b"EOB", b"BNC", b"ERR")


def bounds(message: int, reply: int, *, replies: bool = True) -> Bounds:
    """Return bounds of so many bytes."""
    return Bounds(Limits(message, reply), WORDS, replies=replies)


def test_bounds_are_inclusive() -> None:
    """A reply is counted as it is on the wire, a message without its EOM."""
    bounds(3, 12).check_reply([b"abc", b"abc"])
    with pytest.raises(PayloadTooBig, match="reply is 12 bytes long, expected no more"):
        bounds(3, 11).check_reply([b"abc", b"abc"])
    with pytest.raises(PayloadTooBig, match="message is 3 bytes long, expected no"):
        bounds(2, 99).check_reply([b"a", b"abc"])


def test_sound_ones_come_first() -> None:
    """What is in front of the first that is too big is passed on."""
    tight = bounds(2, 9)
    assert tight.sound([b"", b"ab", b"abc", b""]) == 2
    assert tight.sound_replies([(), (b"ab",), (b"a", b"a", b"a"), ()]) == 2
    tight.check_messages([b"ab"])
    with pytest.raises(PayloadTooBig, match="message is 3 bytes long"):
        tight.check_messages([b"ab", b"abc"])


@pytest.mark.parametrize("replies", [True, False])
def test_rest_may_hold_a_part_of_a_marker(replies: bool) -> None:
    """Two bytes of EOM, or ERR, may be there already."""
    held = ReceiveBuffer()
    held.feed(b"abcdeEO")
    bounds(5, 5, replies=replies).check_rest(held)
    held.feed(b"M" if replies else b"x")
    what = "reply" if replies else "message"
    with pytest.raises(
        PayloadTooBig, match=rf"{what} is more than 5 bytes .* offset 8"
    ):
        bounds(5, 5, replies=replies).check_rest(held)
