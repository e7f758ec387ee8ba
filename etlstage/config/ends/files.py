"""Files as ends, without Spark; Arrow is imported only to build them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from etlstage.config.end import (
    End,
    EpochKeys,
    Missing,
    SinkKeys,
    Site,
    SourceKeys,
    absent_input,
    epoch_text,
    one_load,
    present_output,
    unrecorded,
)
from etlstage.errors import guess
from etlstage.pipeline.delivery.delivery import Bounds
from etlstage.settings.ddl import DDL, Type, columns_of
from etlstage.settings.definition import UNREAD, broken
from etlstage.settings.problem import Loc, Problem
from etlstage.settings.units import Argument, local_path

if TYPE_CHECKING:
    from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
    from etlstage.config.presence import Look
    from etlstage.pipeline.interfaces import Sink, Source

__all__ = ("FILES", "FileSinkKeys", "FileSourceKeys")

Format = Literal["csv", "json", "ndjson", "parquet", "text"]

_OPTIONS: Final[Mapping[str, Sequence[str]]] = {
    "csv": ("header", "sep", "delimiter", "escape"),
    "json": (),
    "ndjson": (),
    "parquet": (),
    "text": (),
}
"""What may be said of a format, as Spark calls it."""
_PACKED: Final = ("none", "gzip", "zstd")
_VALUES: Final[Mapping[str, Sequence[str]]] = {
    "header": ("true", "false"),
    "escape": ("\\", '"'),
    "compression": _PACKED,
}
_TYPES: Final = (
    *("tinyint", "smallint", "int", "bigint", "float", "double", "decimal", "boolean"),
    *(
        "string",
        "binary",
        "date",
        "timestamp",
        "timestamp_ntz",
        "array",
        "struct",
        "map",
    ),
)
_FLAT: Final = ("array", "struct", "map", "binary")
"""What CSV has no cells for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSourceKeys(SourceKeys):
    """Files to read, by Arrow, and the message that a row becomes."""

    rows: ClassVar[bool] = True
    path: Argument
    """A file, a folder or a pattern, relative to the file's folder."""
    format: Format = "parquet"
    """What they are; gzip and zstd are seen from their names."""
    options: dict[str, str] = field(default_factory=dict)
    """Of csv, as Spark calls them: header, sep, escape."""
    schema_: Annotated[str, DDL] | None = None
    """Its columns, as in "id long, title string"; without it what the files say."""
    message: str | None = None
    """The column that is the message; without it the only one if it is text or binary,
    else all columns as JSON, with nulls."""
    key: str | None = None
    """A column, for order: key of the next stage."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what contradicts itself."""
        return _rules(_read(given))

    @classmethod
    def missing(
        cls, written: Mapping[str, Any], loc: Loc, look: Look
    ) -> Iterator[Problem]:
        """Yield the input, if there is none."""
        yield from _without_arrow(loc)
        yield from absent_input(written, loc, look)

    @classmethod
    def instead(cls, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return its mapping as Spark's end has it: it calls lines of JSON that."""
        return _spoken(written)

    def text(self) -> str:
        """Return the format and where it is."""
        return f"{self.format} from {self.path}"

    def about(self, stage: ExtractKeys, site: Site) -> Iterator[tuple[str, str]]:
        """Yield where it is, and what a row becomes."""
        del stage
        yield "path", str(site.folder / self.path)
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

    def source(self, stage: ExtractKeys, name: str, site: Site) -> Source:
        """Return what reads the files."""
        del stage
        from etlstage.files.source import RUN_BYTES, RUN_MESSAGES, FileSource

        # Cut so that epochs keep to their bounds.
        once = site.pipeline.delivery == "exactly-once"
        most = site.pipeline.load.end.bounds() if once else Bounds()
        return FileSource(
            str(site.folder / _plain(self.path)),
            self.format,
            schema=self.schema_,
            message=self.message,
            key=self.key,
            options=self.options,
            name=name,
            run_messages=min(RUN_MESSAGES, most.messages),
            run_bytes=min(RUN_BYTES, most.bytes),
        )

    def wrong(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[Problem]:
        """Yield a pause that only a stream makes."""
        del pipeline
        if stage.every is not None:
            text = "is only for a worker on engine local, or for engine streaming"
            yield broken(("extract", "every"), text)

    def not_once(self, stage: ExtractKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield nothing: a file has positions."""
        del stage, pipeline
        yield from ()

    def goes_on(self, stage: ExtractKeys) -> bool:
        """Return True: a file has positions."""
        del stage
        return True

    def reading(self, file: Path) -> Self:
        """Return the same for a file of JSON objects."""
        return replace(self, format="json", path=str(file), options={})


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSinkKeys(SinkKeys):
    """Files to write, by Arrow."""

    rows: ClassVar[bool] = True
    path: Argument
    """The folder where they go, relative to the file's folder."""
    format: Format = "parquet"
    """What they are."""
    options: dict[str, str] = field(default_factory=dict)
    """As Spark calls them: compression, and of csv header, sep, escape."""
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

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what contradicts itself."""
        given = _read(given)
        yield from _rules(given, "compression")
        columns = _columns(given)
        by = given.get("partition_by", ())
        if by and len(columns) == len(set(by)):
            yield broken(("partition_by",), "leaves no column for the files themselves")
            return
        left = {name: kind for name, kind in columns.items() if name not in by}
        made = given.get("format", "parquet")
        if made == "text" and [t.name for t in left.values()] not in (
            ["string"],
            ["binary"],
        ):
            yield broken(
                ("format",), "text has one column, string or binary", at_key=False
            )
        for name, kind in left.items():
            if made == "csv" and kind.name in _FLAT:
                text = (
                    f"csv has no cells for column {name!r}, {kind}: use json or parquet"
                )
                yield broken(("format",), text, at_key=False)

    @classmethod
    def missing(
        cls, written: Mapping[str, Any], loc: Loc, look: Look
    ) -> Iterator[Problem]:
        """Yield the output, if there must be none; columns that the schema has not."""
        yield from _without_arrow(loc)
        yield from present_output(written, loc, look)

    @classmethod
    def instead(cls, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return its mapping as Spark's end has it: it calls lines of JSON that."""
        return _spoken(written)

    def text(self) -> str:
        """Return the format and where it goes."""
        return f"{self.format} to {self.path}"

    def about(self, stage: LoadKeys, site: Site) -> Iterator[tuple[str, str]]:
        """Yield where it goes, what becomes columns, and how much is written at once."""
        yield "path", str(site.folder / self.path)
        yield "mode", self.mode
        by_default = "value, the message as text"
        yield "columns", " ".join((self.schema_ or by_default).split())
        if self.partition_by:
            yield "folders by", ", ".join(self.partition_by)
        yield "epoch", epoch_text(self.epoch, site.pipeline)
        if self.schema_:
            yield "errors", stage.on_error.text(retries=False)

    def held(self, engine: str) -> int:
        """Return what an epoch takes until it is written, its rows and their text."""
        del engine
        return 3 * self.epoch.bytes

    def bounds(self) -> Bounds:
        """Return the bounds of an epoch."""
        return self.epoch.bounds()

    def sink(self, stage: LoadKeys, name: str, site: Site) -> Sink:
        """Return what writes the files, an epoch at a time."""
        from etlstage.files.sink import FileSink

        return FileSink(
            site.folder / _plain(self.path),
            self.format,
            mode=self.mode,
            schema=self.schema_,
            missing=self.missing_,
            extra=self.extra,
            options=self.options,
            partition_by=self.partition_by,
            name=name,
            on_error=stage.on_error,
            dead_letters=site.letters,
            epoch_messages=self.epoch.messages,
            epoch_bytes=self.epoch.bytes,
        )

    def not_once(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield why what was loaded can't be recorded."""
        del stage
        yield from unrecorded(pipeline)

    def promise(self, stage: LoadKeys, pipeline: PipelineKeys) -> str | None:
        """Return what becomes of an epoch that was cut off."""
        del stage
        if pipeline.delivery != "exactly-once":
            return None
        return (
            "exactly once: files of an epoch are moved into the path behind its record;"
            f" those of one that has none are removed{one_load(pipeline)}"
        )

    def again(self, engine: str) -> str:
        """Return what the mode does with what is there."""
        del engine
        texts = {
            "append": "may load some messages twice",
            "overwrite": "replaces what was loaded",
            "error": "is refused while there is output",
        }
        return texts[self.mode]

    def retried(self, pipeline: PipelineKeys, epoch: str) -> tuple[Self, str]:
        """Return what adds to what is there."""
        del epoch
        return replace(self, mode="append"), pipeline.delivery

    def writing(self, folder: Path) -> Self:
        """Return the same that writes JSON there."""
        path, options = str(folder / "rows"), dict[str, str]()
        return replace(self, format="json", path=path, options=options, partition_by=())

    def rows_in(self, folder: Path, site: Site) -> list[bytes]:
        """Return the lines of that JSON."""
        del site
        parts = sorted((folder / "rows").glob("part-*"))
        return [line for part in parts for line in part.read_bytes().splitlines()]


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what could be read."""
    return {name: value for name, value in given.items() if value is not UNREAD}


def _rules(given: Mapping[str, Any], *more: str) -> Iterator[Problem]:
    path = str(given.get("path", ""))
    if path and local_path(path) is None:
        yield broken(("path",), "is not of this machine: Spark's end reads others")
    allowed = (*_OPTIONS[given.get("format", "parquet")], *more)
    options = given.get("options")
    for name, value in (options if isinstance(options, dict) else {}).items():
        key = name.lower()
        if key not in allowed:
            known = f", expected {' or '.join(allowed)}" if allowed else ""
            close = guess(key, allowed) or known
            text = f"is none of files{close}; Spark's end has more"
            yield broken(("options", name), text)
        elif key in _VALUES and value.lower() not in _VALUES[key]:
            text = f"expected {' or '.join(_VALUES[key])}"
            yield broken(("options", name), text, at_key=False)
    for name, kind in _columns(given).items():
        for found in _odd(kind):
            text = f"type {found} of column {name!r} is for Spark's end alone"
            yield broken(("schema",), text, at_key=False)


def _columns(given: Mapping[str, Any]) -> dict[str, Type]:
    schema = given.get("schema_", given.get("schema"))
    if schema is None:
        return {"value": Type("string")}
    return {column.name: column.type for column in columns_of(schema)}


def _odd(kind: Type) -> Iterator[Type]:
    """Yield the types within that Arrow has not, or JSON."""
    if kind.name not in _TYPES or (kind.name == "struct" and not kind.inner):
        yield kind
    if kind.name == "map" and kind.inner[0].type.name != "string":
        yield kind
    for column in kind.inner:
        yield from _odd(column.type)


def _plain(path: str) -> str:
    return str(local_path(path) or path)


def _spoken(written: Mapping[str, Any]) -> Mapping[str, Any]:
    return (
        {**written, "format": "json"} if written.get("format") == "ndjson" else written
    )


def _without_arrow(loc: Loc) -> Iterator[Problem]:
    if find_spec("pyarrow") is None:
        yield broken(loc, "needs PyArrow: pip install 'etlstage[arrow]'")


FILES: Final = End("files", FileSourceKeys, FileSinkKeys)
"""Files, by Arrow."""
