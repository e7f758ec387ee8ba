"""
Messages out of a DataFrame.

A Spark job writes the messages into spool files, all partitions in parallel; then the
files are read one after the other. So reading is as fast as the executors, messages
come in the order of the partitions, and the driver holds only one run at a time.
Executors that do not see the spool directory, as on a cluster, hand the same runs over
through Spark, one partition after the other.
"""

from __future__ import annotations

import errno
import secrets
import tempfile
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import pyarrow as pa
from pyspark.sql import DataFrame

from etlstage.block import Blocks
from etlstage.errors import BlockDamaged, EtlstageError, SourceFailed
from etlstage.messages import AnnotatedRun, Position, Run, plain
from etlstage.pipeline.interfaces import Epochs, Source
from etlstage.spark.dataframe.read import messages_of, run_of
from etlstage.spark.dataframe.spool import (
    NONCE,
    KeptSpool,
    Spooled,
    packed,
    read_packed,
    spooled,
)
from etlstage.spark.errors import explain
from etlstage.spark.session.job import run_job
from etlstage.spark.session.session import Session
from etlstage.transport.watchdog import discard_scratch, make_scratch

__all__ = ("RUN_BYTES", "RUN_MESSAGES", "DataFrameSource")

RUN_MESSAGES: Final = 16_384
"""Messages in a run, at most."""
RUN_BYTES: Final = 1 << 20
"""Bytes in a run, at most, unless it is a single message."""

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


class DataFrameSource(Source):
    """
    Yields the rows of a DataFrame as messages, in the order of its partitions.

    Attributes:
        name: As reports and errors call it.

    """

    def __init__(
        self,
        frame: DataFrame | Callable[[], DataFrame],
        *,
        message: str | None = None,
        key: str | None = None,
        sort: str | None = None,
        name: str = "extract",
        run_messages: int = RUN_MESSAGES,
        run_bytes: int = RUN_BYTES,
        spool_dir: Path | None = None,
        state: Path | None = None,
        of: str = "",
        session: Session | None = None,
        shown: str = "",
    ) -> None:
        """
        Take the settings; Spark is not asked for anything yet.

        Args:
            frame: What to read, or a function that makes it; it is called in a
                thread, and what it raises becomes :exc:`SourceFailed`.
            message: Spark SQL expression, string or binary, that makes a message
                of a row. By default the only column if that is string or binary,
                else ``to_json(struct(*))``.
            key: Spark SQL expression: messages with the same key keep their order even
                where a stage keeps no other. Runs are then an
                :class:`~etlstage.messages.AnnotatedRun`.
            sort: Spark SQL expression that rows are sorted by.
            name: As reports and errors call it.
            run_messages: Messages in a run, at most.
            run_bytes: Bytes in a run, at most, unless it is a single message.
            spool_dir: Folder for the spool, by default ``state``, or the system's
                temporary directory. The spool takes as much space as the messages.
            state: State directory: with one the spool is kept until all messages are
                loaded. A later start reads it again, without Spark.
            of: Identifies the frame among all that may be read with this state: a spool
                that was kept for another one is rejected.
            session: The frame's session, if errors are to name its log.
            shown: What is read, for a human.

        """
        super().__init__(name)
        self._frame = frame
        self._message = message
        self._key = key
        self._sort = sort
        self._bounds = (run_messages, run_bytes)
        self._spool_dir = spool_dir or state
        self._state = state
        self._of = of
        self._shown = shown
        self._kept: KeptSpool | None = None
        self._from = (0, 0)  # a part, and the runs to skip in it
        self._draining = False
        self._session = session or Session()
        self._spool: Path | None = None
        self._whole: tuple[Path, list[Spooled]] | None = None  # read more than once
        self._activity = "starting Spark"
        self.size: int | None = None

    rereads = True

    @property
    def cut(self) -> tuple[int, int]:
        """The bounds of a run: each is followed by a position."""
        return self._bounds

    @property
    def input(self) -> str:
        """What is read, for a human."""
        return self._shown or super().input

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """
        Yield runs of messages and, where the spool is kept, a position after each.

        Raises:
            SourceFailed: If Spark can't read, the expression is wrong, a message is
                null, or the spool is damaged or does not have the position to resume
                from.

        """
        try:
            with self._explained():
                runs = await anyio.to_thread.run_sync(self._again) or await self._read()
                async with aclosing(runs):
                    async for run in runs:
                        yield run
                        if self._draining and isinstance(run, Position):
                            return
        finally:
            await self.aclose()

    async def numbered(self, after: int = -1) -> AsyncGenerator[AnnotatedRun, None]:
        """
        Yield runs numbered by place in the spool; may be called any number of times.

        Another reader of the frame may see other places.
        """
        with self._explained():
            if self._whole is None:
                frame = await anyio.to_thread.run_sync(self._messages)
                spool, parts = await self._fill(frame)
                if parts is None:
                    raise self._failed(
                        f"executors can't access the folder {spool}: the spool is read"
                        " more than once; set spool to a folder that they can access"
                    )
                self._whole = spool, parts
            place, begin = 0, after + 1
            spool, parts = self._whole
            for part in parts:
                if place + part.messages <= begin:
                    place += part.messages
                    continue
                path = spool / part.file
                with closing(_read_file(path, part.messages, keep=True)) as runs:
                    while run := await anyio.to_thread.run_sync(next, runs, None):
                        first, place = max(place, begin), place + len(run)
                        if first < place:
                            rows = plain(run)[first - place :]
                            yield AnnotatedRun(rows, sequence=range(first, place))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except BlockDamaged as error:
            raise self._failed(
                f"{error}; start from the beginning"
                + (", after etlstage state reset" if self._kept else "")
            ) from error
        except EtlstageError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                where = self._spool_dir or tempfile.gettempdir()
                raise self._failed(
                    f"no space left for the spool of all messages in {where}: set"
                    " TMPDIR, or spool, to a folder with room for them"
                ) from error
            raise self._failed(explain(error, self._session.log_path)) from error

    async def _fill(self, frame: DataFrame) -> tuple[Path, list[Spooled] | None]:
        """Write the messages into a spool; parts are None if executors don't see it."""
        self._activity = "reading"
        spool, nonce = await anyio.to_thread.run_sync(self._make_spool)
        parts = await run_job(
            frame.sparkSession,
            lambda: spooled(frame, str(spool), nonce, *self._bounds),
        )
        if parts is not None:
            self._refuse_nulls(sum(part.nulls for part in parts), parts)
            self.size = sum(part.messages for part in parts)
        return spool, parts

    async def _read(self) -> AsyncGenerator[Run | Position, None]:
        frame = await anyio.to_thread.run_sync(self._messages)
        spool, parts = await self._fill(frame)
        if parts is None:
            if self._kept is not None:
                raise self._failed(
                    f"executors can't access the folder {spool}: a run with state keeps"
                    " its spool there; set spool to a folder that they can access"
                )
            return self._packed_runs(frame)
        if self._kept is not None:
            await anyio.to_thread.run_sync(self._kept.keep, parts, self._of)
            if again := await anyio.to_thread.run_sync(self._again):
                return again
            raise self._failed(
                f"the spool in {self._kept.path} was removed during the run"
            )
        return self._spooled_runs(spool, parts)

    def begin(self, epochs: Epochs) -> None:
        """Keep a spool for this load, or reuse it, if there is a state directory."""
        if self._state is not None:
            folder = self._spool_dir or self._state
            self._kept = KeptSpool(self._state, folder, epochs)

    def resume(self, position: object) -> None:
        """Begin in a part, after some runs; raises SourceFailed for other positions."""
        match position:
            case [int(part), int(run)] if self._kept and min(part, run) >= 0:
                self._from = part, run
            case _:
                super().resume(position)

    async def finished(self) -> None:
        """Remove the spool: all messages are loaded."""
        if self._kept is not None:
            await anyio.to_thread.run_sync(self._kept.remove)

    def drain(self) -> bool:
        """End at the next position, if there are any."""
        self._draining = self._kept is not None
        return self._draining

    def _again(self) -> AsyncGenerator[Run | Position, None] | None:
        """Return the runs of the kept spool, if there is one; blocks."""
        if self._kept is None:
            return None
        spool, found = self._kept.path, self._kept.find()
        if found is None:
            if self._from != (0, 0):
                raise self._failed(
                    f"can't resume: there is no complete spool in {spool}; start from the"
                    " beginning, after etlstage state reset"
                )
            return None
        of, parts = found
        if of != self._of:
            raise self._failed(
                f"can't resume: the spool in {spool} was made with different settings;"
                " restore those, or start from the beginning, after etlstage state reset"
            )
        return self._spooled_runs(spool, parts)

    @property
    def activity(self) -> str:
        """Nearly all of the time before the first message is Spark's own start."""
        return self._activity

    async def aclose(self) -> None:
        """Remove the spool; safe to call twice and at any time."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._remove_spool)

    def _messages(self) -> DataFrame:
        frame = self._frame if isinstance(self._frame, DataFrame) else self._frame()
        try:
            return messages_of(frame, self._message, self._key, self._sort)
        except TypeError as error:
            raise self._failed(explain(error)) from error

    def _make_spool(self) -> tuple[Path, str]:
        # Absolute: executors have a working directory of their own.
        if self._kept is not None:
            spool = self._kept.make()
        else:
            spool = self._spool = make_scratch("spool", self._spool_dir)
        nonce = secrets.token_hex()
        (spool / NONCE).write_text(nonce)
        return spool, nonce

    def _remove_spool(self) -> None:
        # A task that was interrupted may still write for some seconds.
        spool, self._spool = self._spool, None
        if spool is not None:
            discard_scratch(spool)

    async def _spooled_runs(
        self, spool: Path, parts: Sequence[Spooled]
    ) -> AsyncGenerator[Run | Position, None]:
        self.size = sum(part.messages for part in parts)
        keeps, (first, skipped) = self._kept is not None, self._from
        if first >= len(parts) and self._from != (0, 0):
            raise self._outside(spool, f"{len(parts)} parts")
        for number, part in enumerate(parts[first:], first):
            path = spool / part.file
            with closing(_read_file(path, part.messages, keep=keeps)) as runs:
                at = 0
                while run := await anyio.to_thread.run_sync(next, runs, None):
                    at += 1
                    if number == first and at <= skipped:
                        continue
                    yield run
                    if keeps:
                        yield Position([number, at])
            if number == first and at < skipped:
                raise self._outside(spool, f"{at} runs in that part")

    async def _packed_runs(
        self, frame: DataFrame
    ) -> AsyncGenerator[Run | Position, None]:
        runs = packed(frame, *self._bounds)
        while item := await anyio.to_thread.run_sync(next, runs, None):
            self._refuse_nulls(item[1], ())
            if run := await anyio.to_thread.run_sync(read_packed, item[0]):
                yield run

    def _refuse_nulls(self, nulls: int, parts: Sequence[Spooled]) -> None:
        if not nulls:
            return
        of = f" of {sum(part.messages for part in parts)}" if parts else ""
        first = next(
            (f", first in partition {p.partition}" for p in parts if p.nulls), ""
        )
        expression = self._message or "the message"
        raise self._failed(
            f"message is null in {nulls}{of} rows{first}: filter these rows, "
            f"or give them a message with coalesce({expression}, '')"
        )

    def _outside(self, spool: Path, found: str) -> SourceFailed:
        part, run = self._from
        return self._failed(
            f"can't resume after run {run} of part {part} (parts are counted from 0):"
            f" the spool in {spool} has {found}; start from the beginning, after etlstage"
            " state reset"
        )

    def _failed(self, text: str) -> SourceFailed:
        return SourceFailed(f"{self.name}: {text}", stage=self.name)


def _read_file(
    path: Path, messages: int, *, keep: bool = False
) -> Generator[Run, None, None]:
    """
    Yield the runs of a spool file, then remove it unless it is kept; blocks.

    Args:
        path: The file.
        messages: How many were written; the file must have all of them.
        keep: Whether it is kept.

    Raises:
        BlockDamaged: If a block is not as written, or the number of messages differs.

    """
    with pa.OSFile(str(path)) as file:
        blocks = Blocks(file.read_buffer, name=str(path))
        for block in blocks:
            yield run_of(block.batch)
    if blocks.messages != messages:
        raise BlockDamaged(
            f"{path} has complete blocks with {blocks.messages} messages, up to byte"
            f" {blocks.end}, expected {messages} messages"
        )
    if not keep:
        path.unlink(missing_ok=True)
