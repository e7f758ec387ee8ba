"""
What is in a file, in chunks of rows: text, CSV, JSON by lines, Parquet.

A chunk knows the offset behind it, from which reading goes on: bytes of the text, as it
is unpacked, or rows of Parquet. CSV and JSON are what Spark takes them for, where it
takes them for anything; a value that is not of its type is an error here, and no null.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as pt

from etlstage.columns import array_of
from etlstage.files.find import InputFile
from etlstage.files.fit import Read, arrow_type, reader_of
from etlstage.pipeline.invalid import kind_of, loaded
from etlstage.settings.ddl import DeclaredColumn, Type, columns_of

__all__ = ("FORMATS", "Chunk", "Format", "Unreadable")

_CHUNK: Final = 1 << 20
_ROWS: Final = 8192  # of Parquet
_PACKED: Final = {".gz": "gzip", ".zst": "zstd"}
_BLANK: Final = re.compile(rb"^[\x00-\x09\x0b-\x20]+$", re.MULTILINE)
_WHOLE: Final = re.compile(r"[+-]?\d+")
_REAL: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|NaN|-?Inf")
_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


class Unreadable(ValueError):
    """A file is not of its format; the text has the place, and what would do."""


class Chunk(NamedTuple):
    """Some rows of a file."""

    table: pa.Table
    end: int
    """Offset behind them."""


class Format(ABC):
    """
    Reads files of one format.

    Args:
        files: All files of the input.
        schema: Columns as DDL; None: what the files themselves have.
        options: As Spark calls them, as far as they are known here.

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
        """Find out what is the same for all files."""

    @abstractmethod
    def chunks(self, file: InputFile, start: int) -> Iterator[Chunk]:
        """Yield what is in a file behind an offset; blocks."""


class _Lines:
    """
    Chunks of whole lines, ended by a line feed each.

    Attributes:
        end: Offset behind the last.

    """

    def __init__(self, file: InputFile, start: int) -> None:
        packed = _PACKED.get(file.path.suffix)
        self._stream: Any = pa.input_stream(str(file.path), compression=packed)
        self._rest = b""
        self.end = start
        if packed is None:
            self._stream.seek(start)
        while packed is not None and start:
            skipped = len(self._stream.read(min(start, _CHUNK)))
            if not skipped:
                raise Unreadable(f"{file.path} ends before offset {self.end}")
            start -= skipped

    def __iter__(self) -> Iterator[bytes]:
        while data := self._next():
            bare = data.removeprefix(b"\xef\xbb\xbf") if not self.end else data
            self.end += len(data)
            if b"\r" in bare:
                bare = bare.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            yield bare if bare.endswith(b"\n") or not bare else bare + b"\n"

    def _next(self) -> bytes:
        """Return whole lines, as they are; nothing at the end."""
        data = self._rest
        while True:
            more = bytes(self._stream.read(_CHUNK))
            data += more
            if not more:
                self._rest = b""
                return data
            # One that ends in a carriage return may go on with a line feed.
            cut = data.rfind(b"\n") + 1 or data.rfind(b"\r", 0, -1) + 1
            if cut:
                data, self._rest = data[:cut], data[cut:]
                return data

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class _OfLines(Format):
    """Reads a row, or none, of each line."""

    def chunks(self, file: InputFile, start: int) -> Iterator[Chunk]:
        number = 1
        with closing(_Lines(file, start)) as lines:
            for data in lines:
                yield Chunk(self._table(data, file, start, number), lines.end)
                number += data.count(b"\n")

    @abstractmethod
    def _table(self, data: bytes, file: InputFile, start: int, number: int) -> pa.Table:
        """Return the rows of lines, the first of which has that number behind start."""


class _Text(_OfLines):
    def _table(self, data: bytes, file: InputFile, start: int, number: int) -> pa.Table:
        values = array_of(data.split(b"\n")[:-1], pa.binary())
        return pa.table({"value": values})


class _Csv(_OfLines):
    def _prepare(self) -> None:
        self._sep = self._options.get("sep", self._options.get("delimiter", ","))
        self._escape = self._options.get("escape", "\\")
        self._header = self._options.get("header", "false").lower() == "true"
        sep, escape = re.escape(self._sep), re.escape(self._escape)
        quoted = (
            '(?:[^"]|"")*+' if self._escape == '"' else rf'(?:[^"{escape}]|{escape}.)*+'
        )
        self._cell = re.compile(
            rf'(?:"({quoted})"|((?:[^"{sep}][^{sep}]*+)?))({sep}|$)'
        )
        plain = rf'(?:"[^"\n{escape}]*+"|(?:[^"\n{sep}][^"\n{sep}]*+)?)[{sep}\n]'
        self._plain = re.compile(f"(?:{plain})*+".encode())
        self._names = self._named()

    def _named(self) -> list[str]:
        first = next((line for file in self._files for line in self._first(file)), None)
        if self._columns is not None:
            return [column.name for column in self._columns]
        if first is None:
            return []
        cells = self._cells(first, self._files[0], 1)
        if not self._header:
            return [f"_c{n}" for n in range(len(cells))]
        names = [cell or f"_c{n}" for n, cell in enumerate(cells)]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise Unreadable(
                f"{self._files[0].path}:1: column {min(twice)!r} is there twice: name"
                " them apart, or leave out the option header"
            )
        return names

    def _first(self, file: InputFile) -> Iterator[str]:
        """Yield the first line that is not blank, if there is one."""
        with closing(_Lines(file, 0)) as lines:
            for data in lines:
                for line in data.split(b"\n")[:-1]:
                    if line.strip():
                        yield line.decode(errors="replace")
                        return

    def _table(self, data: bytes, file: InputFile, start: int, number: int) -> pa.Table:
        where = f"behind byte {start}" if start else f"lines from {number}"
        if self._header and not start and number == 1:
            head = re.match(rb"(?:[\x00-\x20]*\n)?[^\n]*\n", data)
            skipped = head.end() if head else 0
            number += data.count(b"\n", 0, skipped)
            data = data[skipped:]
        table = self._at_once(data)
        if table is None:
            table = self._by_line(data, file, number)
        return self._typed(table, f"{file.path}, {where}")

    def _at_once(self, data: bytes) -> pa.Table | None:
        """Return the cells by Arrow, or None if a line needs a closer look."""
        if not data or _BLANK.search(data) or len(self._sep) != 1:
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

    def _by_line(self, data: bytes, file: InputFile, number: int) -> pa.Table:
        width, rows = len(self._names), []
        for n, line in enumerate(data.split(b"\n")[:-1], number):
            if line.strip(bytes(range(33))):
                cells = self._cells(line.decode(errors="replace"), file, n)
                rows.append([*cells, *[None] * (width - len(cells))][:width])
        columns: Any = zip(*rows, strict=True) if rows else [[] for _ in range(width)]
        made = [array_of(list(column), pa.string()) for column in columns]
        return pa.table(made, self._names)

    def _cells(self, line: str, file: InputFile, number: int) -> list[str | None]:
        if '"' not in line:
            return [cell or None for cell in line.split(self._sep)]
        cells: list[str | None] = []
        at = 0
        while True:
            found = self._cell.match(line, at)
            if found is None:
                raise Unreadable(
                    f"{file.path}:{number}: a quote stands where a cell is neither begun"
                    " nor ended: write a quote within quotes behind the option escape,"
                    f" which is {self._escape}, or set it to '\"'"
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

    def _typed(self, table: pa.Table, where: str) -> pa.Table:
        if self._columns is None:
            return table
        columns = []
        for column, values in zip(self._columns, table.columns, strict=True):
            try:
                columns.append(_parsed(values, column.type))
            except ValueError:
                raise Unreadable(
                    f"{where}: a value of column {column.name!r} is no {column.type}:"
                    " leave out the schema, and have a worker look at the text"
                ) from None
        return pa.table(columns, [column.name for column in self._columns])


def _parsed(values: pa.ChunkedArray, kind: Type) -> pa.ChunkedArray:
    """Return texts of CSV as values; raises ValueError if one is none."""
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
        elif kind.name == "decimal":
            try:
                value = Decimal(text)
            except InvalidOperation:
                raise ValueError(text) from None
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
                with closing(_Lines(file, 0)) as lines:
                    for where, row in _objects(lines, str(file.path)):
                        seen = _merged(seen, _type_of(row, where))
            settled = _settled(seen)
            columns = list(settled.inner) if settled is not None else []
        self._readers = [
            (c.name, arrow_type(c.type), _json_reader(c.type), str(c.type))
            for c in columns
        ]

    def _table(self, data: bytes, file: InputFile, start: int, number: int) -> pa.Table:
        where = f"{file.path}, behind byte {start}" if start else str(file.path)
        rows = list(_objects([data], where, number))
        columns = [
            array_of(list(self._values(name, read, expected, rows)), kind)
            for name, kind, read, expected in self._readers
        ]
        return pa.table(columns, [name for name, *_ in self._readers])

    def _values(
        self, name: str, read: Read, expected: str, rows: Sequence[tuple[str, Any]]
    ) -> Iterator[Any]:
        for where, row in rows:
            value = row.get(name)
            try:
                yield None if value is None else read(value)
            except Exception:
                raise Unreadable(
                    f"{where}: field {name!r} is {kind_of(value)} that is no {expected}:"
                    " set another schema, or read the lines as text"
                ) from None


def _objects(
    lines: Iterable[bytes], where: str, number: int = 1
) -> Iterator[tuple[str, Any]]:
    """Yield the objects of lines, and where each is; blank lines are none."""
    for data in lines:
        for n, line in enumerate(data.split(b"\n")[:-1], number):
            if not line.strip():
                continue
            try:
                row = loaded(line.decode())
            except (ValueError, RecursionError) as error:
                raise Unreadable(
                    f"{where}:{n}: the line is not one JSON document ({error}): read the"
                    " lines as text, and have a worker look at them"
                ) from None
            if not isinstance(row, dict):
                raise Unreadable(
                    f"{where}:{n}: the line is {kind_of(row)}, expected an object"
                )
            yield f"{where}:{n}", row
        number += data.count(b"\n")


def _type_of(value: object, where: str) -> Type:
    """Return the type of a value, ``void`` where that is not known."""
    if isinstance(value, dict):
        fields = (DeclaredColumn(k, None, _type_of(v, where)) for k, v in value.items())
        return Type("struct", (), tuple(fields))
    if isinstance(value, list):
        inner = Type("void")
        for item in value:
            inner = _merged(inner, _type_of(item, where))
        return Type("array", (), (DeclaredColumn("element", None, inner),))
    if isinstance(value, int) and value.bit_length() > 63:
        raise Unreadable(f"{where}: a number has more than 64 bits: set a schema")
    return Type(_FOUND[type(value)])


_FOUND: Final[Mapping[type, str]] = {
    bool: "boolean",
    int: "bigint",
    float: "double",
    str: "string",
    type(None): "void",
}


def _merged(one: Type, other: Type) -> Type:
    """Return the type that values of both have."""
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
    """Return a type as Spark has it in the end, None for one without anything in it."""
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
    """Return what reads a value as Spark does: text may be anything."""
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
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


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
            return reading.ParquetFile(file.path, coerce_int96_timestamp_unit="us")
        except pa.ArrowException as error:
            raise Unreadable(f"{file.path} is no Parquet: {error}") from error

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
                columns.append(column.cast(field.type))
            except pa.ArrowException as error:
                raise Unreadable(
                    f"{file.path}: column {field.name!r} is {column.type}, expected"
                    f" {field.type}: {error}"
                ) from None
        return pa.table(columns, self._schema)


def _olds(found: Any) -> list[bool]:  # noqa: ANN401 - Arrow is not typed
    """Return which columns are times as Spark writes them: instants, in 12 bytes."""
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
