from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from etlstage.supervisor.stderr.line import (
    Diagnostic,
    DiagnosticReader,
    LinesDropped,
    LineWritten,
)
from etlstage.supervisor.stderr.throttle import Throttle

TEXT = st.lists(
    st.sampled_from([b"one", b"\n", b"\r\n", b"ERROR: x\n", b"\xff", b"y" * 9000, b" "])
).map(b"".join)


def reader(rate: float = 100.0, burst: float = 1e9) -> DiagnosticReader:
    """Return a reader that leaves out nothing, unless told."""
    return DiagnosticReader(Throttle(rate=rate, burst=burst))


def texts(seen: list[Diagnostic]) -> list[str]:
    """Return the text of what was not left out."""
    return [x.text for x in seen if isinstance(x, LineWritten)]


def test_lines() -> None:
    """Cut at line ends, with their levels; empty ones are none."""
    r = reader()
    assert r.receive(b"one\r\n\nERR", 0.0) == [LineWritten("info", "one")]
    assert r.receive(b"OR: \xff\x1b[0m\0two\nthree", 0.0) == [
        LineWritten("error", r"ERROR: \xff\x00two")
    ]
    assert r.finish(0.0) == [LineWritten("info", "three")]
    assert r.finish(0.0) == []
    assert r.lines == 3


def test_long_line_comes_in_pieces() -> None:
    """Also when its end never comes."""
    r = reader()
    assert [len(text) for text in texts(r.receive(b"x" * 20_000, 0.0))] == [8192, 8192]
    assert [len(text) for text in texts(r.receive(b"\n", 0.0))] == [20_000 - 2 * 8192]
    whole = texts(r.receive(b"x" * 20_000 + b"\n", 0.0))
    assert [len(text) for text in whole] == [8192, 8192, 20_000 - 2 * 8192]


def test_dropped_lines_are_counted() -> None:
    """It is told before the next line that passes."""
    r = reader(rate=2, burst=2)
    assert texts(r.receive(b"a\nb\nc\nd\n", 0.0)) == ["a", "b"]
    assert r.owing
    assert r.receive(b"ee\n", 0.5) == []
    assert r.receive(b"f\n", 1.0) == [LinesDropped(3, 4), LineWritten("info", "f")]
    assert not r.owing
    assert r.lines == 6


def test_dropped_lines_are_told_when_asked() -> None:
    """After a while of silence; once."""
    r = reader(burst=1)
    r.receive(b"a\nb\n", 0.0)
    assert r.settle() == [LinesDropped(1, 1)]
    assert r.settle() == []


def test_dropped_lines_are_told_at_the_end() -> None:
    """With what has no line end."""
    r = reader(burst=1)
    r.receive(b"a\nb\nc", 0.0)
    assert r.finish(0.0) == [LinesDropped(2, 2)]


def test_tail_has_dropped_lines_too() -> None:
    """The last lines are the ones that matter."""
    r = reader(burst=1)
    r.receive(b"".join(b"%d\n" % n for n in range(100)), 0.0)
    assert r.tail == tuple(str(n) for n in range(90, 100))


def test_tail_is_bounded_in_bytes() -> None:
    """It is part of every error text; of long lines the end is kept."""
    r = reader()
    for n in range(10):
        r.receive(b"x" * 8000 + b"%d\n" % n, 0.0)
    assert [line[-2:] for line in r.tail] == ["x8", "x9"]
    assert sum(map(len, r.tail)) <= 8192
    r.receive(b"short\nlast\n", 0.0)
    assert r.tail[-2:] == ("short", "last")


@given(TEXT, st.lists(st.integers(0, 30_000)), st.integers(1, 20))
def test_chunks_make_no_difference(text: bytes, cuts: list[int], burst: int) -> None:
    """Nor to what is left out, nor to the tail."""
    whole, cut = (reader(burst=burst) for _ in range(2))
    seen = whole.receive(text, 0.0) + whole.finish(0.0)
    places = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces: list[Diagnostic] = []
    for start, end in pairwise(places):
        pieces += cut.receive(text[start:end], 0.0)
    pieces += cut.finish(0.0)
    assert pieces == seen
    assert (cut.tail, cut.lines) == (whole.tail, whole.lines)


@given(
    st.lists(st.tuples(TEXT, st.floats(0, 2), st.booleans()), max_size=20),
    st.integers(1, 20),
)
def test_every_line_passes_or_is_counted(
    steps: list[tuple[bytes, float, bool]], burst: int
) -> None:
    """Nothing is lost between the two, whenever it is asked for."""
    r, everything = reader(rate=2, burst=burst), reader()
    now, seen = 0.0, []
    for text, wait, asked in steps:
        now += wait
        seen += r.receive(text, now)
        if asked:
            seen += r.settle()
    seen += r.finish(now)
    dropped = [x for x in seen if isinstance(x, LinesDropped)]
    whole = b"".join(text for text, _, _ in steps)
    expected = texts(everything.receive(whole, 0.0) + everything.finish(0.0))

    assert len(texts(seen)) + sum(x.lines for x in dropped) == r.lines == len(expected)
    assert all(x.lines for x in dropped)
    remaining = iter(expected)
    assert all(text in remaining for text in texts(seen))
    assert r.tail == everything.tail
