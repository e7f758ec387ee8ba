from __future__ import annotations

import pytest

from etlstage.protocol.base import Side
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.testing.dialect import kit_of

pytestmark = pytest.mark.core


def test_what_a_worker_reads() -> None:
    """It is initialized, and given the first records."""
    first, second = kit_of(KclDialect()).raw([b"one"]).splitlines()

    assert first.startswith(b'{"action":"initialize"')
    assert b'"data":"b25l"' in second
    assert b'"records":[]' in kit_of(KclDialect()).raw([])


ASKED = b'\n{"action":"checkpoint","sequenceNumber":"1","subSequenceNumber":0}\n'
STATUS = b'\n{"action": "status", "responseFor": "processRecords"}\n'


def test_one_line_is_a_turn() -> None:
    """Lines are actions or answers to a worker, checkpoints or statuses from it."""
    kit = kit_of(KclDialect())
    initialize, records = kit.raw([b"one"]).splitlines(keepends=True)
    assert kit.cut(Side.SUPERVISOR, initialize + records[:5]) == [
        initialize,
        records[:5],
    ]
    said = b"a print" + ASKED + STATUS + b"\n"
    assert kit.cut(Side.WORKER, said) == [b"a print" + ASKED, STATUS, b"\n"]
