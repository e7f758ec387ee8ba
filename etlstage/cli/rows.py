"""Rows in tests: the two ends of a pipeline, with Spark on this machine if it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import anyio.to_thread

from etlstage.config.end import Site
from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
from etlstage.config.variant import lenient
from etlstage.messages import Position
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters

__all__ = ("RowEnds",)


class RowEnds:
    """
    One Spark session for all tests that have rows; started with the first.

    Args:
        keys: The pipeline; where its session runs is not heeded.

    """

    def __init__(self, keys: PipelineKeys) -> None:
        session = replace(keys.spark, master="local[2]", remote=None)
        self._keys = replace(keys, engine="local", state=None, spark=session)
        self._site: Site | None = None

    async def start(self) -> None:
        """Start the session, if an end needs one: that counts for no test's time."""
        ends = self._keys.extract.end, self._keys.load.end
        if any(end.rows and end.needs_spark for end in ends):
            site = self._at(Path.cwd())
            await anyio.to_thread.run_sync(lambda: site.session().start())

    def stop(self) -> None:
        """Stop the session, if there is one."""
        if self._site is not None and self._site.shared is not None:
            self._site.shared.stop()

    async def extracted(
        self, keys: ExtractKeys, rows: Sequence[bytes], folder: Path
    ) -> list[bytes]:
        """
        Return the messages that rows become.

        Args:
            keys: The extract stage; what it reads from is replaced.
            rows: JSON objects.
            folder: Where they may be written.

        """
        path = folder / "rows.json"
        path.write_bytes(b"".join(row.replace(b"\n", b" ") + b"\n" for row in rows))
        source = keys.end.reading(path).source(keys, self._at(folder))
        messages: list[bytes] = []
        async with aclosing(source.runs()) as runs:
            async for run in runs:
                messages += [] if isinstance(run, Position) else list(run)
        return messages

    async def loaded(
        self, keys: LoadKeys, messages: list[bytes], folder: Path
    ) -> tuple[list[bytes], list[DeadLetter]]:
        """
        Return the rows that messages become, and those that do not fit.

        Args:
            keys: The load stage; where it writes to is replaced.
            messages: What it loads.
            folder: Where it may write.

        """
        end = keys.end.writing(folder)
        keys = replace(lenient(keys), end=end)
        letters = DeadLetters(folder / "state", pipeline="test")
        site = self._at(folder, letters)
        async with end.sink(keys, site) as sink:
            await sink.write(messages)
            await sink.finish()
        await letters.sync()
        try:
            rows = await anyio.to_thread.run_sync(end.rows_in, folder, site)
            return rows, list(letters.letters())
        finally:
            letters.close()

    def _at(self, folder: Path, letters: DeadLetters | None = None) -> Site:
        """Return what an end is given; all have one session."""
        letters = letters or DeadLetters(folder / "state", pipeline="test")
        shared = self._site.shared if self._site is not None else None
        self._site = Site(self._keys, folder, letters, shared=shared)
        return self._site
