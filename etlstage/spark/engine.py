"""
A run whose stages are inside Spark's executors.

One job passes the DataFrame through all transform stages, within one ``mapInArrow``,
into a staging folder, together with what the tasks note: dead letters and accounts.
Then the notes are read. Only if the run has not failed by then, a second job loads
what was staged: nothing is loaded of a run that fails, and a task that was retried or
ran twice counts once.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from pyspark.sql import DataFrame, SparkSession

from etlstage.errors import ConfigError, EtlstageError, SourceFailed, StageError
from etlstage.pipeline.dead_letter import DeadLetter, DeadLetters
from etlstage.pipeline.interfaces import DeadLetterSink
from etlstage.pipeline.refusal import over_budget
from etlstage.pipeline.report import Report
from etlstage.pipeline.runner import Runner
from etlstage.spark.chain import Chain, Note
from etlstage.spark.frame import messages_of
from etlstage.spark.job import run_job
from etlstage.spark.problem import explain
from etlstage.spark.staged_sink import StagedSink
from etlstage.spark.staging import Staging
from etlstage.supervisor import Stage

__all__ = ("ExecutorPipeline",)

_COUNTS: Final = ("received", "done", "dead", "failed", "lost", "produced")


class ExecutorPipeline(Runner):
    """
    Runs transform stages where the data is.

    Args:
        name: As the report calls it.
        frame: What to read, or a function that makes it, called in a thread.
        message: Spark SQL expression that makes a message of a row, see
            :class:`DataFrameSource`.
        key: Spark SQL expression by which messages keep their order.
        source: Name of the extract stage.
        stages: What the messages pass through.
        sink: Where they end.
        dead_letters: Where messages are put aside that a stage can't process.
        dead_letter_sink: What is given the dead letters at the end of the run.
        staging: Folder, or URL of one, that all executors see. By default one in the
            system's temporary directory, if the executors are on this machine.
        log_path: Spark's log, for errors to name.

    """

    def __init__(
        self,
        *,
        name: str,
        frame: DataFrame | Callable[[], DataFrame],
        message: str | None = None,
        key: str | None = None,
        source: str = "extract",
        stages: Sequence[Stage] = (),
        sink: StagedSink,
        dead_letters: DeadLetters,
        dead_letter_sink: DeadLetterSink | None = None,
        staging: str | None = None,
        log_path: Path | None = None,
    ) -> None:
        super().__init__(
            name,
            source=source,
            stages=stages,
            sink=sink,
            dead_letters=dead_letters,
            dead_letter_sink=dead_letter_sink,
        )
        self._frame = frame
        self._message = message
        self._key = key
        self._source = source
        self._sink = sink
        self._letters = dead_letters
        self._folder = staging
        self._log_path = log_path
        self._transforming: anyio.CancelScope | None = None
        self._drained = False

    def drain(self) -> None:
        """
        Stop, unless loading has begun; :meth:`run` returns then.

        A DataFrame is read as a whole or not at all: before that there is nothing to
        load.
        """
        self._drained = True
        if self._transforming is not None:
            self._transforming.cancel()

    async def run(self) -> Report:
        """Run to the end and return the report; a failure is in there."""
        self._started = anyio.current_time()
        self._transforming = stopped = anyio.CancelScope()
        whole = False
        try:
            async with self._sink:
                await self._run(stopped)
            await self._hand_over_letters()
            whole = self._error is None and not stopped.cancelled_caught
        except Exception as error:
            self._error = error
        finally:
            with anyio.CancelScope(shield=True):
                await self._close_letters()
                await self.aclose()
            self._ended = anyio.current_time()
            self._take_stock()
            if not whole:
                self.ledger.settle()
        if self._error is not None:
            return self.report("failed")
        if stopped.cancelled_caught:
            return self.report("drained")
        self.ledger.check(whole=True)
        return self.report("done")

    async def aclose(self) -> None:
        """Do nothing: the session is not ours."""

    async def _run(self, stopped: anyio.CancelScope) -> None:
        messages = await anyio.to_thread.run_sync(self._messages)
        spark = messages.sparkSession
        with self._staging(spark) as staging:
            with stopped:
                if self._drained:
                    stopped.cancel()
                notes = await self._transform(messages, staging)
                starts = await self._settle(notes)
            if not stopped.cancelled_caught:
                await self._sink.load(staging.messages(spark), starts)

    def _messages(self) -> DataFrame:
        try:
            frame = self._frame() if callable(self._frame) else self._frame
            return messages_of(frame, self._message, self._key)
        except EtlstageError:
            raise
        except Exception as error:
            raise SourceFailed(
                f"{self._source}: {explain(error, self._log_path)}", stage=self._source
            ) from error

    @contextmanager
    def _staging(self, spark: SparkSession) -> Iterator[Staging]:
        master = str(spark.conf.get("spark.master", ""))
        if self._folder is None and not master.startswith("local"):
            raise ConfigError(
                f"engine spark on {master or 'a server'} needs the key spark.staging: a"
                " folder that all executors see, such as hdfs:///tmp/etlstage"
            )
        if self._folder is not None:
            staging = Staging(f"{self._folder}/{self.name}-{secrets.token_hex(4)}")
            try:
                yield staging
            finally:
                staging.remove(spark)
            return
        with tempfile.TemporaryDirectory(prefix="etlstage-staging-") as folder:
            yield Staging(f"{folder}/rows")

    async def _transform(self, messages: DataFrame, staging: Staging) -> list[Note]:
        spark = messages.sparkSession
        chain = Chain(self._source, self._stages, self._letters)

        def job() -> list[Note]:
            staging.fill(messages, chain)
            return staging.notes(spark)

        try:
            return await run_job(spark, job)
        except Exception as error:
            text = explain(error, self._log_path)
            raise StageError(text, stage=self._source) from error

    async def _settle(self, notes: list[Note]) -> dict[int, int]:
        """
        Book what the tasks have noted; raise if that ends the run.

        Returns:
            For each partition, the place of its first message among all that are to
            be loaded.

        """
        accounts = {note.partition: note.accounts for note in notes if note.accounts}
        # By stage and partition: the place of a task's first message among all.
        starts = [dict[int, int]() for _ in self.ledger]
        for partition, counts in accounts.items():
            for account, places, row in zip(self.ledger, starts, counts, strict=True):
                places[partition] = account.received
                for name, count in zip(_COUNTS, row, strict=True):
                    setattr(account, name, getattr(account, name) + count)
        for account in self.ledger:
            self._tick(account)
        names = [account.stage for account in self.ledger]
        last: dict[str, DeadLetter] = {}
        for note in notes:
            if (letter := note.letter) is not None:
                start = starts[names.index(letter.stage)][note.partition]
                await self._letters.adopt(letter, place=start + letter.place)
                last[letter.stage] = letter
        await self._letters.sync()
        for note in notes:
            if note.error is not None:
                raise note.error
        for stage, account in zip(self._stages, list(self.ledger)[1:], strict=False):
            policy = stage.on_error
            if not policy.budget.allows(account.dead, account.received):
                raise over_budget(
                    stage.name,
                    policy,
                    account.dead,
                    account.received,
                    last[stage.name].error,
                    self._letters,
                )
        return starts[-1]
