"""The code that a task of a read runs, without Spark."""

from __future__ import annotations

import pytest

from etlstage.errors import SourceFailed
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.spark.datasource.reader import Range, extracted
from etlstage.stage import OffsetPolicy, Stage
from tests.planted import AGAIN

pytestmark = pytest.mark.process


def test_replies_that_are_doubtful_fail_the_task() -> None:
    """The rows may belong to other offsets, which was noticed too late (issue 10)."""
    stage = Stage(
        name="e",
        kind=StageKind.EXTRACT,
        worker=AGAIN,
        dialect=MarkerDialect(mode=Mode.CYCLIC),
    )
    policy = OffsetPolicy(by="supervisor", start=0, end=3, step=1)
    with pytest.raises(
        SourceFailed,
        match=r"e: results of 1 message may be mismatched: .*, partition 0",
    ):
        list(extracted(stage, Range(0, 1, 0, 3), policy))
