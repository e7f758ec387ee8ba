from __future__ import annotations

import pytest

from etlstage.protocol.kcl.settings import KclDialect
from etlstage.testing.dialect import kit_of

pytestmark = pytest.mark.core


def test_what_a_worker_reads() -> None:
    """Its life up to the first records."""
    first, second = kit_of(KclDialect()).raw([b"one"]).splitlines()

    assert first.startswith(b'{"action":"initialize"')
    assert b'"data":"b25l"' in second
    assert b'"records":[]' in kit_of(KclDialect()).raw([])
