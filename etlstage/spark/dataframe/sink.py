"""
Messages into a DataFrame, epoch by epoch.

Messages are kept until an epoch is full, then written as one DataFrame: memory
stays bounded and what has landed is durable.  An epoch is checked as a whole before
Spark touches the destination: messages that do not fit are dead-lettered,
or, where there is no place for these, none of the epoch is loaded.
``destination.py`` knows how output is marked as complete.
"""

from __future__ import annotations

from typing import Self

import anyio.to_thread
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from etlstage.errors import SinkFailed, StageError
from etlstage.messages import Run, counted, size_of
from etlstage.pipeline.dead_letter.policy import DeadLetterPolicy
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.interfaces import Sink
from etlstage.spark.dataframe.destination import Destination
from etlstage.spark.dataframe.epoch import Epoch
from etlstage.spark.dataframe.fit import Misfits, misfits_of, rows_of
from etlstage.spark.errors import explain
from etlstage.spark.session.job import run_job
from etlstage.spark.session.session import Session
from etlstage.stage import ErrorPolicy

__all__ = ("DataFrameSink",)

_MISFITS = 10_000  # dead-lettered at a time
_FILE_BYTES = 32 << 20  # of messages; also what one task of an epoch writes


class DataFrameSink(Sink):
    """
    Loads messages into whatever Spark can write.

    Attributes:
        name: As reports and errors call it.
        account: What became of the messages.
        epochs: Epochs that were written.

    """

    def __init__(
        self,
        spark: SparkSession | Session,
        destination: Destination,
        *,
        schema: str | None = None,
        name: str = "load",
        epoch_messages: int = 1_000_000,
        epoch_bytes: int = 128 << 20,
        on_error: ErrorPolicy | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        """
        Take the settings; Spark is not asked for anything yet.

        Args:
            spark: The session; it is not stopped.
            destination: Where the output goes, and how.
            schema: Columns as DDL: messages are JSON objects. By default a message
                is the string ``value``; a schema of one binary column takes
                messages as they are.
            name: As reports and errors call it.
            epoch_messages: Messages in an epoch, at most.
            epoch_bytes: Bytes in an epoch, at most, unless a single run has more.
            on_error: What becomes of messages that do not fit the schema.
            dead_letters: Where these go; None: the first one ends the run.

        """
        super().__init__(name)
        self.epochs = 0
        self._session = Session.of(spark)
        self._destination = destination
        self._ddl = schema
        self._policy = DeadLetterPolicy(
            self.account, on_error or ErrorPolicy(), self._config(), dead_letters
        )
        self._bounds = (epoch_messages, epoch_bytes)
        self._epoch = Epoch()
        self._spark: SparkSession | None = None
        self._schema: StructType | None = None
        self._error: SinkFailed | None = None
        self._whole = False

    async def __aenter__(self) -> Self:
        """Find out what is wrong with the settings; raises as :meth:`write`."""
        try:
            await self._prepare()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def write(self, run: Run) -> None:
        """
        Take a run, and load the epoch that is full without it.

        Raises:
            SinkFailed: If Spark can't write, or a message does not fit the schema.

        """
        most, size_limit = self._bounds
        await self._prepare()
        while run:
            part, run = run[:most], run[most:]
            size = size_of(part)
            epoch = self._epoch
            over = epoch.size + size > size_limit or epoch.messages + len(part) > most
            # The last epoch is written by finish(), which marks the output.
            if epoch.messages and over:
                await self._land(last=False)
            self._epoch.add(part, size)
            self.account.received += len(part)

    async def flush(self) -> None:
        """Load what has come so far, as an epoch; raises as :meth:`write`."""
        await self._prepare()
        if self._epoch.messages:
            await self._land(last=False)

    async def finish(self) -> None:
        """Load the rest and mark the output as complete; raises as :meth:`write`."""
        await self._prepare()
        if self._whole:
            return
        # Without messages there still is an output: its schema, and its marker.
        if self._epoch.messages or not self.epochs or self._destination.marks:
            await self._land(last=True)
        self._whole = True

    async def aclose(self) -> None:
        """Forget what has not been loaded; safe to call twice and at any time."""
        self._epoch = Epoch()

    def landed(self) -> str:
        """Return, in one line for a human, what was loaded and what was not."""
        account = self.account
        waiting = account.received - account.done - account.dead
        rest = f"; {counted(waiting, 'message')} not loaded" if waiting else ""
        if not self.epochs:
            return f"nothing was written to {self._destination}{rest}"
        complete = "complete" if self._whole else "incomplete"
        return (
            f"wrote {counted(account.done, 'message')} in"
            f" {counted(self.epochs, 'epoch')} to {self._destination};"
            f" output {complete}{rest}"
        )

    async def _prepare(self) -> None:
        if self._error is not None:
            raise self._error
        if self._spark is not None:
            return
        try:
            self._spark = await anyio.to_thread.run_sync(self._open)
        except SinkFailed as error:
            self._error = error
            raise
        except Exception as error:
            self._error = self._failure(explain(error, self._session.log_path))
            raise self._error from error

    def _open(self) -> SparkSession:
        spark = self._session.start()
        if self._ddl is not None:
            schema = StructType.fromDDL(self._ddl)
            if not isinstance(schema, StructType):
                raise self._failure(
                    f"schema '{self._ddl}' is a type, expected columns such as "
                    "'id long, title string'"
                )
            rows_of(spark, Epoch(), schema)
            self._schema = schema
        columns = ["value"] if self._schema is None else self._schema.names
        objection = self._destination.objection(columns)
        if objection is not None:
            raise self._failure(objection)
        return spark

    async def _land(self, *, last: bool) -> None:
        """Load the epoch that has come together, and begin the next."""
        spark = self._spark
        assert spark is not None
        try:
            while not await run_job(spark, lambda: self._load(spark, last=last)):
                await self._put_aside(spark)
        except SinkFailed as error:
            self._error = error
            raise
        except StageError:
            raise
        except Exception as error:
            self._error = self._failure(
                f"can't write epoch {self.epochs + 1} to {self._destination}: "
                f"{explain(error, self._session.log_path)}"
            )
            raise self._error from error
        except BaseException:
            self._error = self._failure("the epoch under way was interrupted")
            raise
        self.account.done += self._epoch.messages
        self.epochs += 1
        self._epoch = Epoch()

    def _load(self, spark: SparkSession, *, last: bool) -> bool:
        """Load the epoch; return False if something is to be dead-lettered first."""
        epoch, account = self._epoch, self.account
        rows = rows_of(spark, epoch, self._schema)
        if isinstance(rows, Misfits):
            if self._policy.keeps:
                return False
            account.failed += rows.total
            raise self._failure(
                f"{rows.total} of {epoch.messages} messages do not fit the schema "
                f"'{self._ddl or 'value string'}': message "
                f"{account.done + account.dead + rows.place + 1} is the first, {rows.why}; "
                f"nothing of epoch {self.epochs + 1} is loaded"
            )
        # Arrow brings a partition for every 10,000 rows, and each would be a file.
        files = max(1, round(epoch.size / _FILE_BYTES))
        self._destination.write(rows.coalesce(files), first=not self.epochs, last=last)
        return True

    async def _put_aside(self, spark: SparkSession) -> None:
        """Take what does not fit out of the epoch; raises when it is too much."""
        epoch, schema = self._epoch, self._schema
        misfits = await run_job(
            spark, lambda: misfits_of(spark, epoch, schema, limit=_MISFITS)
        )
        before = self.account.done + self.account.dead
        for place, why in misfits:
            error = self._failure(
                f"message {before + place + 1} does not fit the schema "
                f"'{self._ddl or 'value string'}': {why}"
            )
            await self._policy.settle(
                error, [epoch.message(place)], place=before + place
            )
        self._epoch = epoch.without([place for place, _ in misfits])

    def _config(self) -> dict[str, object]:
        """Return what the dead letters hold of this stage: no values of options."""
        place = self._destination
        return {
            "name": self.name,
            "kind": "load",
            "format": place.format,
            "path": place.path,
            "table": place.table,
            "options": sorted(place.options),
            "schema": self._ddl,
        }

    def _failure(self, text: str) -> SinkFailed:
        return SinkFailed(f"{self.name}: {text}", stage=self.name)
