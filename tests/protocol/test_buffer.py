from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.protocol.buffer import ReceiveBuffer
from tests.protocol.strategies import moderate


def filled(*chunks: bytes) -> ReceiveBuffer:
    """Return a buffer that was fed with ``chunks``."""
    buffer = ReceiveBuffer()
    for chunk in chunks:
        buffer.feed(chunk)
    return buffer


def test_new_buffer_is_empty() -> None:
    """Nothing was received, and the stream is at its beginning."""
    buffer = ReceiveBuffer()
    assert len(buffer) == 0
    assert buffer.offset == 0
    assert buffer.peek(5) == b""


def test_fed_bytes_are_appended() -> None:
    """Chunks are held in the order in which they came."""
    buffer = filled(b"one", b"", b"two")
    assert len(buffer) == 6
    assert buffer.peek(6) == b"onetwo"


def test_peeking_keeps_what_it_shows() -> None:
    """To look is not to take; fewer bytes come out when fewer are there."""
    buffer = filled(b"abc")
    assert buffer.peek(2) == b"ab"
    assert buffer.peek(9) == b"abc"
    assert len(buffer) == 3
    assert buffer.offset == 0


def test_startswith_looks_at_the_first_byte_held() -> None:
    """What was taken does not count."""
    buffer = filled(b"abc")
    assert buffer.startswith(b"ab")
    assert not buffer.startswith(b"b")
    buffer.drop(1)
    assert buffer.startswith(b"b")


def test_taking_removes_and_moves_the_offset() -> None:
    """The offset is the place in the stream of the first byte held."""
    buffer = filled(b"abcdef")
    assert buffer.take(2) == b"ab"
    assert buffer.offset == 2
    assert buffer.peek(9) == b"cdef"


def test_dropping_moves_the_offset_too() -> None:
    """Dropped bytes were received all the same."""
    buffer = filled(b"abcdef")
    buffer.drop(4)
    assert buffer.offset == 4
    assert buffer.peek(9) == b"ef"


def test_put_back_restores_the_offset() -> None:
    """What is put back was never taken, as far as anybody can see."""
    buffer = filled(b"abcdef")
    taken = buffer.take(4)
    buffer.put_back(taken[2:])
    assert buffer.offset == 2
    assert buffer.peek(9) == b"cdef"


def test_put_back_of_nothing_changes_nothing() -> None:
    """A run that ends at a boundary leaves no rest."""
    buffer = filled(b"abc")
    buffer.put_back(b"")
    assert buffer.offset == 0
    assert buffer.peek(9) == b"abc"


def test_truncating_forgets_the_end() -> None:
    """The first bytes stay where they are in the stream."""
    buffer = filled(b"xxabcdef")
    buffer.drop(2)
    buffer.truncate(3)
    assert buffer.peek(9) == b"abc"
    assert buffer.offset == 2


def test_marker_is_found_where_it_first_begins() -> None:
    """The place counts from the first byte held."""
    buffer = filled(b"xxEOMyyEOM")
    assert buffer.find(b"EOM") == 2
    assert buffer.find(b"EOP") == -1


def test_marker_cut_by_chunks_is_found() -> None:
    """A search that found nothing must not step over a marker's first bytes."""
    buffer = filled(b"xE")
    assert buffer.find(b"EOM") == -1
    buffer.feed(b"O")
    assert buffer.find(b"EOM") == -1
    buffer.feed(b"M")
    assert buffer.find(b"EOM") == 1


def test_found_marker_is_found_again() -> None:
    """To look is not to take."""
    buffer = filled(b"xEOMEOM")
    assert buffer.find(b"EOM") == 1
    buffer.feed(b"EOM")
    assert buffer.find(b"EOM") == 1


def test_search_remembers_how_far_it_came() -> None:
    """A message in a thousand pieces is looked at once and not a thousand times."""
    starts: list[int] = []

    class Spy(bytearray):
        def find(self, marker: bytes, start: int = 0) -> int:  # type: ignore[override]
            starts.append(start)
            return super().find(marker, start)

    buffer = ReceiveBuffer()
    buffer._data = Spy()
    for _ in range(4):
        buffer.feed(b"1234567890")
        buffer.find(b"EOM")
    assert starts == [0, 8, 18, 28]


def test_each_marker_has_its_own_search() -> None:
    """One marker's progress has no effect on another's."""
    buffer = filled(b"a-b=c")
    assert buffer.find(b"=") == 3
    assert buffer.find(b"-") == 1


def test_search_begins_anew_after_each_change_in_front() -> None:
    """Places that were searched are other places now."""
    buffer = filled(b"aaaa-bbbb")
    assert buffer.find(b"-") == 4
    buffer.put_back(b"-")
    assert buffer.find(b"-") == 0
    buffer.drop(1)
    assert buffer.find(b"=") == -1
    buffer.truncate(4)
    buffer.feed(b"=")
    assert buffer.find(b"=") == 4


def test_end_of_last_is_behind_the_last_marker() -> None:
    """Everything up to there is complete."""
    assert filled(b"a\nbb\nc").end_of_last(b"\n") == 5
    assert filled(b"aEOMbEOM").end_of_last(b"EOM") == 8


def test_end_of_last_is_zero_without_a_marker() -> None:
    """Nothing is complete yet."""
    assert filled(b"abc").end_of_last(b"\n") == 0
    assert filled().end_of_last(b"\n") == 0


def test_buffer_can_be_fed_after_a_take() -> None:
    """No view of the bytes stays open: a bytearray with one can't be resized."""
    buffer = filled(b"abc")
    buffer.take(1)
    buffer.feed(b"d")
    assert buffer.peek(9) == b"bcd"


@pytest.mark.parametrize("count", [0, 2, 4])
def test_what_is_fed_and_taken_passes_behind_what_is_held(count: int) -> None:
    """Up to where it was found; the rest of it stays."""
    buffer = filled(b"ab")
    assert buffer.feed_and_take(b"cdef", count) == b"abcdef"[: 2 + count]
    assert (buffer.offset, buffer.peek(9)) == (2 + count, b"cdef"[count:])


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["feed", "take", "feed_and_take", "drop", "truncate", "put_back"]
        ),
        st.lists(st.sampled_from([b"a", b"b", b"ab", b"abb"]), max_size=4).map(
            b"".join
        ),
    ),
    max_size=20,
)


@given(steps, st.sampled_from([b"a", b"ab", b"bb", b"aba"]))
@moderate
def test_buffer_is_a_string_with_an_offset(
    steps: list[tuple[str, bytes]], marker: bytes
) -> None:
    """Whatever is done to it, it answers as plain bytes would."""
    buffer, model, offset = ReceiveBuffer(), b"", 0
    for step, data in steps:
        count = min(len(data), len(model))
        if step == "feed":
            buffer.feed(data)
            model += data
        elif step == "feed_and_take":
            through = len(model) + len(data) // 2
            model += data
            assert buffer.feed_and_take(data, len(data) // 2) == model[:through]
            model, offset = model[through:], offset + through
        elif step == "put_back":
            count = min(count, offset)
            buffer.put_back(data[:count])
            model, offset = data[:count] + model, offset - count
        elif step == "truncate":
            buffer.truncate(count)
            model = model[:count]
        else:
            if step == "take":
                assert buffer.take(count) == model[:count]
            else:
                buffer.drop(count)
            model, offset = model[count:], offset + count
        assert (len(buffer), buffer.offset) == (len(model), offset)
        assert buffer.find(marker) == model.find(marker)
        last = model.rfind(marker)
        assert buffer.end_of_last(marker) == (last + len(marker) if last >= 0 else 0)
        assert buffer.startswith(marker) == model.startswith(marker)
        # Where a marker overlaps itself, a cut may have one counted twice.
        count = buffer.count(marker)
        assert count >= model.count(marker)
        assert len(set(marker)) < len(marker) or count == model.count(marker)


def test_bytes_pass_by_an_empty_buffer_and_are_counted() -> None:
    """What is held would come first; then they have to be fed."""
    buffer = ReceiveBuffer()
    assert buffer.pass_by(3)
    assert (buffer.offset, len(buffer)) == (3, 0)
    buffer.feed(b"a")
    assert not buffer.pass_by(3)
    assert buffer.offset == 3
