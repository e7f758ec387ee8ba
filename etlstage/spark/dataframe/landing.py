"""
Messages that become rows of a DataFrame, as far as all engines do it alike.

Messages are checked before Spark touches the destination. ``destination.py`` knows how
output is marked as complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, Self

import anyio
import anyio.to_thread
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from etlstage.errors import SinkFailed
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.place import EpochFiles
from etlstage.pipeline.interfaces import Epochs, Output
from etlstage.pipeline.landing import RowLanding
from etlstage.spark.dataframe.database import (
    NotCommitted,
    create_unknown,
    for_writers,
)
from etlstage.spark.dataframe.destination import Destination
from etlstage.spark.dataframe.fit import judged, rows_of, unfit_of
from etlstage.spark.dataframe.schema import Contract, fitted, is_raw
from etlstage.spark.dataframe.table import EpochTable
from etlstage.spark.errors import explain
from etlstage.spark.session.job import run_job
from etlstage.spark.session.session import Session
from etlstage.stage import ErrorPolicy

__all__ = ("FrameLanding",)

_AT_ONCE: Final = 10_000  # that do not fit are collected; more come in turns


class FrameLanding(RowLanding):
    """Loads messages into whatever Spark can write; see :class:`DataFrameSink`."""

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
        self._others = {"missing": missing, "extra": extra}
        self._destination = destination
        super().__init__(
            name,
            where=str(destination),
            path=destination.local,
            replaces=destination.mode == "overwrite",
            schema=schema,
            on_error=on_error,
            dead_letters=dead_letters,
            config=self._config(name, schema),
        )
        self._session = Session.of(spark)
        self._spark: SparkSession | None = None
        self._contract: Contract | None = None
        self._table: EpochTable | None = None
        self._flushed = 0  # of what is written, what is to be committed

    def _files_of(self, epochs: Epochs) -> EpochFiles | None:
        if self._destination.of_database:
            self._table = EpochTable(self._destination.options, epochs)
            return None
        return super()._files_of(epochs)

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
            # Epochs have names of their own, and are there as a whole.
            if self._path and self._destination.marks and self._files is None:
                await anyio.to_thread.run_sync(self._claim)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """Forget what has not been loaded; safe to call twice and at any time."""
        await super().aclose()
        if self._table is not None:
            # Where that fails the next start does it.
            with suppress(Exception), anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._table.close)

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
        self._recover()
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

    async def _settle_epoch(self) -> int:
        self._flushed = await super()._settle_epoch()
        return self._flushed

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

    async def _settle(
        self,
        mine: DataFrame,
        starts: Mapping[int, int],
        counts: tuple[int, int],
        what: str,
    ) -> None:
        """Dead-letter what does not fit; raises when it is too much."""
        at_once = _AT_ONCE if self._policy.keeps else 1
        async for unfit in unfit_of(mine, self._contract, at_once=at_once):
            place = starts[unfit.partition] + unfit.place
            await self._refuse(unfit.message, unfit.why, place, counts, what)

    def _why(self, error: Exception) -> str:
        if isinstance(error, NotCommitted):
            return str(error)
        return explain(error, self._session.log_path)

    def _config(self, name: str, schema: str | None) -> dict[str, object]:
        """Return what the dead letters hold of this stage: no values of options."""
        place = self._destination
        return {
            "name": name,
            "kind": "load",
            "format": place.format,
            "path": place.path,
            "table": place.table,
            "options": sorted(place.options),
            "schema": schema,
            **self._others,
        }
