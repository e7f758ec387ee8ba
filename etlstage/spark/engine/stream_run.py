"""
A run over a stream: Spark cuts it into batches; each passes all stages and is loaded.

Spark's checkpoint, in the state directory, records which rows a batch has;
``micro_batch.py`` processes a batch. A run that is asked to stop ends after the current
batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from pyspark.sql.streaming.query import StreamingQuery

from etlstage.errors import EtlstageError, SinkFailed, SourceFailed, StageError
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.files import letter_files, read_letters
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import Epochs, Landing, Output
from etlstage.pipeline.report import Report, Status
from etlstage.pipeline.runner import Runner
from etlstage.spark.engine.micro_batch import CHECKPOINT, STOPPED, Batches
from etlstage.spark.engine.stage_job import Origin
from etlstage.spark.errors import text_of
from etlstage.spark.session.session import Session
from etlstage.spark.ship.artifact import Shipment
from etlstage.spark.sink import SparkSink
from etlstage.spark.task.chain import Chain
from etlstage.stage import Stage
from etlstage.telemetry.log import Log

__all__ = ("StreamingPipeline",)

_log = Log()

_FIRST: Final = "the first batch"
_LOOK: Final = 1  # seconds between two looks at the query, a whole number
_SLOW: Final = re.compile(r"python worker (failed )?to connect back", re.IGNORECASE)
"""The error of a query whose Python process does not connect within Spark's limit of 10
seconds: a process that runs a batch, or one that reads a data source."""
_STARTS: Final = 3
"""Starts of a query that ends with that error, at most. It resumes from its checkpoint,
as the next run would."""


class StreamingPipeline(Runner):
    """
    Runs transform stages on the batches of a streaming DataFrame.

    Each batch is an epoch. A batch that is run again, because the process was killed
    during it, is loaded once if the sink writes files to a path on this machine, where
    they are moved after the record is stored, or, with ``exactly_once``, to a database,
    which stores the record. Other sinks may be given such a batch twice.

    Args:
        name: As the report calls it.
        origin: What to read, a streaming DataFrame.
        session: The session; released after the run.
        stages: What the messages pass through.
        sink: Where messages are loaded.
        dead_letters: Where messages are dead-lettered that a stage can't process.
        state: The state directory. One process uses it at a time.
        exactly_once: Whether each batch is to be loaded once, and not at least once.
        every: Seconds from one batch to the next, in a run without end. None: load what
            is available now, in as many batches as the source makes, and end.
        staging: Folder, or URL of one, that all executors see; see
            :class:`ExecutorPipeline`.
        shipment: What was sent to the executors for the stages.
        drain_limit: Seconds that the current batch may still take in a run that is
            drained; then it is cancelled, and repeated by the next run. None: no limit.

    """

    def __init__(
        self,
        *,
        name: str,
        origin: Origin,
        session: Session,
        stages: Sequence[Stage] = (),
        sink: SparkSink,
        dead_letters: DeadLetters,
        state: Path,
        exactly_once: bool = False,
        every: float | None = None,
        staging: str | None = None,
        shipment: Shipment | None = None,
        drain_limit: float | None = None,
    ) -> None:
        self._landed = _Landed(sink, session, dead_letters)
        super().__init__(
            name,
            source=origin.name,
            stages=stages,
            sink=self._landed,
            dead_letters=dead_letters,
            dead_letter_sink=None,
            release=session.release,
            delivery=Delivery(state.absolute(), exactly_once=exactly_once, whole=True),
            drain_limit=drain_limit,
        )
        self.ledger.awaited = _FIRST
        self._origin = origin
        self._input = origin.input
        self._letters = dead_letters
        self._state = state.absolute()
        self._checkpoint = self._state / CHECKPOINT
        self._sink = sink
        self._every = every
        self._session = session
        self._drained = False
        self._booked: Mapping[str, Sequence[int]] = {}
        self._from = 0
        self._batches = Batches(
            state.absolute(),
            Chain(origin.name, tuple(stages), dead_letters, shipment),
            sink=sink,
            staging=staging,
        )

    def drain(self) -> None:
        """
        End after the current batch; the next run resumes from there.

        After ``drain_limit`` seconds the batch is cancelled.
        """
        self._drained = True
        if self._batches.fence:
            self._batches.stop()

    async def _run(self) -> Status:
        delivery = self._delivery
        lost = not self._checkpoint.exists()
        record = await self._begin_delivery(from_start=lost)
        assert delivery is not None
        assert record is not None
        self._booked, self._from = record.accounts, record.epoch
        self._landed.resumed = bool(self._carried)
        self._batches.fence, self._batches.at = record.fence, delivery.at
        try:
            if not self._drained:
                await self._run_batches()
            delivery.reread()
            if not self._cut:
                if not self._drained and self._every is None:
                    await anyio.to_thread.run_sync(self._landed.mark)
                # A batch that was cancelled may be committed by the sink already, and one
                # that Spark repeats may have to be moved: then the run is interrupted.
                if self._is_over(delivery.record.epoch):
                    delivery.end()
        finally:
            self._book()
        return "drained" if self._drained else "done"

    def _is_over(self, batches: int) -> bool:
        """Return whether Spark has recorded the end of that many batches, too."""
        last = self._checkpoint / "commits" / str(batches - 1)
        return not batches or last.exists()

    def report(self, status: Status) -> Report:
        """Return the report of a run that ended with ``status``."""
        # The letters were written in another process, or by another object.
        self._letters.count = sum(account.dead for account in self.ledger)
        return super().report(status)

    def letters(self) -> Iterator[DeadLetter]:
        """Yield the dead letters of the run, once it is over; blocks."""
        # Letter files are named by batch; no other run uses the state directory.
        began = self._began.isoformat(timespec="milliseconds")
        for path in letter_files(self._state):
            for letter in read_letters(path):
                if isinstance(letter, DeadLetter) and letter.time >= began:
                    yield letter

    async def _run_batches(self) -> None:
        self._batches.begin()
        try:
            for left in reversed(range(_STARTS)):
                try:
                    await self._run_query()
                except SourceFailed as error:
                    if not left or self._drained or not _SLOW.search(str(error)):
                        raise
                    _log.warning("query is restarted", reason=str(error))
                else:
                    return
        finally:
            self._batches.forget_stop()

    async def _run_query(self) -> None:
        try:
            query = await anyio.to_thread.run_sync(self._start)
        except EtlstageError:
            raise
        except Exception as error:
            raise self._origin.failure(error, self._session) from error
        try:
            await self._watch(query)
        except anyio.get_cancelled_exc_class():
            self._batches.stop(at_once=True)
            raise
        finally:
            # It fails if Spark is gone, which has been reported.
            with anyio.CancelScope(shield=True), suppress(Exception):
                await anyio.to_thread.run_sync(query.stop)

    def _start(self) -> StreamingQuery:
        messages = self._origin.messages(self._session)
        if not messages.isStreaming:
            raise SourceFailed(
                f"{self._origin.name}: the DataFrame is not a stream: use spark.readStream",
                stage=self._origin.name,
            )
        assert self._delivery is not None
        moved_from = self._delivery.record.moved_from
        objection = None
        if moved_from or not self._checkpoint.exists():
            objection = self._sink.objection(moved_from=moved_from)
        if objection is not None:
            raise SinkFailed(objection, stage=self._landed.name)
        self._batches.log_path = self._session.log_path
        writer = messages.writeStream.foreachBatch(self._batches)
        writer = writer.option("checkpointLocation", str(self._checkpoint))
        if self._every is None:
            writer = writer.trigger(availableNow=True)
        else:
            every = f"{round(self._every * 1000)} milliseconds"
            writer = writer.trigger(processingTime=every)
        return writer.queryName(self.name).start()

    async def _watch(self, query: StreamingQuery) -> None:
        assert self._delivery is not None
        limit = math.inf  # when the batch is cancelled
        while True:
            try:
                ended = await anyio.to_thread.run_sync(
                    query.awaitTermination, _LOOK, abandon_on_cancel=True
                )
                status = await anyio.to_thread.run_sync(lambda: query.status)
            except Exception as error:
                self._book()
                if STOPPED in text_of(error):
                    # Stopped by us, by another process, or by a user.
                    self._drained = True
                    return
                raise self._failure(error) from error
            self._book()
            if ended:
                return
            running = status["isTriggerActive"] and status["isDataAvailable"]
            number = self._from + self._landed.epochs
            self.ledger.awaited = (
                f"batch {number}, which is running" if running else _FIRST
            )
            self._delivery.check()  # a stream without input is taken over, too
            if self._drained:
                if not status["isTriggerActive"]:
                    return
                now = anyio.current_time()
                limit = min(limit, now + self.drain_limit)
                if now >= limit and not self._cut:
                    self._break_off()

    def _break_off(self) -> None:
        """Cancel the current batch; the next run repeats it."""
        self._cut = True
        self._batches.stop(at_once=True)
        _log.warning(
            "draining took too long: the batch is aborted", seconds=self.drain_limit
        )

    def _failure(self, error: Exception) -> StageError:
        failure = self._batches.failure()
        if failure is None:
            return self._origin.failure(error, self._session)
        for account, counts in zip(self.ledger, failure.accounts, strict=False):
            account.add(counts)
        return StageError(failure.error, stage=self._origin.name)

    def _book(self) -> None:
        """Add the accounts of recorded batches to the ledger."""
        record = CommitRecord.latest(self._state)
        if record.fence != self._batches.fence:
            return  # another run's, by now
        for account in self.ledger:
            now, before = record.accounts[account.stage], self._booked[account.stage]
            if now:
                pairs = zip_longest(now, before, fillvalue=0)
                account.add([a - b for a, b in pairs])
            self._tick(account)
        self._booked = record.accounts
        self._landed.epochs = record.epoch - self._from


class _Landed(Landing):
    """Stands for the sinks of all batches, with what these have reported."""

    def __init__(self, sink: SparkSink, session: Session, letters: DeadLetters) -> None:
        super().__init__(sink.name)
        self.epochs = 0
        self.resumed = False
        """Whether messages of an interrupted start count, too."""
        self._sink = sink
        self._session = session
        self._letters = letters
        self._known: Epochs | None = None

    def begin(self, epochs: Epochs) -> None:
        """Record what was loaded before."""
        self._known = epochs

    async def noted(self) -> str | None:
        """Return the note of the last batch, if the destination stores notes."""
        return await self._of_batch().noted()

    def mark(self) -> None:
        """Mark the output as complete; blocks."""
        self._of_batch().mark()

    def _of_batch(self) -> SparkSink:
        assert self._known is not None
        return self._sink.of_batch(self._session, self._known, self._letters)

    def output(self) -> Output:
        """Return where the messages end."""
        return self._sink.output()

    def landed(self) -> str:
        """Return, in one line for a human, what was loaded."""
        done = counted(self.account.done, "message")
        if self.resumed and self.account.done:
            return f"wrote {done} to {self._sink}"
        if not self.epochs:
            return f"nothing new was written to {self._sink}"
        return f"wrote {done} in {counted(self.epochs, 'epoch')} to {self._sink}"
