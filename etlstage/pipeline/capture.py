"""
A sink that keeps messages in a file instead of loading them.

Each run is stored as one block, see ``etlstage/block.py``. So memory never holds more
than one run, and millions of messages are read back at the speed of the disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Self

import anyio.to_thread

from etlstage.block import Blocks, block_of
from etlstage.errors import SinkFailed, os_reason
from etlstage.messages import Run, counted
from etlstage.pipeline.interfaces import Output, Sink

__all__ = ("Capture",)


class Capture(Sink):
    """
    A sink that keeps messages in a file; iterating reads them back, in order.

    Args:
        path: The file; its content is replaced.
        name: Name of the stage in reports and errors.

    """

    def __init__(self, path: Path, *, name: str = "load") -> None:
        super().__init__(name)
        self._path = path
        self._file: FileIO | None = None

    def __len__(self) -> int:
        return self.account.done

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            for block in Blocks(file.read, name=str(self._path)):
                yield from block.messages

    async def __aenter__(self) -> Self:
        """Create the file; raises like :meth:`write`."""
        try:
            self._file = self._path.open("wb", buffering=0)
        except OSError as error:
            raise self._failure(error) from error
        return self

    async def aclose(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    async def write(self, run: Run) -> None:
        """Append a run; raises SinkFailed if the file can't be written."""
        self.account.received += len(run)
        await anyio.to_thread.run_sync(self._append, run)
        # What is captured need not outlive us, so there is nothing to flush.
        self.account.done += len(run)

    def landed(self) -> str:
        """Return how many messages were captured, for humans."""
        return f"{counted(self.account.done, 'message')} captured"

    def output(self) -> Output:
        """Return the file."""
        return Output("file", str(self._path))

    def _append(self, run: Run) -> None:
        assert self._file is not None
        try:
            for part in block_of(run, self.account.done):
                rest = memoryview(part)
                while rest:
                    rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> SinkFailed:
        return SinkFailed(
            f"{self.name}: can't capture messages in {self._path}: {os_reason(error)}",
            stage=self.name,
        )
