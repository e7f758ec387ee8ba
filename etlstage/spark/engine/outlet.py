"""
Where the batches of a stream end.

An outlet is plain data: over Spark Connect it travels to the process that runs the
batches, and makes a sink for each of them there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from pyspark.sql import SparkSession

from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.spark.dataframe.destination import Destination
from etlstage.spark.engine.staging import StagedLoad
from etlstage.spark.load.dataframe import StagedSink
from etlstage.spark.load.worker import StagedWorker
from etlstage.spark.ship.artifact import place
from etlstage.stage import ErrorPolicy, Stage

__all__ = ("FrameOutlet", "Outlet", "WorkerOutlet")


class Outlet(Protocol):
    """Makes the sink of each batch."""

    @property
    def name(self) -> str:
        """Name of the load stage."""
        ...

    def objection(self) -> str | None:
        """Return what stands against a stream that begins, as far as it is known."""
        ...

    def sink(self, spark: SparkSession, epoch: str, letters: DeadLetters) -> StagedLoad:
        """
        Return the sink of a batch.

        Args:
            spark: The session.
            epoch: What the batch is called, every time it is run.
            letters: Where messages are dead-lettered.

        """
        ...

    def __str__(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class FrameOutlet:
    """A DataFrame: a path has a folder for each epoch, which is replaced as a whole."""

    destination: Destination
    """With mode ``error`` a stream that begins must find nothing there."""
    name: str = "load"
    schema: str | None = None
    """As for :class:`DataFrameSink`."""
    on_error: ErrorPolicy = field(default_factory=ErrorPolicy)

    def __str__(self) -> str:
        return str(self.destination)

    def objection(self) -> str | None:
        """Return what stands against a stream that begins, as far as it is known."""
        return self.destination.objection(self.destination.partition_by)

    def sink(self, spark: SparkSession, epoch: str, letters: DeadLetters) -> StagedSink:
        """Return the sink of a batch."""
        place = replace(self.destination, mode="append")
        if place.path is not None:
            path = f"{place.path}/epoch={epoch}"
            place = replace(place, path=path, mode="overwrite")
        return StagedSink(
            spark,
            place,
            name=self.name,
            schema=self.schema,
            on_error=self.on_error,
            dead_letters=letters,
        )


@dataclass(frozen=True, kw_only=True)
class WorkerOutlet:
    """Load workers; a batch that is run again is loaded again."""

    stage: Stage
    place: Callable[[Stage], Stage] = place
    """Makes of it the one that runs in a task."""

    @property
    def name(self) -> str:
        """Name of the load stage."""
        return self.stage.name

    def __str__(self) -> str:
        return f"stage {self.stage.name}"

    def objection(self) -> str | None:
        """Return None: a worker says what it wants when it runs."""
        return None

    def sink(
        self, spark: SparkSession, epoch: str, letters: DeadLetters
    ) -> StagedWorker:
        """Return the sink of a batch."""
        del spark, epoch
        return StagedWorker(self.stage, dead_letters=letters, place=self.place)
