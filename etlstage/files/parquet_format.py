"""Read Parquet; a value that a declared type does not have exactly is an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyarrow import types as pt

from etlstage.files.find import InputFile
from etlstage.files.fit import arrow_type
from etlstage.files.format import Chunk, Format
from etlstage.files.lines import Unreadable
from etlstage.files.text import is_text

__all__ = ("ParquetFormat",)

_ROWS: Final = 8192  # per batch of Parquet


class ParquetFormat(Format):
    """
    Rows in batches; without a schema the columns are those of the first file.

    Nulls without a type get that of the first later file that has one.
    """

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
                    (field.name, _plain(field.type)) for field in _schema_of(found)
                ]
            self._schema = pa.schema(fields)
            for file in self._files[1:]:
                if not any(_has_nulls(field.type) for field in self._schema):
                    return
                with self._opened(file) as found:
                    self._give_types(_schema_of(found), file)

    def _give_types(self, schema: pa.Schema, file: InputFile) -> None:
        for number, field in enumerate(self._schema):
            name = self._name_in(schema.names, field.name, file)
            if name is not None:
                kind = _plain(field.type, _plain(schema.field(name).type))
                self._schema = self._schema.set(number, field.with_type(kind))

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
        """Yield the rows after a number of rows; blocks."""
        with self._opened(file) as found:
            schema, end = _schema_of(found), 0
            for group in range(found.num_row_groups):
                rows = found.metadata.row_group(group).num_rows
                if end + rows <= start:
                    end += rows
                    continue
                for batch in found.iter_batches(_ROWS, row_groups=[group]):
                    skipped, end = max(0, start - end), end + len(batch)
                    if skipped < len(batch):
                        table = pa.Table.from_batches([batch.slice(skipped)])
                        yield Chunk(self._fitted(table, schema, file), end)

    def _fitted(self, table: pa.Table, schema: pa.Schema, file: InputFile) -> pa.Table:
        if not self._schema:
            return table.select([])  # a table that is made of no columns has no rows
        columns = []
        for field in self._schema:
            name = self._name_in(table.column_names, field.name, file)
            if name is None:
                columns.append(pa.nulls(table.num_rows, field.type))
                continue
            column = table[name].cast(schema.field(name).type)
            try:
                columns.append(_cast(column, field.type))
            except (pa.ArrowException, ValueError) as error:
                raise Unreadable(
                    f"{file.path}: column {field.name!r} is {column.type}, expected"
                    f" {field.type}: {error}"
                ) from None
        return pa.table(columns, self._schema)

    def _name_in(self, names: Sequence[str], name: str, file: InputFile) -> str | None:
        """Return a column's name in a file; it may differ in case, as with Spark."""
        if name in names:
            return name
        wanted = [one for one in self._schema.names if one.lower() == name.lower()]
        alike = {one for one in names if one.lower() == name.lower()}
        free = sorted(alike.difference(wanted))
        if free and (len(free) > 1 or len(wanted) > 1):
            raise Unreadable(
                f"{file.path}: can't match column {' or '.join(map(repr, free))} of the"
                f" file with {' or '.join(map(repr, wanted))} of the schema, which differ"
                " in case only: rename one, or set a schema with the exact name"
            )
        return free[0] if free else None


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return values of another type; raises ValueError if one would be changed."""
    column = column.cast(_plain(column.type, kind))
    _check_times(column.type, kind)
    made = column.cast(kind)
    # A text may be written in several ways; other values must be the same again.
    if column.type == kind or is_text(column.type) or is_text(kind):
        return made
    again = made.cast(column.type)
    # As Python's values, for these may be nested, and NaN may be among them.
    if not again.equals(column) and repr(again.to_pylist()) != repr(column.to_pylist()):
        raise ValueError("a value would be changed")
    return made


def _plain(old: pa.DataType, new: pa.DataType | None = None) -> pa.DataType:
    """
    Return a type that has the same values, but in no particular encoding.

    At any depth, nulls without a type get that of the same place in ``new``.
    """
    if pt.is_null(old):
        return old if new is None else new
    if pt.is_dictionary(old):
        return old.value_type
    if pt.is_string_view(old):
        return pa.string()
    if pt.is_binary_view(old) or pt.is_fixed_size_binary(old):
        return pa.binary()
    news = {} if new is None else _inner(new)
    return _with_inner(
        old, {name: _plain(kind, news.get(name)) for name, kind in _inner(old).items()}
    )


def _check_times(old: pa.DataType, new: pa.DataType) -> None:
    """
    Raise ValueError if times are not of the same sort in two types, at any depth.

    Numbers are no times, and times with a zone differ from those without.
    """
    if _time_of(old) != _time_of(new) and not (
        is_text(old) or is_text(new) or pt.is_null(old)
    ):
        raise ValueError(
            "numbers and times are not converted into each other: declare the type of"
            " the file, and have a worker convert the values"
        )
    both = pt.is_timestamp(old) and pt.is_timestamp(new)
    if both and (old.tz is None) != (new.tz is None):
        raise ValueError(
            "only one of the two has a zone: declare timestamp_ntz for times without a"
            " zone, timestamp for others"
        )
    inner = _inner(new)
    for name, kind in _inner(old).items():
        _check_times(kind, inner.get(name, kind))


def _time_of(kind: pa.DataType) -> str:
    """Return which sort of time a type is; empty for others."""
    if pt.is_date(kind) or pt.is_timestamp(kind):
        return "instant"
    if pt.is_time(kind):
        return "time of day"
    return "duration" if pt.is_duration(kind) else ""


def _inner(kind: pa.DataType) -> Mapping[str, pa.DataType]:
    """Return the types within a type, by the name of a field, if there are fields."""
    if pt.is_struct(kind):
        return {field.name: field.type for field in kind}
    if pt.is_map(kind):
        return {"key": kind.key_type, "value": kind.item_type}
    return {"element": kind.value_type} if pt.is_nested(kind) else {}


def _has_nulls(kind: pa.DataType) -> bool:
    """Return whether a type is, at any depth, that of nulls without a type."""
    return pt.is_null(kind) or any(map(_has_nulls, _inner(kind).values()))


def _with_inner(kind: pa.DataType, inner: Mapping[str, pa.DataType]) -> pa.DataType:
    """Return a type with other types within it, named as :func:`_inner` does."""
    if pt.is_struct(kind):
        return pa.struct([field.with_type(inner[field.name]) for field in kind])
    if pt.is_map(kind):
        return pa.map_(inner["key"], inner["value"])
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return pa.list_(inner["element"])
    return kind


def _schema_of(found: Any) -> pa.Schema:  # noqa: ANN401 - Arrow is not typed
    """Return the columns of a file; INT96, as Spark writes instants, has a zone."""
    leaves = [found.schema.column(n).physical_type for n in range(len(found.schema))]
    if "INT96" not in leaves:
        return found.schema_arrow
    stored = iter(leaves)
    return pa.schema([(f.name, _instants(f.type, stored)) for f in found.schema_arrow])


def _instants(kind: pa.DataType, stored: Iterator[str]) -> pa.DataType:
    """Return a type; ``stored`` has how Parquet stores each type without inner ones."""
    if inner := _inner(kind):
        made = {name: _instants(one, stored) for name, one in inner.items()}
        return _with_inner(kind, made)
    return pa.timestamp("us", "UTC") if next(stored) == "INT96" else kind
