"""The formats of files that are read, by name; and text, which is one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pyarrow as pa

from etlstage.columns import array_of
from etlstage.files.csv_format import CsvFormat
from etlstage.files.format import Format, LineFormat
from etlstage.files.json_format import JsonFormat
from etlstage.files.lines import FileLines
from etlstage.files.parquet_format import ParquetFormat

__all__ = ("FORMATS",)


class TextFormat(LineFormat):
    """A row of bytes from each line."""

    def _place(self, lines: FileLines) -> Callable[[int], str]:
        return lines.place

    def _table(self, data: bytes, lines: FileLines) -> pa.Table:
        values = array_of(data.split(b"\n")[:-1], pa.binary())
        return pa.table({"value": values})


FORMATS: Final[Mapping[str, type[Format]]] = {
    "csv": CsvFormat,
    "json": JsonFormat,
    "ndjson": JsonFormat,
    "parquet": ParquetFormat,
    "text": TextFormat,
}
