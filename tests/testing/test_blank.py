"""What is left of a conversation of which nobody is to know what was said."""

from __future__ import annotations

import pytest

from etlstage.messages import StageKind
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.dialect import kit_of
from etlstage.testing.recording.blank import Blank
from etlstage.testing.strategies import MARKER_SETS, sendable
from etlstage.testing.transcript import Channel, Entry

pytestmark = pytest.mark.core


class Notebook:
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ended: list[tuple[int | None, bool]] = []

    def add(self, entry: Entry, /) -> None:
        """Note it."""
        self.entries.append(entry)

    def end(self, exit_: int | None, /, *, stopped: bool) -> None:
        """Note the end."""
        self.ended.append((exit_, stopped))


def blank(
    *entries: Entry,
    kind: StageKind = StageKind.TRANSFORM,
    markers: Markers | None = None,
) -> Notebook:
    """Return what is left of a conversation."""
    notes = Notebook()
    left = Blank(notes, MarkerDialect(markers=markers or Markers()), kind)
    for entry in entries:
        left.add(entry)
    left.end(0, stopped=False)
    assert notes.ended == [(0, False)]
    return notes


def test_lengths_and_bounds_stay() -> None:
    """And when each read was; of a refusal its length is left (issue 12)."""
    notes = blank(
        Entry(Channel.STDIN, b"se", 0.1),
        Entry(Channel.STDIN, b"cret\n\x15\n", 0.2, 2),
        Entry(Channel.STDERR, b"a secret\nis known", 0.3),
        Entry(Channel.STDOUT, b"SECRET\n\0no secret\x15", 0.4),
        Entry(Channel.STDIN, b"", 0.5),
    )
    assert notes.entries == [
        Entry(Channel.STDIN, b"xx", 0.1),
        Entry(Channel.STDIN, b"xxxx\nx\n", 0.2, 2),
        Entry(Channel.STDERR, b"xxxxxxxx\nxxxxxxxx", 0.3),
        Entry(Channel.STDOUT, b"xxxxxx\n\0xxxxxxxxx\x15", 0.4),
        Entry(Channel.STDIN, b"", 0.5),
    ]


def test_what_is_asked_of_an_extraction_stays() -> None:
    """Without it nothing could be played (issue 12)."""
    entries = blank(
        Entry(Channel.STDIN, b'{"start": 0}\n'),
        Entry(Channel.STDOUT, b"secret\n\0"),
        kind=StageKind.EXTRACT,
    ).entries
    assert [entry.data for entry in entries] == [b'{"start": 0}\n', b"xxxxxx\n\0"]


def test_what_may_be_a_marker_waits() -> None:
    """What comes meanwhile elsewhere, too; at the end it was none (issue 12)."""
    notes = Notebook()
    left = Blank(notes, MarkerDialect(markers=MARKER_SETS[2]), StageKind.TRANSFORM)
    left.add(Entry(Channel.STDIN, b"aE"))
    left.add(Entry(Channel.STDERR, b"b\n"))
    assert notes.entries == []
    left.add(Entry(Channel.STDIN, b"OMc"))
    left.add(Entry(Channel.STDIN, b"EO"))
    assert [entry.data for entry in notes.entries] == [b"xE", b"x\n", b"OMx"]
    left.end(None, stopped=True)
    assert [entry.data for entry in notes.entries[3:]] == [b"xx"]
    assert notes.ended == [(None, True)]


@pytest.mark.parametrize("markers", MARKER_SETS, ids=repr)
def test_nothing_is_left_but_markers(markers: Markers) -> None:
    """Wherever what is written is cut (issue 12)."""
    dialect = MarkerDialect(markers=markers)
    drawn = [b"", b"E", b"secret", b"\x80 EO", b"\x15"]
    said = [message for message in drawn if sendable(message, markers)]
    raw = kit_of(dialect).raw(said)
    filler = b"-" if b"x" in b"".join(markers.named.values()) else b"x"
    wanted = kit_of(dialect).raw([filler * len(message) for message in said])
    for cut in range(1, len(raw)):
        reads = [Entry(Channel.STDIN, part) for part in (raw[:cut], raw[cut:])]
        left = [entry.data for entry in blank(*reads, markers=markers).entries]
        assert left == [wanted[:cut], wanted[cut:]]
