"""
How fast does Spark read journals as a stream, compared to files of Parquet?

The same messages of 100 bytes, in runs, are in a set of journals and in files; a query
of all available data writes either to Parquet. A stream is as fast as its batches; the
start of a query, with three Python processes for journals, is a row without a target.
"""

from __future__ import annotations

import shutil
import time
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.streaming.readwriter import DataStreamReader

from benchmarks.harness import Row, in_turn, messages
from benchmarks.spark import session
from etlstage.columns import Column
from etlstage.journal import Journals, Publisher, RunMessage
from etlstage.spark import register

RUN = 8192
FILES = 8
RUNS = 48
"""Runs in a file; the journals have as many in all."""
COUNT = FILES * RUNS * RUN


def measure() -> list[Row]:
    """Return messages per second."""
    run = messages(RUN)
    with TemporaryDirectory() as folder, session() as spark:
        place = Path(folder)
        _prepare(place, run)
        register(spark)
        ours = spark.readStream.format("etlstage-journal").schema("value binary")
        files = spark.readStream.format("parquet").schema("value binary")
        found = in_turn(
            {
                "ours": lambda: _rate(ours, place / "journals", place),
                "files": lambda: _rate(files, place / "files", place),
            },
            rounds=5,
        )
    against = "the same from Parquet files"
    return [
        Row(what, [*ours], against, [*theirs], "messages/s", target)
        for (what, target), ours, theirs in zip(
            (
                ("readStream from journals into Parquet, its batch", 0.5),
                ("the same, with the start of the query", 0),
            ),
            zip(*found["ours"], strict=True),
            zip(*found["files"], strict=True),
            strict=True,
        )
    ]


def _prepare(place: Path, run: list[bytes]) -> None:
    array = pa.array(run, pa.binary())
    column, batch = Column(array), pa.table([array], ["value"])
    content_type = "application/x-etlstage-run"
    with Journals.open(
        place / "journals", partitions=2, content_type=content_type
    ) as journals:
        turn = cycle(spec.name for spec in journals.select())
        publisher = Publisher(journals, mapping=lambda _: (next(turn), content_type))
        for _ in range(FILES * RUNS):
            publisher.publish_committed(RunMessage(column))
    (place / "files").mkdir()
    for number in range(FILES):
        with pq.ParquetWriter(
            place / "files" / f"{number}.parquet", batch.schema
        ) as to:
            for _ in range(RUNS):
                to.write_table(batch)


def _rate(reader: DataStreamReader, source: Path, place: Path) -> tuple[float, float]:
    started = time.perf_counter()
    query = (
        reader.load(str(source))
        .writeStream.option("checkpointLocation", str(place / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(place / "out"), format="parquet")
    )
    query.awaitTermination()
    spent = time.perf_counter() - started
    assert query.exception() is None
    (batch,) = (one for one in query.recentProgress if one["numInputRows"])
    assert batch["numInputRows"] == COUNT
    for name in ("checkpoint", "out"):
        shutil.rmtree(place / name)
    return COUNT * 1000 / batch["durationMs"]["triggerExecution"], COUNT / spent
