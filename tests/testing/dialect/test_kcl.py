from __future__ import annotations

import pytest

from etlstage.protocol.base import Side
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.testing.dialect import kit_of

pytestmark = pytest.mark.core


def test_what_a_worker_reads() -> None:
    """Its life up to the first records."""
    first, second = kit_of(KclDialect()).raw([b"one"]).splitlines()

    assert first.startswith(b'{"action":"initialize"')
    assert b'"data":"b25l"' in second
    assert b'"records":[]' in kit_of(KclDialect()).raw([])


ASKED = b'\n{"action":"checkpoint","sequenceNumber":"1","subSequenceNumber":0}\n'
STATUS = b'\n{"action": "status", "responseFor": "processRecords"}\n'


def test_one_line_is_a_turn() -> None:
    """An action, or the answer to a checkpoint; and a checkpoint, or a status."""
    kit = kit_of(KclDialect())
    initialize, records = kit.raw([b"one"]).splitlines(keepends=True)
    assert kit.cut(Side.SUPERVISOR, initialize + records[:5]) == [
        initialize,
        records[:5],
    ]
    said = b"a print" + ASKED + STATUS + b"\n"
    assert kit.cut(Side.WORKER, said) == [b"a print" + ASKED, STATUS, b"\n"]


def test_recording_without_content() -> None:
    """Data, keys and prints are others of the same length; lines stay."""
    kit = kit_of(KclDialect())
    _, records = kit.raw([b"secret", b""]).splitlines(keepends=True)
    blank = kit.blank(Side.SUPERVISOR, records)
    assert len(blank) == len(records)
    assert b'"data":"AAAAAAAA","partitionKey":"xxxxxxxx","sequenceNumber":"1"' in blank
    assert b'"data":""' in blank
    assert kit.blank(Side.SUPERVISOR, records[:9]) == b""
    assert kit.blank(Side.WORKER, b"se\ncret" + ASKED) == b"xx\nxxxx" + ASKED
    assert kit.blank(Side.WORKER, b"secret", last=True) == b"xxxxxx"
