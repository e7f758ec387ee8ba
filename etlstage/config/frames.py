"""
The Spark ends of a pipeline, and the session that they share.

The session starts when the first of the two needs it, and ends when the last of them
is closed; one that was handed in is left as it was. Imported only for pipelines
that name Spark.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import anyio
import anyio.to_thread

from etlstage.config.model import (
    SessionKeys,
    SparkLetterKeys,
    SparkSinkKeys,
    SparkSourceKeys,
)
from etlstage.config.stages import located
from etlstage.messages import Position, Run
from etlstage.pipeline.dead_letter import DeadLetter, DeadLetters
from etlstage.pipeline.interfaces import Sink
from etlstage.spark import (
    DataFrameSink,
    DataFrameSource,
    DeadLetterFrame,
    Destination,
    Session,
    read_frame,
)
from etlstage.spark.engine.pipeline import ExecutorPipeline
from etlstage.spark.engine.staged_capture import StagedCapture
from etlstage.spark.engine.staged_sink import StagedSink
from etlstage.spark.engine.streaming import StreamingPipeline
from etlstage.supervisor import ErrorPolicy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = (
    "SharedSession",
    "executor_pipeline",
    "letter_frame",
    "sink",
    "source",
    "staged_sink",
    "streaming_pipeline",
)


class SharedSession:
    """A session for as long as one of its users is open."""

    def __init__(self, keys: SessionKeys, spark: SparkSession | None) -> None:
        self._session = Session(spark, **keys.given("master", "remote", "config"))
        self._users = 0
        self._lock = threading.Lock()
        self._failed = False

    @property
    def log_path(self) -> Path | None:
        """Spark's log, once the session has started."""
        return self._session.log_path

    def join(self) -> None:
        """Count one more user; nothing is started."""
        self._users += 1

    def start(self) -> SparkSession:
        """Return the session, started by the first who asks; blocks."""
        with self._lock:
            return self._session.start()

    def note(self, error: BaseException | None) -> None:
        """Keep Spark's log if ``error`` sends the user there."""
        if self.log_path is not None and str(self.log_path) in str(error):
            self._failed = True

    async def leave(self) -> None:
        """Count one user less; the last one ends the session."""
        self._users -= 1
        if not self._users:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._stop)

    def _stop(self) -> None:
        with self._lock:
            self._session.stop(failed=self._failed)


class _Membership:
    """One user's part in a session."""

    def __init__(self, session: SharedSession) -> None:
        session.join()
        self._session: SharedSession | None = session

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.leave()


def source(
    keys: SparkSourceKeys, name: str, folder: Path, session: SharedSession
) -> DataFrameSource:
    """Return the source that the keys describe."""
    spool = folder / keys.spool if keys.spool else None
    return _Source(
        session,
        _reading(keys, folder),
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
    return _Sink(
        session,
        _destination(keys, folder),
        schema=keys.schema_,
        name=name,
        on_error=on_error,
        dead_letters=dead_letters,
        **epoch,
    )


def staged_sink(
    keys: SparkSinkKeys,
    name: str,
    folder: Path,
    session: SharedSession,
    *,
    on_error: ErrorPolicy,
    dead_letters: DeadLetters,
) -> StagedSink:
    """Do as :func:`sink`, for what executors have staged."""
    return _StagedSink(
        session,
        _destination(keys, folder),
        schema=keys.schema_,
        name=name,
        on_error=on_error,
        dead_letters=dead_letters,
    )


def staged_capture(sink: Sink) -> StagedSink:
    """Return what gives ``sink`` what executors have staged."""
    return cast("StagedSink", StagedCapture(sink))


def executor_pipeline(
    keys: SparkSourceKeys,
    source: str,
    folder: Path,
    session: SharedSession,
    **settings: Any,  # noqa: ANN401 - passed on
) -> ExecutorPipeline:
    """
    Return what runs stages where the DataFrame is that the keys describe.

    Args:
        keys: The keys of the extract stage.
        source: Its name.
        folder: What paths are relative to.
        session: The session.
        settings: The others of :class:`ExecutorPipeline`.

    """
    return _ExecutorPipeline(
        session,
        _reading(keys, folder),
        message=keys.message,
        key=keys.key,
        source=source,
        **settings,
    )


def letter_frame(
    keys: SparkLetterKeys, folder: Path, session: SharedSession
) -> DeadLetterFrame:
    """Return what appends dead letters to the DataFrame that the keys describe."""
    writing = _placed(keys.given("format", "path", "table", "options"), folder)
    return _LetterFrame(session, Destination(**writing))


def streaming_pipeline(
    keys: SparkSourceKeys,
    source: str,
    folder: Path,
    session: SharedSession,
    *,
    sink: SparkSinkKeys,
    sink_name: str,
    on_error: ErrorPolicy,
    **settings: Any,  # noqa: ANN401 - passed on
) -> StreamingPipeline:
    """
    Return what runs stages on the batches of the stream that the keys describe.

    Args:
        keys: The keys of the extract stage.
        source: Its name.
        folder: What paths are relative to.
        session: The session.
        sink: The keys of the load stage.
        sink_name: Its name.
        on_error: What becomes of messages that do not fit the schema.
        settings: The others of :class:`StreamingPipeline`.

    """
    return _StreamingPipeline(
        session,
        {**_reading(keys, folder), "streaming": True},
        message=keys.message,
        key=keys.key,
        source=source,
        destination=_destination(sink, folder),
        sink={"name": sink_name, "on_error": on_error, "schema": sink.schema_},
        **settings,
    )


def _reading(keys: SparkSourceKeys, folder: Path) -> dict[str, Any]:
    """Return how to read, as :func:`read_frame` wants to know it."""
    reading = _placed(keys.given("format", "path", "table", "options"), folder)
    if keys.schema_ is not None:
        reading["schema"] = keys.schema_
    return reading


def _destination(keys: SparkSinkKeys, folder: Path) -> Destination:
    names = ("format", "path", "table", "mode", "options", "partition_by")
    return Destination(**_placed(keys.given(*names), folder))


def _placed(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values that are not null, their path seen from ``folder``."""
    placed = {name: value for name, value in values.items() if value is not None}
    if "path" in placed:
        placed["path"] = located(placed["path"], folder)
    return placed


class _User:
    """What the parts of a pipeline that share a session have in common."""

    _log_path: Path | None

    def _join(self, session: SharedSession) -> None:
        self._shared = session
        self._membership = _Membership(session)

    def _start_session(self) -> SparkSession:
        spark = self._shared.start()
        self._log_path = self._shared.log_path
        return spark

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._shared.note(error)
            raise


class _Source(_User, DataFrameSource):
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


class _Sink(_User, DataFrameSink):
    """Also what :class:`_StagedSink` has of a shared session."""

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
        async with aclosing(self._membership):
            await super().aclose()


class _StagedSink(_Sink, StagedSink):
    pass


class _ExecutorPipeline(_User, ExecutorPipeline):
    def __init__(
        self,
        session: SharedSession,
        reading: Mapping[str, Any],
        **settings: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(frame=self._frame_of, **settings)
        self._reading = reading
        self._join(session)

    async def aclose(self) -> None:
        await self._membership.aclose()

    async def _run(self, stopped: anyio.CancelScope) -> None:
        with self._noted():
            await super()._run(stopped)

    def _frame_of(self) -> DataFrame:
        return read_frame(self._start_session(), **self._reading)


class _StreamingPipeline(_User, StreamingPipeline):
    def __init__(
        self,
        session: SharedSession,
        reading: Mapping[str, Any],
        **settings: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(frame=self._frame_of, **settings)
        self._reading = reading
        self._join(session)

    async def aclose(self) -> None:
        await self._membership.aclose()

    async def _run(self) -> None:
        with self._noted():
            await super()._run()

    def _frame_of(self) -> DataFrame:
        return read_frame(self._start_session(), **self._reading)


class _LetterFrame(_User, DeadLetterFrame):
    def __init__(self, session: SharedSession, destination: Destination) -> None:
        super().__init__(self._start_session, destination)
        self._join(session)

    async def write(self, letters: Iterator[DeadLetter]) -> None:
        with self._noted():
            await super().write(letters)

    async def aclose(self) -> None:
        async with aclosing(self._membership):
            await super().aclose()
