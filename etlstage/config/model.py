"""
What may stand in a pipeline file: its two ends, their DataFrames, the session.

Each model is one mapping of the file; what a stage with a worker says is in
``worker.py``, and what keys say *together* in ``rules.py``, where several can be wrong
at once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from etlstage.config.mapping import Argument, Count, Keys, Name, as_problem
from etlstage.config.quantity import Duration, Size, one_of
from etlstage.config.worker import (
    FedStageKeys,
    TransformKeys,
    WorkerKeys,
    WorkerStageKeys,
)
from etlstage.pipeline.worker_source import OffsetPolicy

__all__ = (
    "DeadLetterKeys",
    "EpochKeys",
    "ExtractKeys",
    "LoadKeys",
    "OffsetKeys",
    "PipelineKeys",
    "SessionKeys",
    "SparkLetterKeys",
    "SparkSinkKeys",
    "SparkSourceKeys",
)


def _server(url: str) -> str:
    if not url.startswith("sc://"):
        wanted = "a Spark Connect server such as sc://host:15002"
        raise PydanticCustomError("expected", "{text}", {"text": wanted})
    return url


class OffsetKeys(Keys):
    """Who remembers how far an extract stage has read."""

    by: Annotated[
        Literal["worker", "supervisor"],
        BeforeValidator(one_of("keeper of offsets", "worker", "supervisor")),
    ]
    start: int | None = None
    step: Count | None = None
    end: int | None = None
    template: str | None = None

    @model_validator(mode="after")
    def _fit(self) -> OffsetKeys:
        with as_problem("offsets"):
            self.policy()
        return self

    def policy(self) -> OffsetPolicy:
        """Return the policy; raises ConfigError for offsets that lead nowhere."""
        values = self.given().items()
        return OffsetPolicy(**{n: v for n, v in values if v is not None})


class SparkSourceKeys(Keys):
    """A DataFrame to read, and the message that a row becomes."""

    format: str | None = None
    path: Argument | None = None
    table: str | None = None
    options: dict[str, str] = Field(default_factory=dict)
    schema_: str | None = Field(default=None, alias="schema")
    message: str | None = None
    key: str | None = None
    spool: Argument | None = None


class EpochKeys(Keys):
    """How much is written to a DataFrame at once."""

    messages: Count | None = None
    bytes: Size | None = None


class SparkSinkKeys(Keys):
    """A DataFrame to write."""

    format: str | None = None
    path: Argument | None = None
    table: str | None = None
    options: dict[str, str] = Field(default_factory=dict)
    mode: Annotated[
        Literal["append", "overwrite", "error"],
        BeforeValidator(one_of("mode", "append", "overwrite", "error")),
    ] = "error"
    schema_: str | None = Field(default=None, alias="schema")
    partition_by: tuple[str, ...] = ()
    epoch: EpochKeys = EpochKeys()


class ExtractKeys(WorkerStageKeys):
    """Where messages come from: a DataFrame or a worker."""

    spark: SparkSourceKeys | None = None
    worker: WorkerKeys | None = None
    mode: Annotated[
        Literal["plain", "cyclic"], BeforeValidator(one_of("mode", "plain", "cyclic"))
    ] = "plain"
    offsets: OffsetKeys | None = None
    every: Duration | None = None


class LoadKeys(FedStageKeys):
    """Where messages end: a DataFrame or a worker."""

    spark: SparkSinkKeys | None = None
    worker: WorkerKeys | None = None


class SparkLetterKeys(Keys):
    """A DataFrame to which the dead letters of each run are appended."""

    format: str | None = None
    path: Argument | None = None
    table: str | None = None
    options: dict[str, str] = Field(default_factory=dict)


class DeadLetterKeys(Keys):
    """Where dead letters go besides their files."""

    spark: SparkLetterKeys


class SessionKeys(Keys):
    """The Spark session; without it a local one on all cores."""

    master: str | None = None
    remote: Annotated[str, AfterValidator(_server)] | None = None
    config: dict[str, str] = Field(default_factory=dict)
    staging: Argument | None = None
    files: tuple[Argument, ...] = ()
    archives: tuple[Argument, ...] = ()


class PipelineKeys(Keys):
    """The whole file."""

    name: Name
    engine: Annotated[
        Literal["local", "spark", "streaming"],
        BeforeValidator(one_of("engine", "local", "spark", "streaming")),
    ] = "local"
    delivery: Annotated[
        Literal["at-least-once", "exactly-once"],
        BeforeValidator(
            one_of("delivery", "at-least-once", "exactly-once", later=("at-most-once",))
        ),
    ] = "at-least-once"
    state: Argument | None = None
    spark: SessionKeys = SessionKeys()
    extract: ExtractKeys
    transform: tuple[TransformKeys, ...] = ()
    load: LoadKeys
    dead_letters: DeadLetterKeys | None = None
