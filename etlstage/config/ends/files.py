"""Files as ends, without Spark; Arrow is imported only to build them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from etlstage.config.end import End, Site, one_load, unrecorded, without_arrow
from etlstage.config.ends.row import RowSinkKeys, RowSourceKeys, absent_input, plain
from etlstage.errors import guess, os_reason
from etlstage.settings.ddl import DDL, Type, columns_of
from etlstage.settings.definition import UNREAD, broken
from etlstage.settings.problem import Loc, Problem
from etlstage.settings.units import Location, local_path

if TYPE_CHECKING:
    from etlstage.config.model import ExtractKeys, LoadKeys, PipelineKeys
    from etlstage.config.presence import Look
    from etlstage.files.find import InputFile
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
"""The options of a format, by Spark's names."""
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
"""Types that a CSV cell can't hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSourceKeys(RowSourceKeys):
    """Files to read with Arrow, and the message made from each row."""

    numbered: ClassVar[bool] = True
    path: Location
    """A file, a folder or a pattern, relative to the pipeline file's folder."""
    format: Format = "parquet"
    """Format of the files; gzip and zstd are recognized by file names."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of format csv, named as in Spark: header, sep, escape."""
    schema_: Annotated[str, DDL] | None = None
    """Columns of the files, as in "id long, title string"; by default the files'
    own."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return the contradictions among the given values."""
        from etlstage.files.find import NO_TEXT

        given = _read(given)
        yield from _rules(given)
        kinds = {kind.name for kind in _columns(given).values()}
        if given.get("format") == "text" and kinds.isdisjoint(("string", "binary")):
            yield broken(("schema",), NO_TEXT, at_key=False)

    def missing(self, loc: Loc, look: Look) -> Iterator[Problem]:
        """Yield a problem if there is no input, or it has what can't be read."""
        yield from without_arrow(loc)
        place = look.path(self.path)
        # Unlike Spark, files that exist are read even if their path is a pattern, too.
        if place is not None and not os.path.exists(place):
            absent = [*absent_input(self.path, place, loc, look)]
            yield from absent
            if absent:
                return
        files, error = self._found(look)
        if error is None:
            yield from self._no_text(loc, files)
            return
        why = os_reason(error)
        text = f"can't read {error.filename}: {why}"
        hidden = f"has a file that can't be read: {why}"
        yield Problem((*loc, "path"), text, hidden=hidden)

    def reads(self, look: Look) -> Iterator[Path]:
        """Yield the files of the input that are on this machine."""
        files, error = self._found(look)
        paths = [file.path for file in files]
        yield from paths if error is None else [Path(error.filename)]

    def _found(self, look: Look) -> tuple[list[InputFile], OSError | None]:
        """Return the files of the input, or the error that keeps them from being read."""
        from etlstage.files.find import PartitionsInvalid, find

        place = look.path(self.path)
        try:
            return find(plain(self.path), str(look.folder)) if place else [], None
        except PartitionsInvalid:
            return [], None  # reported when they are read
        except OSError as error:
            return [], error

    def _no_text(self, loc: Loc, files: Sequence[InputFile]) -> Iterator[Problem]:
        """Yield the problem of a schema that has not just one column for the lines."""
        from etlstage.files.find import NO_TEXT, text_column

        if self.format != "text" or self.schema_ is None or not files:
            return
        if text_column(files, columns_of(self.schema_)) is None:
            yield Problem((*loc, "schema"), NO_TEXT)

    @classmethod
    def instead(cls, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the mapping for Spark's end, which calls ndjson ``json``."""
        return _spoken(written)

    def text(self) -> str:
        """Return the format and where it is."""
        return f"{self.format} from {self.path}"

    def source(self, stage: ExtractKeys, site: Site) -> Source:
        """Return the source that reads the files."""
        from etlstage.files.source import RUN_BYTES, RUN_MESSAGES, FileSource

        messages, size = self.cut(site.pipeline, RUN_MESSAGES, RUN_BYTES)
        return FileSource(
            plain(self.path),
            self.format,
            folder=str(site.folder),
            schema=self.schema_,
            message=self.message,
            key=self.key,
            options=self.options,
            name=stage.name,
            run_messages=messages,
            run_bytes=size,
        )

    def reading(self, file: Path) -> Self:
        """Return the keys for reading a file of JSON objects."""
        return replace(self, format="json", path=str(file), options={})


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSinkKeys(RowSinkKeys):
    """Files to write with Arrow."""

    path: Location
    """Folder for the files, relative to the pipeline file's folder."""
    format: Format = "parquet"
    """Format of the files."""
    options: dict[str, str] = field(default_factory=dict)
    """Options, named as in Spark: compression; for csv also header, sep, escape."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return the contradictions among the given values."""
        given = _read(given)
        yield from _rules(given, "compression")
        columns = _columns(given)
        by = given.get("partition_by", ())
        left = {name: kind for name, kind in columns.items() if name not in by}
        if not left:
            return  # reported for all ends with rows
        made = given.get("format", "parquet")
        if made == "text" and [t.name for t in left.values()] not in (
            ["string"],
            ["binary"],
        ):
            yield broken(
                ("format",),
                "text needs a single column, string or binary",
                at_key=False,
            )
        for name, kind in left.items():
            if made == "csv" and kind.name in _FLAT:
                text = f"csv can't hold column {name!r}, {kind}: use json or parquet"
                yield broken(("format",), text, at_key=False)

    def missing(self, loc: Loc, look: Look) -> Iterator[Problem]:
        """Yield output that must not exist, and columns that are not in the schema."""
        yield from without_arrow(loc)
        yield from RowSinkKeys.missing(self, loc, look)

    @classmethod
    def instead(cls, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the mapping for Spark's end, which calls ndjson ``json``."""
        return _spoken(written)

    def text(self) -> str:
        """Return the format and where it goes."""
        return f"{self.format} to {self.path}"

    def held(self, engine: str) -> int:
        """Return the bytes of an epoch until it is written, with its rows and text."""
        return 3 * self.epoch.bytes

    def sink(self, stage: LoadKeys, site: Site) -> Sink:
        """Return the sink that writes the files, an epoch at a time."""
        from etlstage.files.sink import FileSink

        return FileSink(
            site.folder / plain(self.path),
            self.format,
            mode=self.mode,
            options=self.options,
            partition_by=self.partition_by,
            **self.written(stage, site),
            epoch_messages=self.epoch.messages,
            epoch_bytes=self.epoch.bytes,
        )

    def not_once(self, stage: LoadKeys, pipeline: PipelineKeys) -> Iterator[str]:
        """Yield why loaded epochs can't be recorded."""
        yield from unrecorded(pipeline)

    def promise(self, stage: LoadKeys, pipeline: PipelineKeys) -> str | None:
        """Return what becomes of an interrupted epoch."""
        if pipeline.delivery != "exactly-once":
            return None
        return (
            "exactly once: files of an epoch are moved into the path once it is"
            f" recorded; those of an unrecorded one are removed{one_load(pipeline)}"
        )

    def retried(self, pipeline: PipelineKeys, epoch: str) -> tuple[Self, str]:
        """Return keys that append to existing output."""
        return replace(self, mode="append"), pipeline.delivery

    def writing(self, folder: Path) -> Self:
        """Return the keys for writing JSON into a folder."""
        path, options = str(folder / "rows"), dict[str, str]()
        return replace(self, format="json", path=path, options=options, partition_by=())

    def rows_in(self, folder: Path, site: Site) -> list[bytes]:
        """Return the lines of the JSON files in a folder."""
        parts = sorted((folder / "rows").glob("part-*"))
        return [line for part in parts for line in part.read_bytes().splitlines()]


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not UNREAD}


def _rules(given: Mapping[str, Any], *more: str) -> Iterator[Problem]:
    path = str(given.get("path", ""))
    if path and local_path(path) is None:
        yield broken(
            ("path",), "is not on this machine: use Spark's end for such paths"
        )
    allowed = (*_OPTIONS[given.get("format", "parquet")], *more)
    options = given.get("options")
    for name, value in (options if isinstance(options, dict) else {}).items():
        key = name.lower()
        if key not in allowed:
            known = f", expected {' or '.join(allowed)}" if allowed else ""
            close = guess(key, allowed) or known
            text = f"is not an option of files{close}; Spark's end has more"
            yield broken(("options", name), text)
        elif key in ("sep", "delimiter") and not value:
            text = "expected one character or more between two cells"
            yield broken(("options", name), text, at_key=False)
        elif key in ("sep", "delimiter") and not _separates(value):
            text = (
                "expected ASCII characters other than line breaks, quotes and NUL:"
                " Spark's end has more"
            )
            yield broken(("options", name), text, at_key=False)
        elif key in _VALUES and value.lower() not in _VALUES[key]:
            text = f"expected {' or '.join(_VALUES[key])}"
            yield broken(("options", name), text, at_key=False)
    for name, kind in _columns(given).items():
        for found in _odd(kind):
            text = f"type {found} of column {name!r} is only for Spark's end"
            yield broken(("schema",), text, at_key=False)


def _separates(sep: str) -> bool:
    return sep.isascii() and not set('\n\r"\0') & set(sep)


def _columns(given: Mapping[str, Any]) -> dict[str, Type]:
    schema = given.get("schema_", given.get("schema"))
    if schema is None:
        return {"value": Type("string")}
    return {column.name: column.type for column in columns_of(schema)}


def _odd(kind: Type) -> Iterator[Type]:
    """Yield the types within a type that Arrow or JSON do not support."""
    if kind.name not in _TYPES or (kind.name == "struct" and not kind.inner):
        yield kind
    if kind.name == "map" and kind.inner[0].type.name != "string":
        yield kind
    for column in kind.inner:
        yield from _odd(column.type)


def _spoken(written: Mapping[str, Any]) -> Mapping[str, Any]:
    return (
        {**written, "format": "json"} if written.get("format") == "ndjson" else written
    )


FILES: Final = End("files", FileSourceKeys, FileSinkKeys)
"""Files, by Arrow."""
