"""
The interface of a pipeline's ends, and which ends there are.

An end is a module. Its keys are the fields of one class for the extract stage and one
for the load stage. The methods of these classes define how messages are read or
written, what ``plan`` shows, what ``validate`` looks for, which deliveries are promised
and why others are not, and how retried dead letters are loaded. A third-party package
registers an :class:`End` with an entry point of the group ``etlstage.ends``::

    [project.entry-points."etlstage.ends"]
    queue = "mine.queue:QUEUE"

Entry points are loaded only for a name that no end of etlstage has.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self

from etlstage.errors import ConfigError
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Bounds
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.protocol.registry import entry_at, loaded
from etlstage.settings.definition import Definition, Place, broken, settings_of
from etlstage.settings.problem import Loc, Problem
from etlstage.telemetry import Meter
from etlstage.transport import Launch, launch_worker

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pyspark.sql import DataFrame, SparkSession

    from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
    from etlstage.config.presence import Look
    from etlstage.spark import Session
    from etlstage.spark.engine.stage_job import Origin
    from etlstage.spark.ship.artifact import Shipment
    from etlstage.spark.sink import SparkSink

__all__ = (
    "GROUP",
    "SCHEME",
    "End",
    "Keys",
    "SinkKeys",
    "Site",
    "SourceKeys",
    "ends",
    "located",
    "name_of",
    "one_load",
    "unrecorded",
    "without_arrow",
)

GROUP: Final = "etlstage.ends"
"""The group of entry points that third-party packages register."""
SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")

_OURS: Final = ("spark", "worker", "files", "journal", "kinesis")
"""Modules of ``etlstage.config.ends``, in the order in which they are named."""


def located(path: str, folder: Path) -> str:
    """Return ``path`` relative to the file's folder; unchanged if it has a scheme."""
    return path if SCHEME.match(path) else str(folder / path)


class Keys(Definition):
    """Base of the mappings that occur only in pipeline files."""

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
        launch: Starts the workers that run on the driver's machine.
        spark: A session to use in place of the file's own; it is not stopped.
        shared: The session of another site, to be used by both.

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
        """The folder that stores positions; None: they are not stored."""
        state = self.pipeline.state
        return self.folder / state if state is not None else None

    def session(self) -> Session:
        """Return the Spark session that all parts share."""
        if self.shared is None:
            from etlstage.spark import Session

            settings = self.pipeline.spark.given("master", "remote", "config")
            self.shared = Session(self._spark, **settings)
        return self.shared

    def shipment(self) -> Shipment:
        """Return what the file sends to executors."""
        from etlstage.spark.ship.artifact import Shipment

        keys = self.pipeline.spark
        return Shipment(self.folder, files=keys.files, archives=keys.archives)

    def sent(
        self, read: Callable[[SparkSession], DataFrame]
    ) -> Callable[[SparkSession], DataFrame]:
        """Return a function that sends the shipment to the executors, then reads."""

        def read_behind(spark: SparkSession) -> DataFrame:
            # First: a plan refers to what had been sent when it was made.
            self.shipment().send(spark)
            return read(spark)

        return read_behind


class _EndKeys(Keys):
    """The interface that both roles of an end share."""

    __slots__ = ()
    place: ClassVar[Place]
    """Which keys of a stage can be used with it."""
    engines: ClassVar[Sequence[str]] = ("local",)
    """Which engines can build it."""
    needs_spark: ClassVar[bool] = False
    """Whether it needs a Spark session on every engine."""
    rows: ClassVar[bool] = False
    """Whether it has rows, which a file's tests may give and expect."""

    @classmethod
    def instead(cls, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return its mapping for another end that replaces it and has the same keys."""
        return written

    def text(self) -> str:
        """Return a description in one line, such as ``csv from in.csv``."""
        return ", ".join(f"{key} {value}" for key, value in self.given().items())

    def about(self, stage: Any, site: Site) -> Iterator[tuple[str, str]]:  # noqa: ANN401
        """Yield what ``plan`` shows of it, as pairs of a heading and a text."""
        yield from ()

    def held(self, engine: str) -> int:
        """Return how many bytes it may hold in memory, without its workers."""
        return 0

    def missing(self, loc: Loc, look: Look) -> Iterator[Problem]:
        """
        Yield what the end names that is not on this machine.

        Args:
            loc: Where the end is written.
            look: Finds files.

        """
        yield from ()


class SourceKeys(_EndKeys):
    """The keys of an extract stage's end, and what it can do."""

    __slots__ = ()
    place: ClassVar[Place] = Place.SOURCE
    numbered: ClassVar[bool] = False
    """Whether its messages have numbers that are the same for all readers."""
    repeatable: ClassVar[bool] = False
    """Whether it can be read any number of times."""
    sharded: ClassVar[bool] = False
    """Whether its messages come from shards of its own."""

    @property
    def keyed(self) -> bool:
        """Whether there is a key beside each message."""
        return False

    @abstractmethod
    def source(self, stage: ExtractKeys, site: Site) -> Source:
        """Return the source that reads messages on engine local."""

    def origin(self, stage: ExtractKeys, site: Site) -> Origin:
        """Return what is read on an engine that runs stages in executors."""
        raise NotImplementedError

    def edge(self, stage: ExtractKeys, site: Site) -> str | None:
        """Describe the place on disk that buffers messages on engine local, if any."""
        return None

    def wrong(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield conflicts with the engine, or with other keys of the stage."""
        yield from ()

    def not_once(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield why an interrupted run can't resume reading here, with the remedy."""
        yield "needs positions from which extraction can resume"

    def goes_on(self, stage: ExtractKeys) -> bool:
        """Return whether a repeated run resumes reading after what was loaded."""
        return False

    def reads(self, look: Look) -> Iterator[Path]:
        """Yield the files that are read while messages are loaded."""
        yield from ()

    def tried(self) -> SourceKeys:
        """Return the keys for a trial run, which ends and leaves no traces."""
        return self

    def reading(self, file: Path) -> Self:
        """Return the keys for reading a test's rows, JSON objects in a file."""
        raise NotImplementedError


class SinkKeys(_EndKeys):
    """The keys of a load stage's end, and what it can do."""

    __slots__ = ()
    place: ClassVar[Place] = Place.SINK

    @abstractmethod
    def sink(self, stage: LoadKeys, site: Site) -> Sink:
        """Return the sink that writes messages on engine local."""

    def retry_sink(self, stage: LoadKeys, site: Site, number: int) -> Sink:
        """Return the sink for messages of a retry, whichever input they come from."""
        return self.sink(stage, site)

    def spark_sink(self, stage: LoadKeys, site: Site) -> SparkSink:
        """Return the sink for DataFrames, on engines spark and streaming."""
        raise NotImplementedError

    def bounds(self, stage: LoadKeys) -> Bounds:
        """Return how much one epoch covers."""
        return Bounds()

    def wrong(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield conflicts with the engine, or with other keys of the stage."""
        yield from ()

    def not_once(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield why the source's messages can't be loaded once, with the remedy."""
        yield "needs an end that loads each epoch once as a whole, or not at all"

    def promise(self, stage: LoadKeys, pipeline: PipelineKeys) -> str | None:
        """Return the delivery promise and its reason; None: plain at least once."""
        return None

    def again(self, engine: str) -> str:
        """Return what loading again does to messages that were loaded before."""
        return "may load some messages twice"

    def retried(self, pipeline: PipelineKeys, epoch: str) -> tuple[Self, str]:
        """
        Return the keys for loading retried dead letters, and the delivery.

        Args:
            pipeline: The keys of the file.
            epoch: The name of the retry.

        """
        return self, pipeline.delivery

    def redoes(self, pipeline: PipelineKeys) -> bool:
        """Return whether a retry replaces what it loaded before it was interrupted."""
        return pipeline.delivery == "exactly-once"

    def notes(self, pipeline: PipelineKeys) -> bool:
        """Return whether the sink itself keeps a record of each epoch."""
        return False

    def writing(self, folder: Path) -> Self:
        """Return the keys for writing rows where a test reads them."""
        raise NotImplementedError

    def rows_in(self, folder: Path, site: Site) -> list[bytes]:
        """Return the rows, JSON objects, that a sink of :meth:`writing` has left."""
        raise NotImplementedError


def unrecorded(pipeline: PipelineKeys) -> Iterator[str]:
    """Yield why loaded epochs can't be recorded, with the remedy."""
    # A stream records them in its checkpoint.
    if pipeline.engine == "streaming":
        return
    if pipeline.state is None:
        yield "needs state, a folder that records what was loaded"
    if pipeline.dead_letters is not None:
        yield "can't be guaranteed for dead_letters: read their files in the state"
    if pipeline.extract is not None:
        yield from pipeline.extract.end.not_once(pipeline.extract, pipeline)


def one_load(pipeline: PipelineKeys) -> str:
    """Return the limit of exactly once, where a new run does not resume reading."""
    if pipeline.engine == "local" and pipeline.extract.offsets is not None:
        return ""
    return (
        "; this covers one load, from its first start to its end: a new run loads"
        " everything again (engine streaming loads only what is new)"
    )


class End(NamedTuple):
    """An end: its name in a file, and the classes of its keys."""

    name: str
    """Its key in a stage."""
    source: type[SourceKeys] | None = None
    """For extract stages, if it can be read."""
    sink: type[SinkKeys] | None = None
    """For load stages, if it can be written."""


def ends(
    *, others: bool = False, named: Container[str] | None = None
) -> dict[str, End]:
    """
    Return the ends by name.

    Args:
        others: Whether to load the entry points of other packages, too.
        named: Names that are used: an entry point with another name is left out if it
            is broken. None: none may be broken.

    Raises:
        ConfigError: If an entry point can't be loaded, or is not an end, or its name is
            taken.

    """
    found = {
        name: getattr(import_module(f"etlstage.config.ends.{name}"), name.upper())
        for name in _OURS
    }
    return {**found, **_of_others(found, named)} if others else found


def name_of(end: SourceKeys | SinkKeys) -> str:
    """Return the name of an end in a file."""
    for others in (False, True):
        for name, known in ends(others=others, named=()).items():
            if type(end) in known:
                return name
    raise AssertionError(f"unreachable: {type(end).__name__} is of no end")


def _of_others(ours: Mapping[str, End], named: Container[str] | None) -> dict[str, End]:
    from importlib.metadata import entry_points  # takes a moment

    found: dict[str, End] = {}
    for entry in sorted(entry_points(group=GROUP)):
        try:
            end = _loaded(entry, {*ours, *found})
        except ConfigError:
            if named is None or entry.name in named:
                raise
        else:
            found[end.name] = end
    return found


def _loaded(entry: EntryPoint, taken: Container[str]) -> End:
    end = loaded(entry)
    if not isinstance(end, End):
        raise ConfigError(f"{entry_at(entry)}: expected an End, got {entry.value}")
    if end.name in taken:
        raise ConfigError(f"{entry_at(entry)}: there is already an end {end.name!r}")
    return end


def without_arrow(loc: Loc) -> Iterator[Problem]:
    """Yield the problem of a setting that needs PyArrow, if it is not installed."""
    if find_spec("pyarrow") is None:
        yield broken(loc, "needs PyArrow: pip install 'etlstage[arrow]'")
