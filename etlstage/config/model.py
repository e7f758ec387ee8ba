"""
What may stand in a pipeline file.

The keys of a stage are the settings of :class:`~etlstage.stage.Stage` and of its
dialect, see ``stages.py``; here is what only a file says: its ends, their DataFrames,
the session. What keys of several mappings say together is in ``rules.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from etlstage.config.case import CaseKeys
from etlstage.config.end import Keys, SinkKeys, SourceKeys
from etlstage.config.ends.spark import SparkLetterKeys
from etlstage.config.fault import FaultKeys
from etlstage.config.stages import StageKeys, stage_section
from etlstage.messages import StageKind
from etlstage.settings.definition import Place, broken, settings_of
from etlstage.settings.kind import (
    Choice,
    Instance,
    ListOf,
    Pattern,
    Schema,
)
from etlstage.settings.problem import (
    Problem,
)
from etlstage.settings.units import (
    Argument,
    Command,
    Duration,
    Name,
)
from etlstage.stage import OffsetPolicy

__all__ = (
    "DeadLetterKeys",
    "ExtractKeys",
    "LoadKeys",
    "PipelineKeys",
    "SessionKeys",
    "TransformKeys",
)


@dataclass(frozen=True, kw_only=True)
class ExtractKeys(StageKeys):
    """Where messages come from: a DataFrame or a worker."""

    kind: ClassVar[StageKind] = StageKind.EXTRACT
    place: ClassVar[Place] = Place.EXTRACT
    frame: ClassVar[Place] = Place.SOURCE
    end: Annotated[SourceKeys, Instance(SourceKeys), Place(0)]
    """What is read, and how."""
    offsets: Annotated[OffsetPolicy | None, Place.EXTRACT] = None
    """Who keeps the offsets of a cyclic extraction, and how they advance."""
    every: Annotated[Duration | None, Place.EXTRACT | Place.SOURCE] = None
    """Pause once all is read, until stopped; without it the run ends then."""


@dataclass(frozen=True, kw_only=True)
class TransformKeys(StageKeys):
    """One transform stage."""

    kind: ClassVar[StageKind] = StageKind.TRANSFORM
    place: ClassVar[Place] = Place.TRANSFORM


@dataclass(frozen=True, kw_only=True)
class LoadKeys(StageKeys):
    """Where messages end: a DataFrame or a worker."""

    kind: ClassVar[StageKind] = StageKind.LOAD
    place: ClassVar[Place] = Place.LOAD
    frame: ClassVar[Place] = Place.SINK
    end: Annotated[SinkKeys, Instance(SinkKeys), Place(0)]
    """What is written, and how."""
    commit: Annotated[Command | None, Place.LOAD] = None
    """Makes final what the workers have loaded in an epoch, for exactly-once."""
    abort: Annotated[Command | None, Place.LOAD] = None
    """Undoes an epoch, whether it is final or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetterKeys(Keys):
    """Where dead letters go besides their files."""

    spark: SparkLetterKeys
    """A DataFrame to which the dead letters of each run are appended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionKeys(Keys):
    """The Spark session; without it a local one on all cores."""

    master: str | None = None
    """Where Spark runs; without it and remote local[*]."""
    remote: (
        Annotated[
            str, Pattern("sc://.*", "a Spark Connect server such as sc://host:15002")
        ]
        | None
    ) = None
    """A Spark Connect server."""
    config: dict[str, str] = field(default_factory=dict)
    """Spark's own settings; they win over ours."""
    staging: Argument | None = None
    """A folder that all executors see, and you."""
    files: tuple[Argument, ...] = ()
    """Sent to the executors, with etlstage."""
    archives: tuple[Argument, ...] = ()
    """Sent to the executors and unpacked there, as what stands behind #."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what contradicts itself."""
        if "master" in given and "remote" in given:
            yield broken(("remote",), "can't be used together with master")


_DELIVERIES: Final = ("at-least-once", "exactly-once")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineKeys(Keys):
    """A pipeline of etlstage."""

    more: ClassVar[Schema] = {
        "patternProperties": {
            "^x-": {"description": "Yours: a place for anchors; nobody else reads it."}
        }
    }
    name: Name
    """As reports, logs and errors call it."""
    engine: Literal["local", "spark", "streaming"] = "local"
    """Where the stages run: beside the driver (local), in Spark's executors (spark), or
    there in micro-batches (streaming)."""
    delivery: Annotated[
        Literal["at-least-once", "exactly-once"],
        Choice("delivery", {d: d for d in _DELIVERIES}, later=("at-most-once",)),
    ] = "at-least-once"
    """How often a message may arrive; exactly-once needs files or a database, and state
    on engines local and spark; or, on engine local, a load worker that commits."""
    state: Argument | None = None
    """Folder where offsets are kept between runs, and dead letters; without it dead
    letters alone, in .etlstage beside the file."""
    spark: SessionKeys = field(default_factory=SessionKeys)
    """The Spark session; without it a local one on all cores."""
    extract: Annotated[ExtractKeys, stage_section(ExtractKeys)]
    """Where messages come from: a DataFrame or a worker."""
    transform: Annotated[
        tuple[TransformKeys, ...], ListOf(stage_section(TransformKeys))
    ] = ()
    """Stages that turn each message into none, one or many."""
    load: Annotated[LoadKeys, stage_section(LoadKeys)]
    """Where messages end: a DataFrame or a worker."""
    tests: tuple[CaseKeys, ...] = ()
    """Tests of the stages, for etlstage test."""
    faults: tuple[FaultKeys, ...] = ()
    """What goes wrong with workers in a trial, for etlstage run --faults."""
    dead_letters: DeadLetterKeys | None = None
    """Where a copy of each run's dead letters goes, besides their files."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return a pipeline of the values that could be read, without a check."""
        made = object.__new__(cls)
        for name, setting in settings_of(cls).items():
            default = None if setting.required else setting.default
            value = values.get(name)
            object.__setattr__(made, name, default if value is None else value)
        return made
