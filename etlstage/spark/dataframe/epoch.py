"""
Messages that are loaded together, kept as Arrow columns.

A Python list costs three times what its messages hold; Arrow costs four bytes per
message on top of them.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from etlstage.columns import Column
from etlstage.messages import Run
from etlstage.spark.dataframe.fit import strings_of

__all__ = ("Epoch",)

_CHUNK: Final = 8192


class Epoch:
    """
    Messages in load order.

    Attributes:
        messages: How many they are.
        size: How many bytes they hold.

    """

    def __init__(self) -> None:
        self.messages: int = 0
        self.size: int = 0
        self._pending: list[bytes] = []
        self._chunks: list[pa.Array] = []

    def add(self, run: Run, size: int) -> None:
        """Take ``run``, whose messages hold ``size`` bytes."""
        self.messages += len(run)
        self.size += size
        if isinstance(run, Column) and len(run) >= _CHUNK // 16:
            self._settle()
            self._chunks.append(run.array)
            return
        self._pending += run
        # Runs may be as small as one message: a chunk each would cost more.
        if len(self._pending) >= _CHUNK or size >= _CHUNK * 16:
            self._settle()

    def binary(self) -> pa.ChunkedArray:
        """Return the messages as they are."""
        self._settle()
        return pa.chunked_array(self._chunks, pa.binary())

    def strings(self) -> pa.ChunkedArray:
        """Return the messages as strings, null in place of what is not UTF-8."""
        chunks = [strings_of(chunk) for chunk in self.binary().chunks]
        return pa.chunked_array(chunks, pa.string())

    def _settle(self) -> None:
        if self._pending:
            self._chunks.append(pa.array(self._pending, pa.binary()))
            self._pending = []
