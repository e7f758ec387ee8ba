"""
The Spark ends of a pipeline of engine ``local``, and the dead letters of any.

Imported only for pipelines that name Spark.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from etlstage.config.model import (
    SparkLetterKeys,
    SparkSinkKeys,
    SparkSourceKeys,
)
from etlstage.config.session import SessionUser, SharedSession
from etlstage.config.stages import located
from etlstage.messages import Position, Run
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.spark import (
    DataFrameSink,
    DataFrameSource,
    DeadLetterFrame,
    Destination,
    read_frame,
)
from etlstage.stage import ErrorPolicy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ("SessionSink", "destination", "letter_frame", "reading", "sink", "source")


def source(
    keys: SparkSourceKeys, name: str, folder: Path, session: SharedSession
) -> DataFrameSource:
    """Return the source that the keys describe."""
    spool = folder / keys.spool if keys.spool else None
    return _Source(
        session,
        reading(keys, folder),
        message=keys.message,
        key=keys.key,
        name=name,
        spool_dir=spool,
    )


def sink(
    keys: SparkSinkKeys,
    name: str,
    folder: Path,
    session: SharedSession,
    *,
    on_error: ErrorPolicy,
    dead_letters: DeadLetters,
) -> DataFrameSink:
    """
    Return the sink that the keys describe.

    Args:
        keys: The keys.
        name: Name of the stage.
        folder: What paths are relative to.
        session: The session.
        on_error: What becomes of messages that do not fit the schema.
        dead_letters: Where they are put aside.

    """
    epoch = {
        name: bound
        for name, bound in (
            ("epoch_messages", keys.epoch.messages),
            ("epoch_bytes", keys.epoch.bytes),
        )
        if bound is not None
    }
    return SessionSink(
        session,
        destination(keys, folder),
        schema=keys.schema_,
        name=name,
        on_error=on_error,
        dead_letters=dead_letters,
        **epoch,
    )


def letter_frame(
    keys: SparkLetterKeys, folder: Path, session: SharedSession
) -> DeadLetterFrame:
    """Return what appends dead letters to the DataFrame that the keys describe."""
    writing = _placed(keys.given("format", "path", "table", "options"), folder)
    return _LetterFrame(session, Destination(**writing))


def reading(keys: SparkSourceKeys, folder: Path) -> dict[str, Any]:
    """Return how to read, as :func:`read_frame` wants to know it."""
    values = _placed(keys.given("format", "path", "table", "options"), folder)
    if keys.schema_ is not None:
        values["schema"] = keys.schema_
    return values


def destination(keys: SparkSinkKeys, folder: Path) -> Destination:
    """Return where the keys say that rows go."""
    names = ("format", "path", "table", "mode", "options", "partition_by")
    return Destination(**_placed(keys.given(*names), folder))


def _placed(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values that are not null, their path seen from ``folder``."""
    placed = {name: value for name, value in values.items() if value is not None}
    if "path" in placed:
        placed["path"] = located(placed["path"], folder)
    return placed


class _Source(SessionUser, DataFrameSource):
    def __init__(
        self,
        session: SharedSession,
        reading: Mapping[str, Any],
        **settings: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(self._frame_of, **settings)
        self._reading = reading
        self._join(session)

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        with self._noted():
            async with aclosing(super().runs()) as runs:
                async for run in runs:
                    yield run

    async def aclose(self) -> None:
        async with aclosing(self._membership):
            await super().aclose()

    def _frame_of(self) -> DataFrame:
        return read_frame(self._start_session(), **self._reading)


class SessionSink(SessionUser, DataFrameSink):
    """A sink with a session that others use, too."""

    def __init__(
        self,
        session: SharedSession,
        destination: Destination,
        **settings: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(self._start_session, destination, **settings)
        self._join(session)

    async def __aenter__(self) -> Self:
        with self._noted():
            return await super().__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._shared.note(error)
        await super().__aexit__(kind, error, trace)

    async def aclose(self) -> None:
        """Release the session, if nobody else uses it."""
        async with aclosing(self._membership):
            await super().aclose()


class _LetterFrame(SessionUser, DeadLetterFrame):
    def __init__(self, session: SharedSession, destination: Destination) -> None:
        super().__init__(self._start_session, destination)
        self._join(session)

    async def write(self, letters: Iterator[DeadLetter]) -> None:
        with self._noted():
            await super().write(letters)

    async def aclose(self) -> None:
        async with aclosing(self._membership):
            await super().aclose()
