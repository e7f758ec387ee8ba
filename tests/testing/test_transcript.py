from __future__ import annotations

import pytest

from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.transcript import BYTEWISE, Channel, Entry, Transcript, cut

pytestmark = pytest.mark.core

IN, OUT, EVENT = Channel.STDIN, Channel.STDOUT, Channel.EVENT


def shown(*entries: tuple[Channel, bytes]) -> list[str]:
    """Return the lines that people are shown, without their times."""
    said = Transcript(Entry(channel, data, 0.5) for channel, data in entries)
    lines = said.shown(MarkerDialect()).splitlines()
    return [line.removeprefix("     0.500  ") for line in lines]


def test_what_goes_one_way_is_a_line() -> None:
    """Cuts are shown in what was written, but not in what was read."""
    assert shown(
        (IN, b"o"), (IN, b"ne\n"), (OUT, b"O"), (OUT, b"NE\n\0"), (IN, b"two\n")
    ) == ["stdin   o | ne<EOM>", "stdout  ONE<EOM><EOP>", "stdin   two<EOM>"]


def test_each_event_is_a_line() -> None:
    """Two events in a row are not joined (issue 12)."""
    assert shown((EVENT, b"stdin was closed"), (EVENT, b"exited with status 0")) == [
        "event   stdin was closed",
        "event   exited with status 0",
    ]


def test_much_is_shown_from_both_ends() -> None:
    """Many lines or bytes are cut in their middle; pieces are counted (issue 12)."""
    lines = shown(*((IN, b"a\n"), (OUT, b"A\n\0")) * 50)
    assert len(lines) == 31
    assert lines[15].strip() == "... 70 lines ..."
    (line,) = shown((OUT, b"a" + b"x" * 1000 + b"z"))
    assert line.startswith("stdout  axx")
    assert " ... 762 bytes ... " in line
    assert line.endswith("xxz")
    (line,) = shown(*((IN, b"x"),) * 41)
    assert line == f"stdin   {'x' * 41} (in 41 pieces)"


def test_bytes_are_cut_where_it_is_asked_for() -> None:
    """Places outside are ignored; ``offset`` is subtracted from each (issue 12)."""
    assert [*cut(b"abc", (0, 1, 3, 9))] == [b"a", b"bc"]
    assert [*cut(b"abc", BYTEWISE)] == [b"a", b"b", b"c"]
    assert [*cut(b"abc", (5,), offset=3)] == [b"ab", b"c"]
    assert [*cut(b"abc", ())] == [b"abc"]
