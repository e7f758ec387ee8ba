"""
Read CSV as Spark reads it, but for values that are not of their column's type.

Where Spark makes these null, they are an error here. Arrow reads a chunk at once if no
line needs a closer look.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from etlstage.columns import array_of
from etlstage.files.find import InputFile, partition_columns
from etlstage.files.fit import arrow_type, is_kept, reader_of
from etlstage.files.format import LineFormat, Where, decoded, without_columns
from etlstage.files.lines import BLANKS, FileLines, Unreadable
from etlstage.messages import counted
from etlstage.pipeline.invalid import Fraction
from etlstage.settings.ddl import Type

__all__ = ("CsvFormat", "parsed", "separator")

_BLANK: Final = re.compile(rb"^[\x00-\x09\x0b-\x20]+$", re.MULTILINE)
_MARK: Final = "\ufeff".encode()
_WHOLE: Final = re.compile(r"[+-]?\d+")
_REAL: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|NaN|-?Inf")
_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def separator(options: Mapping[str, str]) -> str:
    """Return what separates cells of CSV; options are by lower-case names."""
    found = options.get("sep", options.get("delimiter", ","))
    return "\t" if found == "\\t" else found


class CsvFormat(LineFormat):
    """A row from each line that is not blank; cells are read by their place."""

    def _prepare(self) -> None:
        self._sep = separator(self._options)
        self._escape = self._options.get("escape", "\\")
        self._header = self._options.get("header", "false").lower() == "true"
        sep, escape = re.escape(self._sep), re.escape(self._escape)
        quoted = (
            '(?:[^"]|"")*+' if self._escape == '"' else rf'(?:[^"{escape}]|{escape}.)*+'
        )
        # Python before 3.11.5 mismatches a lookahead within a possessive group.
        self._cell = re.compile(
            rf'(?:"({quoted})"|((?:(?!"|{sep}).+?)?))({sep}|$)', re.DOTALL
        )
        plain = rf'(?:"[^"\n{escape}]*+"|(?:[^"\n{sep}][^"\n{sep}]*+)?)[{sep}\n]'
        self._plain = re.compile(f"(?:{plain})*+".encode())
        if self._columns is not None:
            # As with Spark, the cells are those of the other columns.
            by = partition_columns(self._files, self._columns)
            self._columns = [c for c in self._columns if c not in by]
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
        lower = [name.lower() for name in names]
        for n, name in enumerate(names):
            if lower[n] in lower[:n]:
                raise Unreadable(
                    f"{where()}: column {name!r} appears twice, ignoring case: give the"
                    " columns different names, or omit the option header"
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
                    yield decoded(line, where), where
                    return

    def _table(self, data: bytes, lines: FileLines) -> pa.Table:
        skipped = 0
        if self._header and lines.first:
            head = re.match(rb"(?:[\x00-\x20]*\n)?([^\n]*)\n", data)
            if head is not None:
                skipped = data.count(b"\n", 0, head.end())
                self._check_header(head[1], lines, skipped - 1)
                data = data[head.end() :]

        if self._columns == []:
            return without_columns(sum(1 for _ in _filled(data)))

        def place(index: int) -> str:
            return lines.place(skipped + index)

        table = self._at_once(data)
        if table is None:
            table = self._by_line(data, place)
        return self._typed(table, data, place)

    def _check_header(self, line: bytes, lines: FileLines, index: int) -> None:
        """Assert that no value gets into another column than the one that it is in."""
        if not line.strip(BLANKS):
            return
        where = partial(lines.place, index)
        names = self._named_by(self._cells(decoded(line, where), where))
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
            cells = self._cells(decoded(line, where), where)
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
                columns.append(parsed(values, column.type))
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
        if line.strip(BLANKS):
            yield n, line


def _first_wrong(values: pa.ChunkedArray, kind: Type) -> int:
    """Return the index of the first text that is not a value of a type."""
    at, count = 0, len(values)
    while count > 1:
        half = count // 2
        try:
            parsed(values.slice(at, half), kind)
        except ValueError:
            count = half
        else:
            at, count = at + half, count - half
    return at


def parsed(values: pa.ChunkedArray, kind: Type) -> pa.ChunkedArray:
    """Return texts of cells as values of a type; raises ValueError if one is invalid."""
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
            if _WHOLE.fullmatch(text) and not is_kept(int(text), kind):
                raise ValueError(text)
            value = Fraction.of(text)
        elif kind.name == "boolean":
            value = {"true": True, "false": False}.get(text.lower(), text)
        try:
            return read(value)
        except Exception:
            raise ValueError(text) from None

    return one
