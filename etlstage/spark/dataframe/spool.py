"""
What Spark's executors do to hand a DataFrame over, partition by partition.

The functions that travel to the executors are made here; Spark pickles them by
value, because they are nested, so that executors need PyArrow but not etlstage.
Hence the imports inside them, which use no name of this module.

A partition becomes one file of blocks, see ``etlstage/block.py``. The name of the file
contains the task attempt, and the driver gets the names from the attempts that Spark
counts: a retried task or two attempts at once do no harm.

A task that does not see the spool directory fails, and the job with it: returning early
would not do, because Spark goes on computing what is not read.

A spool may be kept after a run fails. It is named by its load, as a spool of another
load is of no use. Each start writes a spool of its own, because Spark may still be
writing that of a start that was taken over, and renames it when it is whole; the first
whole spool is the one that is read. Others may have spools in the same folder. So the
state directory records where the spool is, and nothing is removed but what is recorded
there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import pyarrow as pa

from etlstage.block import making
from etlstage.disk import make, sync, sync_all
from etlstage.messages import Run
from etlstage.pipeline.delivery.position import load, store
from etlstage.pipeline.interfaces import Epochs
from etlstage.spark.dataframe.read import run_of
from etlstage.spark.errors import text_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = (
    "NONCE",
    "KeptSpool",
    "Spooled",
    "packed",
    "read_packed",
    "spool_into",
    "spooled",
)

Batches: TypeAlias = "Iterator[pa.RecordBatch]"
Cut: TypeAlias = "Callable[[pa.RecordBatch], Batches]"

NONCE: Final = "nonce"
"""File in the spool directory by which a task recognizes the driver's directory."""

_SPOOLED: Final = "partition int, file string, messages long, nulls long"
_UNSEEN: Final = "etlstage can't access its spool directory"
_FULL: Final = "no space is left in etlstage's spool directory"
_PACKED: Final = "partition int, run binary, nulls long"


class Spooled(NamedTuple):
    """The spool file of one partition."""

    partition: int
    """Its number, which is its place in the order."""
    file: str
    """Name in the spool directory."""
    messages: int
    """Messages in the file."""
    nulls: int
    """How many of them are null."""


def spooled(
    frame: DataFrame, directory: str, nonce: str, messages: int, size: int
) -> list[Spooled] | None:
    """
    Write ``frame`` into ``directory``; blocks.

    Args:
        frame: What to write: messages, binary, and maybe their keys, long.
        directory: The spool directory, as the driver calls it.
        nonce: Content of the file :data:`NONCE` in it.
        messages: Messages in one record batch at most.
        size: Bytes in one record batch at most, unless it is a single message.

    Returns:
        One entry for each partition, in order; empty partitions for which Spark did not
        start a task are missing. None if executors do not see the directory.

    Raises:
        OSError: If there is no space left in it.

    """
    cut = _cutting(messages, size)
    function = spool_into(directory, nonce, cut, len(frame.columns))
    try:
        rows = frame.mapInArrow(function, _SPOOLED).collect()
    except Exception as error:
        text = text_of(error)
        if _UNSEEN in text:
            return None
        if _FULL in text:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    return sorted(Spooled(*row) for row in rows)


def packed(frame: DataFrame, messages: int, size: int) -> Iterator[tuple[bytes, int]]:
    """
    Yield the runs of ``frame``, packed, and the number of nulls in each.

    For executors that do not see the spool directory. Spark computes one partition
    at a time and holds no more than that.

    """
    function = _pack(_cutting(messages, size))
    for row in frame.mapInArrow(function, _PACKED).toLocalIterator():
        yield bytes(row["run"]), int(row["nulls"])


def read_packed(run: bytes) -> Run:
    """Return the messages of one packed run."""
    return run_of(pa.ipc.open_stream(run).read_next_batch())


def _cutting(messages: int, size: int) -> Cut:
    """Return a function that cuts a batch until each piece is within the bounds."""

    def cut(batch: pa.RecordBatch) -> Batches:
        pieces = [batch]
        while pieces:
            piece = pieces.pop()
            count = piece.num_rows
            if count > messages or (count > 1 and piece.nbytes > size):
                half = count // 2
                pieces += [piece.slice(half), piece.slice(0, half)]
            elif count:
                yield piece

    return cut


def spool_into(
    directory: str, nonce: str, cut: Cut, width: int = 1
) -> Callable[[Batches], Batches]:
    """
    Return the function that writes a partition into a file of ``directory``.

    Args:
        directory: As for :func:`spooled`.
        nonce: Likewise.
        cut: Cuts batches into runs.
        width: Number of columns: 2 if the messages have keys.

    """
    unseen, full, block = _UNSEEN, _FULL, making()

    def write(batches: Batches, path: str) -> tuple[int, int]:
        import pyarrow as pa

        fields = [pa.field("message", pa.binary()), pa.field("key", pa.int64())]
        schema = pa.schema(fields[:width])
        messages = nulls = 0
        with pa.OSFile(path, "wb") as file:
            for batch in batches:
                column = batch.column(0).cast(pa.binary())
                nulls += column.null_count
                columns = [column, *batch.columns[1:]]
                for piece in cut(pa.record_batch(columns, schema=schema)):
                    for part in block(piece, messages):
                        file.write(part)
                    messages += piece.num_rows
        return messages, nulls

    def spool(batches: Batches) -> Batches:
        import errno
        import os

        import pyarrow as pa
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        name = f"{task.partitionId()}-{task.taskAttemptId()}.arrow"
        path = os.path.join(directory, name)
        try:
            with open(os.path.join(directory, "nonce")) as file:
                seen = file.read() == nonce
        except OSError:
            seen = False
        if not seen:
            raise RuntimeError(unseen)
        try:
            messages, nulls = write(batches, path + ".part")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise RuntimeError(full) from error
            raise
        os.rename(path + ".part", path)
        yield pa.record_batch(
            {
                "partition": pa.array([task.partitionId()], pa.int32()),
                "file": pa.array([name]),
                "messages": pa.array([messages], pa.int64()),
                "nulls": pa.array([nulls], pa.int64()),
            }
        )

    return spool


def _pack(cut: Cut) -> Callable[[Batches], Batches]:
    """Return the function that turns a partition into rows of packed runs."""

    def pack(batches: Batches) -> Batches:
        import pyarrow as pa
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        for batch in batches:
            column = batch.column(0).cast(pa.binary())
            keys = {} if batch.num_columns == 1 else {"key": batch.column(1)}
            for piece in cut(pa.record_batch({"message": column, **keys})):
                nulls = piece.column(0).null_count
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, piece.schema) as stream:
                    stream.write_batch(piece)
                yield pa.record_batch(
                    {
                        "partition": pa.array([task.partitionId()], pa.int32()),
                        "run": pa.array([sink.getvalue().to_pybytes()], pa.binary()),
                        "nulls": pa.array([nulls], pa.int64()),
                    }
                )

    return pack


_LIST: Final = "spool.json"


class KeptSpool:
    """
    The spool of one load.

    Args:
        state: The state directory.
        folder: Where spools go.
        epochs: The epochs of the load.

    Attributes:
        path: Where the spool is once it is whole.

    """

    def __init__(self, state: Path, folder: Path, epochs: Epochs) -> None:
        name = f"spool-{epochs.load}"
        self.path: Path = folder.absolute() / name
        self._aside = self.path.with_name(f"{name}.{epochs.start}")
        self._state = state
        self._note = state / f"{name}.json"
        self._check = epochs.check

    def make(self) -> Path:
        """
        Make the folder that this start writes into, and remove all recorded spools.

        Raises:
            OSError: If that can't be done.
            StateUnusable: If another run has taken over, which may read a spool.

        """
        for note in self._state.glob("spool-*.json"):
            self._remove(note)
        store(self._note, str(self.path.parent))
        make(self._aside, 0o700)
        return self._aside

    def keep(self, parts: Sequence[Spooled], of: str) -> None:
        """
        Put the spool that was written in place, durably.

        Args:
            parts: The files.
            of: Identifies what was read among everything that might be.

        Raises:
            OSError: If that can't be done.
            StateUnusable: If another run has taken over.

        """
        sync_all(self._aside)
        store(self._aside / _LIST, {"of": of, "parts": [list(part) for part in parts]})
        self._check()
        try:
            self._aside.rename(self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another start of the load has put a spool there, which is whole, too.
            self._check()
            rmtree(self._aside, ignore_errors=True)
        sync(self.path.parent)

    def find(self) -> tuple[str, list[Spooled]] | None:
        """Return the spool's ``of`` and its files; None if it is not whole."""
        try:
            found = load(self.path / _LIST)
            parts = [Spooled(*part) for part in found["parts"]]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None
        sync(self.path.parent)  # a start that was killed may not have done it
        return found["of"], parts

    def remove(self) -> None:
        """Remove the spool; raises StateUnusable if another run has taken over."""
        if self._note.exists():
            self._remove(self._note)

    def _remove(self, note: Path) -> None:
        try:
            folder = Path(load(note))
        except (ValueError, TypeError):
            folder = self.path.parent
        self._check()
        rest = f"{note.stem}.[0-9]*"  # of interrupted starts
        for path in (folder / note.stem, *folder.glob(rest)):
            rmtree(path, ignore_errors=True)
        note.unlink(missing_ok=True)
