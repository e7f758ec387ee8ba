"""DataFrames of Spark as ends; PySpark is imported only to build them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from etlstage.config.end import End, Keys, Site, located, one_load, unrecorded
from etlstage.config.ends.row import RowSinkKeys, RowSourceKeys, absent_input
from etlstage.settings.ddl import spark_ddl
from etlstage.settings.definition import broken
from etlstage.settings.problem import Loc, Problem
from etlstage.settings.units import FILES, Location, literal, local_path, of_files

if TYPE_CHECKING:
    from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
    from etlstage.config.presence import Look
    from etlstage.pipeline.interfaces import DeadLetterSink, Source
    from etlstage.spark import DataFrameSink, Destination
    from etlstage.spark.engine.stage_job import Origin
    from etlstage.spark.sink import SparkSink

__all__ = (
    "SPARK",
    "SparkLetterKeys",
    "SparkSinkKeys",
    "SparkSourceKeys",
    "digest",
)

_ALL: Final = ("local", "spark", "streaming")
_READ_ONLY: Final = ("binaryfile", "image", "libsvm")
"""More formats of Spark that are read from files, whose path is a pattern."""


def digest(settings: Mapping[str, object]) -> str:
    """Return a digest of settings in place of their values: some are secret."""
    plain = json.dumps(settings, default=str, sort_keys=True)
    return sha256(plain.encode()).hexdigest()


def _frame_rules(given: Mapping[str, Any], default: str) -> Iterable[Problem]:
    if "path" in given and "table" in given:
        yield broken(("table",), "can't be used together with path")
    options = given.get("options")
    named = {name.lower() for name in options} if isinstance(options, dict) else set()
    somewhere = given.get("path") or given.get("table") or named & {"path", "paths"}
    if given and not somewhere and of_files(given.get("format", default)):
        # Without a place, Spark reads format text as an empty DataFrame.
        yield broken((), "needs the key path or the key table")


def _takes_pattern(format_: str | None) -> bool:
    """Return whether a format, by default Spark's own, is read from files."""
    kind = format_ or "parquet"
    return of_files(kind) or kind.lower() in _READ_ONLY


def _placed(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values that are not null, with the path relative to ``folder``."""
    placed = {name: value for name, value in values.items() if value is not None}
    if "path" in placed:
        placed["path"] = located(placed["path"], folder)
    return placed


def _shown(settings: Mapping[str, Any]) -> str:
    """Return what is read, without the options, which may be secret."""
    names = ("format", "table", "path")
    return " ".join(str(settings[name]) for name in names if name in settings)


def _text(format_: str | None, table: str | None, path: str | None, way: str) -> str:
    where = f"table {table}" if table else path
    return f"{format_ or 'Spark'} {way} {where}" if where else str(format_)


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkSourceKeys(RowSourceKeys):
    """A DataFrame to read, and the message made from each row."""

    engines: ClassVar[Sequence[str]] = _ALL
    needs_spark: ClassVar[bool] = True
    repeatable: ClassVar[bool] = True
    format: str | None = None
    """Format, named as in Spark; by default Spark's own default."""
    table: str | None = None
    """Table of the catalog, in place of a path."""
    message: str | None = None
    """Spark SQL expression for the message; by default the only column if it is text or
    binary, else all columns as JSON, with nulls."""
    key: str | None = None
    """Spark SQL expression for the key, for order: key of the next stage."""
    sort: str | None = None
    """Spark SQL expression by which rows are sorted on engine local, such as the column
    that is shards.sequence."""
    spool: Location | None = None
    """Folder where all messages are stored before they are processed, on engine local;
    by default state, or else the system's temporary directory."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return the contradictions among the given values."""
        return _frame_rules(given, "")

    def missing(self, loc: Loc, look: Look) -> Iterator[Problem]:
        """Yield a problem if the input is files, and there are none."""
        files = self.table is None and look.reads_here
        if self.path and files and _takes_pattern(self.format):
            yield from absent_input(self.path, look.path(self.path), loc, look)

    def text(self) -> str:
        """Return the format and where it is."""
        return _text(self.format, self.table, self.path, "from")

    def edge(self, stage: ExtractKeys, site: Site) -> str | None:
        """Return where the spool is."""
        where = site.folder / self.spool if self.spool else site.state
        return f"a spool on disk in {where or 'the temporary directory'}, all messages"

    def source(self, stage: ExtractKeys, site: Site) -> Source:
        """Return the source that reads the DataFrame through a spool."""
        from etlstage.spark import DataFrameSource, read_frame
        from etlstage.spark.dataframe.source import RUN_BYTES, RUN_MESSAGES

        settings, session = self._reading(site.folder), site.session()
        messages, size = self.cut(site.pipeline, RUN_MESSAGES, RUN_BYTES)
        of = {**settings, "message": self.message, "key": self.key}
        return DataFrameSource(
            lambda: read_frame(session.start(), **settings),
            message=self.message,
            key=self.key,
            sort=self.sort,
            name=stage.name,
            run_messages=messages,
            run_bytes=size,
            spool_dir=site.folder / self.spool if self.spool else None,
            state=site.state,
            of=digest(of if self.sort is None else {**of, "sort": self.sort}),
            session=session,
            shown=_shown(settings),
        )

    def wrong(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield the problem of ``sort`` on engines that read in parallel, or a brace."""
        yield from RowSourceKeys.wrong(self, stage, pipeline)
        if "[{]" in (self.path or "") and of_files(self.format or "parquet"):
            text = "Spark does not take [{] for a brace: put ? in its place"
            yield broken(("extract", "spark", "path"), text, at_key=False)
        if self.sort is not None and pipeline.engine != "local":
            text = "needs engine local: other engines read partitions in parallel"
            yield broken(("extract", "spark", "sort"), text)

    def origin(self, stage: ExtractKeys, site: Site) -> Origin:
        """Return the DataFrame itself."""
        from etlstage.spark import read_frame
        from etlstage.spark.engine.stage_job import Origin

        streaming = site.pipeline.engine == "streaming"
        settings = self._reading(site.folder)
        place = located(self.path, site.folder) if self.path else None
        if streaming and place and place != settings["path"] == literal(place):
            # For a folder without escapes Spark itself does so, to find partitions.
            settings["options"] = {"basePath": place, **self.options}
        read = partial(read_frame, streaming=streaming, **settings)
        return Origin(
            read=site.sent(read),
            message=self.message,
            key=self.key,
            name=stage.name,
            input=_shown(settings),
        )

    def reading(self, file: Path) -> Self:
        """Return the keys for reading a file of JSON objects."""
        path = literal(str(file))
        return replace(
            self, format="json", path=path, table=None, options={}, spool=None
        )

    def _reading(self, folder: Path) -> dict[str, Any]:
        """Return the keyword arguments for :func:`read_frame`."""
        if _takes_pattern(self.format):
            folder = Path(literal(str(folder)))
        values = _placed(self.given("format", "path", "table", "options"), folder)
        if self.schema_ is not None:
            values["schema"] = spark_ddl(self.schema_)
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkSinkKeys(RowSinkKeys):
    """A DataFrame to write."""

    engines: ClassVar[Sequence[str]] = _ALL
    needs_spark: ClassVar[bool] = True
    format: str = "parquet"
    """Format, named as in Spark."""
    table: str | None = None
    """Table of the catalog, in place of a path."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return the contradictions among the given values."""
        return _frame_rules(given, "parquet")

    def found(self, look: Look) -> Path | None:
        """Return where files would be, if that is on this machine."""
        here = self.path is not None and self.table is None and look.reads_here
        return look.path(self.path) if self.path and here else None

    def text(self) -> str:
        """Return the format and where it goes."""
        return _text(self.format, self.table, self.path, "to")

    def held(self, engine: str) -> int:
        """Return twice the bytes of an epoch, which is held until it is written."""
        return 2 * self.epoch.bytes if engine == "local" else 0

    def sink(self, stage: LoadKeys, site: Site) -> DataFrameSink:
        """Return the sink that writes the DataFrame, an epoch at a time."""
        from etlstage.spark import DataFrameSink

        return DataFrameSink(
            site.session(),
            self._destination(site.folder),
            **self.written(stage, site),
            epoch_messages=self.epoch.messages,
            epoch_bytes=self.epoch.bytes,
        )

    def spark_sink(self, stage: LoadKeys, site: Site) -> SparkSink:
        """Return the same sink, which takes DataFrames, too."""
        return self.sink(stage, site)

    def wrong(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield a mode that a stream can't have."""
        if pipeline.engine == "streaming" and self.mode == "overwrite" and self._far:
            text = (
                "can't be overwrite with engine streaming and a path on another"
                " machine: a stream adds to existing output"
            )
            yield broken(("load", "spark", "mode"), text, at_key=False)

    def not_once(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield why a DataFrame can't be loaded once, with the remedy."""
        if self.format.lower() == "jdbc":
            if not {"url", "dbtable"} <= {name.lower() for name in self.options}:
                yield "needs load.spark.options with url and dbtable"
            if pipeline.spark.remote is not None:
                yield (
                    "needs a session with its own JVM for a database: Spark Connect has"
                    " no transactions; use spark.master"
                )
        elif not of_files(self.format) or self.path is None:
            yield (
                "needs load.spark with a path and a format of files"
                f" ({', '.join(FILES)}), or format jdbc"
            )
        if self._far:
            yield (
                "needs a path on this machine, where an epoch can be renamed, such as"
                " that of a mounted file system"
            )
        yield from unrecorded(pipeline)

    def promise(self, stage: LoadKeys, pipeline: PipelineKeys) -> str | None:
        """Return what becomes of an interrupted epoch or batch."""
        folders = self.path is not None and of_files(self.format)
        once = pipeline.delivery == "exactly-once"
        if pipeline.engine == "streaming" and self.path is None and once:
            return (
                "exactly once: each batch and its record are added in one transaction"
            )
        if pipeline.engine == "streaming" and not folders:
            return (
                "at least once: a batch that is repeated after a crash is loaded again"
            )
        if pipeline.engine == "streaming" and self._far:
            return (
                "at least once: a batch that is repeated after a crash replaces its folder"
                " epoch=..., which readers see as a column"
            )
        if pipeline.engine == "streaming":
            return (
                f"{pipeline.delivery.replace('-', ' ')}: files of a batch are moved into"
                " the path once it is recorded; those of an unrecorded one are removed"
            )
        if not once:
            return None
        if self.path is None:
            return (
                "exactly once: an epoch and its record are added in one transaction; an"
                f" interrupted run resumes after the last record{one_load(pipeline)}"
            )
        return (
            "exactly once: files of an epoch are moved into the path once it is"
            f" recorded; those of an unrecorded one are removed{one_load(pipeline)}"
        )

    def retried(self, pipeline: PipelineKeys, epoch: str) -> tuple[Self, str]:
        """
        Return keys that append to existing output.

        On another machine, a stream has a folder for each epoch. There a retry has one,
        too, which is replaced as a whole until the retry is recorded.
        """
        sink, delivery = replace(self, mode="append"), pipeline.delivery
        if pipeline.engine == "streaming" and sink.path is not None:
            far = local_path(sink.path) is None
            delivery = "at-least-once" if far else "exactly-once"
            if far:
                path = f"{sink.path}/epoch={epoch}"
                sink = replace(sink, path=path, mode="overwrite")
        return sink, delivery

    def redoes(self, pipeline: PipelineKeys) -> bool:
        """Return whether a retry replaces what it loaded before it was interrupted."""
        streams_files = pipeline.engine == "streaming" and self.path is not None
        return pipeline.delivery == "exactly-once" or streams_files

    def notes(self, pipeline: PipelineKeys) -> bool:
        """Return whether a database has the record, in the transaction of an epoch."""
        return pipeline.delivery == "exactly-once" and self.path is None

    def writing(self, folder: Path) -> Self:
        """Return the keys for writing Parquet into a folder."""
        path = str(folder / "rows")
        return replace(self, format="parquet", path=path, table=None, options={})

    def rows_in(self, folder: Path, site: Site) -> list[bytes]:
        """Return the rows of the Parquet files in a folder."""
        from etlstage.spark.dataframe.read import objects_of, read_frame

        path = literal(str(folder / "rows"))
        frame = read_frame(site.session().start(), format="parquet", path=path)
        return objects_of(frame)

    @property
    def _far(self) -> bool:
        """Whether files go to another machine, where they can't be renamed."""
        return (
            self.table is None
            and self.path is not None
            and local_path(self.path) is None
        )

    def _destination(self, folder: Path) -> Destination:
        from etlstage.spark import Destination

        names = ("format", "path", "table", "mode", "options", "partition_by")
        return Destination(**_placed(self.given(*names), folder))


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkLetterKeys(Keys):
    """A DataFrame to which the dead letters of each run are appended."""

    format: str = "parquet"
    """Format, named as in Spark."""
    path: Location | None = None
    """Path to write, relative to the pipeline file's folder."""
    table: str | None = None
    """Table of the catalog, in place of a path."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the format."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return the contradictions among the given values."""
        return _frame_rules(given, "parquet")

    def sink(self, site: Site) -> DeadLetterSink:
        """Return the sink that appends dead letters to the DataFrame."""
        from etlstage.spark import DeadLetterFrame, Destination

        writing = _placed(self.given("format", "path", "table", "options"), site.folder)
        return DeadLetterFrame(site.session(), Destination(**writing))


SPARK: Final = End("spark", SparkSourceKeys, SparkSinkKeys)
"""A DataFrame."""
