"""
Where messages become rows: what all that load into a DataFrame have in common.

Messages are checked before Spark touches the destination: those that do not fit are
dead-lettered, or, where there is no place for these, none of what is loaded at once is
loaded. ``destination.py`` knows how output is marked as complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from shutil import rmtree
from typing import Final, Self

import anyio
import anyio.to_thread
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from etlstage.errors import SinkFailed, StageError
from etlstage.messages import counted
from etlstage.pipeline.dead_letter.policy import DeadLetterPolicy, letter_time
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.holder import Claim
from etlstage.pipeline.interfaces import Epochs, Landing, Output
from etlstage.spark.dataframe.database import (
    NotCommitted,
    create_unknown,
    for_writers,
)
from etlstage.spark.dataframe.destination import Destination
from etlstage.spark.dataframe.fit import judged, rows_of, unfit_of
from etlstage.spark.dataframe.place import EpochFiles
from etlstage.spark.dataframe.schema import Contract, fitted, is_raw
from etlstage.spark.dataframe.table import EpochTable
from etlstage.spark.errors import explain
from etlstage.spark.session.job import run_job
from etlstage.spark.session.session import Session
from etlstage.stage import ErrorPolicy

__all__ = ("FrameLanding",)

_AT_ONCE: Final = 10_000  # that do not fit are collected; more come in turns


class FrameLanding(Landing):
    """
    Loads messages into whatever Spark can write; see :class:`DataFrameSink`.

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
        missing: str = "dead_letter",
        extra: str = "ignore",
        name: str = "load",
        on_error: ErrorPolicy | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        super().__init__(name)
        self.epochs: int = 0
        self._session = Session.of(spark)
        self._destination = destination
        self._ddl = schema
        self._letters = dead_letters
        self._others = {"missing": missing, "extra": extra}
        self._policy = DeadLetterPolicy(
            self.account, on_error or ErrorPolicy(), self._config(), dead_letters
        )
        self._spark: SparkSession | None = None
        self._contract: Contract | None = None
        self._claimed: Claim | None = None
        self._filled: Counter[str] = Counter()  # messages that have a column
        self._error: SinkFailed | None = None
        self._whole = False
        self._goes_on = self._resumed = False
        self._known: Epochs | None = None  # where each is loaded once
        self._files: EpochFiles | None = None
        self._table: EpochTable | None = None
        self._fitted = 0  # messages that are written and not durable
        self._flushed = 0  # of them those to be committed

    def begin(self, epochs: Epochs) -> None:
        """Take note of what was loaded before: it is not replaced, nor in the way."""
        self._goes_on = self._resumed = epochs.done > 0
        if not epochs.once:
            return
        self._known, self.epochs = epochs, max(epochs.done, 0)
        self._whole = epochs.ended
        if self._destination.of_database:
            self._table = EpochTable(self._destination.options, epochs)
            return
        path = self._destination.local
        if path is None:
            raise self._failure(
                f"can't load epochs once into {self._destination}: it is no path of"
                " this machine, nor a table of a database"
            )
        self._files = EpochFiles(path, epochs.load, epochs.start)

    async def noted(self) -> str | None:
        """Return the note of the last epoch, if the destination keeps these."""
        table = self._table
        if table is None:
            return None
        with self._failing("the epochs "):
            found = await anyio.to_thread.run_sync(
                lambda: table.noted(self._session.start())
            )
        if found is None and self.epochs:
            # The rows of the epochs before are in another one, and would stay there.
            raise self._failure(
                f"epoch {self.epochs} of the load that goes on is recorded, and"
                f" {self._destination} has none of it: set the url that it had, or have"
                " it loaded anew by 'etlstage state reset'"
            )
        return found

    async def __aenter__(self) -> Self:
        """Find out what is wrong with the settings; raises as :meth:`write`."""
        try:
            await self._prepare()
            await anyio.to_thread.run_sync(self._claim)
        except BaseException:
            await self.aclose()
            raise
        return self

    def _claim(self) -> None:
        """Assert that no other run writes to the same files, and that none will."""
        path = self._destination.local
        # Epochs have names of their own, and are there as a whole.
        if path is None or not self._destination.marks or self._files is not None:
            return
        self._claimed = claim = Claim(path)
        try:
            holder = claim.take()
        except OSError:
            return  # no lock can be had: they are as they were without one
        if holder is not None:
            raise self._failure(
                f"another run writes to {path} ({holder}): wait until it has ended, or"
                " set another path"
            )

    async def aclose(self) -> None:
        """Forget what has not been loaded; safe to call twice and at any time."""
        if self._claimed is not None:
            self._claimed.release()
        if self._files is not None and self._known is not None and not self._whole:
            with suppress(OSError):
                rmtree(self._files.aside(self._known.done + 1))
        if self._table is not None:
            # Where that fails the next start does it.
            with suppress(Exception), anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._table.close)

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
            f" output {complete}{rest}{self._empty}"
        )

    def output(self) -> Output:
        """Return the destination."""
        return self._destination.output()

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
            self._error = self._failure(self._why(error))
            raise self._error from error

    def _open(self) -> SparkSession:
        spark = self._session.start()
        if self._ddl is not None:
            try:
                contract = Contract.of(self._ddl, **self._others)
            except ValueError as error:
                raise self._failure(f"schema '{self._ddl}': {error}") from error
            # Spark looks at the types of the columns when it is asked for a plan.
            _ = fitted(spark.createDataFrame([], "value string"), contract).schema
            self._contract = contract
        unmade = self._destination.unmade(spark)
        if unmade is not None:
            raise self._failure(unmade)
        columns = ["value"] if self._contract is None else self._contract.schema.names
        if self._files is not None and self._known is not None:
            sealed = self._files.sweep(self._known.done, check=self._known.check)
            self._known.check()
            self._files.mark(whole=False)
            for number in sealed:
                self._move(number)
            if self._whole:
                self._files.mark(whole=True)
        if self._table is not None and self._known is not None:
            by_default = StructType().add("value", "string")
            schema = self._contract.schema if self._contract else by_default
            adds = self._goes_on or self._destination.mode != "error"
            objection = self._table.open(
                spark, schema, done=self._known.done, adds=adds
            )
            if objection is not None:
                raise self._failure(objection)
            return spark
        new = not self._goes_on and (self._files is None or self._files.others())
        objection = self._destination.objection(columns, new=bool(new))
        if objection is not None:
            raise self._failure(objection)
        return spark

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Say what is written; make of an error one of the sink, failed for good."""
        self.activity: str = f"writing {what or 'the output'}".rstrip()
        try:
            yield
        except SinkFailed as error:
            self._error = error
            raise
        except StageError:
            raise
        except Exception as error:
            self._error = self._failure(
                f"can't write {what}to {self._destination}: {self._why(error)}"
            )
            raise self._error from error
        except BaseException:
            self._error = self._failure("the epoch under way was interrupted")
            raise
        finally:
            self.activity = ""

    async def _load(
        self,
        messages: DataFrame,
        starts: Mapping[int, int],
        *,
        what: str,
        last: bool,
        files: int | None = None,
    ) -> int:
        """
        Load messages, all of them or none, and return how many fitted.

        Args:
            messages: As :func:`with_text` returns them.
            starts: For each partition, the place of its first message among all.
            what: As an error calls them; empty where it is the whole input.
            last: Whether the output is complete with it.
            files: How many to write, at most.

        """
        spark, mine = messages.sparkSession, judged(messages, self._contract)
        # Not a filter: Spark would parse the message anew for each test in it.
        counts = mine.agg(
            sf.count(sf.lit(1)), sf.count_if(sf.col("unfit")), *self._filled_of()
        )
        total, unfit, *filled = (await run_job(spark, counts.collect))[0]
        if not what:
            self.account.received = total
        if unfit:
            await self._settle(mine, starts, (unfit, total), what)
            mine = mine.where(~sf.col("unfit"))
        await self._write(rows_of(mine, self._contract), last=last, files=files)
        self._filled.update(dict(zip(self._columns, filled, strict=True)))
        return int(total - unfit)

    @property
    def _columns(self) -> list[str]:
        """The columns that are found in JSON."""
        contract = self._contract
        if contract is None or is_raw(contract.schema):
            return []
        return contract.schema.names

    def _filled_of(self) -> list[Column]:
        """Return, for each column, how many messages that fit have it."""
        row = sf.col("row")
        return [
            sf.count_if(~sf.col("unfit") & row.getField(name).isNotNull())
            for name in self._columns
        ]

    @property
    def _empty(self) -> str:
        """What is to be said of columns in which there is nothing but null."""
        names = [name for name in self._columns if not self._filled[name]]
        if not names or not self.account.done or not self._whole or self._resumed:
            return ""
        columns, are = ("column", "is") if len(names) == 1 else ("columns", "are")
        count = self.account.done
        return (
            f"; {columns} {', '.join(names)} {are} null in all rows loaded, {count:,}"
        )

    async def _write(
        self, rows: DataFrame, *, last: bool, files: int | None = None
    ) -> None:
        destination, first = self._destination, not (self.epochs or self._goes_on)
        if self._files is not None and self._known is not None:
            aside = self._files.aside(self._known.done + 1)
            destination = replace(destination, path=str(aside), mode="append")
            first, last = False, False
        if self._table is not None:
            await anyio.to_thread.run_sync(self._table.stage)
            destination = replace(destination, options=self._table.staging)
            first = False
        elif destination.of_database:
            spark, options = rows.sparkSession, for_writers(destination.options)
            destination = replace(destination, options=options)
            # What is made now is not in the way of mode error.
            first = first and not await anyio.to_thread.run_sync(
                create_unknown, spark, options, rows.schema
            )
        if files is not None:
            rows = rows.coalesce(files)
        await run_job(
            rows.sparkSession,
            lambda: destination.write(rows, first=first, last=last),
        )
        if first:
            await self._supersede()

    async def _settle_epoch(self) -> None:
        """Make what was written whole: the next epoch begins."""
        files, known = self._files, self._known
        assert known is not None
        number = known.done + 1
        if files is not None:
            with self._failing(f"epoch {number} "):
                await anyio.to_thread.run_sync(
                    lambda: files.seal(number, always=self._replaces, check=known.check)
                )
            self._goes_on = True
        self._known = known._replace(done=number)
        self._count(self._fitted)
        self._flushed, self._fitted = self._fitted, 0

    @property
    def performs(self) -> bool:
        """Whether files are moved behind the record."""
        return self._files is not None

    async def perform(self) -> None:
        """Move the files of the last epoch to where they are read."""
        files, known = self._files, self._known
        if files is None or known is None:
            return
        with self._failing(f"epoch {known.done} "):
            await anyio.to_thread.run_sync(self._move, known.done)
            if self._whole:
                await anyio.to_thread.run_sync(lambda: files.mark(whole=True))

    def _move(self, number: int) -> None:
        files, known = self._files, self._known
        assert files is not None
        assert known is not None
        replaces = self._destination.mode == "overwrite" and number == 1
        files.move(number, replaces=replaces, check=known.check)
        if replaces and self._letters is not None:
            self._letters.supersede(letter_time())

    async def commit(self, note: str) -> None:
        """Have the database add what was flushed; nothing, where it is no database."""
        table, known = self._table, self._known
        if table is None or known is None:
            return
        number, rows, replaces = known.done, self._flushed, self._replaces
        try:
            with self._failing(f"epoch {number} "):
                await anyio.to_thread.run_sync(
                    lambda: table.commit(number, note, rows=rows, replaces=replaces)
                )
        except BaseException:
            # Or nobody knows; the next run finds out.
            self._count(-rows, epochs=-1)
            raise
        await self._supersede()
        self._goes_on = True

    async def _supersede(self) -> None:
        """Record which dead letters are of output that the epoch has replaced."""
        if self._replaces and self._letters is not None:
            await anyio.to_thread.run_sync(self._letters.supersede, letter_time())

    @property
    def _replaces(self) -> bool:
        """Whether the epoch takes the place of all that there is."""
        return self._destination.mode == "overwrite" and not self._goes_on

    def _count(self, messages: int, *, epochs: int = 1) -> None:
        """Take note of an epoch that is durable."""
        self.account.done += messages
        self.epochs += epochs

    async def _settle(
        self,
        mine: DataFrame,
        starts: Mapping[int, int],
        counts: tuple[int, int],
        what: str,
    ) -> None:
        """Dead-letter what does not fit; raises when it is too much."""
        keeps, wanted = self._policy.keeps, self._ddl or "value string"
        at_once = _AT_ONCE if keeps else 1
        async for unfit in unfit_of(mine, self._contract, at_once=at_once):
            place = starts[unfit.partition] + unfit.place
            if not keeps:
                self.account.failed += counts[0]
                raise self._failure(
                    f"{counts[0]:,} of {counted(counts[1], 'message')}"
                    f" {'does' if counts[0] == 1 else 'do'} not fit the schema"
                    f" '{wanted}': message {place + 1} is the first, {unfit.why};"
                    f" nothing{what and ' of '}{what} is loaded"
                )
            error = self._failure(
                f"message {place + 1} does not fit the schema '{wanted}': {unfit.why}"
            )
            await self._policy.settle(error, [unfit.message], place=place)

    def _why(self, error: Exception) -> str:
        if isinstance(error, NotCommitted):
            return str(error)
        return explain(error, self._session.log_path)

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
            **self._others,
        }

    def _failure(self, text: str) -> SinkFailed:
        return SinkFailed(f"{self.name}: {text}", stage=self.name)
