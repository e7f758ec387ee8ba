"""What the property tests of the marker dialect draw from."""

from __future__ import annotations

from itertools import cycle
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st

from etlstage.protocol.marker import Markers

__all__ = (
    "MARKER_SETS",
    "PR399",
    "REPEATED",
    "WORDS",
    "cut",
    "fragments",
    "garbage",
    "messages",
    "moderate",
    "reasons",
    "sendable",
    "sizes",
    "thorough",
)

WORDS: Final = Markers(b"EOM", b"EOP", b"EOB", b"BNC", b"ERR")
REPEATED: Final = Markers(b"\n\n", b"--", b"==", b"..", b"!!")
PR399: Final = Markers(b"\n", b"\0", b"EOB", b"BNC", None)

MARKER_SETS: Final = (
    Markers(),
    Markers(eop=b"\n"),
    WORDS,
    REPEATED,
    Markers(b"\n\n", b"\n\n", b"==", b"..", b"!!"),
    PR399,
    Markers(b"aab", b"cc", b"xyx", b"ded", b"fgf"),
)
"""One byte, words, the same byte twice, ends as it begins; ``eop == eom`` or not; with
ERR or without."""

# Two cores are shared by everything that runs: no deadline, few examples.
moderate: Final = settings(deadline=None, max_examples=150)
thorough: Final = settings(deadline=None, max_examples=2000)

sizes: Final = st.lists(st.integers(1, 5), min_size=1, max_size=6)
"""Lengths of reads, in bytes, used in turns."""


def cut(data: bytes, lengths: list[int]) -> list[bytes]:
    """Return ``data`` in reads of ``lengths``, over and over."""
    chunks = []
    turns = cycle(lengths)
    while data:
        length = next(turns)
        chunks.append(data[:length])
        data = data[length:]
    return chunks


def fragments(markers: Markers) -> st.SearchStrategy[bytes]:
    """Draw beginnings and ends of markers, and other bytes."""
    named = markers.named.values()
    parts = {marker[:n] for marker in named for n in range(1, len(marker))}
    parts |= {marker[n:] for marker in named for n in range(1, len(marker))}
    return st.sampled_from([b"x", b"yy", b"zzzzz", b"\xc3\xa9", *sorted(parts)])


def sendable(message: bytes, markers: Markers) -> bool:
    """Return whether no marker begins in ``message``, its EOM behind it."""
    framed = message + markers.eom
    named = markers.named.values()
    return not any(0 <= framed.find(marker) < len(message) for marker in named)


def messages(markers: Markers) -> st.SearchStrategy[bytes]:
    """Draw messages that look as much like markers as they may."""
    joined = st.lists(fragments(markers), max_size=4).map(b"".join)
    return joined.filter(lambda message: sendable(message, markers))


def reasons(markers: Markers) -> st.SearchStrategy[str]:
    """Draw why something is refused."""
    err = markers.err or b""
    drawn = messages(markers).filter(lambda said: (said + err).find(err) == len(said))
    return drawn.map(bytes.decode)


def garbage(markers: Markers) -> st.SearchStrategy[bytes]:
    """Draw what a peer that loses its way now and then might write."""
    eom, eop, eob, bnc, err = markers
    err = err or b"\x15"
    replies = [eop, b"x" + eom + eop, b"x" + eom + b"yy" + eom + eop]
    parts = [eom, b"x" + eom, eob, bnc, b"x" + eom + eob, eom + eop, err, b"x" + err]
    return st.lists(
        st.sampled_from(replies) | st.sampled_from(parts) | fragments(markers),
        max_size=9,
    ).map(b"".join)
