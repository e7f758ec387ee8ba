"""What a run on executors reads: a DataFrame, and what makes messages of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame

from etlstage.errors import SourceFailed
from etlstage.spark.dataframe.read import messages_of
from etlstage.spark.errors import explain

__all__ = ("Origin",)


@dataclass(frozen=True)
class Origin:
    """
    The extract stage of a run on executors.

    Attributes:
        frame: What to read, or a function that makes it, called in a thread.
        message: Spark SQL expression that makes a message of a row, see
            :class:`DataFrameSource`.
        key: Spark SQL expression by which messages keep their order.
        name: Of the stage.

    """

    frame: DataFrame | Callable[[], DataFrame]
    message: str | None = None
    key: str | None = None
    name: str = "extract"

    def messages(self) -> DataFrame:
        """Return the messages, and their keys if there are any; blocks."""
        frame = self.frame() if callable(self.frame) else self.frame
        return messages_of(frame, self.message, self.key)

    def failure(self, error: Exception, log_path: Path | None) -> SourceFailed:
        """Return what ``error`` means, raised by Spark on the way to the messages."""
        return SourceFailed(f"{self.name}: {explain(error, log_path)}", stage=self.name)
