"""
What may stand in a pipeline file.

The keys of a stage are the settings of :class:`~etlstage.stage.Stage` and of its
dialect, see ``stages.py``; here is what only a file has: its ends, their DataFrames,
the session. Rules across several mappings are in ``rules.py``.
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
from etlstage.settings.units import Argument, Command, Duration, Name, Pointer
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformKeys(StageKeys):
    """One transform stage."""

    kind: ClassVar[StageKind] = StageKind.TRANSFORM
    place: ClassVar[Place] = Place.TRANSFORM
    stage: Annotated[Stage, Instance(Stage), Place(0)]
    """What its worker is."""
    durable: Annotated[DurableKeys | None, Durable(), Place.TRANSFORM] = None
    """Whether what leaves it waits in journals in the state, so that it is not made
    twice; true, or a mapping. Needs engine local, and state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardKeys(Keys):
    """
    How the input is cut into shards, for a worker that commits.

    Each shard has a worker of its own, and is committed in its own time.
    """

    label: ClassVar[tuple[str, ...]] = ("shards",)
    count: Annotated[int, Whole(1, 1000)] = 1
    """Shards, each with a worker."""
    key: Pointer | None = None
    """A JSON pointer: messages that have the same there are in one shard, in their
    order; by default a hash of the message picks it."""
    sequence: Pointer | None = None
    """A JSON pointer to the sequence number, which rises within a shard; by default
    messages are numbered as they come. What is not above the checkpoint was loaded."""
    arrival: Pointer | None = None
    """A JSON pointer to when a record arrived, in milliseconds since 1970 or as in
    2026-11-23T18:00:00Z."""
    at_end: Annotated[Literal["shard_ended", "shutdown"], Noun("end of the input")] = (
        "shard_ended"
    )
    """What workers are sent at the end of the input: that their shard has ended, or
    that they are to shut down and it goes on with the next run."""
    leases: Argument | None = None
    """Where runners share the shards: postgresql://..., or the path of a file for those
    of one host."""
    table: Annotated[str, Pattern("[a-z_][a-z0-9_]{0,40}", "a name of a table")] = (
        "etlstage_leases"
    )
    """Name of the table of the leases; each pipeline has its own."""
    failover: Duration = 10.0
    """Time without a sign of life after which others take a runner's shards."""
    outage: Duration = 300.0
    """Time for which the leases may be out of reach, at the start or later: then the
    run ends. What it had is taken by others, or by the next run."""


@dataclass(frozen=True, kw_only=True, slots=True)
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
    epoch: Annotated[EpochKeys | None, Place.LOAD] = None
    """How much is loaded and committed at once, for exactly-once."""
    shards: Annotated[ShardKeys | None, Place.LOAD] = None
    """Parts of the input that have a worker each, in a dialect whose workers commit."""


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
    """Spark's own settings; they override the defaults."""
    staging: Argument | None = None
    """A directory shared by driver and executors."""
    files: tuple[Argument, ...] = ()
    """Sent to the executors, with etlstage."""
    archives: tuple[Argument, ...] = ()
    """Sent to the executors and unpacked there, as what stands behind #."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what contradicts itself."""
        if "master" in given and "remote" in given:
            yield broken(("remote",), "can't be used together with master")

    @property
    def here(self) -> bool:
        """Whether executors are on this machine."""
        master = (self.master or "local").partition("[")[0]
        return self.remote is None and master in ("local", "local-cluster")

    def shipped(self) -> Iterator[tuple[Loc, str, str]]:
        """
        Yield what is sent to executors: where it stands, its path, its name there.

        That name is what stands behind a ``#`` in the last part of the path.
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
    drain: Duration | None = None
    """How long messages that were read are still processed when a run is to end; then
    only what workers have. By default 30s where the next run reads the rest again, else
    no limit. On engines spark and streaming a load, or a batch, that takes longer is
    broken off; by default it may take any time."""
    spark: SessionKeys = field(default_factory=SessionKeys)
    """The Spark session; without it a local one on all cores."""
    extract: Annotated[ExtractKeys, stage_section(ExtractKeys)]
    """Where messages come from: a DataFrame or a worker."""
    transform: Annotated[
        tuple[TransformKeys, ...], Stages(stage_section(TransformKeys))
    ] = ()
    """Stages that turn each message into none, one or many."""
    load: Annotated[LoadKeys, stage_section(LoadKeys)]
    """Where messages end: a DataFrame or a worker."""
    tests: tuple[CaseKeys, ...] = ()
    """Tests of the stages, for etlstage test."""
    faults: tuple[StageFaultKeys, ...] = ()
    """What goes wrong with workers in a trial, for etlstage run --faults."""
    dead_letters: DeadLetterKeys | None = None
    """Where a copy of each run's dead letters goes, besides their files."""

    def stages(self) -> Iterator[tuple[Loc, StageKeys]]:
        """Yield the stages in the order of the line, with their places in the file."""
        yield ("extract",), self.extract
        for i, stage in enumerate(self.transform):
            yield ("transform", i), stage
        yield ("load",), self.load
