"""Frames by their names, each as it was written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.protocol.base import Side
from etlstage.protocol.cocaine import Version
from etlstage.protocol.cocaine.passing import Passed, Passing
from etlstage.testing.sessions import frames
from etlstage.testing.strategies import chunkings

pytestmark = pytest.mark.core

HELLO = b"\x93\x01\x00\x91\xa1u"
BEAT = b"\x93\x01\x00\x90"


@settings(max_examples=50, deadline=None)
@given(st.lists(frames(), max_size=5).map(b"".join).flatmap(chunkings))
def test_frame_comes_as_it_was_written(chunks: list[bytes]) -> None:
    """However it was cut; what is not complete is the rest (issue 15)."""
    passing = Passing(Version.ONE)
    found = [p for chunk in chunks for p in passing.read(Side.WORKER, chunk)]
    assert b"".join(p.raw for p in found) == b"".join(chunks)
    assert passing.rest(Side.WORKER) == b""
    assert all(isinstance(p.frame, tuple) for p in found)


def test_each_is_named() -> None:
    """With its session and what it carries, once it is complete (issue 15)."""
    passing = Passing(Version.AUTO)
    assert passing.words is None
    assert [p.name for p in passing.read(Side.WORKER, HELLO + BEAT + b"\x93\x02")] == [
        "handshake",
        "heartbeat",
    ]
    assert passing.words is Version.ONE.words
    assert list(passing.read(Side.WORKER, b"\x00\x91\xa1x")) == [
        Passed(
            b"\x93\x02\x00\x91\xa1x", (2, 0, (b"x",)), "chunk", 2, (b"x",), headers=()
        )
    ]


def test_what_is_no_frame_comes_as_it_is() -> None:
    """From no msgpack on, whatever comes (issue 15)."""
    passing = Passing(Version.ONE)
    assert list(passing.read(Side.WORKER, b"\x07\x93\x02")) == [Passed(b"\x07", 7)]
    assert list(passing.read(Side.WORKER, b"\x00\xc1")) == [Passed(b"\x93\x02\x00\xc1")]
    assert list(passing.read(Side.WORKER, BEAT)) == [Passed(BEAT)]


def test_rest_comes_once() -> None:
    """It is what makes no frame yet (issue 15)."""
    passing = Passing(Version.ONE)
    assert list(passing.read(Side.WORKER, BEAT[:2])) == []
    assert passing.rest(Side.WORKER) == BEAT[:2]
    assert passing.rest(Side.WORKER) == b""
