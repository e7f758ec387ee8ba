"""Frames by name: each with its raw bytes, and as it is shown to people."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.protocol.base import Limits, Side
from etlstage.protocol.cocaine import CocaineVersion
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import (
    Added,
    Alive,
    Ended,
    Farewell,
    Opened,
    Ready,
)
from etlstage.testing.dialect import kit_of
from etlstage.testing.dialect.cocaine import CocaineReader, PassedFrame, Passing
from etlstage.testing.strategies import chunkings
from tests.protocol.cocaine.drawn import frames

pytestmark = pytest.mark.core

OURS, THEIRS = Side.SUPERVISOR, Side.WORKER
HELLO = b"\x93\x01\x00\x91\xa1u"
BEAT = b"\x93\x01\x00\x90"


@settings(max_examples=50, deadline=None)
@given(st.lists(frames(), max_size=5).map(b"".join).flatmap(chunkings))
def test_frame_comes_as_it_was_written(chunks: list[bytes]) -> None:
    """Its raw bytes are kept, however they are cut (issue 15)."""
    passing = Passing(CocaineVersion.ONE)
    found = [p for chunk in chunks for p in passing.read(Side.WORKER, chunk)]
    assert b"".join(p.raw for p in found) == b"".join(chunks)
    assert passing.rest(Side.WORKER) == b""
    assert all(isinstance(p.frame, tuple) for p in found)


def test_each_is_named() -> None:
    """It has its session and its arguments, once it is complete (issue 15)."""
    passing = Passing(CocaineVersion.AUTO)
    assert passing.words is None
    assert [p.name for p in passing.read(Side.WORKER, HELLO + BEAT + b"\x93\x02")] == [
        "handshake",
        "heartbeat",
    ]
    assert passing.words is CocaineVersion.ONE.words
    assert list(passing.read(Side.WORKER, b"\x00\x91\xa1x")) == [
        PassedFrame(
            b"\x93\x02\x00\x91\xa1x", (2, 0, (b"x",)), "chunk", 2, (b"x",), headers=()
        )
    ]


def test_what_is_no_frame_comes_as_it_is() -> None:
    """After bytes that are no msgpack, nothing is parsed any more (issue 15)."""
    passing = Passing(CocaineVersion.ONE)
    assert list(passing.read(Side.WORKER, b"\x07\x93\x02")) == [PassedFrame(b"\x07", 7)]
    assert list(passing.read(Side.WORKER, b"\x00\xc1")) == [
        PassedFrame(b"\x93\x02\x00\xc1")
    ]
    assert list(passing.read(Side.WORKER, BEAT)) == [PassedFrame(BEAT)]


def test_rest_comes_once() -> None:
    """The rest is the beginning of an incomplete frame (issue 15)."""
    passing = Passing(CocaineVersion.ONE)
    assert list(passing.read(Side.WORKER, BEAT[:2])) == []
    assert passing.rest(Side.WORKER) == BEAT[:2]
    assert passing.rest(Side.WORKER) == b""


@pytest.mark.parametrize("version", [v for v in CocaineVersion if v.words is not None])
@pytest.mark.parametrize("known", [True, False])
def test_each_frame_has_its_name_and_what_it_carries(
    version: CocaineVersion, known: bool
) -> None:
    """The version need not be known in advance (issue 15)."""
    told = version if known else CocaineVersion.AUTO
    reader = kit_of(CocaineDialect(protocol=told)).reader()
    assert reader is not None
    dialect = CocaineDialect(protocol=version)
    ours, theirs = (dialect.open(side, Limits()) for side in (OURS, THEIRS))
    seen = []

    def pass_on(side: Side) -> None:
        here, there = (ours, theirs) if side is OURS else (theirs, ours)
        data = b"".join(here.data_to_send())
        there.receive_data(data, 0.0)
        seen.extend(reader.read(side, data[:7]) + reader.read(side, data[7:]))

    theirs.send(Ready("u"))
    pass_on(THEIRS)
    headers = ((b"trace_id", b"7"),)
    ours.send(Opened(1, [b"one", b""], each=False, event="echo", headers=headers))
    ours.send(Opened(2, [], each=False, event="echo"))
    pass_on(OURS)
    theirs.send(Ended(1, [(b"x" * 50,)]))
    theirs.send(Ended.refused(2, -3, "no", 42))
    theirs.send(Alive())
    pass_on(THEIRS)
    ours.send(Farewell(1, "bye"))
    pass_on(OURS)

    one = 1 if version is CocaineVersion.ZERO else 2
    half = "x" * 24
    pairs = version is CocaineVersion.ONE
    assert seen == [
        "handshake 'u'",
        "heartbeat",
        "heartbeat",
        f"invoke {one} 'echo' headers [[False, 'trace_id', '7']]",
        f"chunk {one} 'one'",
        f"chunk {one} ''",
        f"choke {one}",
        f"invoke {one + 1} 'echo'",
        f"choke {one + 1}",
        "heartbeat",
        f"chunk {one} '{half}'... 50 bytes ...'{half}'",
        f"choke {one}",
        f"error {one + 1} {'[42, -3]' if pairs else -3} 'no'",
        *([] if pairs else [f"choke {one + 1}"]),
        "heartbeat",
        "terminate 1 'bye'",
    ]


def test_what_is_no_frame_is_shown_as_it_is() -> None:
    """So is everything after bytes that are no msgpack (issue 15)."""
    reader = CocaineReader(CocaineVersion.ONE)
    assert reader.read(THEIRS, b"\x93\x02\x09\x90\x93\x01\x07\x90") == [
        "frame 9 for 2",
        "control frame 7",
    ]
    assert reader.read(THEIRS, b"\x01\x92\x01\x02") == [
        "not a frame: 1",
        "not a frame: [1, 2]",
    ]
    assert reader.read(THEIRS, b"\xc1 what") == [r"not a frame: '\xc1 what'"]
    assert reader.read(THEIRS, b"is it") == ["not a frame: 'is it'"]
    assert reader.read(OURS, b"\x93\x01\x00\x90") == ["handshake"]


def test_raw_is_a_session_as_a_worker_reads_it() -> None:
    """Any messages and any event make a session."""
    dialect = CocaineDialect(protocol=CocaineVersion.ZERO, event="echo")

    raw = kit_of(dialect).raw([b"one", b"two"])

    assert raw.hex(" ") == (
        "93 03 01 91 a4 65 63 68 6f 93 04 01 91 a3 6f 6e 65"
        " 93 04 01 91 a3 74 77 6f 93 06 01 90"
    )
    assert (
        kit_of(CocaineDialect()).raw([]).hex() == "93020091a97472616e73666f726d93020290"
    )


@pytest.mark.parametrize("version", CocaineVersion)
def test_what_was_sent_is_cut_behind_each_session(version: CocaineVersion) -> None:
    """Exchanges are listed by session, without what varies (issue 15)."""
    dialect = CocaineDialect(protocol=version)
    ours, theirs = (dialect.open(side, Limits()) for side in Side)
    theirs.send(Ready("u"))
    said = b"".join(theirs.data_to_send())
    ours.receive_data(said, 0.0)
    ours.send(Opened(1, [b"a"], each=False, event="echo"))
    ours.send(Opened(2, [b"b"], each=False, event="echo"))
    told = b"".join(ours.data_to_send())
    theirs.receive_data(told, 0.0)
    theirs.send(Added(1, [b"A"]))
    theirs.send(Ended.refused(2, 7, "no", 42))
    theirs.send(Ended(1, [(b"Z",)]))
    said += b"".join(theirs.data_to_send())

    kit = kit_of(dialect)
    *pieces, rest = kit.cut(Side.WORKER, said + b"\x93")
    assert (len(pieces), rest, b"".join(pieces)) == (2, b"\x93", said)
    one, two = kit.exchanges(Side.WORKER, said)
    assert [b"A" in one, b"Z" in one, b"no" in two] == [True] * 3
    assert b"u" not in one + two
    assert len(kit.cut(Side.SUPERVISOR, told)) == 3
    assert len(kit.exchanges(Side.SUPERVISOR, told)) == 2
