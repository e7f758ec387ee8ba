"""
What may stand in a pipeline file.

The keys of a stage are the settings of :class:`~etlstage.stage.Stage` and of its
dialect, see ``stages.py``; here is what only a file says: its ends, their DataFrames,
the session. What keys of several mappings say together is in ``rules.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from etlstage.config.case import CaseKeys
from etlstage.config.fault import FaultKeys
from etlstage.config.stages import StageKeys, stage_section
from etlstage.messages import StageKind
from etlstage.settings.definition import (
    Definition,
    Place,
    broken,
    settings_of,
)
from etlstage.settings.kind import (
    Choice,
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
    Count,
    Duration,
    Name,
    Size,
    of_files,
)
from etlstage.stage import OffsetPolicy

__all__ = (
    "DeadLetterKeys",
    "EpochKeys",
    "ExtractKeys",
    "LoadKeys",
    "PipelineKeys",
    "SessionKeys",
    "SparkLetterKeys",
    "SparkSinkKeys",
    "SparkSourceKeys",
    "TransformKeys",
)


class Keys(Definition):
    """Base of all mappings that only a file has."""

    __slots__ = ()

    def given(self, *names: str) -> dict[str, Any]:
        """Return the values, of ``names``, that are not the default."""
        own = settings_of(type(self))
        values = {name: getattr(self, name) for name in names}
        return {name: v for name, v in values.items() if v != own[name].default}


def _frame_rules(given: Mapping[str, Any], default: str) -> Iterable[Problem]:
    if "path" in given and "table" in given:
        yield broken(("table",), "can't be used together with path")
    options = given.get("options")
    named = {name.lower() for name in options} if isinstance(options, dict) else set()
    somewhere = given.get("path") or given.get("table") or named & {"path", "paths"}
    if given and not somewhere and of_files(given.get("format", default)):
        # Spark takes text that is nowhere for an empty DataFrame.
        yield broken((), "needs the key path or the key table")


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkSourceKeys(Keys):
    """A DataFrame to read, and the message that a row becomes."""

    format: str | None = None
    """As Spark calls it; without it Spark's default."""
    path: Argument | None = None
    """Where it is, relative to the file's folder."""
    table: str | None = None
    """A table of the catalog, in place of a path."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the format."""
    schema_: str | None = None
    """Its columns, as in "id long, title string"; a stream of files needs them."""
    message: str | None = None
    """A Spark SQL expression; without it the only column if it is text or binary,
    else to_json(struct(*))."""
    key: str | None = None
    """A Spark SQL expression, for order: key of the next stage."""
    spool: Argument | None = None
    """Where all messages wait on engine local; without it the system's temporary
    directory."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what contradicts itself."""
        return _frame_rules(given, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochKeys(Keys):
    """How much is written to a DataFrame at once."""

    messages: Count = 1_000_000
    """Messages, at most."""
    bytes: Size = 128 << 20
    """Bytes, at most, unless a single run has more."""
    seconds: Duration = 60.0
    """Time that messages wait for an epoch to be full, with exactly-once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkSinkKeys(Keys):
    """A DataFrame to write."""

    format: str = "parquet"
    """As Spark calls it."""
    path: Argument | None = None
    """Where it goes, relative to the file's folder."""
    table: str | None = None
    """A table of the catalog, in place of a path."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the format."""
    mode: Literal["append", "overwrite", "error"] = "error"
    """What is done about what is there."""
    schema_: str | None = None
    """Columns that JSON messages become; without it one column, value."""
    partition_by: tuple[str, ...] = ()
    """Columns that become directories."""
    epoch: EpochKeys = field(default_factory=EpochKeys)
    """How much is written at once."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what contradicts itself."""
        return _frame_rules(given, "parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkLetterKeys(Keys):
    """A DataFrame to which the dead letters of each run are appended."""

    format: str = "parquet"
    """As Spark calls it."""
    path: Argument | None = None
    """Where it goes, relative to the file's folder."""
    table: str | None = None
    """A table of the catalog, in place of a path."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the format."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what contradicts itself."""
        return _frame_rules(given, "parquet")


@dataclass(frozen=True, kw_only=True)
class ExtractKeys(StageKeys):
    """Where messages come from: a DataFrame or a worker."""

    kind: ClassVar[StageKind] = StageKind.EXTRACT
    place: ClassVar[Place] = Place.EXTRACT
    frame: ClassVar[Place] = Place.SOURCE
    spark: Annotated[SparkSourceKeys | None, Place.SOURCE] = None
    """A DataFrame to read."""
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
    spark: Annotated[SparkSinkKeys | None, Place.SINK] = None
    """A DataFrame to write."""
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
