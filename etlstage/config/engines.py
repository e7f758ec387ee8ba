"""
Pipelines whose stages run inside Spark's executors, from the keys of a file.

Imported only for files that name such an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from etlstage.config.frames import SessionSink, destination, reading
from etlstage.config.model import ExtractKeys, LoadKeys, SessionKeys
from etlstage.config.session import SessionUser, SharedSession
from etlstage.config.stages import error_policy, extract_stage, load_stage
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.report import Status
from etlstage.spark import read_frame
from etlstage.spark.datasource.datasource import read_worker
from etlstage.spark.engine.batch_run import ExecutorPipeline
from etlstage.spark.engine.origin import Origin
from etlstage.spark.engine.outlet import FrameOutlet, Outlet, WorkerOutlet
from etlstage.spark.engine.staging import StagedLoad
from etlstage.spark.engine.stream_run import StreamingPipeline
from etlstage.spark.load.dataframe import StagedSink
from etlstage.spark.load.worker import StagedWorker
from etlstage.spark.ship.plan import Shipment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = (
    "executor_pipeline",
    "outlet",
    "shipment",
    "staged_load",
    "streaming_pipeline",
)

Read: TypeAlias = "Callable[[SparkSession], DataFrame]"


def executor_pipeline(
    keys: ExtractKeys,
    source: str,
    folder: Path,
    session: SharedSession,
    *,
    shipment: Shipment,
    **settings: Any,  # noqa: ANN401 - passed on
) -> ExecutorPipeline:
    """
    Return what runs stages where the rows are that the keys describe.

    Args:
        keys: The keys of the extract stage.
        source: Its name.
        folder: What paths are relative to.
        session: The session.
        shipment: What is sent to the executors before.
        settings: The others of :class:`ExecutorPipeline`.

    """
    read = _read(keys, source, folder, shipment, streaming=False)
    return _ExecutorPipeline(
        session,
        read,
        _messages(keys) | {"name": source},
        shipment=shipment,
        **settings,
    )


def streaming_pipeline(
    keys: ExtractKeys,
    source: str,
    folder: Path,
    session: SharedSession,
    *,
    shipment: Shipment,
    **settings: Any,  # noqa: ANN401 - passed on
) -> StreamingPipeline:
    """Do as :func:`executor_pipeline`, with the settings of a stream."""
    read = _read(keys, source, folder, shipment, streaming=True)
    return _StreamingPipeline(
        session,
        read,
        _messages(keys) | {"name": source},
        every=keys.every,
        shipment=shipment,
        **settings,
    )


def staged_load(
    keys: LoadKeys,
    name: str,
    folder: Path,
    session: SharedSession,
    *,
    dead_letters: DeadLetters,
    shipment: Shipment,
) -> StagedLoad:
    """
    Return what loads what executors have staged.

    Args:
        keys: The keys of the load stage.
        name: Its name.
        folder: What paths are relative to.
        session: The session.
        dead_letters: Where messages are put aside.
        shipment: What is sent to the executors before.

    """
    if keys.spark is None:
        stage = load_stage(keys, name, folder)
        return StagedWorker(stage, dead_letters=dead_letters, place=shipment.place)
    return _StagedSink(
        session,
        destination(keys.spark, folder),
        schema=keys.spark.schema_,
        name=name,
        on_error=error_policy(keys.on_error),
        dead_letters=dead_letters,
    )


def shipment(keys: SessionKeys, folder: Path) -> Shipment:
    """Return what the keys say that executors need."""
    return Shipment(folder, files=keys.files, archives=keys.archives)


def outlet(keys: LoadKeys, name: str, folder: Path, *, shipment: Shipment) -> Outlet:
    """Return where the batches of a stream end; arguments as for :func:`staged_load`."""
    if keys.spark is None:
        stage = load_stage(keys, name, folder)
        return WorkerOutlet(stage=stage, place=shipment.place)
    return FrameOutlet(
        destination=destination(keys.spark, folder),
        name=name,
        schema=keys.spark.schema_,
        on_error=error_policy(keys.on_error),
    )


def _read(
    keys: ExtractKeys,
    name: str,
    folder: Path,
    shipment: Shipment,
    *,
    streaming: bool,
) -> Read:
    read: Read
    if keys.spark is not None:
        settings = reading(keys.spark, folder)
        read = partial(read_frame, streaming=streaming, **settings)
    else:
        read = partial(
            read_worker,
            stage=extract_stage(keys, name, folder),
            offsets=keys.offsets.policy() if keys.offsets is not None else None,
            streaming=streaming,
            place=shipment.place,
        )

    def sent_and_read(spark: SparkSession) -> DataFrame:
        # Before: a plan remembers what was sent when it is made.
        shipment.send(spark)
        return read(spark)

    return sent_and_read


def _messages(keys: ExtractKeys) -> dict[str, str | None]:
    """Return what makes messages of the rows; a worker's are messages already."""
    if keys.spark is None:
        return {"message": "value"}
    return {"message": keys.spark.message, "key": keys.spark.key}


class _StagedSink(SessionSink, StagedSink):
    pass


class _Reader(SessionUser):
    """What both pipelines have of a session that others use, too."""

    def __init__(
        self,
        session: SharedSession,
        read: Read,
        origin: Mapping[str, Any],
        **settings: Any,  # noqa: ANN401 - passed on
    ) -> None:
        # That of the pipeline, which comes behind in each of the two below.
        super().__init__(  # type: ignore[call-arg]
            origin=Origin(self._frame_of, **origin), **settings
        )
        self._read = read
        self._join(session)

    async def aclose(self) -> None:
        await self._membership.aclose()

    def _frame_of(self) -> DataFrame:
        return self._read(self._start_session())


class _ExecutorPipeline(_Reader, ExecutorPipeline):
    async def _run(self) -> Status:
        with self._noted():
            return await super()._run()


class _StreamingPipeline(_Reader, StreamingPipeline):
    async def _run(self) -> Status:
        with self._noted():
            return await super()._run()
