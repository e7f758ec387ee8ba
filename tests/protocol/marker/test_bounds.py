"""What is too big, and how it is reported; where it is found, see the reader's tests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.errors import PayloadTooBig
from etlstage.messages import OVERHEAD
from etlstage.protocol.base import Limits
from etlstage.protocol.buffer import ReceiveBuffer
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.reader import ReceiveBounds

WORDS = Markers(b"EOM", b"EOP", b"EOB", b"BNC", b"ERR")


def bounds(message: int, reply: int, *, replies: bool = True) -> ReceiveBounds:
    """Return bounds of so many bytes."""
    return ReceiveBounds(Limits(message, reply), WORDS, replies=replies)


def test_bounds_are_inclusive() -> None:
    """A reply costs what it takes in memory, a message what it is without its EOM."""
    cost = 12 + 2 * OVERHEAD
    assert not bounds(3, cost).too_big([b"abc", b"abc"])
    assert bounds(3, cost - 1).too_big([b"abc", b"abc"])
    text = str(bounds(3, cost - 1).fault([b"abc", b"abc"]))
    assert text.startswith(f"reply of 2 messages takes {cost} bytes of memory")
    assert bounds(2, 99).too_big([b"a", b"abc"])
    text = str(bounds(2, 99).fault([b"a", b"abc"]))
    assert text.startswith("message is 3 bytes long, expected no")


@given(
    data=st.lists(st.sampled_from([b"EOM", b"x", b"E"]), max_size=6).map(b"".join),
    message=st.integers(0, 9),
    reply=st.integers(0, 9 * OVERHEAD),
)
def test_nothing_that_fits_is_too_big(data: bytes, message: int, reply: int) -> None:
    """Whatever it is: it need not be looked at (issue 10)."""
    found = bounds(message, reply)
    if len(data) <= found.small:
        assert not found.too_big(data.split(b"EOM"))
    assert found.small <= message
    assert ReceiveBounds(Limits(), WORDS, replies=True).small >= 1024 * 1024


def test_sound_ones_come_first() -> None:
    """What is in front of the first that is too big is passed on."""
    tight = bounds(2, 99)
    assert tight.sound([b"", b"ab", b"abc", b""]) == 2
    tight.check_messages([b"ab"])
    with pytest.raises(PayloadTooBig, match="message is 3 bytes long"):
        tight.check_messages([b"ab", b"abc"])


@pytest.mark.parametrize("replies", [True, False])
def test_rest_may_hold_a_part_of_a_marker(replies: bool) -> None:
    """Two bytes of EOM, or ERR, may be there already."""
    held = ReceiveBuffer()
    held.feed(b"abcdeEO")
    bounds(5, 5, replies=replies).check_rest(held, 0)
    held.feed(b"M" if replies else b"x")
    what = "reply" if replies else "message"
    with pytest.raises(
        PayloadTooBig, match=rf"{what} (is|takes) more than 5 bytes .* offset 8"
    ):
        bounds(5, 5, replies=replies).check_rest(held, 0)


TEN, ELEVEN = b"x" * 10, b"y" * 11
BOUNDS = ReceiveBounds(Limits(10, 22 + 2 * OVERHEAD), Markers(), replies=True)


@pytest.mark.parametrize(
    ("tail", "fits"),
    [
        (TEN + b"\n" + TEN + b"\n" + TEN, True),
        (TEN + b"\n" + ELEVEN, True),  # which has no end yet
        (b"\n" * 30, True),
        (b"a\nb\n" + ELEVEN + b"\n", False),
        (ELEVEN + b"\nc", False),
    ],
)
def test_tail_is_searched_for_what_is_too_long(tail: bytes, fits: bool) -> None:
    """Without a look at each message, of which there may be millions (issue 10)."""
    if fits:
        BOUNDS.check_tail(tail)
    else:
        with pytest.raises(PayloadTooBig, match="message is 11 bytes long"):
            BOUNDS.check_tail(tail)


@pytest.mark.parametrize(
    ("groups", "sound"),
    [
        ([], 0),
        ([()] * 50, 50),
        ([(b"a",)] * 50, 50),
        ([(TEN, TEN), (TEN, TEN, b"")], 1),
        ([(), (b"",) * 3], 1),
        ([(TEN,), (ELEVEN,)], 1),
    ],
)
def test_each_reply_is_counted_for_itself(
    groups: list[tuple[bytes, ...]], sound: int
) -> None:
    """As many and as big as they are together (issue 10)."""
    size = sum(len(m) + 1 for group in groups for m in group) + len(groups)
    count = sum(map(len, groups))
    assert BOUNDS.sound_replies(groups, size, count, OVERHEAD) == sound
