"""The formats of files that are read, by name; and text, which is one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa

from etlstage.columns import array_of
from etlstage.files.csv_format import CsvFormat
from etlstage.files.find import NO_TEXT, text_column
from etlstage.files.format import Format, LineFormat
from etlstage.files.json_format import JsonFormat
from etlstage.files.lines import FileLines, Unreadable
from etlstage.files.parquet_format import ParquetFormat

__all__ = ("FORMATS",)


class TextFormat(LineFormat):
    """A row of bytes from each line, in the only column of the schema, or ``value``."""

    def _prepare(self) -> None:
        self._name: str | None = "value"
        if self._columns is not None:
            self._name = text_column(self._files, self._columns)
        if self._name is None:
            raise Unreadable(f"schema: {NO_TEXT}")

    def _place(self, lines: FileLines) -> Callable[[int], str]:
        return lines.place

    def _table(self, data: bytes, lines: FileLines) -> pa.Table:
        values = array_of(data.split(b"\n")[:-1], pa.binary())
        return pa.table([values], [self._name])


FORMATS: Final[Mapping[str, type[Format]]] = {
    "csv": CsvFormat,
    "json": JsonFormat,
    "ndjson": JsonFormat,
    "parquet": ParquetFormat,
    "text": TextFormat,
}
