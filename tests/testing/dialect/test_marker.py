from __future__ import annotations

import pytest

from etlstage.protocol.base import Side
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.testing.dialect import kit_of as kit
from tests.protocol.marker.test_settings import COUNTING, ODD

pytestmark = pytest.mark.core


def test_raw_is_what_the_worker_reads() -> None:
    """A batch that the supervisor closes ends with EOB."""
    assert kit(ODD).raw([b"a", b"b"]) == b"a<m>b<m>\x17<m>"
    assert kit(ODD.fitted(batches=False, heartbeat=None)).raw([b"a"]) == b"a<m>"


def test_reply_too_many_may_be_that_to_a_full_batch() -> None:
    """A worker that counts messages itself replies to EOB, too."""
    batch = MarkerDialect(mode=Mode.BATCH_SUPERVISOR)
    assert kit(MarkerDialect()).unsolicited(b"\0") == "wrote 1 reply too many: <EOP>"
    assert kit(batch).unsolicited(b"\0").endswith("set dialect.eob_after_full: false")
    assert kit(COUNTING).unsolicited(b"\0") == "wrote 1 reply too many: <EOP>"


@pytest.mark.parametrize(
    ("dialect", "side", "data", "pieces"),
    [
        (MarkerDialect(), Side.SUPERVISOR, b"a\nb\nc", [b"a\n", b"b\n", b"c"]),
        (
            MarkerDialect(),
            Side.WORKER,
            b"a\n\0no\x15b\n",
            [b"a\n\0", b"no\x15", b"b\n"],
        ),
        (MarkerDialect(mode=Mode.PLAIN), Side.WORKER, b"a\nb\n", [b"a\n", b"b\n", b""]),
        (
            MarkerDialect(mode=Mode.BATCH_WORKER),
            Side.WORKER,
            b"\x05\x05a\n\0",
            [b"\x05", b"\x05", b"a\n\0", b""],
        ),
        (
            MarkerDialect(mode=Mode.BATCH_WORKER),
            Side.SUPERVISOR,
            b"a\n\x17",
            [b"a\n", b"\x17", b""],
        ),
        (
            MarkerDialect(mode=Mode.BATCH_SUPERVISOR),
            Side.SUPERVISOR,
            b"a\nb\n\x17c\n",
            [b"a\nb\n\x17", b"c\n"],
        ),
        (ODD, Side.SUPERVISOR, b"a<m>\x17<m>b", [b"a<m>\x17<m>", b"b"]),
        (
            MarkerDialect(markers=Markers(eop=b"\n", err=None)),
            Side.WORKER,
            b"a\nb\x15",
            [b"a\n", b"b\x15"],
        ),
    ],
)
def test_conversation_is_cut_into_requests_and_replies(
    dialect: MarkerDialect, side: Side, data: bytes, pieces: list[bytes]
) -> None:
    """A request is a message, or a whole batch; asking for more is a reply."""
    assert kit(dialect).cut(side, data) == pieces


def test_bytes_are_shown_with_the_markers_of_the_stage() -> None:
    """Authors must see where their own markers are."""
    dialect = MarkerDialect(markers=Markers(eop=b"end"))
    assert kit(dialect).shown(b"one\nend") == "one<EOM><EOP>"
