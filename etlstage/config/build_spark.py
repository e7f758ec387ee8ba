"""
What a pipeline file says of Spark: both ends, dead letters, engines on executors.

Imported only for files that name Spark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etlstage.config.model import (
    ExtractKeys,
    LoadKeys,
    SessionKeys,
    SparkLetterKeys,
    SparkSinkKeys,
    SparkSourceKeys,
)
from etlstage.config.stages import located, stage_of
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.spark import (
    DataFrameSink,
    DataFrameSource,
    DeadLetterFrame,
    Destination,
    Session,
    read_frame,
)
from etlstage.spark.datasource.datasource import read_worker
from etlstage.spark.engine.micro_batch import FrameOutlet, Outlet, WorkerOutlet
from etlstage.spark.engine.stage_job import Origin
from etlstage.spark.engine.staging import StagedLoad
from etlstage.spark.load.dataframe import StagedSink
from etlstage.spark.load.worker import StagedWorker
from etlstage.spark.ship.plan import Shipment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = (
    "digest",
    "letter_frame",
    "origin",
    "outlet",
    "session",
    "shipment",
    "sink",
    "source",
    "staged_load",
)


def session(keys: SessionKeys, spark: SparkSession | None) -> Session:
    """Return the session that the keys describe, or what stands for ``spark``."""
    return Session(spark, **keys.given("master", "remote", "config"))


# --- engine local, and dead letters -------------------------------------------------


def source(
    keys: SparkSourceKeys,
    name: str,
    folder: Path,
    session: Session,
    *,
    state: Path | None = None,
) -> DataFrameSource:
    """Return the source that the keys describe."""
    settings = _reading(keys, folder)
    return DataFrameSource(
        lambda: read_frame(session.start(), **settings),
        message=keys.message,
        key=keys.key,
        name=name,
        spool_dir=folder / keys.spool if keys.spool else None,
        state=state,
        of=digest({**settings, "message": keys.message, "key": keys.key}),
        session=session,
    )


def digest(settings: Mapping[str, object]) -> str:
    """Return what tells settings from others, and not what they are: some are secret."""
    plain = json.dumps(settings, default=str, sort_keys=True)
    return sha256(plain.encode()).hexdigest()


def sink(
    keys: LoadKeys,
    name: str,
    folder: Path,
    session: Session,
    *,
    dead_letters: DeadLetters,
) -> DataFrameSink:
    """Return the sink that the keys describe."""
    assert keys.spark is not None
    bounds = {
        "epoch_messages": keys.spark.epoch.messages,
        "epoch_bytes": keys.spark.epoch.bytes,
    }
    return DataFrameSink(
        session,
        _destination(keys.spark, folder),
        schema=keys.spark.schema_,
        name=name,
        on_error=keys.on_error,
        dead_letters=dead_letters,
        **{name: bound for name, bound in bounds.items() if bound is not None},
    )


def letter_frame(
    keys: SparkLetterKeys, folder: Path, session: Session
) -> DeadLetterFrame:
    """Return what appends dead letters to the DataFrame that the keys describe."""
    writing = _placed(keys.given("format", "path", "table", "options"), folder)
    return DeadLetterFrame(session, Destination(**writing))


# --- engines on executors -------------------------------------------------------------


def shipment(keys: SessionKeys, folder: Path) -> Shipment:
    """Return what the keys say that executors need."""
    return Shipment(folder, files=keys.files, archives=keys.archives)


def origin(
    keys: ExtractKeys, name: str, folder: Path, *, shipment: Shipment, streaming: bool
) -> Origin:
    """
    Return what a run on executors reads.

    Args:
        keys: The keys of the extract stage.
        name: Its name.
        folder: What paths are relative to.
        shipment: What is sent to the executors before.
        streaming: Whether it is to be a stream.

    """
    read: Callable[[SparkSession], DataFrame]
    if keys.spark is not None:
        settings = _reading(keys.spark, folder)
        message, key = keys.spark.message, keys.spark.key
        read = partial(read_frame, streaming=streaming, **settings)
    else:
        message, key = "value", None  # what a worker gives are messages already
        read = partial(
            read_worker,
            stage=stage_of(keys, name, folder),
            offsets=keys.offsets,
            streaming=streaming,
            place=shipment.place,
        )

    def sent_and_read(spark: SparkSession) -> DataFrame:
        # Before: a plan remembers what was sent when it is made.
        shipment.send(spark)
        return read(spark)

    return Origin(read=sent_and_read, message=message, key=key, name=name)


def staged_load(
    keys: LoadKeys,
    name: str,
    folder: Path,
    session: Session,
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
        dead_letters: Where messages are dead-lettered.
        shipment: What is sent to the executors before.

    """
    if keys.spark is None:
        return StagedWorker(
            stage_of(keys, name, folder),
            dead_letters=dead_letters,
            place=shipment.place,
            session=session,
        )
    return StagedSink(
        session,
        _destination(keys.spark, folder),
        schema=keys.spark.schema_,
        name=name,
        on_error=keys.on_error,
        dead_letters=dead_letters,
    )


def outlet(keys: LoadKeys, name: str, folder: Path, *, shipment: Shipment) -> Outlet:
    """Return where the batches of a stream end; arguments as for :func:`staged_load`."""
    if keys.spark is None:
        stage = stage_of(keys, name, folder)
        return WorkerOutlet(stage=stage, place=shipment.place)
    return FrameOutlet(
        destination=_destination(keys.spark, folder),
        name=name,
        schema=keys.spark.schema_,
        on_error=keys.on_error,
    )


# --- what both need -------------------------------------------------------------------


def _reading(keys: SparkSourceKeys, folder: Path) -> dict[str, Any]:
    """Return how to read, as :func:`read_frame` wants to know it."""
    values = _placed(keys.given("format", "path", "table", "options"), folder)
    if keys.schema_ is not None:
        values["schema"] = keys.schema_
    return values


def _destination(keys: SparkSinkKeys, folder: Path) -> Destination:
    """Return where the keys say that rows go."""
    names = ("format", "path", "table", "mode", "options", "partition_by")
    return Destination(**_placed(keys.given(*names), folder))


def _placed(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values that are not null, their path seen from ``folder``."""
    placed = {name: value for name, value in values.items() if value is not None}
    if "path" in placed:
        placed["path"] = located(placed["path"], folder)
    return placed
