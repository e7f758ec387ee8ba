from __future__ import annotations

import struct
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.messages import size_of, sound
from etlstage.protocol.marker import Markers
from etlstage.speedups import Compiled, compiled, find
from tests.protocol.marker.twins import TWINS, using

MARKERS = Markers()


@pytest.fixture
def fast() -> Compiled:
    """Return the compiled module; skip the test where it was not built."""
    if compiled is None:
        pytest.skip("not compiled: no C compiler at installation, or ETLSTAGE_PURE")
    return compiled


def ends(*numbers: int) -> bytes:
    """Return the bounds of an Arrow array."""
    return struct.pack(f"={len(numbers)}i", *numbers)


@pytest.mark.parametrize(
    ("bounds", "first", "count"),
    [
        (ends(0, 9), 0, 1),
        (ends(-1, 2), 0, 1),
        (ends(2, 1), 0, 1),
        (ends(0, 1), 0, 2),
        (ends(0, 1), 2, 0),
        (ends(0, 1), -1, 1),
        (ends(0, 1), 0, -1),
        (ends(0, 1), 1, sys.maxsize),
        (b"", 0, 1),
    ],
)
def test_nothing_outside_of_a_column_is_read(
    fast: Compiled, bounds: bytes, first: int, count: int
) -> None:
    """Bounds outside of the data are an error (issue 13)."""
    with pytest.raises(ValueError, match="an element lies outside of its column"):
        fast.join_column(bounds, b"abc", first, count, MARKERS, 9)


def test_bounds_may_begin_anywhere(fast: Compiled) -> None:
    """They need not be aligned in memory, either (issue 13)."""
    moved = memoryview(b"x" + ends(1, 2, 3))[1:]
    assert fast.join_column(moved, b"abc", 0, 2, MARKERS, 9) == b"b\nc\n"
    assert fast.join_column(moved, b"abc", 1, 1, MARKERS, 9) == b"c\n"
    assert fast.join_column(moved, b"", 2, 0, MARKERS, 9) == b""


def test_what_is_not_sound_is_left_to_python(fast: Compiled) -> None:
    """Python's path raises the errors (issue 13)."""
    other: Any = bytearray(b"a")
    assert fast.measure([b"a", other]) is None
    assert fast.bounds([b"a", other]) is None
    for unsound in [b"a", b"b\n"], [b"long"], [other], [b"a\x15"]:
        assert fast.join_list(unsound, MARKERS, 3) is None
    assert fast.join_column(ends(0, 2), b"a\0", 0, 1, MARKERS, 3) is None
    for columns in False, True:
        assert fast.split(b"a\0", b"\n", b"\0", columns) is None
        assert fast.split(b"a", b"", b"\0", columns) is None
        assert fast.split(b"a", b"\n", b"", columns) is None


def test_only_a_list_is_measured(fast: Compiled) -> None:
    """The code reads the pointers of a list, so it refuses other types (issue 13)."""
    other: Any = (b"a", b"bc")
    with pytest.raises(SystemError):
        fast.measure(other)
    with pytest.raises(SystemError):
        fast.bounds(other)
    assert fast.measure([*other]) == 3
    assert fast.measure([]) == 0
    assert fast.bounds([*other]) == ends(0, 1, 3)
    assert fast.bounds([]) == ends(0)


class Named(bytes):
    """A subclass of bytes."""


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=9),
            st.sampled_from([bytearray(b"a"), Named(b"bc"), "text", None, 7]),
        )
    )
)
def test_what_a_caller_gives_is_measured_as_python_does(run: list[Any]) -> None:
    """The valid part, the error after it, and the size are the same (issue 13)."""
    found = []
    for twin in TWINS:
        with using(twin):
            messages, error = sound(run, 1)
            found.append(([*map(type, messages)], messages, str(error)))
            assert size_of(messages) == sum(map(len, messages))
    assert found == found[-1:] * len(TWINS)


@pytest.mark.parametrize(
    "markers", [(b"\n", b"\0"), (b"", b"", b"", b"", None), (b"\n", 1, b"", b"", None)]
)
def test_other_markers_do_no_harm(
    fast: Compiled, markers: tuple[bytes | None, ...]
) -> None:
    """They are refused, or left to Python (issue 13)."""
    with suppress(TypeError):
        assert fast.join_list([b"a"], markers, 9) is None


def test_many_are_found_as_a_few_are(fast: Compiled) -> None:
    """Their buffer may grow any number of times (issue 13)."""
    messages = [b"%d" % n for n in range(5000)]
    wire = fast.join_list(messages, MARKERS, 9)
    assert wire == b"\n".join((*messages, b""))
    replies = b"\n\0".join((*messages, b"rest"))
    assert fast.split(replies, b"\n", b"\0", False) == (
        messages,
        None,
        None,
        len(replies) - 4,
    )


def test_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who suspects the compiled code can turn it off (issue 13)."""
    monkeypatch.setenv("ETLSTAGE_PURE", "1")
    assert find() is None


def test_where_it_was_not_built_python_does_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a compiler, or in a zip (issue 13)."""
    monkeypatch.delenv("ETLSTAGE_PURE", raising=False)
    monkeypatch.setitem(sys.modules, "etlstage._speedups", None)
    assert find() is None


def test_it_is_found_where_it_was_built(
    fast: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty variable is as good as none (issue 13)."""
    monkeypatch.setenv("ETLSTAGE_PURE", "")
    assert find() is fast
