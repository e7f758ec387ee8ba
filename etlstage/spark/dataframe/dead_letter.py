"""
The dead letters of a run as rows, beside their files.

The files are authoritative and are written first; the rows are a copy for queries. Rows
are appended, some thousand letters at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

import anyio.to_thread
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from etlstage.errors import SinkFailed
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.interfaces import DeadLetterSink
from etlstage.spark.dataframe.destination import Destination
from etlstage.spark.errors import explain
from etlstage.spark.session.job import run_job
from etlstage.spark.session.session import Session

__all__ = ("COLUMNS", "DeadLetterFrame")

COLUMNS: Final = (
    "id string, time timestamp, pipeline string, run string, stage string, place long,"
    " message binary, error string, kind string, attempts array<struct<worker: string,"
    " pid: int, error: string, story: array<string>, stderr: array<string>>>,"
    " config string"
)
"""Columns of a letter's row; ``place`` is counted from 1, ``config`` is JSON."""

_CHUNK: Final = 10_000
_CHUNK_BYTES: Final = 32 << 20


class DeadLetterFrame(DeadLetterSink):
    """
    Appends dead letters to whatever Spark can write.

    Args:
        spark: The session; it is not stopped.
        destination: Where the rows go, and how; they are appended in any mode.

    """

    def __init__(
        self,
        spark: SparkSession | Session,
        destination: Destination,
    ) -> None:
        self._session = Session.of(spark)
        self._destination = replace(destination, mode="append")

    async def write(self, letters: Iterator[DeadLetter]) -> None:
        """Append the letters; raises SinkFailed if Spark can't write them."""
        try:
            spark = await anyio.to_thread.run_sync(self._session.start)
            await run_job(spark, lambda: self._append(spark, letters))
        except Exception as error:
            raise SinkFailed(
                f"can't write the dead letters to {self._destination}: "
                f"{explain(error, self._session.log_path)}",
                stage="dead_letters",
            ) from error

    def _append(self, spark: SparkSession, letters: Iterator[DeadLetter]) -> None:
        first = True
        columns = StructType.fromDDL(COLUMNS)
        assert isinstance(columns, StructType)
        schema = to_arrow_schema(columns, timezone="UTC")
        for chunk in _chunks(letters):
            made = [_row(letter, columns.names) for letter in chunk]
            table = pa.Table.from_pylist(made, schema)
            rows = spark.createDataFrame(table, columns).coalesce(1)
            self._destination.write(rows, first=first, last=True)
            first = False


def _chunks(letters: Iterator[DeadLetter]) -> Iterator[list[DeadLetter]]:
    chunk: list[DeadLetter] = []
    size = 0
    for letter in letters:
        chunk.append(letter)
        size += len(letter.message)
        if len(chunk) >= _CHUNK or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _row(letter: DeadLetter, names: Sequence[str]) -> dict[str, object]:
    return {
        **{name: getattr(letter, name) for name in names},
        "place": letter.place + 1,
        "time": datetime.fromisoformat(letter.time),
        "attempts": [attempt._asdict() for attempt in letter.attempts],
        "config": json.dumps(letter.config),
    }
