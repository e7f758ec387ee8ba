"""Rows of DataFrames in tests: the two ends of a pipeline, with Spark on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from etlstage.config.model import LoadKeys, SessionKeys, SparkSourceKeys
from etlstage.messages import Position
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.stage import ErrorBudget

if TYPE_CHECKING:
    from etlstage.spark import Session

__all__ = ("Rows",)


class Rows:
    """
    One Spark session for all tests that have rows; started with the first.

    Args:
        keys: What the pipeline says of its session; where it runs is not heeded.

    """

    def __init__(self, keys: SessionKeys) -> None:
        self._keys = replace(keys, master="local[2]", remote=None)
        self._session: Session | None = None

    async def start(self) -> Session:
        """Return the session, started."""
        from etlstage.config import build_spark

        session = self._session = self._session or build_spark.session(self._keys, None)
        await anyio.to_thread.run_sync(session.start)
        return session

    def stop(self) -> None:
        """Stop the session, if there is one."""
        if self._session is not None:
            self._session.stop()

    async def extracted(
        self, keys: SparkSourceKeys, name: str, rows: Sequence[bytes], folder: Path
    ) -> list[bytes]:
        """
        Return the messages that rows become.

        Args:
            keys: The DataFrame to read; what it is read from is replaced.
            name: Name of the stage.
            rows: JSON objects.
            folder: Where they may be written.

        """
        from etlstage.config import build_spark

        path = folder / "rows.json"
        path.write_bytes(b"".join(row.replace(b"\n", b" ") + b"\n" for row in rows))
        keys = replace(
            keys, format="json", path=str(path), table=None, options={}, spool=None
        )
        source = build_spark.source(keys, name, folder, await self.start())
        messages: list[bytes] = []
        async with aclosing(source.runs()) as runs:
            async for run in runs:
                messages += [] if isinstance(run, Position) else list(run)
        return messages

    async def loaded(
        self, keys: LoadKeys, name: str, messages: list[bytes], folder: Path
    ) -> tuple[list[bytes], list[DeadLetter]]:
        """
        Return the rows that messages become, and those that do not fit.

        Args:
            keys: The load stage; where it writes to is replaced.
            name: Its name.
            messages: What it loads.
            folder: Where it may write.

        """
        from etlstage.config import build_spark

        assert keys.spark is not None
        policy = replace(keys.on_error, then="dead_letter", budget=ErrorBudget())
        frame = replace(
            keys.spark,
            format="parquet",
            path=str(folder / "rows"),
            table=None,
            options={},
        )
        keys = replace(keys, spark=frame, written={**keys.written, "on_error": policy})
        letters = DeadLetters(folder / "state", pipeline="test")
        session = await self.start()
        sink = build_spark.sink(keys, name, folder, session, dead_letters=letters)
        async with sink:
            await sink.write(messages)
            await sink.finish()
        await letters.sync()
        try:
            rows = await anyio.to_thread.run_sync(_rows, session, str(folder / "rows"))
            return rows, list(letters.letters())
        finally:
            letters.close()


def _rows(session: Session, path: str) -> list[bytes]:
    from etlstage.spark import read_frame

    frame = read_frame(session.start(), format="parquet", path=path)
    whole = frame.selectExpr("to_json(struct(*)) as row")
    return [row["row"].encode() for row in whole.collect()]
