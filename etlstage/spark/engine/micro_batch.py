"""
One micro-batch of a stream: through the stages, into the sink, once.

Spark repeats a batch, with the same number and the same rows, if it was stopped before
it had recorded that the batch has ended. So a batch is an epoch, which is recorded once
all of it is loaded; a recorded batch is skipped. Files of a batch that is not recorded
are removed; those of a recorded batch are moved to where they are read. A database
stores the record with the rows: a start that finds it there stores it in the state
directory, before Spark repeats the batch.

Over Spark Connect this code runs on the server's machine, in a process of its own,
which may outlive the run. So the fence is checked here, and the record is stored here.
"""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple

import anyio
from pyspark.sql import DataFrame

from etlstage.disk import make, sync_all
from etlstage.errors import EtlstageError, StateUnusable
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.position import load, store
from etlstage.pipeline.interfaces import Epochs
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.spark.engine.stage_job import StageJob
from etlstage.spark.engine.staging import staging_for
from etlstage.spark.session.job import over_connect
from etlstage.spark.sink import SparkSink
from etlstage.spark.task.chain import Chain

__all__ = ("CHECKPOINT", "STOPPED", "BatchFailure", "Batches")

CHECKPOINT: Final = "checkpoint"
"""Spark's checkpoint of the query, in the state directory."""
STOPPED: Final = "etlstage starts no further batch"
"""The error of a batch that comes after the stream was asked to stop."""

_REQUESTS: Final = "stop-*"  # to stop, each named by the fence of its run
_LOOK: Final = 0.2  # seconds between two looks whether to stop now


@contextmanager
def _uncollected() -> Iterator[None]:
    """
    Collect no garbage within a block, but once at its end.

    Where PySpark's handle of a batch is collected, it calls the server. A collection may
    begin within another call, such as while gRPC holds a lock and starts a thread: then
    both would wait for ever.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.enable()


class BatchFailure(NamedTuple):
    """What a failed batch leaves for the run, which it ends."""

    fence: int
    """The fence of the run."""
    accounts: list[list[int]]
    """For each stage, the counts of its account."""
    error: str


class Batches:
    """
    The function that Spark calls for each batch.

    Args:
        state: The state directory.
        chain: What each task runs, with the dead letters of the run.
        sink: Where messages are loaded; it makes the sink of each batch.
        staging: See :func:`staging_for`.

    Attributes:
        fence: The fence of the run, set once it has the state directory.
        log_path: Spark's log, for errors to name, once there is one.
        at: Called with each step of a commit, see :class:`Delivery`.

    """

    def __init__(
        self,
        state: Path,
        chain: Chain,
        *,
        sink: SparkSink,
        staging: str | None = None,
    ) -> None:
        self._state = state
        self._chain = chain
        self._sink = sink
        self._staging = staging
        self.fence: int = 0
        self.log_path: Path | None = None
        self.at: Callable[[str], None] | None = None

    def __call__(self, messages: DataFrame, number: int) -> None:
        """Process a batch; blocks."""
        if self._stop.exists():
            raise RuntimeError(STOPPED)
        with _uncollected() if over_connect(messages.sparkSession) else nullcontext():
            anyio.run(self._process_unless_stopped, messages, number)

    def failure(self) -> BatchFailure | None:
        """Return the failure that has ended this run, if a batch has failed."""
        try:
            failure = BatchFailure(**load(self._failure))
        except FileNotFoundError:
            return None
        return failure if failure.fence == self.fence else None

    def begin(self) -> None:
        """Remove what earlier runs left: requests to stop, and failures."""
        # A run that is killed while it writes its failure leaves the file *.new.
        left = (*self._state.glob(_REQUESTS), self._failure)
        for note in (*left, self._failure.with_suffix(".new")):
            note.unlink(missing_ok=True)

    def stop(self, *, at_once: bool = False) -> None:
        """
        Begin no further batch.

        Args:
            at_once: Cancel the current batch, too: it is repeated when batches begin
                again.

        """
        make(self._state, 0o700)
        self._stop.touch()
        if at_once:
            self._stop_now.touch()

    def forget_stop(self) -> None:
        """Let batches begin again."""
        self._stop.unlink(missing_ok=True)
        self._stop_now.unlink(missing_ok=True)

    async def _process_unless_stopped(self, messages: DataFrame, number: int) -> None:
        error: Exception | None = None
        ended = False
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._call_off, tasks.cancel_scope)
            try:
                await self._process(messages, number)
                ended = True
            except Exception as caught:
                error = caught
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        if not ended:
            raise RuntimeError(STOPPED)

    async def _call_off(self, batch: anyio.CancelScope) -> None:
        # Over Connect another process may stop it.
        while not self._stop_now.exists():  # noqa: ASYNC110
            await anyio.sleep(_LOOK)
        batch.cancel()

    async def _process(self, messages: DataFrame, number: int) -> None:
        accounts: list[Account] = []
        try:
            delivery = Delivery.joined(self._state, self.fence)
            delivery.at = self.at or delivery.at
            done = delivery.record.epoch
            if done > number:
                await self._show(messages, delivery)
                return
            if done < number:
                raise StateUnusable(
                    f"can't continue with batch {number}: {self._state} has records of"
                    f" only {done} of the batches before it; 'etlstage state reset"
                    f" {shlex.quote(str(self._state))}' starts from the beginning"
                )
            await self._load(messages, delivery, accounts)
        except EtlstageError as error:
            for account in accounts:
                account.unprocessed += account.pending
            counts = [account.counts for account in accounts]
            store(self._failure, BatchFailure(self.fence, counts, str(error))._asdict())
            raise

    async def _load(
        self, messages: DataFrame, delivery: Delivery, accounts: list[Account]
    ) -> None:
        """Load a batch and record it; add its stages' accounts to ``accounts``."""
        record = delivery.record
        epochs = self._epochs(delivery)
        letters = self._chain.letters.of_run(f"{record.load}-{record.epoch + 1}")
        sink = self._sink.of_batch(messages.sparkSession, epochs, letters)
        names = [stage.name for stage in self._chain.stages]
        ledger = Ledger.of_pipeline(self._chain.source, names, sink.account)
        accounts += ledger
        try:
            # Entered first, so that it can object before the stages run.
            async with sink:
                await self._pass(messages, ledger, letters, sink, delivery)
                await letters.sync()
                ledger.check(whole=True)
                before = record.accounts
                counts = {a.stage: _sums(before[a.stage], a.counts) for a in ledger}
                record = delivery.next(
                    record.epoch + 1, accounts=counts, letters=letters.sizes()
                )
                # Spark plans a repeated batch by its checkpoint: if that were lost,
                # other rows could be in a batch that is recorded as loaded.
                sync_all(self._state / CHECKPOINT)
                await sink.commit(record.note)
                delivery.at("committed")
                delivery.keep(record)
                if sink.performs:
                    await sink.perform()
                    delivery.at("performed")
        finally:
            letters.close()

    async def _show(self, messages: DataFrame, delivery: Delivery) -> None:
        """Finish a batch that was interrupted after its record was stored."""
        epochs = self._epochs(delivery)
        letters = self._chain.letters.of_run(f"{epochs.load}-{epochs.done}")
        await self._sink.of_batch(messages.sparkSession, epochs, letters).perform()

    def _epochs(self, delivery: Delivery) -> Epochs:
        record = delivery.record
        return Epochs(
            record.load,
            record.epoch,
            record.delivery == "exactly-once",
            delivery.check,
            self.fence,
            moved_from=record.moved_from,
        )

    async def _pass(
        self,
        messages: DataFrame,
        ledger: Ledger,
        letters: DeadLetters,
        sink: SparkSink,
        delivery: Delivery,
    ) -> None:
        spark = messages.sparkSession
        chain = replace(self._chain, letters=letters)
        passing = StageJob(chain, ledger, log_path=self.log_path)
        with staging_for(spark, self._staging, letters.pipeline) as staging:
            await passing.fill(messages, staging)
            delivery.check()  # before its letters are kept
            starts = await passing.settle(spark, staging)
            made = await passing.messages(spark, staging)
            delivery.check()
            delivery.at("begin")
            await sink.load(made, starts)
        delivery.at("written")

    @property
    def _stop(self) -> Path:
        return self._state / f"stop-{self.fence}"

    @property
    def _stop_now(self) -> Path:
        return self._state / f"stop-now-{self.fence}"

    @property
    def _failure(self) -> Path:
        return self._state / "failed.json"


def _sums(before: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Add the counts of a stage to its earlier ones; these may be missing."""
    # A record of an older version has fewer counts.
    return [a + b for a, b in zip_longest(before, counts, fillvalue=0)]
