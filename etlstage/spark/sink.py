"""
The interface of sinks that load the messages of a DataFrame, on any engine.

Engine spark has one DataFrame for its run, engine streaming one for each batch. A
destination that engine local can load into, too, is the same class there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Self

from pyspark.sql import DataFrame, SparkSession

from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Epochs, Landing
from etlstage.spark.session.session import Session

__all__ = ("SparkSink",)


class SparkSink(Landing):
    """
    Loads messages that are in a DataFrame, an epoch at a time.

    Before it is entered it is plain data: over Spark Connect it is sent to the process
    that runs the batches of a stream.
    """

    @abstractmethod
    async def load(self, messages: DataFrame, starts: Mapping[int, int]) -> None:
        """
        Load all messages; unless they are a batch, mark the output as complete.

        Args:
            messages: As :meth:`Staging.messages` returns them.
            starts: For each partition, the place of its first message among all.

        Raises:
            StageError: If the messages, or too many of them, can't be loaded.

        """

    def mark(self) -> None:
        """Mark the output of all batches as complete; blocks."""

    def objection(self, *, moved_from: str = "") -> str | None:
        """
        Return why a stream can't be loaded, as far as that is known; blocks.

        Args:
            moved_from: What was written before, if the stream continues elsewhere.

        """
        del moved_from
        return None

    def of_batch(
        self, spark: SparkSession | Session, epochs: Epochs, letters: DeadLetters
    ) -> Self:
        """
        Return the sink of a batch.

        Args:
            spark: The session.
            epochs: What was loaded before; the batch is the next.
            letters: Where messages are dead-lettered.

        """
        raise NotImplementedError
