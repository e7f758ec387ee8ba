"""
Extract messages from files, one for each row.

No messages are buffered on disk: files are read a megabyte at a time. A position is a
file, an offset in it, and how many rows after that offset are done. It is valid as long
as the files are the same; a start that finds different files fails and does not guess.
"""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import anyio.to_thread
import pyarrow as pa
from pyarrow import types as pt

from etlstage.columns import Column, array_of, one_of
from etlstage.errors import EtlstageError, SourceFailed, guess, os_reason
from etlstage.files.csv_format import parsed
from etlstage.files.find import (
    InputFile,
    PartitionsInvalid,
    digests_of,
    find,
    is_changed,
    partition_columns,
)
from etlstage.files.format import Format
from etlstage.files.formats import FORMATS
from etlstage.files.lines import Unreadable
from etlstage.files.text import is_text, objects
from etlstage.messages import AnnotatedRun, Position, Run, plain
from etlstage.pipeline.interfaces import Epochs, Source
from etlstage.settings.ddl import DeclaredColumn, Type, columns_of

__all__ = ("RUN_BYTES", "RUN_MESSAGES", "FileSource")

RUN_MESSAGES: Final = 16_384
"""Messages in a run, at most."""
RUN_BYTES: Final = 1 << 20
"""Bytes in a run, at most, unless it is a single message."""
_ROW_BITS: Final = 48
_Place: TypeAlias = tuple[int, int]  # file, row


class FileSource(Source):
    """
    Yields the rows of files as messages, in the order of the files' names.

    Args:
        path: A file, a folder, or a pattern of these.
        format: ``csv``, ``json``, ``ndjson``, ``parquet`` or ``text``.
        schema: Columns as DDL; by default those of the files.
        message: The text or binary column that is the message. By default the only
            column if it is one, else all columns as JSON, with nulls.
        key: A column by which messages keep their order where a stage keeps no other.
        options: Options by Spark's names.
        name: Name in reports and errors.
        run_messages: Messages in a run, at most.
        run_bytes: Bytes in a run, at most, unless it is a single message.
        keeps: Whether to yield positions.
        folder: What a relative path is relative to; no part of the pattern.

    """

    def __init__(
        self,
        path: str,
        format: str,  # noqa: A002 - as Spark calls it
        *,
        schema: str | None = None,
        message: str | None = None,
        key: str | None = None,
        options: Mapping[str, str] | None = None,
        name: str = "extract",
        run_messages: int = RUN_MESSAGES,
        run_bytes: int = RUN_BYTES,
        keeps: bool = False,
        folder: str = "",
    ) -> None:
        super().__init__(name)
        self._inside = path, folder
        self._path = os.path.join(folder, path)
        self._format = format
        self._schema = schema
        self._columns = columns_of(schema) if schema is not None else []
        self._checked = [column for column in self._columns if _has_not_null(column)]
        self._message = message
        self._key = key
        self._options = options or {}
        self._bounds = (run_messages, run_bytes)
        self._keeps = keeps
        self._from: tuple[int, int, int] = (0, 0, 0)
        self._of: list[str] = []  # digests, one of which the files must have
        self._draining = False

    rereads = True

    @property
    def cut(self) -> tuple[int, int]:
        """Messages and bytes of a run, at most: a position comes after each."""
        return self._bounds

    @property
    def input(self) -> str:
        """What is read, for a human."""
        return f"{self._format} {self._path}"

    def begin(self, epochs: Epochs) -> None:
        """Yield positions from now on, as the load may be restarted."""
        self._keeps = True

    def resume(self, position: object) -> None:
        """Begin at a position; raises SourceFailed if it is not one of this source."""
        match position:
            case [int(file), int(offset), int(rows), str(of)] if (
                min(file, offset, rows) >= 0
            ):
                self._from, self._of = (file, offset, rows), of.split(" ")
            case _:
                super().resume(position)

    def drain(self) -> bool:
        """End at the next position; return whether there are positions."""
        self._draining = self._keeps
        return self._draining

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """
        Yield runs of messages, and a position after each.

        Raises:
            SourceFailed: If a file can't be read, a column is missing, a message is
                null, or the files are not those of the position.

        """
        async with aclosing(self._read(*self._from)) as items:
            async for run, _, position in items:
                yield run
                if self._keeps:
                    yield position
                    if self._draining:
                        return

    async def numbered(self, after: int = -1) -> AsyncGenerator[AnnotatedRun, None]:
        """Yield runs whose numbers are places: a file, and a row in it."""
        # Not an offset: where chunks begin depends on where reading began.
        file, row = divmod(after + 1, 1 << _ROW_BITS)
        async with aclosing(self._read(file, 0, row)) as items:
            async for run, (file, row), _ in items:
                first = (file << _ROW_BITS) + row
                numbers = range(first, first + len(run))
                yield AnnotatedRun(plain(run), sequence=numbers)

    def identity(self) -> str:
        """Return a digest of the files; reading then fails if they differ. Blocks."""
        try:
            self._keeps, self._of = True, digests_of(find(*self._inside))
        except PartitionsInvalid as error:
            raise self._failed(str(error)) from error
        return self._of[0]

    async def _read(
        self, *start: int
    ) -> AsyncGenerator[tuple[Run, _Place, Position], None]:
        items = self._items(*start)
        try:
            while item := await anyio.to_thread.run_sync(next, items, None):
                yield item
        except EtlstageError:
            raise
        except OSError as error:
            raise self._failed(
                f"can't read {error.filename or self._path}: {os_reason(error)}"
            ) from error
        except (ValueError, pa.ArrowException) as error:
            raise self._failed(str(error)) from error
        finally:
            items.close()

    def _items(
        self, first: int, start: int, skipped: int
    ) -> Generator[tuple[Run, _Place, Position], None, None]:
        """Yield runs, each with its place, and the position after it."""
        files = find(*self._inside)
        if not files:
            text = f"there is no file to read at {self._path}"
            if os.path.exists(self._path):
                text += ": names that begin with a dot or an underscore are not data"
            raise self._failed(text)
        of = digests_of(files) if self._keeps else []
        if self._of and not {*self._of} & {*of}:
            raise self._failed(
                f"can't resume: the files of {self._path} are not those that were read"
                " before; restore them, or start from the beginning after"
                " 'etlstage state reset', which loads everything again"
            )
        by = partition_columns(files, self._columns)
        reads = FORMATS[self._format](files, self._schema, self._options)
        for number, file in enumerate(files[first:], first):
            self._check_unchanged(file)
            runs = self._runs_of(reads, file, start, skipped, by)
            for run, row, *behind in runs:
                yield run, (number, row), Position([number, *behind, " ".join(of)])
            self._check_unchanged(file)
            start = skipped = 0

    def _check_unchanged(self, file: InputFile) -> None:
        # Lines that were cut off would be missing without any other sign.
        if is_changed(file):
            raise self._failed(
                f"{file.path} was changed during the run: give a file its place once it is"
                " complete (write it elsewhere, then rename it), and start again"
            )

    def _runs_of(
        self,
        reads: Format,
        file: InputFile,
        start: int,
        skipped: int,
        by: Sequence[DeclaredColumn],
    ) -> Generator[tuple[Run, int, int, int], None, None]:
        """
        Yield runs, each with its first row, and offset and row of the next run.

        The first row is counted from ``start``, that of the next run from its offset.
        """
        most, size = self._bounds
        before = 0
        for table, end, place in reads.chunks(file, start):
            whole = _with_partition(table, file, by)
            self._check_nulls(whole, file)
            messages, keys = self._messages(whole, file, place), self._keys(whole)
            pieces = [(min(skipped, len(messages)), len(messages))]
            skipped -= pieces[0][0]
            while pieces:
                at, stop = pieces.pop()
                part = Column(messages[at:stop])
                if stop - at > most or (stop - at > 1 and part.size > size):
                    middle = at + min(most, max(1, (stop - at) // 2))
                    pieces += [(middle, stop), (at, middle)]
                elif stop > at:
                    run = (
                        part if keys is None else AnnotatedRun(part, key=keys[at:stop])
                    )
                    last = stop == len(messages)
                    yield run, before + at, *((end, 0) if last else (start, stop))
            before += len(messages)
            # Reading from the end of blank lines would take a header for a row.
            start = end if len(messages) else start

    def _messages(
        self, table: pa.Table, file: InputFile, place: Callable[[int], str] | None
    ) -> pa.BinaryArray:
        names, name = table.column_names, self._message
        if name is None and len(names) == 1 and is_text(table.column(0).type):
            name = names[0]
        if name is None:
            return _one(objects(_decoded(table, place))).cast(pa.binary())
        self._known(names, name, "message")
        column = _one(table[name])
        if not is_text(column.type):
            raise self._failed(
                f"message {name!r} is {column.type}, expected string or binary: omit"
                " message to get all columns as JSON"
            )
        if column.null_count:
            remedy = (
                "omit message, and have a worker check all columns"
                if len(names) > 1
                else "set a schema with a second column and no message, which gives all"
                " columns as JSON, and have a worker check these"
            )
            raise self._failed(
                f"message {name!r} is null in at least {column.null_count} rows of"
                f" {file.path}: {remedy}"
            )
        return column.cast(pa.binary())

    def _check_nulls(self, table: pa.Table, file: InputFile) -> None:
        for column in self._checked:
            if (name := _null_in(_one(table[column.name]), column)) is not None:
                raise self._failed(
                    f"column {name} is NOT NULL in the schema, and null in a row of"
                    f" {file.path}: omit NOT NULL, and have a worker check all rows"
                )

    def _keys(self, table: pa.Table) -> list[Any] | None:
        if self._key is None:
            return None
        self._known(table.column_names, self._key, "key")
        keys: list[Any] = _one(table[self._key]).to_pylist()
        return [hash(str(key)) for key in keys]

    def _known(self, names: list[str], name: str, what: str) -> None:
        if name not in names:
            close = guess(name, names) or f", expected one of {', '.join(names)}"
            raise self._failed(f"{what}: there is no column {name!r}{close}")

    def _failed(self, text: str) -> SourceFailed:
        return SourceFailed(f"{self.name}: {text}", stage=self.name)


def _has_not_null(column: DeclaredColumn) -> bool:
    """Return whether a column, or a field in it, is NOT NULL."""
    return column.nullable is False or any(map(_has_not_null, column.type.inner))


def _null_in(values: pa.Array, column: DeclaredColumn) -> str | None:
    """Return the name of a column, or of a field in it, that is null but must not be."""
    if column.nullable is False and values.null_count:
        return column.name
    if not column.type.inner:
        return None
    values = values.drop_null()
    if pt.is_map(values.type):
        parts = [values.keys, values.items]
    else:  # a list has one inner column, as many as it has fields a struct
        parts = values.flatten() if pt.is_struct(values.type) else [values.flatten()]
    for part, inner in zip(parts, column.type.inner, strict=True):
        if (name := _null_in(part, inner)) is not None:
            return f"{column.name}.{name}"
    return None


def _one(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        chunks = column.chunks or [array_of([], column.type)]
        return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
    return column


def _decoded(table: pa.Table, place: Callable[[int], str] | None) -> pa.Table:
    """Return a table with the lines of a text file as strings, for JSON."""
    if place is None or not pt.is_binary(table.column(0).type):
        return table
    texts, name = list[str](), table.column_names[0]
    for row, line in enumerate(table.column(0).to_pylist()):
        try:
            texts.append(line.decode())
        except UnicodeDecodeError as error:
            raise Unreadable(
                f"{place(row)}: the line is not UTF-8 at offset {error.start}: convert the"
                f" file, or set message to {name}, which passes lines as they are"
            ) from None
    return table.set_column(0, name, array_of(texts, pa.string()))


def _with_partition(
    table: pa.Table, file: InputFile, columns: Sequence[DeclaredColumn]
) -> pa.Table:
    for column, (_, value) in zip(columns, file.partition, strict=True):
        try:
            one = _partition_value(value, column.type)
        except ValueError:
            raise Unreadable(
                f"{file.path.parent}: the value of column {column.name!r} is not of type"
                f" {column.type}: declare it as string, and have a worker parse the text"
            ) from None
        name = column.name.lower()
        same = [other for other in table.column_names if other.lower() == name]
        table = table.drop_columns(same)
        table = table.append_column(column.name, pa.repeat(one, table.num_rows))
    return table


def _partition_value(text: str | None, kind: Type) -> pa.Scalar:
    if text is not None and kind.name == "binary":
        # In folders as in JSON; Spark writes bytes as they are, if they are UTF-8.
        return one_of(b64decode(text, validate=True))
    return parsed(pa.chunked_array([array_of([text], pa.string())]), kind)[0]
