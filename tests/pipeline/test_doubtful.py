"""A worker whose surplus reply shows only when it ends."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from etlstage.errors import RepliesDoubtful
from etlstage.messages import Position, StageKind
from etlstage.pipeline import Pipeline, WorkerSink, WorkerSource
from etlstage.pipeline.delivery.delivery import Bounds, Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.stage import OffsetPolicy, Stage
from etlstage.testing import (
    MemoryEpochs,
    MemoryEpochSink,
    MemorySink,
    MemorySource,
)
from tests.patience import HANG
from tests.supervisor.workers import cyclic

pytestmark = pytest.mark.process

STRAY = "printf '\\0'"
RANGES = """\
import json, sys
while line := sys.stdin.readline():
    asked = json.loads(line.strip("\\0"))
    numbers = range(asked["start"], asked["end"])
    print(*numbers, sep="\\n", end="\\n\\0", flush=True)
print(end="\\0")
"""


def shell(kind: StageKind, script: str) -> Stage:
    """Return a stage whose worker is a shell script."""
    return Stage(name=kind.value, kind=kind, worker=("sh", "-c", script))


def extraction() -> Source:
    """Return a source that reads four numbers, two at a time."""
    stage = replace(cyclic("ranges", 4), worker=(sys.executable, "-c", RANGES))
    offsets = OffsetPolicy(by="supervisor", start=0, step=2, end=4)
    return WorkerSource(stage, offsets=offsets)


class Goes(MemorySource):
    """A source that the next run resumes after the last position."""

    goes_on = True


@pytest.mark.parametrize(
    ("kind", "once"),
    [
        (StageKind.EXTRACT, False),
        (StageKind.EXTRACT, True),
        (StageKind.TRANSFORM, False),
        (StageKind.TRANSFORM, True),
        (StageKind.LOAD, False),  # the workers of an epoch end with it
    ],
)
async def test_last_position_is_not_recorded(
    tmp_path: Path, kind: StageKind, *, once: bool
) -> None:
    """What precedes it may not be loaded, so the next run reads it again (issue 14)."""
    source: Source = Goes([[b"0", b"1"], Position(2), [b"2", b"3"], Position(4)])
    sink: Sink = MemoryEpochSink(MemoryEpochs()) if once else MemorySink()
    stages = []
    if kind is StageKind.EXTRACT:
        source = extraction()
    elif kind is StageKind.TRANSFORM:
        each = f"while read -r line; do printf '%s\\n\\0' $line; done; {STRAY}"
        stages = [shell(kind, each)]
    else:
        sink = WorkerSink(shell(kind, f"while read -r line; do {STRAY}; done; {STRAY}"))
    delivery = Delivery(
        tmp_path, exactly_once=once, bounds=Bounds(messages=2, seconds=3600)
    )
    pipeline = Pipeline(
        name="p",
        source=source,
        stages=stages,
        sink=sink,
        delivery=delivery,
        flush_every=3600,
    )
    with anyio.fail_after(HANG):
        report = await pipeline.run()
    assert isinstance(report.error, RepliesDoubtful)
    record = CommitRecord.latest(tmp_path)
    assert (record.position, record.ended) == (2, False)
