"""What a person is shown of frames."""

from __future__ import annotations

import pytest

from etlstage.protocol.base import Limits, Side
from etlstage.protocol.cocaine import Version
from etlstage.protocol.cocaine.reading import FrameReader
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import (
    Alive,
    Ended,
    Farewell,
    Opened,
    Ready,
)

pytestmark = pytest.mark.core

OURS, THEIRS = Side.SUPERVISOR, Side.WORKER


@pytest.mark.parametrize("version", [v for v in Version if v.words is not None])
@pytest.mark.parametrize("known", [True, False])
def test_each_frame_has_its_name_and_what_it_carries(
    version: Version, known: bool
) -> None:
    """In any version, which need not be known before (issue 15)."""
    told = version if known else Version.AUTO
    reader = CocaineDialect(protocol=told).reader()
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

    one = 1 if version is Version.ZERO else 2
    half = "x" * 24
    pairs = version is Version.ONE
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
    """And all behind it that is no msgpack either (issue 15)."""
    reader = FrameReader(Version.ONE)
    assert reader.read(THEIRS, b"\x93\x02\x09\x90\x93\x01\x07\x90") == [
        "frame 9 for 2",
        "control frame 7",
    ]
    assert reader.read(THEIRS, b"\x01\x92\x01\x02") == [
        "no frame: 1",
        "no frame: [1, 2]",
    ]
    assert reader.read(THEIRS, b"\xc1 what") == [r"no frame: '\xc1 what'"]
    assert reader.read(THEIRS, b"is it") == ["no frame: 'is it'"]
    assert reader.read(OURS, b"\x93\x01\x00\x90") == ["handshake"]
