"""What workers tell beside their replies."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.supervisor.status import StatusReader, Told


def line(**said: object) -> bytes:
    """Return a line that a worker may write."""
    return json.dumps(said).encode() + b"\n"


SKIPPED = line(metric="skipped", add=3)
THREE = Told(Counter(skipped=3))


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
    assert told == Told(progress=share)


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
    """And what comes behind it is understood again."""
    reader = StatusReader()
    assert reader.receive(wire) == Told()
    assert reader.receive(b"\n" + SKIPPED) == THREE


def test_line_without_end_takes_no_memory() -> None:
    """It is dropped, up to its end."""
    reader = StatusReader()
    for _ in range(1000):
        assert reader.receive(b"x" * 4096) == Told()
        assert len(reader._rest) <= 4096
    assert reader.receive(SKIPPED) == Told()
    assert reader.receive(SKIPPED) == THREE
