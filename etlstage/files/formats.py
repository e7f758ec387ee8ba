"""
Read files in chunks of rows: text, CSV, JSON lines and Parquet.

Each chunk has the offset after it, from which reading can resume: bytes of decompressed
text, or rows of Parquet. CSV and JSON are read as Spark reads them, but for values that
are not of their column's type: where Spark makes them null, they are an error here.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as pt

from etlstage.columns import array_of
from etlstage.files.find import InputFile
from etlstage.files.fit import Read, arrow_type, reader_of
from etlstage.files.lines import FileLines, Unreadable
from etlstage.messages import counted
from etlstage.pipeline.invalid import Fraction, kind_of, loaded
from etlstage.settings.ddl import DeclaredColumn, Type, columns_of

__all__ = ("FORMATS", "Chunk", "Format", "is_text", "separator")

_ROWS: Final = 8192  # per batch of Parquet
_BLANK: Final = re.compile(rb"^[\x00-\x09\x0b-\x20]+$", re.MULTILINE)
_MARK: Final = "\ufeff".encode()
_BLANKS: Final = bytes(range(33))
_HALF: Final = re.compile("[\ud800-\udfff]")
_WHOLE: Final = re.compile(r"[+-]?\d+")
_REAL: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|NaN|-?Inf")
_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


Where: TypeAlias = Callable[[], str]
"""Returns the place of a line; called for an error only, as it may have to count."""


class Chunk(NamedTuple):
    """Some rows of a file."""

    table: pa.Table
    end: int
    """Offset after the last row."""
    place: Callable[[int], str] | None = None
    """Of a text, returns the file and line number of a row."""


class Format(ABC):
    """
    Reads files of one format.

    Args:
        files: All files of the input.
        schema: Columns as DDL; None: the columns of the files themselves.
        options: Options by Spark's names, as far as they are supported here.

    """

    def __init__(
        self,
        files: Sequence[InputFile],
        schema: str | None,
        options: Mapping[str, str],
    ) -> None:
        self._files = files
        self._options = {name.lower(): value for name, value in options.items()}
        self._columns = columns_of(schema) if schema is not None else None
        self._prepare()

    def _prepare(self) -> None:
        """Determine what all files have in common, such as the columns."""

    @abstractmethod
    def chunks(self, file: InputFile, start: int) -> Iterator[Chunk]:
        """Yield the rows of a file after an offset; blocks."""


class _OfLines(Format):
    """Reads at most one row from each line."""

    def chunks(self, file: InputFile, start: int) -> Iterator[Chunk]:
        with closing(FileLines(file, start)) as lines:
            for data in lines:
                yield Chunk(self._table(data, lines), lines.end, self._place(lines))

    @abstractmethod
    def _table(self, data: bytes, lines: FileLines) -> pa.Table:
        """Return the rows of a chunk of lines."""

    def _place(self, _lines: FileLines) -> Callable[[int], str] | None:
        return None


class _Text(_OfLines):
    def _place(self, lines: FileLines) -> Callable[[int], str]:
        return lines.place

    def _table(self, data: bytes, lines: FileLines) -> pa.Table:
        values = array_of(data.split(b"\n")[:-1], pa.binary())
        return pa.table({"value": values})


def separator(options: Mapping[str, str]) -> str:
    """Return what separates cells of CSV; options are by lower-case names."""
    found = options.get("sep", options.get("delimiter", ","))
    return "\t" if found == "\\t" else found


class _Csv(_OfLines):
    def _prepare(self) -> None:
        self._sep = separator(self._options)
        self._escape = self._options.get("escape", "\\")
        self._header = self._options.get("header", "false").lower() == "true"
        sep, escape = re.escape(self._sep), re.escape(self._escape)
        quoted = (
            '(?:[^"]|"")*+' if self._escape == '"' else rf'(?:[^"{escape}]|{escape}.)*+'
        )
        self._cell = re.compile(
            rf'(?:"({quoted})"|((?:(?!"|{sep}).(?:(?!{sep}).)*+)?))({sep}|$)', re.DOTALL
        )
        plain = rf'(?:"[^"\n{escape}]*+"|(?:[^"\n{sep}][^"\n{sep}]*+)?)[{sep}\n]'
        self._plain = re.compile(f"(?:{plain})*+".encode())
        self._names = self._named()

    def _named(self) -> list[str]:
        first = next(
            (found for file in self._files for found in self._first(file)), None
        )
        if self._columns is not None:
            return [column.name for column in self._columns]
        if first is None:
            return []
        line, where = first
        cells = self._cells(line, where)
        if not self._header:
            return [f"_c{n}" for n in range(len(cells))]
        names = self._named_by(cells)
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise Unreadable(
                f"{where()}: column {min(twice)!r} appears twice: give the columns"
                " different names, or omit the option header"
            )
        return names

    @staticmethod
    def _named_by(header: Sequence[str | None]) -> list[str]:
        return [cell or f"_c{n}" for n, cell in enumerate(header)]

    def _first(self, file: InputFile) -> Iterator[tuple[str, Where]]:
        """Yield the first line that is not blank, if there is one."""
        with closing(FileLines(file)) as lines:
            for data in lines:
                for n, line in _filled(data):
                    where = partial(lines.place, n)
                    yield _decoded(line, where), where
                    return

    def _table(self, data: bytes, lines: FileLines) -> pa.Table:
        skipped = 0
        if self._header and lines.first:
            head = re.match(rb"(?:[\x00-\x20]*\n)?[^\n]*\n", data)
            end = head.end() if head else 0
            skipped = data.count(b"\n", 0, end)
            self._check_header(data[:end].strip(_BLANKS), lines, skipped - 1)
            data = data[end:]

        def place(index: int) -> str:
            return lines.place(skipped + index)

        table = self._at_once(data)
        if table is None:
            table = self._by_line(data, place)
        return self._typed(table, data, place)

    def _check_header(self, line: bytes, lines: FileLines, index: int) -> None:
        """Assert that no value gets into another column than the one that it is in."""
        if not line:
            return
        where = partial(lines.place, index)
        names = self._named_by(self._cells(_decoded(line, where), where))
        if self._columns is None and names != self._names:
            raise Unreadable(
                f"{where()}: the header has columns {', '.join(names)}, expected"
                f" {', '.join(self._names)} as in the first file: read these files one by"
                " one, or set a schema and omit the header"
            )
        wanted = [name.lower() for name in self._names]
        for at, name in enumerate(map(str.lower, names)):
            if name in wanted and wanted.index(name) != at:
                raise Unreadable(
                    f"{where()}: column {names[at]!r} is number {at + 1} in the header, and"
                    f" {wanted.index(name) + 1} in the schema: cells are read by their"
                    " place; order the schema as the file"
                )

    def _at_once(self, data: bytes) -> pa.Table | None:
        """Return the cells as read by Arrow, or None if a line needs a closer look."""
        # Arrow would take the bytes at the beginning for a byte order mark.
        if not data or data.startswith(_MARK) or _BLANK.search(data):
            return None
        if len(self._sep) != 1:
            return None
        quotes = b'"' in data
        if quotes and not self._plain.fullmatch(data):
            return None
        from pyarrow import csv as reading

        try:
            return reading.read_csv(
                pa.py_buffer(data),
                reading.ReadOptions(column_names=self._names, block_size=2 * len(data)),
                reading.ParseOptions(
                    delimiter=self._sep, quote_char='"' if quotes else False
                ),
                reading.ConvertOptions(
                    column_types=dict.fromkeys(self._names, pa.string()),
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=True,
                ),
            )
        except pa.ArrowException:
            return None

    def _by_line(self, data: bytes, place: Callable[[int], str]) -> pa.Table:
        width, rows = len(self._names), []
        for n, line in _filled(data):
            where = partial(place, n)
            cells = self._cells(_decoded(line, where), where)
            if any(cells[width:]):
                raise Unreadable(
                    f"{where()}: the line has {counted(len(cells), 'cell')}, expected"
                    f" {width}: quote cells that contain {self._sep!r}, or read the"
                    " lines as text"
                )
            rows.append([*cells, *[None] * (width - len(cells))][:width])
        columns: Any = zip(*rows, strict=True) if rows else [[] for _ in range(width)]
        made = [array_of(list(column), pa.string()) for column in columns]
        return pa.table(made, self._names)

    def _cells(self, line: str, where: Where) -> list[str | None]:
        if '"' not in line:
            return [cell or None for cell in line.split(self._sep)]
        cells: list[str | None] = []
        at = 0
        while True:
            found = self._cell.match(line, at)
            if found is None:
                raise Unreadable(
                    f"{where()}: the closing quote of a cell is missing, or is not at the"
                    " end of the cell: within quotes, write a quote after the option"
                    f" escape, which is {self._escape}, or set it to '\"'; a cell with a"
                    " line break needs Spark, with its option multiLine"
                )
            if found[1] is None:
                cells.append(found[2] or None)
            else:
                cells.append(self._unescaped(found[1]) or None)
            at = found.end()
            if not found[3]:
                return cells

    def _unescaped(self, text: str) -> str:
        escape = self._escape
        if escape not in text:
            return text
        kept = '"' if escape == '"' else f'"{escape}'
        return re.sub(rf"{re.escape(escape)}([{re.escape(kept)}])", r"\1", text)

    def _typed(
        self, table: pa.Table, data: bytes, place: Callable[[int], str]
    ) -> pa.Table:
        if self._columns is None:
            return table
        columns = []
        for column, values in zip(self._columns, table.columns, strict=True):
            try:
                columns.append(_parsed(values, column.type))
            except ValueError:
                row = _first_wrong(values, column.type)
                index, _ = next(islice(_filled(data), row, None))
                raise Unreadable(
                    f"{place(index)}: the value of column {column.name!r} is not of type"
                    f" {column.type}: omit the schema, and have a worker parse the text"
                ) from None
        return pa.table(columns, [column.name for column in self._columns])


def _filled(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its index among all lines."""
    for n, line in enumerate(data.split(b"\n")[:-1]):
        if line.strip(_BLANKS):
            yield n, line


def _first_wrong(values: pa.ChunkedArray, kind: Type) -> int:
    """Return the index of the first text that is not a value of a type."""
    at, count = 0, len(values)
    while count > 1:
        half = count // 2
        try:
            _parsed(values.slice(at, half), kind)
        except ValueError:
            count = half
        else:
            at, count = at + half, count - half
    return at


def _parsed(values: pa.ChunkedArray, kind: Type) -> pa.ChunkedArray:
    """Return texts of CSV as values of a type; raises ValueError if one is invalid."""
    wanted = arrow_type(kind)
    if wanted == pa.string():
        return values
    if wanted == pa.binary():
        return values.cast(wanted)
    if kind.name in ("int", "bigint") and pc.all(
        pc.match_substring_regex(values, r"^-?\d+$")
    ).as_py() in (True, None):
        return values.cast(wanted)
    read = _cell_reader(kind)
    made = [None if text is None else read(text) for text in values.to_pylist()]
    return pa.chunked_array([array_of(made, wanted)])


def _cell_reader(kind: Type) -> Callable[[str], Any]:
    read = reader_of(kind)

    def one(text: str) -> Any:  # noqa: ANN401 - of any type
        value: Any = text
        if kind.name in _BITS:
            value = int(text) if _WHOLE.fullmatch(text) else text
        elif kind.name in ("float", "double"):
            if not _REAL.fullmatch(text):
                raise ValueError(text)
            if text.endswith(("NaN", "Inf")):
                return float(text)
            value = float(text)
        elif kind.name == "boolean":
            value = {"true": True, "false": False}.get(text.lower(), text)
        try:
            return read(value)
        except Exception:
            raise ValueError(text) from None

    return one


class _Json(_OfLines):
    def _prepare(self) -> None:
        columns = self._columns
        if columns is None:
            seen = Type("struct")
            for file in self._files:
                with closing(FileLines(file)) as lines:
                    for data in lines:
                        for where, row in _objects(data, lines):
                            seen = _merged(seen, _type_of(row, where))
            settled = _settled(seen)
            columns = list(settled.inner) if settled is not None else []
        self._readers = [
            (c.name, arrow_type(c.type), _json_reader(c.type), str(c.type))
            for c in columns
        ]
        # These have a number as it is written.
        self._literal = any(
            kind in expected
            for *_, expected in self._readers
            for kind in ("decimal", "string")
        )

    def _table(self, data: bytes, lines: FileLines) -> pa.Table:
        rows = list(_objects(data, lines, literal=self._literal))
        columns = [
            array_of(list(self._values(name, read, expected, rows)), kind)
            for name, kind, read, expected in self._readers
        ]
        return pa.table(columns, [name for name, *_ in self._readers])

    def _values(
        self, name: str, read: Read, expected: str, rows: Sequence[tuple[Where, Any]]
    ) -> Iterator[Any]:
        for where, row in rows:
            value = row.get(name)
            try:
                yield None if value is None else read(value)
            except Exception:
                raise Unreadable(
                    f"{where()}: field {name!r} is {kind_of(value)} that is not of type {expected}:"
                    " set another schema, or read the lines as text"
                ) from None


def _decoded(line: bytes, where: Where) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"{where()}: the line is not UTF-8 at offset {error.start}: convert the file, or"
            " read the lines as text"
        ) from None


def _objects(
    data: bytes, lines: FileLines, *, literal: bool = False
) -> Iterator[tuple[Where, Any]]:
    """Yield the object of each line of a chunk that is not blank, with its place."""
    for n, line in enumerate(data.split(b"\n")[:-1]):
        if not line.strip():
            continue
        where = partial(lines.place, n)
        try:
            row = loaded(line.decode(), literal=literal)
        except (ValueError, RecursionError) as error:
            raise Unreadable(
                f"{where()}: the line is not one JSON document ({error}): read the lines"
                " as text, and have a worker parse them"
            ) from None
        if not isinstance(row, dict):
            raise Unreadable(
                f"{where()}: the line is {kind_of(row)}, expected an object"
            )
        yield where, row


def _type_of(value: object, where: Where) -> Type:
    """Return the inferred type of a JSON value, ``void`` where it is unknown."""
    texts = value if isinstance(value, dict) else [value]
    if any(isinstance(t, str) and not t.isascii() and _HALF.search(t) for t in texts):
        raise Unreadable(
            f"{where()}: the line has an unpaired surrogate, which no valid text contains:"
            " set a schema without that field, or read the lines as text"
        )
    if isinstance(value, dict):
        fields = (DeclaredColumn(k, None, _type_of(v, where)) for k, v in value.items())
        return Type("struct", (), tuple(fields))
    if isinstance(value, list):
        inner = Type("void")
        for item in value:
            inner = _merged(inner, _type_of(item, where))
        return Type("array", (), (DeclaredColumn("element", None, inner),))
    if isinstance(value, int) and value.bit_length() > 63:
        raise Unreadable(f"{where()}: a number does not fit into bigint: set a schema")
    return Type(_FOUND[type(value)])


_FOUND: Final[Mapping[type, str]] = {
    bool: "boolean",
    int: "bigint",
    float: "double",
    str: "string",
    type(None): "void",
}


def _merged(one: Type, other: Type) -> Type:
    """Return a type that has room for the values of both."""
    if one == other or other.name == "void":
        return one
    if one.name == "void":
        return other
    if one.name == other.name == "array":
        inner = _merged(one.inner[0].type, other.inner[0].type)
        return Type("array", (), (DeclaredColumn("element", None, inner),))
    if one.name == other.name == "struct":
        fields = {column.name: column.type for column in one.inner}
        for column in other.inner:
            fields[column.name] = _merged(
                fields.get(column.name, Type("void")), column.type
            )
        return Type(
            "struct", (), tuple(DeclaredColumn(n, None, t) for n, t in fields.items())
        )
    both = {one.name, other.name}
    return Type("double" if both == {"bigint", "double"} else "string")


def _settled(kind: Type) -> Type | None:
    """Return the type that Spark settles on; None for a struct without fields."""
    if kind.name == "void":
        return Type("string")
    if not kind.inner:
        return None if kind.name == "struct" else kind
    inner = [(column.name, _settled(column.type)) for column in kind.inner]
    if kind.name == "struct":
        inner.sort()
    kept = tuple(DeclaredColumn(name, None, found) for name, found in inner if found)
    return Type(kind.name, (), kept) if kept else None


def _json_reader(kind: Type) -> Read:
    """Return a reader of JSON values by Spark's rules: a string may be any value."""
    if kind.name == "string":
        return _as_text
    inner = [(column.name, _json_reader(column.type)) for column in kind.inner]
    if kind.name == "array":
        read = inner[0][1]
        return lambda value: [_or_null(read, item) for item in _of(list, value)]
    if kind.name == "map":
        read = inner[1][1]
        return lambda value: [
            (k, _or_null(read, v)) for k, v in _of(dict, value).items()
        ]
    if kind.name == "struct":
        return lambda value: {
            name: _or_null(read, _of(dict, value).get(name)) for name, read in inner
        }
    return reader_of(kind)


def _or_null(read: Read, value: Any) -> Any:  # noqa: ANN401 - any JSON
    return None if value is None else read(value)


def _of(kind: type, value: Any) -> Any:  # noqa: ANN401 - any JSON
    if not isinstance(value, kind):
        raise TypeError
    return value


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else _as_json(value)


def _as_json(value: object) -> str:
    match value:
        case Fraction():
            return value.literal
        case dict():
            members = (f"{_as_json(k)}:{_as_json(v)}" for k, v in value.items())
            return f"{{{','.join(members)}}}"
        case list():
            return f"[{','.join(map(_as_json, value))}]"
    return json.dumps(value, ensure_ascii=False)


class _Parquet(Format):
    def _prepare(self) -> None:
        self._schema = pa.schema([])
        if self._columns is not None:
            fields = [
                (column.name, arrow_type(column.type)) for column in self._columns
            ]
            self._schema = pa.schema(fields)
        elif self._files:
            with self._opened(self._files[0]) as found:
                fields = [
                    (field.name, _instant(field.type) if old else field.type)
                    for field, old in zip(found.schema_arrow, _olds(found), strict=True)
                ]
            self._schema = pa.schema(fields)

    def _opened(self, file: InputFile) -> Any:  # noqa: ANN401 - Arrow is not typed
        from pyarrow import parquet as reading

        try:
            found = reading.ParquetFile(file.path, coerce_int96_timestamp_unit="us")
        except pa.ArrowException as error:
            raise Unreadable(
                f"{file.path} is not Parquet: if it is another format, set format to text,"
                f" csv, json or ndjson ({error})"
            ) from error
        names = found.schema_arrow.names
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            found.close()
            raise Unreadable(
                f"{file.path}: column {min(twice)!r} appears twice, but JSON can have it"
                " only once: give the columns different names"
            )
        return found

    def chunks(self, file: InputFile, start: int) -> Iterator[Chunk]:
        with self._opened(file) as found:
            old = dict(zip(found.schema_arrow.names, _olds(found), strict=True))
            end = 0
            for group in range(found.num_row_groups):
                rows = found.metadata.row_group(group).num_rows
                if end + rows <= start:
                    end += rows
                    continue
                for batch in found.iter_batches(_ROWS, row_groups=[group]):
                    skipped, end = max(0, start - end), end + len(batch)
                    if skipped < len(batch):
                        table = pa.Table.from_batches([batch.slice(skipped)])
                        yield Chunk(self._fitted(table, old, file), end)

    def _fitted(
        self, table: pa.Table, old: Mapping[str, bool], file: InputFile
    ) -> pa.Table:
        columns = []
        for field in self._schema:
            if field.name not in table.column_names:
                columns.append(pa.nulls(table.num_rows, field.type))
                continue
            column = table[field.name]
            if old[field.name]:
                column = column.cast(_instant(column.type))
            try:
                columns.append(_cast(column, field.type))
            except (pa.ArrowException, ValueError) as error:
                raise Unreadable(
                    f"{file.path}: column {field.name!r} is {column.type}, expected"
                    f" {field.type}: {error}"
                ) from None
        return pa.table(columns, self._schema)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return values of another type; raises ValueError if one would be changed."""
    made = column.cast(kind)
    both = pt.is_timestamp(kind) and pt.is_timestamp(column.type)
    if both and (column.type.tz is None) != (kind.tz is None):
        raise ValueError(
            "only one of the two has a zone: declare timestamp_ntz for times without a"
            " zone, timestamp for others"
        )
    # A text may be written in several ways; other values must be the same again.
    if column.type == kind or is_text(column.type) or is_text(kind):
        return made
    again = made.cast(column.type)
    # As Python's values, for these may be nested, and NaN may be among them.
    if not again.equals(column) and repr(again.to_pylist()) != repr(column.to_pylist()):
        raise ValueError("a value would be changed")
    return made


def is_text(kind: pa.DataType) -> bool:
    """Return whether values of a type are strings or bytes."""
    return bool(
        pt.is_string(kind)
        or pt.is_binary(kind)
        or pt.is_large_string(kind)
        or pt.is_large_binary(kind)
    )


def _olds(found: Any) -> list[bool]:  # noqa: ANN401 - Arrow is not typed
    """Return which columns are INT96, the 12-byte instants that Spark writes."""
    paths = (found.schema.column(n) for n in range(len(found.schema)))
    old = {column.path for column in paths if column.physical_type == "INT96"}
    return [name in old for name in found.schema_arrow.names]


def _instant(kind: pa.DataType) -> pa.DataType:
    return pa.timestamp("us", "UTC") if pt.is_timestamp(kind) else kind


FORMATS: Final[Mapping[str, type[Format]]] = {
    "csv": _Csv,
    "json": _Json,
    "ndjson": _Json,
    "parquet": _Parquet,
    "text": _Text,
}
