"""Frames of dialect ``cocaine``, as Hypothesis draws them."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from etlstage.protocol.cocaine import CocaineVersion
from etlstage.protocol.cocaine.frame import Encoding, Packer
from etlstage.testing.sessions import chunks

__all__ = ("frames",)

_NUMBERS: Final = (0, 1, 2, 3, 127, 128, 65536, 2**32)


def frames(version: CocaineVersion = CocaineVersion.ONE) -> st.SearchStrategy[bytes]:
    """Draw a frame in a version's layout; it need not be valid, or expected."""
    words = version.words
    assert words is not None, "auto is what a worker begins with"
    number, kind = st.sampled_from(_NUMBERS), st.integers(0, 7)
    order = (number, kind) if words.channel_first else (kind, number)
    pair = st.tuples(st.integers(0, 50), st.integers(-20, 300))
    argument = chunks() | st.integers(-20, 300) | pair
    arguments = st.lists(argument, max_size=3).map(tuple)
    headers = st.lists(st.integers(1, 90), max_size=2).map(tuple)
    frame = st.tuples(*order, arguments) | st.tuples(*order, arguments, headers)
    return frame.map(Packer(Encoding.RAW).pack)
