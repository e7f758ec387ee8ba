"""
The keys of a pipeline file.

The keys of a stage are the settings of :class:`~etlstage.stage.Stage` and of its
dialect, see ``stages.py``. Here are the keys that only a file has: its ends, their
DataFrames, the session. Rules across several mappings are in ``rules.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from etlstage.config.case import CaseKeys
from etlstage.config.end import Keys, SinkKeys, SourceKeys
from etlstage.config.ends.journal import Durable, DurableKeys
from etlstage.config.ends.row import EpochKeys
from etlstage.config.ends.spark import SparkLetterKeys
from etlstage.config.fault import StageFaultKeys
from etlstage.config.stages import StageKeys, Stages, stage_section
from etlstage.messages import StageKind
from etlstage.settings.definition import Place, broken
from etlstage.settings.kind import Choice, Instance, Noun, Pattern, Schema, Whole
from etlstage.settings.problem import Loc, Problem
from etlstage.settings.units import Command, Duration, Location, Name, Pointer
from etlstage.stage import OffsetPolicy, Stage

__all__ = (
    "DeadLetterKeys",
    "ExtractKeys",
    "LoadKeys",
    "PipelineKeys",
    "SessionKeys",
    "ShardKeys",
    "TransformKeys",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractKeys(StageKeys):
    """Where messages come from: files, a DataFrame, journals, a stream or a worker."""

    kind: ClassVar[StageKind] = StageKind.EXTRACT
    place: ClassVar[Place] = Place.EXTRACT
    frame: ClassVar[Place] = Place.SOURCE
    end: Annotated[SourceKeys, Instance(SourceKeys), Place(0)]
    """What is read, and how."""
    offsets: Annotated[OffsetPolicy | None, Place.EXTRACT] = None
    """Who keeps the offsets of a cyclic extraction, and how they advance."""
    every: Annotated[Duration | None, Place.EXTRACT | Place.SOURCE] = None
    """Pause before reading again once everything was read; the run then lasts until it
    is stopped. By default it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformKeys(StageKeys):
    """One transform stage."""

    kind: ClassVar[StageKind] = StageKind.TRANSFORM
    place: ClassVar[Place] = Place.TRANSFORM
    stage: Annotated[Stage, Instance(Stage), Place(0)]
    """What its worker is."""
    durable: Annotated[DurableKeys | None, Durable(), Place.TRANSFORM] = None
    """Whether the stage's outputs wait in journals in the state, so that they are not
    computed twice: true, or a mapping. Needs engine local, and state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardKeys(Keys):
    """
    How the input is cut into shards, for a worker that commits.

    Each shard has a worker of its own, and is committed in its own time.
    """

    label: ClassVar[tuple[str, ...]] = ("shards",)
    count: Annotated[int, Whole(1, 1000)] = 1
    """Number of shards, each with a worker of its own."""
    key: Pointer | None = None
    """JSON pointer to the key of a message: messages with the same key go to the same
    shard, in their order. By default a hash of the message selects the shard."""
    sequence: Pointer | None = None
    """JSON pointer to the sequence number, which must rise within a shard; by default
    messages are numbered as they come. A message whose number is not above the
    checkpoint counts as loaded."""
    arrival: Pointer | None = None
    """JSON pointer to the time at which a record arrived, in milliseconds since 1970 or
    as in 2026-11-23T18:00:00Z."""
    at_end: Annotated[Literal["shard_ended", "shutdown"], Noun("value")] = "shard_ended"
    """What workers are sent at the end of the input: that their shard has ended
    (shard_ended), or that they are to shut down, and the next run continues the shard
    (shutdown)."""
    leases: Location | None = None
    """Where several runners share the shards: postgresql://..., or the path of a file
    for runners on one host."""
    table: Annotated[
        str,
        Pattern(
            "[a-z_][a-z0-9_]{0,40}",
            "a table name of up to 41 lower-case letters, digits and underscores",
        ),
    ] = "etlstage_leases"
    """Name of the table of leases; each pipeline needs a table of its own."""
    failover: Duration = 10.0
    """How long a runner may show no sign of life before others take its shards."""
    outage: Duration = 300.0
    """How long the leases may be out of reach, at the start or later, before the run
    ends. Other runners, or the next run, then take its shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadKeys(StageKeys):
    """Where messages are loaded: files, a DataFrame, journals or a worker."""

    kind: ClassVar[StageKind] = StageKind.LOAD
    place: ClassVar[Place] = Place.LOAD
    frame: ClassVar[Place] = Place.SINK
    end: Annotated[SinkKeys, Instance(SinkKeys), Place(0)]
    """What is written, and how."""
    commit: Annotated[Command | None, Place.LOAD] = None
    """Program that makes final what the workers have loaded in an epoch, for
    exactly-once."""
    abort: Annotated[Command | None, Place.LOAD] = None
    """Program that undoes an epoch, whether it is final or not."""
    epoch: Annotated[EpochKeys | None, Place.LOAD] = None
    """How much is loaded and committed at once, for exactly-once."""
    shards: Annotated[ShardKeys | None, Place.LOAD] = None
    """How the input is divided into shards, each with a worker of its own, in a dialect
    whose workers commit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetterKeys(Keys):
    """Where dead letters are written besides their files."""

    spark: SparkLetterKeys
    """A DataFrame to which the dead letters of each run are appended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionKeys(Keys):
    """The Spark session; by default a local one on all cores."""

    master: str | None = None
    """Where Spark runs; local[*] if neither master nor remote is set."""
    remote: (
        Annotated[
            str, Pattern("sc://.*", "a Spark Connect server such as sc://host:15002")
        ]
        | None
    ) = None
    """URL of a Spark Connect server."""
    config: dict[str, str] = field(default_factory=dict)
    """Settings of Spark itself; they override etlstage's defaults."""
    staging: Location | None = None
    """Folder, or URL of one, that the driver and all executors share; required unless
    Spark is local."""
    files: tuple[Location, ...] = ()
    """Files to send to the executors, besides etlstage."""
    archives: tuple[Location, ...] = ()
    """Archives to send to the executors and unpack there, under the name after #."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return the contradictions among the given values."""
        if "master" in given and "remote" in given:
            yield broken(("remote",), "can't be used together with master")

    @property
    def here(self) -> bool:
        """Whether executors are on this machine."""
        master = (self.master or "local").partition("[")[0]
        return self.remote is None and master in ("local", "local-cluster")

    def shipped(self) -> Iterator[tuple[Loc, str, str]]:
        """
        Yield what is sent to executors: where it is written, its path, its name there.

        That name follows a ``#`` in the last part of the path; by default it is that
        part itself.
        """
        for key, paths in (("files", self.files), ("archives", self.archives)):
            for i, written in enumerate(paths):
                folder, slash, name = written.rpartition("/")
                file, _, there = name.partition("#")
                yield ("spark", key, i), f"{folder}{slash}{file}", there or file


_DELIVERIES: Final = ("at-least-once", "exactly-once")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineKeys(Keys):
    """A pipeline of etlstage."""

    more: ClassVar[Schema] = {
        "patternProperties": {
            "^x-": {"description": "Free for anchors; etlstage does not read it."}
        }
    }
    name: Name
    """Name of the pipeline in reports, logs and errors."""
    engine: Literal["local", "spark", "streaming"] = "local"
    """Where the stages run: on the driver's machine (local), in Spark's executors
    (spark), or there in micro-batches (streaming)."""
    delivery: Annotated[
        Literal["at-least-once", "exactly-once"],
        Choice("delivery", {d: d for d in _DELIVERIES}, later=("at-most-once",)),
    ] = "at-least-once"
    """How often a message may arrive. exactly-once needs a load into files, journals or
    a database, and state on engines local and spark; or, on engine local, a load worker
    with commit and abort."""
    state: Location | None = None
    """Folder that keeps offsets and dead letters between runs; without it only dead
    letters are kept, in .etlstage beside the file."""
    drain: Duration | None = None
    """How long messages that were already read are still processed when a run is
    stopped; after that only those that workers hold. By default 30s if the next run can
    read the rest again, else without limit. On engines spark and streaming, how long a
    load, or a batch, may then still take before it is cancelled; by default without
    limit."""
    spark: SessionKeys = field(default_factory=SessionKeys)
    """The Spark session; by default a local one on all cores."""
    extract: Annotated[ExtractKeys, stage_section(ExtractKeys)]
    """Where messages come from: files, a DataFrame, journals, a stream or a worker."""
    transform: Annotated[
        tuple[TransformKeys, ...], Stages(stage_section(TransformKeys))
    ] = ()
    """Stages that turn each message into zero, one or many."""
    load: Annotated[LoadKeys, stage_section(LoadKeys)]
    """Where messages are loaded: files, a DataFrame, journals or a worker."""
    tests: tuple[CaseKeys, ...] = ()
    """Tests of the stages, which etlstage test runs."""
    faults: tuple[StageFaultKeys, ...] = ()
    """Faults to inject into workers in a trial, with etlstage run --faults."""
    dead_letters: DeadLetterKeys | None = None
    """Where a copy of each run's dead letters is written, besides their files."""

    def stages(self) -> Iterator[tuple[Loc, StageKeys]]:
        """Yield the stages in pipeline order, with their places in the file."""
        yield ("extract",), self.extract
        for i, stage in enumerate(self.transform):
            yield ("transform", i), stage
        yield ("load",), self.load
