from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etlstage.protocol.buffer import ReceiveBuffer
from tests.protocol.strategies import moderate


def test_search_remembers_how_far_it_came() -> None:
    """A message in a thousand pieces is searched once, not a thousand times."""
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
    """After any operations it answers as plain bytes would."""
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
        assert buffer.peek(3) == model[:3]
        assert buffer.find(marker) == model.find(marker)
        assert buffer.find(b"ba") == model.find(b"ba")
        last = model.rfind(marker)
        assert buffer.end_of_last(marker) == (last + len(marker) if last >= 0 else 0)
        assert buffer.startswith(marker) == model.startswith(marker)
        # A marker that overlaps itself may be counted twice at a cut.
        count = buffer.count(marker)
        assert count >= model.count(marker)
        assert len(set(marker)) < len(marker) or count == model.count(marker)


def test_bytes_pass_by_an_empty_buffer_and_are_counted() -> None:
    """Data held in the buffer would come first; then bytes have to be fed."""
    buffer = ReceiveBuffer()
    assert buffer.pass_by(3)
    assert (buffer.offset, len(buffer)) == (3, 0)
    buffer.feed(b"a")
    assert not buffer.pass_by(3)
    assert buffer.offset == 3
