"""
One DataFrame of messages through all transform stages, and its accounts.

A job passes the messages through the stages, within one ``mapInArrow``, into a staging
folder, together with the notes of the tasks: dead letters, and the outcome of the task.
The notes are read before any message is loaded.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final, TypeVar

import anyio
import anyio.to_thread
from pyspark.sql import DataFrame, SparkSession

from etlstage.errors import EtlstageError, SourceFailed, StageError, os_reason
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.policy import check_budget
from etlstage.pipeline.ledger import Ledger
from etlstage.spark.dataframe.read import messages_of
from etlstage.spark.engine.staging import Staging
from etlstage.spark.errors import explain
from etlstage.spark.session.job import run_job
from etlstage.spark.session.session import Session
from etlstage.spark.task.chain import Chain, TaskEnd

__all__ = ("Origin", "StageJob")

T = TypeVar("T")

_IN_MEMORY: Final = 4 * 1024 * 1024  # bytes of letters


@dataclass(frozen=True, kw_only=True)
class Origin:
    """
    The extract stage of a run on executors.

    Attributes:
        read: Makes the DataFrame, in a thread.
        message: Spark SQL expression that makes a message of a row, see
            :class:`DataFrameSource`.
        key: Spark SQL expression: messages with the same key keep their order.
        name: Name of the stage.
        input: What it reads, for a human.

    """

    read: Callable[[SparkSession], DataFrame]
    message: str | None = None
    key: str | None = None
    name: str = "extract"
    input: str = ""

    def messages(self, session: Session) -> DataFrame:
        """
        Return the messages, and their keys if there are any; blocks.

        Raises:
            SourceFailed: If Spark can't read, or an expression is wrong.

        """
        spark = session.start()
        try:
            return messages_of(self.read(spark), self.message, self.key)
        except EtlstageError:
            raise
        except Exception as error:
            raise self.failure(error, session) from error

    def failure(self, error: Exception, session: Session) -> SourceFailed:
        """Return the explanation of ``error``, which Spark raised while reading."""
        text = explain(error, session.log_path)
        return SourceFailed(f"{self.name}: {text}", stage=self.name)


class StageJob:
    """
    Passes messages through the stages, once.

    Args:
        chain: What each task runs.
        ledger: The ledger in which to count the messages.
        log_path: Spark's log, for errors to name.

    """

    def __init__(
        self, chain: Chain, ledger: Ledger, *, log_path: Path | None = None
    ) -> None:
        self._chain = chain
        self._ledger = ledger
        self._letters = chain.letters
        self._log_path = log_path
        # Messages that a task returns are not loaded yet: their loader counts them.
        self._accounts = list(ledger)[: 1 + len(chain.all)]

    async def fill(self, messages: DataFrame, staging: Staging) -> None:
        """Stage the results of the stages; raises StageError if Spark can't."""
        spark = messages.sparkSession
        await self._run(spark, lambda: staging.fill(messages, self._chain))

    async def settle(self, spark: SparkSession, staging: Staging) -> dict[int, int]:
        """
        Take over the accounts and the dead letters that are staged.

        Returns:
            For each partition, the place of its first message among all that are to
            be loaded.

        Raises:
            StageError: If a stage can't process its messages, or the rows of a task are
                missing.

        """
        outcomes = await self._run(spark, partial(staging.outcomes, spark))
        if [outcome.partition for outcome in outcomes] != [*range(len(outcomes))]:
            staging.whole = False  # so the next start runs the stages again
            raise StageError(
                f"{self._chain.source}: the staged rows of some tasks are missing:"
                " something else removed them; start the run again",
                stage=self._chain.source,
            )
        failed = next((o.error for o in outcomes if o.error is not None), None)
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
            if any(outcome.letters for outcome in outcomes):
                try:
                    await self._fetch(staging, spark, file)
                except StageError as error:
                    if failed is None:
                        raise
                    raise failed from error
            # Letters are kept and counted as a unit, whether the run goes on to load or
            # fails: cancellation takes effect only above.
            starts = self._book(outcomes)
            with anyio.CancelScope(shield=True):
                last = await anyio.to_thread.run_sync(self._adopt, file, starts)
                await self._letters.sync()
        if failed is not None:
            raise failed
        self._judge(last)
        return starts[-1]

    async def messages(self, spark: SparkSession, staging: Staging) -> DataFrame:
        """Return the messages to be loaded; raises StageError if Spark can't."""
        return await self._run(spark, partial(staging.messages, spark))

    async def _run(self, spark: SparkSession, job: Callable[[], T]) -> T:
        try:
            return await run_job(spark, job)
        except Exception as error:
            text = explain(error, self._log_path)
            raise StageError(text, stage=self._chain.source) from error

    async def _fetch(
        self, staging: Staging, spark: SparkSession, file: IO[bytes]
    ) -> None:
        """Copy the dead letters into a file, as they may not fit into memory."""
        for pages in await self._run(spark, partial(staging.pages, spark)):
            found = await self._run(spark, partial(staging.letters, spark, pages))
            try:
                pickle.dump(found, file)
                file.flush()
            except OSError as error:
                raise self._no_room(error) from error

    def _no_room(self, error: OSError) -> StageError:
        return StageError(
            f"{self._chain.source}: can't store the dead letters in"
            f" {tempfile.gettempdir()}: {os_reason(error)}; set TMPDIR to a folder with"
            " room for them",
            stage=self._chain.source,
        )

    def _book(self, outcomes: list[TaskEnd]) -> list[dict[int, int]]:
        """Add up the accounts; return first messages' places by stage and partition."""
        starts = [dict[int, int]() for _ in self._ledger]
        totals = [0 for _ in self._ledger]
        for outcome in outcomes:
            for number, (received, *_) in enumerate(outcome.accounts):
                starts[number][outcome.partition] = totals[number]
                totals[number] += received
            for account, row in zip(self._accounts, outcome.accounts, strict=False):
                account.add(row)
        return starts

    def _adopt(
        self, file: IO[bytes], starts: list[dict[int, int]]
    ) -> dict[str, DeadLetter]:
        """Add the dead letters to those of the run; return the last of each stage."""
        names = [account.stage for account in self._ledger]
        last: dict[str, DeadLetter] = {}
        end = file.tell()
        file.seek(0)
        while file.tell() < end:
            for partition, letter in pickle.load(file):  # noqa: S301 - our own
                start = 0  # load workers know the places of their messages
                if self._chain.load is None:
                    start = starts[names.index(letter.stage)][partition]
                self._letters.adopt(letter, place=start + letter.place)
                last[letter.stage] = letter
        return last

    def _judge(self, last: dict[str, DeadLetter]) -> None:
        """Check the error budgets, which a task can't: it knows only its own part."""
        for stage, account in zip(self._chain.all, self._accounts[1:], strict=True):
            if stage.name in last:
                check_budget(
                    account,
                    stage.on_error.budget,
                    last=last[stage.name].error,
                    look=self._letters.look,
                )
