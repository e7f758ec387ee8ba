"""Builds batches for Spark from the pieces that a task returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from etlstage.columns import Column, array_of
from etlstage.messages import Run, plain

__all__ = ("RowBuilder", "binary_of")

_ROWS: Final = 10_000  # in a batch, about, as Spark's own have
_BYTES: Final = 8 * 1024 * 1024


class RowBuilder:
    """
    Collects columns until there is enough for a batch.

    Args:
        names: Names of the columns.
        rows: Rows in a batch, about, by default as in Spark's; bytes are bounded, too.

    """

    def __init__(self, names: Sequence[str], *, rows: int | None = None) -> None:
        self._names = list(names)
        self._most = rows or _ROWS
        self._pieces: list[Sequence[pa.Array]] = []
        self._rows = self._size = 0

    def add(self, columns: Sequence[pa.Array], size: int) -> Iterator[pa.RecordBatch]:
        """Take the next rows, of ``size`` bytes; yield a batch if there is enough."""
        self._pieces.append(columns)
        self._rows += len(columns[0])
        self._size += size
        if self._rows >= self._most or self._size >= _BYTES:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows, if any."""
        pieces, self._pieces = self._pieces, []
        rows, self._rows, self._size = self._rows, 0, 0
        if rows:
            columns = [pa.concat_arrays(column) for column in zip(*pieces, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, names=self._names)


def binary_of(run: Run) -> pa.Array:
    """Return messages as a column."""
    messages = plain(run)
    if isinstance(messages, Column):
        return messages.array
    return array_of(messages, pa.binary())
