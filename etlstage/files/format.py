"""
What reading a file of any format has in common: chunks of rows, and their places.

Each chunk has the offset after it, from which reading can resume: bytes of decompressed
text, or rows of Parquet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from etlstage.columns import array_of
from etlstage.files.find import InputFile
from etlstage.files.lines import FileLines, Unreadable
from etlstage.settings.ddl import columns_of

__all__ = ("Chunk", "Format", "LineFormat", "Where", "decoded", "without_columns")

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


class LineFormat(Format):
    """Reads at most one row from each line."""

    def chunks(self, file: InputFile, start: int) -> Iterator[Chunk]:
        """Yield the rows of whole lines, about a megabyte at a time; blocks."""
        with closing(FileLines(file, start)) as lines:
            for data in lines:
                yield Chunk(self._table(data, lines), lines.end, self._place(lines))

    @abstractmethod
    def _table(self, data: bytes, lines: FileLines) -> pa.Table:
        """Return the rows of a chunk of lines."""

    def _place(self, _lines: FileLines) -> Callable[[int], str] | None:
        return None


def without_columns(rows: int) -> pa.Table:
    """Return a table of so many rows; one that is made of no columns has no rows."""
    return pa.Table.from_struct_array(array_of([{}] * rows, pa.struct([])))


def decoded(line: bytes, where: Where) -> str:
    """Return a line as text; raises Unreadable if it is not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"{where()}: the line is not UTF-8 at offset {error.start}: convert the file, or"
            " read the lines as text"
        ) from None
