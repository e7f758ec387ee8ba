"""What a worker writes besides its replies, cut into lines and interpreted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.supervisor.diagnostic import (
    Diagnostic,
    DiagnosticReader,
    Level,
    LinesDropped,
    LineWritten,
    StatusReader,
    StatusUpdate,
    Throttle,
    cause_of,
    level_of,
    traceback_of,
)

TEXT = st.lists(
    st.sampled_from([b"one", b"\n", b"\r\n", b"ERROR: x\n", b"\xff", b"y" * 9000, b" "])
).map(b"".join)


def reader(rate: float = 100.0, burst: float = 1e9) -> DiagnosticReader:
    """Return a reader that drops nothing by default."""
    return DiagnosticReader(Throttle(rate=rate, burst=burst))


def texts(seen: list[Diagnostic]) -> list[str]:
    """Return the texts that were not dropped."""
    return [x.text for x in seen if isinstance(x, LineWritten)]


def test_lines() -> None:
    """Cut at line ends, with their levels; empty lines are skipped."""
    r = reader()
    assert r.receive(b"one\r\n\nERR", 0.0) == [LineWritten("info", "one")]
    assert r.receive(b"OR: \xff\x1b[0m\0two\nthree", 0.0) == [
        LineWritten("error", r"ERROR: \xff\x00two")
    ]
    assert r.finish(0.0) == [LineWritten("info", "three")]
    assert r.finish(0.0) == []
    assert r.lines == 3


def test_long_line_comes_in_pieces() -> None:
    """Even if its end never comes."""
    r = reader()
    assert [len(text) for text in texts(r.receive(b"x" * 20_000, 0.0))] == [8192, 8192]
    assert [len(text) for text in texts(r.receive(b"\n", 0.0))] == [20_000 - 2 * 8192]
    whole = texts(r.receive(b"x" * 20_000 + b"\n", 0.0))
    assert [len(text) for text in whole] == [8192, 8192, 20_000 - 2 * 8192]


TRACE = [
    "Traceback (most recent call last):",
    '  File "w.py", line 3, in <module>',
    "    int(line)",
    "ValueError: x",
]


def test_traceback_is_one() -> None:
    """However it is cut into chunks; later lines are not part of it (issue 26)."""
    whole = LineWritten("info", "\n".join(TRACE))
    data = "\n".join(["a", *TRACE, "b", ""]).encode()
    around = [LineWritten("info", "a"), whole, LineWritten("info", "b")]
    assert reader().receive(data, 0.0) == around
    r = reader()
    seen = [x for n in range(len(data)) for x in r.receive(data[n : n + 1], 0.0)]
    assert seen == around
    assert not r.owing
    twice = "\n".join([*TRACE[:2], *TRACE, ""]).encode()
    assert reader().receive(twice, 0.0) == [
        LineWritten("info", "\n".join(TRACE[:2])),
        whole,
    ]


def test_traceback_without_an_end() -> None:
    """It is not held forever, nor without limit (issue 26)."""
    r = reader()
    assert r.receive("\n".join(TRACE[:3]).encode() + b"\n", 0.0) == []
    assert r.owing
    assert r.settle() == [LineWritten("info", "\n".join(TRACE[:3]))]
    assert not r.owing
    assert r.receive(f"{TRACE[0]}\n  File".encode(), 0.0) == []
    assert r.finish(0.0) == [LineWritten("info", f"{TRACE[0]}\n  File")]
    many = reader().receive(f"{TRACE[0]}\n".encode() + b"  x\n" * 150, 0.0)
    assert [text.count("\n") for text in texts(many)] == [99] + [0] * 51


def test_traceback_of_which_lines_are_dropped() -> None:
    """Lines that passed come before the count (issue 26)."""
    r = reader(rate=2, burst=2)
    seen = r.receive("\n".join([*TRACE, ""]).encode(), 0.0)
    assert seen == [LineWritten("info", "\n".join(TRACE[:2]))]
    assert r.settle() == [LinesDropped(2, len(TRACE[2]) + len(TRACE[3]))]


def test_dropped_lines_are_counted() -> None:
    """Their number is reported before the next line that passes."""
    r = reader(rate=2, burst=2)
    assert texts(r.receive(b"a\nb\nc\nd\n", 0.0)) == ["a", "b"]
    assert r.owing
    assert r.receive(b"ee\n", 0.5) == []
    assert r.receive(b"f\n", 1.0) == [LinesDropped(3, 4), LineWritten("info", "f")]
    assert not r.owing
    assert r.lines == 6


def test_dropped_lines_are_reported_when_asked() -> None:
    """After a while of silence, and only once."""
    r = reader(burst=1)
    r.receive(b"a\nb\n", 0.0)
    assert r.settle() == [LinesDropped(1, 1)]
    assert r.settle() == []


def test_dropped_lines_are_reported_at_the_end() -> None:
    """Including text without a line end."""
    r = reader(burst=1)
    r.receive(b"a\nb\nc", 0.0)
    assert r.finish(0.0) == [LinesDropped(2, 2)]


def test_tail_has_dropped_lines_too() -> None:
    """The last lines are the ones that matter."""
    r = reader(burst=1)
    r.receive(b"".join(b"%d\n" % n for n in range(100)), 0.0)
    assert r.tail == tuple(str(n) for n in range(90, 100))


def test_tail_is_bounded_in_bytes() -> None:
    """It is part of every error; of long lines the end is kept."""
    r = reader()
    for n in range(10):
        r.receive(b"x" * 8000 + b"%d\n" % n, 0.0)
    assert [line[-2:] for line in r.tail] == ["x8", "x9"]
    assert sum(map(len, r.tail)) <= 8192
    r.receive(b"short\nlast\n", 0.0)
    assert r.tail[-2:] == ("short", "last")


@given(TEXT, st.lists(st.integers(0, 30_000)), st.integers(1, 20))
def test_chunks_make_no_difference(text: bytes, cuts: list[int], burst: int) -> None:
    """Neither to the dropped lines, nor to the tail."""
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
    """None is lost in between, whenever counts are requested."""
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


NAMED: dict[str, Level] = {
    # before a colon
    "ERROR: x": "error",
    "Error: x": "error",
    "warning: x": "warning",
    "WARNING:root:x": "warning",
    "CRITICAL:a.b:x": "critical",
    "debug: x": "debug",
    "SEVERE: x": "error",
    "fatal: not a repository": "critical",
    "panic: runtime error: index out of range": "critical",
    "INFO: no ERROR: x": "info",
    # JSON
    '{"level":"error","msg":"x"}': "error",
    '{"severity":"WARNING"}': "warning",
    '{"levelname": "CRITICAL"}': "critical",
    '{"log.level": "debug"}': "debug",
    '{"level":60}': "critical",
    '{"level":50}': "error",
    '{"level":45}': "warning",
    '{"level":30}': "info",
    '{"level":20}': "debug",
    # logfmt
    'ts=1 level=error msg="a b"': "error",
    'time="2026-01-01" level="warning" msg=x': "warning",
    # syslog
    "<3>x": "error",
    "<7>x": "debug",
    "<12>x": "warning",
    "<30>error: x": "info",
    # sentences and other lines
    "no error found": "info",
    "ERROR x": "info",
    "I said: ERROR: x": "info",
    "errors: 0": "info",
    "the level=error is odd": "info",
    "a=1 b=2": "info",
    "level=loud": "info",
    '{"a": "error"}': "info",
    '{"level": true}': "info",
    '{"level": "loud"}': "info",
    '{"level": "error"': "info",
    '{"a":' * 2000: "info",
    "<3 hearts": "info",
    "": "info",
    "   ": "info",
}


@pytest.mark.parametrize(("line", "level"), NAMED.items())
def test_level(line: str, level: Level) -> None:
    """Four formats have a place for the level; a line without one is information."""
    assert level_of(line) == level


@given(st.text())
def test_any_line_has_a_level(line: str) -> None:
    """No line raises, and its beginning decides."""
    assert level_of(line) in {"debug", "info", "warning", "error", "critical"}
    assert level_of(f"ERROR: {line}") == "error"


@given(st.dictionaries(st.text(), st.none() | st.text() | st.integers()))
def test_json_has_the_level_of_its_key(entry: dict[str, object]) -> None:
    """Whatever else it contains."""
    line = json.dumps({"level": "error"} | {k: entry[k] for k in entry if k != "level"})
    assert level_of(line) == "error"


STEPS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 10_000)), max_size=200)


def passed(throttle: Throttle, count: int, now: float, size: int = 80) -> int:
    """Return how many of ``count`` lines pass."""
    return sum(throttle.allows(size, now) for _ in range(count))


def test_burst() -> None:
    """After a silence, and again after the next one."""
    throttle = Throttle(rate=10, burst=100)
    assert passed(throttle, 1000, now=5.0) == 100
    assert passed(throttle, 1000, now=15.0) == 100


def test_flood_passes_in_blocks() -> None:
    """A closed throttle opens for a second's worth at a time, not line by line."""
    throttle = Throttle(rate=10, burst=100)
    passed(throttle, 1000, now=0.0)
    assert [passed(throttle, 100, now=n / 10) for n in range(1, 21)] == [
        *([0] * 9 + [10]),
        *([0] * 9 + [10]),
    ]


def test_slow_writer_is_never_cut() -> None:
    """Below the rate no line is dropped."""
    throttle = Throttle(rate=10, burst=1)
    assert all(throttle.allows(80, now=n * 0.11) for n in range(1000))


def test_long_lines_cost_more() -> None:
    """Otherwise lines of 8 KiB fill the disk."""
    throttle = Throttle(rate=10, burst=100)
    assert passed(throttle, 1000, now=0.0, size=8192) == 12


def test_line_longer_than_everything_passes_when_there_is_room() -> None:
    """Otherwise it would be dropped forever."""
    throttle = Throttle(rate=1, burst=2)
    assert throttle.allows(8192, now=0.0)
    assert not throttle.allows(80, now=0.0)


def test_slow_rate_opens_again() -> None:
    """Even if a second's worth is less than a line."""
    throttle = Throttle(rate=0.1, burst=1)
    assert [throttle.allows(80, now=n) for n in (0.0, 1.0, 11.0)] == [True, False, True]


def test_clock_that_goes_back_gives_nothing() -> None:
    """The time may come from any clock."""
    throttle = Throttle(rate=10, burst=10)
    passed(throttle, 100, now=100.0)
    assert passed(throttle, 100, now=0.0) == 0
    assert passed(throttle, 100, now=100.5) == 0
    assert passed(throttle, 100, now=101.0) == 10


@given(STEPS, st.floats(0.1, 1000), st.floats(1, 1000))
def test_never_more_than_burst_and_rate(
    steps: list[tuple[float, int]], rate: float, burst: float
) -> None:
    """However the lines come, both in lines and in bytes."""
    throttle = Throttle(rate=rate, burst=burst)
    now, lines, cost = 0.0, 0, 0.0
    for wait, size in steps:
        now += wait
        if throttle.allows(size, now):
            lines += 1
            cost += min(burst, max(1.0, size / 1024))
    assert lines <= cost <= (burst + rate * now) * 1.000001


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (1, 0), (1, 0.5)])
def test_bad_settings(rate: float, burst: float) -> None:
    """No line would ever pass."""
    with pytest.raises(ValueError, match="rate must be positive and burst 1 or more"):
        Throttle(rate=rate, burst=burst)


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "clean.py", line 9, in <module>',
    "    main()",
    "    ~~~~^^",
    '  File "clean.py", line 5, in main',
    "    json.loads(line)",
]
ERROR = "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([*TRACEBACK, ERROR], ERROR),
        ([*TRACEBACK[-2:], ERROR], ERROR),
        ([*TRACEBACK, "KeyboardInterrupt"], "KeyboardInterrupt"),
        (["loading", *TRACEBACK, ERROR, "and more of its text"], ERROR),
        ([*TRACEBACK, "KeyError: 'a'", "", *TRACEBACK, ERROR], ERROR),
        ([], ""),
        (["done"], ""),
        (["usage: clean FILE", "  FILE is missing", "Error: usage"], ""),
        (["one", "two: three"], ""),
        ([*TRACEBACK, "(no class has such a name)"], ""),
    ],
)
def test_cause(lines: list[str], cause: str) -> None:
    """The last exception that no other text follows, if any (issue 11)."""
    assert cause_of(lines) == cause


def test_traceback_of_an_error() -> None:
    """Its end, as far as it was kept; anything after it is a note (issue 26)."""
    trace = ['  File "w.py", line 4, in f', "    return [m[9]]", "IndexError: no"]
    lines = ["before", *trace, "message 1, 3 bytes long"]
    assert traceback_of(lines, "IndexError: no") == ("before", *trace)
    assert traceback_of(lines, "IndexError") == ()
    assert traceback_of(["IndexError: no"], "IndexError: no") == ()


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("{}['date']", "KeyError: 'date'"),
        ("raise SystemError", "SystemError"),
        ("import json; json.loads('x')", ERROR),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError: maximum recursion depth"),
        ("raise SystemExit('bad usage')", ""),
    ],
)
def test_cause_of_this_python(code: str, cause: str) -> None:
    """Whatever this version adds to its tracebacks."""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    found = cause_of(ended.stderr.splitlines()[-10:])
    assert found.startswith(cause)
    assert bool(found) == bool(cause)


def line(**said: object) -> bytes:
    """Return a status line of a worker."""
    return json.dumps(said).encode() + b"\n"


SKIPPED = line(metric="skipped", add=3)
THREE = StatusUpdate(Counter(skipped=3))


ROWS = line(metric="rows_2", add=10)
HALF = line(progress=0.5)
LINES = [SKIPPED, ROWS, HALF, b"\n", b"x\n", line(alive=True)]


@given(st.lists(st.sampled_from(LINES)), st.data())
def test_counts_are_added_up(lines: list[bytes], data: st.DataObject) -> None:
    """However the lines are cut into reads."""
    wire, reader = b"".join(lines), StatusReader()
    counts: Counter[str] = Counter()
    progress = 0
    while wire:
        size = data.draw(st.integers(1, 50))
        told = reader.receive(wire[:size])
        counts += told.counts
        progress += told.progress is not None
        wire = wire[size:]
    expected = {"skipped": 3 * lines.count(SKIPPED), "rows_2": 10 * lines.count(ROWS)}
    assert counts == Counter(expected)
    assert bool(progress) == (HALF in lines)


@pytest.mark.parametrize("share", [0, 1, 0.25])
def test_progress_is_a_share(share: float) -> None:
    """The last one counts (issue 11)."""
    told = StatusReader().receive(HALF + line(progress=share))
    assert told == StatusUpdate(progress=share)


@pytest.mark.parametrize(
    "wire",
    [
        b"\n",
        b"!",
        b"{]\n",
        b"\xff\n",
        b"[" * 4000 + b"\n",
        b"3\n",
        line(metric="skipped"),
        line(metric="skipped", add="3"),
        line(metric="skipped", add=True),
        line(metric="skipped", add=0),
        line(metric="skipped", add=-3),
        line(metric="skipped", add=3.0),
        line(metric="skipped", add=10**13),
        line(metric="rows-read", add=3),
        line(metric="r" * 65, add=3),
        line(metric=3, add=3),
        line(progress=True),
        line(progress=-0.1),
        line(progress=1.1),
        line(progress=float("nan")),
        line(progress="0.5"),
        line(metric="skipped", add=3, more=" " * 5000),
    ],
    ids=repr,
)
def test_anything_else_is_a_sign_of_life_and_no_more(wire: bytes) -> None:
    """Later lines are understood again."""
    reader = StatusReader()
    assert reader.receive(wire) == StatusUpdate()
    assert reader.receive(b"\n" + SKIPPED) == THREE


def test_line_without_end_takes_no_memory() -> None:
    """It is dropped, up to its end."""
    reader = StatusReader()
    for _ in range(1000):
        assert reader.receive(b"x" * 4096) == StatusUpdate()
        assert len(reader._rest) <= 4096
    assert reader.receive(SKIPPED) == StatusUpdate()
    assert reader.receive(SKIPPED) == THREE
