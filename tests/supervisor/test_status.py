"""What workers tell beside their replies."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.supervisor.status import StatusReader


def line(**said: object) -> bytes:
    """Return a line that a worker may write."""
    return json.dumps(said).encode() + b"\n"


SKIPPED = line(metric="skipped", add=3)


@given(st.lists(st.sampled_from([SKIPPED, b"\n", b"x\n", line(alive=True)])), st.data())
def test_skipped_messages_are_added_up(lines: list[bytes], data: st.DataObject) -> None:
    """However the lines are cut into reads."""
    wire, reader, skipped = b"".join(lines), StatusReader(), 0
    while wire:
        count = data.draw(st.integers(1, 50))
        skipped += reader.receive(wire[:count])
        wire = wire[count:]
    assert skipped == 3 * lines.count(SKIPPED)


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
        line(metric="rows", add=3),
        line(metric="skipped", add=3, more=" " * 5000),
    ],
    ids=repr,
)
def test_anything_else_is_a_sign_of_life_and_no_more(wire: bytes) -> None:
    """And what comes behind it is understood again."""
    reader = StatusReader()
    assert reader.receive(wire) == 0
    assert reader.receive(b"\n" + SKIPPED) == 3


def test_line_without_end_takes_no_memory() -> None:
    """It is dropped, up to its end."""
    reader = StatusReader()
    for _ in range(1000):
        assert reader.receive(b"x" * 4096) == 0
        assert len(reader._rest) <= 4096
    assert reader.receive(SKIPPED) == 0
    assert reader.receive(SKIPPED) == 3
