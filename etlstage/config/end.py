"""
What an end of a pipeline answers for, and which ends there are.

An end is a module. Its keys are the fields of one class for the extract stage and one
for the load stage; the methods of these say how messages are read or written, what
``plan`` shows, what ``validate`` looks for, which deliveries are promised and why the
others are not, and how dead letters that are retried are loaded. A package of others
has an :class:`End` too, which its entry point of the group ``etlstage.ends`` names::

    [project.entry-points."etlstage.ends"]
    queue = "mine.queue:QUEUE"

Only who is given an end by its name imports the module.
"""

from __future__ import annotations

import glob
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    Self,
)

from etlstage.errors import ConfigError, guess
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Bounds
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.settings.ddl import DDL, columns_of
from etlstage.settings.definition import Definition, Place, broken, judged, settings_of
from etlstage.settings.kind import Choice, Schema
from etlstage.settings.problem import Loc, Problem
from etlstage.settings.units import Argument, Count, Duration, Size
from etlstage.telemetry import Meter
from etlstage.transport import Launch, launch_worker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
    from etlstage.config.presence import Look
    from etlstage.spark import Session
    from etlstage.spark.engine.stage_job import Origin
    from etlstage.spark.ship.plan import Shipment
    from etlstage.spark.sink import SparkSink

__all__ = (
    "GROUP",
    "SCHEME",
    "End",
    "EpochKeys",
    "Keys",
    "RowSinkKeys",
    "RowSourceKeys",
    "SinkKeys",
    "Site",
    "SourceKeys",
    "absent_input",
    "ends",
    "located",
    "name_of",
    "one_load",
    "unrecorded",
)

GROUP: Final = "etlstage.ends"
"""Of entry points, by which packages of others are found."""
SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")

MANY: Final = set("*?[{")
"""In a path that stands for any number of files."""

_OURS: Final = ("spark", "worker", "files", "journal")
"""Modules of ``etlstage.config.ends``, in the order in which they are named."""


def located(path: str, folder: Path) -> str:
    """Return ``path`` seen from the file's folder; one with a scheme is as it is."""
    return path if SCHEME.match(path) else str(folder / path)


class Keys(Definition):
    """Base of all mappings that only a file has."""

    __slots__ = ()

    def given(self, *names: str) -> dict[str, Any]:
        """Return the values, of ``names`` or all, that are not the default."""
        own = settings_of(type(self))
        values = {name: getattr(self, name) for name in names or own}
        return {name: v for name, v in values.items() if v != own[name].default}


class Site:
    """
    What an end is given to build its part of a pipeline.

    Args:
        pipeline: The keys of the file.
        folder: What relative paths are relative to.
        letters: Where messages are dead-lettered.
        meter: Where to count what happens.
        launch: What starts workers beside the driver.
        spark: A session to use in place of the file's own; it is not stopped.
        shared: The session of another site, which both have in common.

    """

    def __init__(
        self,
        pipeline: PipelineKeys,
        folder: Path,
        letters: DeadLetters,
        *,
        meter: Meter | None = None,
        launch: Launch = launch_worker,
        spark: SparkSession | None = None,
        shared: Session | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.folder = folder
        self.letters = letters
        self.meter = meter
        self.launch = launch
        self.shared = shared
        self._spark = spark

    @property
    def state(self) -> Path | None:
        """Where positions are kept, if they are."""
        state = self.pipeline.state
        return self.folder / state if state is not None else None

    def session(self) -> Session:
        """Return the Spark session that all parts have in common."""
        if self.shared is None:
            from etlstage.spark import Session

            settings = self.pipeline.spark.given("master", "remote", "config")
            self.shared = Session(self._spark, **settings)
        return self.shared

    def shipment(self) -> Shipment:
        """Return what the file says that executors need."""
        from etlstage.spark.ship.plan import Shipment

        keys = self.pipeline.spark
        return Shipment(self.folder, files=keys.files, archives=keys.archives)

    def sent(
        self, read: Callable[[SparkSession], DataFrame]
    ) -> Callable[[SparkSession], DataFrame]:
        """Return what sends that to the executors, and then reads."""

        def read_behind(spark: SparkSession) -> DataFrame:
            # Before: a plan remembers what was sent when it is made.
            self.shipment().send(spark)
            return read(spark)

        return read_behind


class _EndKeys(Keys):
    """What both roles of an end answer."""

    __slots__ = ()
    place: ClassVar[Place]
    """Which keys of a stage go with it."""
    engines: ClassVar[Sequence[str]] = ("local",)
    """Which engines can build it."""
    needs_spark: ClassVar[bool] = False
    """Whether it needs a Spark session on every engine."""
    rows: ClassVar[bool] = False
    """Whether it has rows, which tests may give and expect."""

    @classmethod
    def instead(cls, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return its mapping as an end has it that takes its place, with its keys."""
        return written

    def text(self) -> str:
        """Return what it is, in a line, such as ``csv from in.csv``."""
        return ", ".join(f"{key} {value}" for key, value in self.given().items())

    def about(self, stage: Any, site: Site) -> Iterator[tuple[str, str]]:  # noqa: ANN401
        """Yield what ``plan`` shows of it, by what it is about."""
        yield from ()

    def held(self, engine: str) -> int:
        """Return how many bytes it may have in memory beside its workers."""
        return 0

    def missing(self, loc: Loc, look: Look) -> Iterator[Problem]:
        """
        Yield what it names and is not on this machine.

        Args:
            loc: Where it stands.
            look: Finds files.

        """
        yield from ()


class SourceKeys(_EndKeys):
    """The keys of an extract stage's end, and what it can do."""

    __slots__ = ()
    place: ClassVar[Place] = Place.SOURCE

    @property
    def keyed(self) -> bool:
        """Whether there is a key beside each message."""
        return False

    @abstractmethod
    def source(self, stage: ExtractKeys, site: Site) -> Source:
        """Return what reads messages on engine local."""

    def origin(self, stage: ExtractKeys, site: Site) -> Origin:
        """Return what is read on an engine whose stages are in executors."""
        raise NotImplementedError

    def edge(self, stage: ExtractKeys, site: Site) -> str | None:
        """Return where messages wait that were read on engine local, if it is a disk."""
        return None

    def wrong(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield what does not go with the engine, or with other keys of the stage."""
        yield from ()

    def not_once(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield why it can't be read on where a run broke off, and what would do."""
        yield "needs positions from which extraction can go on"

    def goes_on(self, stage: ExtractKeys) -> bool:
        """Return whether a run that is repeated reads on behind what was loaded."""
        return False

    def tried(self) -> SourceKeys:
        """Return what a run on trial reads, which ends and leaves nothing behind."""
        return self

    def reading(self, file: Path) -> Self:
        """Return the same with rows, JSON objects, that a test has in a file."""
        raise NotImplementedError


class SinkKeys(_EndKeys):
    """The keys of a load stage's end, and what it can do."""

    __slots__ = ()
    place: ClassVar[Place] = Place.SINK

    @abstractmethod
    def sink(self, stage: LoadKeys, site: Site) -> Sink:
        """Return what writes messages on engine local."""

    def spark_sink(self, stage: LoadKeys, site: Site) -> SparkSink:
        """Return what loads DataFrames of messages, on engines spark and streaming."""
        raise NotImplementedError

    def bounds(self) -> Bounds:
        """Return how much one epoch covers."""
        return Bounds()

    def wrong(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield what does not go with the engine, or with other keys of the stage."""
        yield from ()

    def not_once(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield why messages can't be loaded once from that source, and what would do."""
        yield "needs an end that loads an epoch once, or none of it"

    def promise(self, stage: LoadKeys, pipeline: PipelineKeys) -> str | None:
        """Return how often a message arrives and why, if it is no plain at least once."""
        return None

    def again(self, engine: str) -> str:
        """Return what becomes of what was loaded when it is loaded again."""
        return "may load some messages twice"

    def retried(self, pipeline: PipelineKeys, epoch: str) -> tuple[Self, str]:
        """
        Return what loads dead letters that are retried, and with which delivery.

        Args:
            pipeline: The keys of the file.
            epoch: What the retry is called.

        """
        return self, pipeline.delivery

    def notes(self, pipeline: PipelineKeys) -> bool:
        """Return whether the sink itself has a record of each epoch."""
        return False

    def writing(self, folder: Path) -> Self:
        """Return the same that writes its rows where a test reads them."""
        raise NotImplementedError

    def rows_in(self, folder: Path, site: Site) -> list[bytes]:
        """Return the rows, JSON objects, that :meth:`writing` has left in a folder."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochKeys(Keys):
    """How much is written at once."""

    messages: Count = 1_000_000
    """Messages, at most; with exactly-once see etlstage plan."""
    bytes: Size = 128 << 20
    """Bytes, at most, unless a single message has more; likewise."""
    seconds: Duration = 60.0
    """Time that messages wait for an epoch to be full, with exactly-once."""

    def text(self, pipeline: PipelineKeys) -> str:
        """Return how much one covers on engine local."""
        size = settings_of(EpochKeys)["bytes"].kind.written(self.bytes)
        return f"{counted(self.messages, 'message')} or {size}{_uncut(pipeline)}"

    def bounds(self) -> Bounds:
        """Return the bounds of an epoch."""
        return Bounds(messages=self.messages, bytes=self.bytes, seconds=self.seconds)


class Missing(Choice):
    """What becomes of what lacks a column; ``null`` is a word here, and no value."""

    def __init__(self) -> None:
        super().__init__("missing", {"dead_letter": "dead_letter", "null": "null"})

    def read(self, value: Any) -> Any:  # noqa: ANN401 - as Kind has it
        return super().read("null" if value is None else value)

    def schema(self) -> Schema:
        found = super().schema()
        return {"anyOf": [*found["anyOf"], {"type": "null"}]}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSourceKeys(SourceKeys):
    """The keys of an end whose rows become messages."""

    rows: ClassVar[bool] = True
    path: Argument | None = None
    """Where it is, relative to the file's folder."""
    format: str | None = None
    """What it is."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the format."""
    schema_: Annotated[str, DDL] | None = None
    """Its columns, as in "id long, title string"; a stream of files needs them."""
    message: str | None = None
    """The column that is the message; without it the only one if it is text or binary,
    else all columns as JSON, with nulls."""
    key: str | None = None
    """A column, for order: key of the next stage."""

    def about(self, stage: ExtractKeys, site: Site) -> Iterator[tuple[str, str]]:
        """Yield where it is, and what a row becomes."""
        if self.path:
            yield "path", located(self.path, site.folder)
        by_default = "the only column if it is text or binary, else all as JSON"
        yield "message", self.message or by_default
        if self.key:
            yield "key", self.key
        if self.schema_:
            yield "schema", " ".join(self.schema_.split())

    @property
    def keyed(self) -> bool:
        """Whether there is a key beside each message."""
        return self.key is not None

    def wrong(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield a pause that only a stream makes."""
        if stage.every is not None and pipeline.engine != "streaming":
            text = "is only for a worker on engine local, or for engine streaming"
            yield broken(("extract", "every"), text)

    def cut(self, pipeline: PipelineKeys, messages: int, size: int) -> tuple[int, int]:
        """Return what a run may have at most, so that epochs keep to their bounds."""
        once = pipeline.delivery == "exactly-once"
        most = pipeline.load.end.bounds() if once else Bounds()
        return min(messages, most.messages), min(size, most.bytes)

    def not_once(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield nothing: each row has a position."""
        yield from ()

    def goes_on(self, stage: ExtractKeys) -> bool:
        """Return True: each row has a position."""
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSinkKeys(SinkKeys):
    """The keys of an end where messages become rows."""

    rows: ClassVar[bool] = True
    path: Argument | None = None
    """Where it goes, relative to the file's folder."""
    format: str = "parquet"
    """What it is."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the format."""
    mode: Literal["append", "overwrite", "error"] = "error"
    """What is done about what is there."""
    schema_: Annotated[str, DDL] | None = None
    """Columns that JSON messages become; without it one column, value."""
    missing_: Annotated[str, Missing()] = "dead_letter"
    """What becomes of a message without a column that is not said to be null."""
    extra: Literal["dead_letter", "ignore"] = "ignore"
    """What becomes of a message with a field that is no column."""
    partition_by: tuple[str, ...] = ()
    """Columns that become directories."""
    epoch: EpochKeys = field(default_factory=EpochKeys)
    """How much is written at once."""

    def found(self, look: Look) -> Path | None:
        """Return where files would be, if that is on this machine."""
        return look.path(self.path) if self.path else None

    def missing(self, loc: Loc, look: Look) -> Iterator[Problem]:
        """Yield the output, if there must be none; columns that the schema has not."""
        yield from judged(self._present(loc, look))
        yield from judged(self._unknown(loc))

    def _present(self, loc: Loc, look: Look) -> Iterator[Problem]:
        if not look.loads or self.mode != "error":
            return
        place, state = self.found(look), look.state / "checkpoint"
        begun = look.engine == "streaming" and os.path.exists(state)
        if place is not None and os.path.exists(place) and not begun:
            text = "exists already: remove it, or set mode to append or overwrite"
            hidden = f"what is there {text}"
            yield Problem((*loc, "path"), f"{place} {text}", hidden=hidden)

    def _unknown(self, loc: Loc) -> Iterator[Problem]:
        schema = columns_of(self.schema_ or "value string")
        columns = [column.name for column in schema]
        for i, name in enumerate(self.partition_by):
            if name not in columns:
                expected = f", expected one of {', '.join(columns)}"
                yield Problem(
                    (*loc, "partition_by", i),
                    f"no column {{got}} in the schema{guess(name, columns) or expected}",
                    name,
                    hidden=f"no such column in the schema{expected}",
                )

    def about(self, stage: LoadKeys, site: Site) -> Iterator[tuple[str, str]]:
        """Yield where it goes, what becomes columns, and how much is written at once."""
        if self.path:
            yield "path", located(self.path, site.folder)
        yield "mode", self.mode
        by_default = "value, the message as text"
        yield "columns", " ".join((self.schema_ or by_default).split())
        if self.partition_by:
            yield "folders by", ", ".join(self.partition_by)
        yield "epoch", self._epoch(site.pipeline)
        if self.schema_:
            yield "errors", stage.on_error.text(retries=False)

    def _epoch(self, pipeline: PipelineKeys) -> str:
        if pipeline.engine == "local":
            return self.epoch.text(pipeline)
        what = (
            "a batch of the stream"
            if pipeline.engine == "streaming"
            else "the whole run"
        )
        return f"{what}, which is not cut"

    def bounds(self) -> Bounds:
        """Return the bounds of an epoch."""
        return self.epoch.bounds()

    def again(self, engine: str) -> str:
        """Return what the mode does with what is there."""
        texts = {
            "append": "may load some messages twice",
            "overwrite": "replaces what was loaded",
            "error": "is refused while there is output",
        }
        if engine == "local":
            return texts[self.mode]
        return f"{texts[self.mode]}; nothing is loaded of a run that fails before"

    def written(self, stage: LoadKeys, site: Site) -> dict[str, Any]:
        """Return what a sink is told of rows, and of messages that become none."""
        return {
            "schema": self.schema_,
            "missing": self.missing_,
            "extra": self.extra,
            "name": stage.name,
            "on_error": stage.on_error,
            "dead_letters": site.letters,
        }


def _uncut(pipeline: PipelineKeys) -> str:
    """Return where an epoch may exceed its bounds, for the source can't be cut."""
    if pipeline.delivery != "exactly-once":
        return ""
    extract = pipeline.extract.name
    if pipeline.extract.offsets is not None:
        return (
            f", but what comes of a range of {pipeline.extract.offsets.step:,} offsets"
            f" of {extract}, which can't be cut: for smaller epochs set"
            " extract.offsets.step"
        )
    if pipeline.transform:
        return f" of {extract}; what stages make of a message is not cut"
    return ""


def absent_input(
    path: str, place: Path | None, loc: Loc, look: Look
) -> Iterator[Problem]:
    """Yield the files of a source, which would be at ``place``, if there are none."""
    if place is None or {"{", "\\"} & set(path):
        return  # Hadoop knows alternatives and escapes, glob does not.
    if not MANY & set(path):
        if not os.path.exists(place):
            yield look.absent((*loc, "path"), "file or folder", place)
    elif not any(glob.iglob(str(place))):
        yield look.absent((*loc, "path"), "file that matches", place)


def unrecorded(pipeline: PipelineKeys) -> Iterator[str]:
    """Yield why what was read can't be recorded once, and what would do."""
    # A stream has its checkpoint for that.
    if pipeline.engine == "streaming":
        return
    if pipeline.state is None:
        yield "needs state, a folder where it is recorded what was loaded"
    if pipeline.dead_letters is not None:
        yield "can't be kept for dead_letters: read their files in the state"
    if pipeline.extract is not None:
        yield from pipeline.extract.end.not_once(pipeline.extract, pipeline)


def one_load(pipeline: PipelineKeys) -> str:
    """Return how far once reaches, where a new run does not read on."""
    if pipeline.engine == "local" and pipeline.extract.offsets is not None:
        return ""
    return (
        "; that covers one load, from its first start to its end: a new run loads all"
        " again (engine streaming has what is new)"
    )


class End(NamedTuple):
    """An end: what a file calls it, and the classes of its keys."""

    name: str
    """Its key in a stage."""
    source: type[SourceKeys] | None = None
    """For extract stages, if it can be read."""
    sink: type[SinkKeys] | None = None
    """For load stages, if it can be written."""


def ends(*, others: bool = False) -> dict[str, End]:
    """
    Return the ends by name.

    Args:
        others: Whether those of other packages are wanted, which have to be looked for.

    Raises:
        ConfigError: If a package of others names something else.

    """
    found = {
        name: getattr(import_module(f"etlstage.config.ends.{name}"), name.upper())
        for name in _OURS
    }
    return {**found, **_of_others(found)} if others else found


def name_of(end: SourceKeys | SinkKeys) -> str:
    """Return what a file calls an end."""
    return next(name for name, known in ends(others=True).items() if type(end) in known)


def _of_others(ours: Mapping[str, End]) -> dict[str, End]:
    from importlib.metadata import entry_points  # takes a moment

    found: dict[str, End] = {}
    for entry in sorted(entry_points(group=GROUP)):
        end = entry.load()
        if not isinstance(end, End):
            raise ConfigError(
                f"entry point {entry.name} of group {GROUP}: expected an End, got"
                f" {entry.value}"
            )
        if end.name in ours or end.name in found:
            raise ConfigError(
                f"entry point {entry.name} of group {GROUP}: there is an end"
                f" {end.name!r} already"
            )
        found[end.name] = end
    return found
