"""Strategies for the property tests of the marker dialect."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from etlstage.protocol.marker import Markers
from etlstage.testing.strategies import MARKER_SETS, fragments, sendable

__all__ = (
    "PR399",
    "REPEATED",
    "WORDS",
    "garbage",
    "moderate",
    "reasons",
    "thorough",
    "unmeasured",
)

Test = TypeVar("Test", bound=Callable[..., Any])

_, _, WORDS, REPEATED, _, PR399, _ = MARKER_SETS

# Everything that runs shares two cores: no deadline, few examples.
moderate: Final = settings(deadline=None, max_examples=150)
thorough: Final = settings(deadline=None, max_examples=2000)


def unmeasured(test: Test) -> Test:
    """Have a test draw many examples, and exclude it from the slower coverage run."""
    marked: Test = pytest.mark.no_cover(thorough(test))
    return marked


@cache
def reasons(markers: Markers) -> st.SearchStrategy[str]:
    """Draw a reason for a refusal."""
    err = markers.err or b""
    letters = fragments(markers).filter(
        lambda part: part not in (b"\x80", b"\x85", b"\xff")
    )
    drawn = st.lists(letters, max_size=4).map(b"".join)
    said = drawn.filter(
        lambda text: sendable(text, markers) and (text + err).find(err) == len(text)
    )
    return said.map(bytes.decode)


@cache
def garbage(markers: Markers) -> st.SearchStrategy[bytes]:
    """Draw bytes of a peer that breaks the protocol now and then."""
    eom, eop, eob, bnc, err = markers
    err = err or b"\x15"
    replies = [eop, b"x" + eom + eop, b"x" + eom + b"yy" + eom + eop]
    parts = [eom, b"x" + eom, eob, bnc, b"x" + eom + eob, eom + eop, err, b"x" + err]
    return st.lists(
        st.sampled_from(replies) | st.sampled_from(parts) | fragments(markers),
        max_size=9,
    ).map(b"".join)
