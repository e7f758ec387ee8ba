"""
Loading of messages through a DataFrame, epoch by epoch, on every engine.

Engine local collects messages until an epoch is full and makes a DataFrame of them, so
memory stays bounded and loaded epochs are durable. Engines spark and streaming have a
DataFrame already, of the whole run or of a batch. An epoch is checked as a whole before
Spark touches the destination; ``destination.py`` defines how output is marked as
complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Self

import anyio
import anyio.to_thread
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructField, StructType

from etlstage.columns import Epoch
from etlstage.errors import SinkFailed
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.delivery.place import EpochFiles, has_output
from etlstage.pipeline.interfaces import Epochs, Output
from etlstage.pipeline.invalid import LINE_BREAK, TextLines
from etlstage.pipeline.landing import RowSink
from etlstage.spark.dataframe.database import (
    CommitRefused,
    create_unknown,
    for_writers,
    option,
)
from etlstage.spark.dataframe.destination import Destination
from etlstage.spark.dataframe.schema import (
    Contract,
    fitted,
    is_raw,
    judged,
    rows_of,
    unfit_of,
    with_text,
)
from etlstage.spark.dataframe.table import EpochTable
from etlstage.spark.errors import explain
from etlstage.spark.session.job import run_job, watch_job
from etlstage.spark.session.session import Session
from etlstage.spark.sink import SparkSink
from etlstage.stage import ErrorPolicy

__all__ = ("DataFrameSink",)

_AT_ONCE: Final = 10_000  # unfit messages that are collected at a time
_FILE_BYTES: Final = 32 << 20  # of messages in a file, which one task writes


class DataFrameSink(RowSink, SparkSink):
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
        missing: str = "dead_letter",
        extra: str = "ignore",
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
            missing: What happens to a message without a column that the schema does not
                declare ``NULL``: ``dead_letter``, or ``null``, which is loaded.
            extra: What happens to a message with a field that is not a column:
                ``dead_letter``, or ``ignore``.
            name: As reports and errors call it.
            epoch_messages: Messages in an epoch, at most.
            epoch_bytes: Bytes in an epoch, at most, unless a single message has more.
            on_error: What happens to messages that do not fit the schema.
            dead_letters: Where these go; None: the first one ends the run.

        """
        self._settings: dict[str, Any] = {
            "schema": schema,
            "missing": missing,
            "extra": extra,
            "name": name,
            "on_error": on_error,
        }
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
        self._bounds = (epoch_messages, epoch_bytes)
        self._epoch = Epoch()
        self._session = Session.of(spark)
        self._spark: SparkSession | None = None
        self._contract: Contract | None = None
        self._table: EpochTable | None = None
        self._flushed = 0  # messages flushed, to be committed
        self._is_batch = False

    def __str__(self) -> str:
        return str(self._destination)

    def begin(self, epochs: Epochs) -> None:
        """Begin after what was loaded before, which is kept."""
        super().begin(epochs)
        if epochs.moved_from:
            self._destination = self._destination.continuing(epochs.moved_from)

    def objection(self, *, moved_from: str = "") -> str | None:
        """
        Return what stands in the way at the destination; blocks.

        Raises:
            SinkFailed: If its folder can't be read.

        """
        place, path = self._destination, self._destination.local
        if moved_from:
            place = place.continuing(moved_from)
        with self._failing("", reads=True):
            new = not moved_from or path is None or has_output(path)
        objection = place.objection(place.partition_by, new=new)
        return objection or place.taken(self._session.start())

    def of_batch(
        self, spark: SparkSession | Session, epochs: Epochs, letters: DeadLetters
    ) -> Self:
        """
        Return the sink of a batch.

        On this machine files are moved into the path after the record is stored.
        Elsewhere nothing can be renamed: an epoch has a folder of its own, which a
        repeated batch replaces. A database adds an epoch in a transaction if it is to
        be loaded once.
        """
        place = self._destination
        once = place.local is not None or (epochs.once and place.of_database)
        far = place.path is not None and place.table is None and not once
        if far:
            path = f"{place.path}/epoch={epochs.load}-{epochs.done + 1}"
            place = replace(place, path=path, mode="overwrite")
        elif not once and (place.mode != "overwrite" or epochs.moved_from):
            # Whether there is output already is checked before the first batch.
            place = replace(place, mode="append")
        sink = type(self)(spark, place, **self._settings, dead_letters=letters)
        if far:
            # It replaces only its own folder, so letters of other batches stay valid.
            sink._overwrites = letters.pending = False
        else:
            sink.begin(epochs._replace(once=once))
        sink._is_batch = True
        return sink

    def _files_of(self, epochs: Epochs) -> EpochFiles | None:
        if self._destination.of_database:
            self._table = EpochTable(self._destination.options, epochs)
            return None
        return super()._files_of(epochs)

    async def noted(self) -> str | None:
        """Return the note of the last epoch, if the destination stores notes."""
        table = self._table
        if table is None:
            return None
        with self._failing("the epochs ", reads=True):
            self.activity: str = "starting Spark"
            spark = await anyio.to_thread.run_sync(self._session.start)
            self.activity = "reading the epochs"
            found = await anyio.to_thread.run_sync(lambda: table.noted(spark))
        if found is None and self.epochs:
            # Rows of earlier epochs are in another database, and would stay there.
            raise self._failure(
                f"epoch {self.epochs} of this load is recorded, but {self._destination}"
                " has no record of the load: set the url that was used before, or load"
                " everything again after 'etlstage state reset'"
            )
        return found

    async def __aenter__(self) -> Self:
        """Find out what is wrong with the settings; raises as :meth:`write`."""
        try:
            await self._prepare()
            # Files of epochs need no claim: their names are unique, and an epoch is
            # moved there as a whole.
            if self._path and self._destination.marks and self._files is None:
                await anyio.to_thread.run_sync(self._claim)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """Discard what has not been loaded; safe to call twice and at any time."""
        await super().aclose()
        if self._table is not None:
            # If this fails, the next start removes the table.
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
            # Spark checks the types of the columns when it makes a plan.
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
            objection = self._table.open(
                spark,
                schema,
                done=self._known.done,
                adds=self._takes(self._destination.mode),
            )
            if objection is not None:
                raise self._failure(objection)
            return spark
        place = self._destination
        new = not self._takes(place.mode) and self._finds_others
        objection = place.objection(columns, new=new)
        if objection is None and new and self._moved_from:
            # Later epochs add to what is there: Spark does not check the mode.
            objection = place.taken(spark)
        if objection is not None:
            raise self._failure(objection)
        return spark

    async def load(self, messages: DataFrame, starts: Mapping[int, int]) -> None:
        """Load messages as one epoch; mark the output as complete, unless of a batch."""
        await self._prepare()
        with self._failing(""):
            fitted = await self._load(messages, starts, what="", last=True)
        if self._known is not None:
            self._fitted = fitted
            await self._settle_epoch()
        else:
            self._count(fitted)
        self._whole = not self._is_batch

    def mark(self) -> None:
        """Mark the output of all batches as complete, if its files are on this machine."""
        if self._files is not None:
            with self._failing(""):
                self._files.mark(whole=True)

    @property
    def _marks(self) -> bool:
        return self._destination.marks and not self._leaves_mark

    @property
    def _leaves_mark(self) -> bool:
        """Whether the mark is left as it is; one in a folder of its own is not."""
        return self.keeps_mark and not self._overwrites

    async def _load_epoch(self, *, last: bool) -> int:
        epoch, spark = self._epoch, self._spark
        schema = self._contract.schema if self._contract is not None else None
        assert spark is not None
        # Spark makes a partition for every 10,000 rows, and each would be a file.
        files = max(1, round(epoch.size / _FILE_BYTES))
        if schema is None or is_raw(schema):
            # These messages are loaded whole, so Spark need not parse them.
            column = epoch.strings() if schema is None else epoch.binary()
            names = ["value"] if schema is None else schema.names
            if not column.null_count and not self._splits(column):
                table = pa.table([column], names)
                rows = spark.createDataFrame(table, schema or "value string")
                await self._write(rows, last=last, files=files)
                return epoch.messages
        places = pa.array(range(epoch.messages), pa.int64())
        table = pa.table({"place": places, "raw": epoch.binary()})
        # Without an explicit schema Spark Connect rejects an empty table.
        frame = spark.createDataFrame(table, "place long, raw binary")
        return await self._load(
            with_text(frame.withColumn("partition", sf.lit(0))),
            {0: self.account.done + self._fitted + self.account.dead},
            what=f"epoch {self.epochs + 1}",
            last=last,
            files=files,
        )

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
            what: As errors call them; empty if they are the whole input.
            last: Whether they complete the output.
            files: Files to write, at most.

        """
        spark = messages.sparkSession
        mine = judged(messages, self._contract, self._lines, self._folders)
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
        rows = rows_of(mine, self._contract, self._destination.folders)
        await self._write(rows, last=last, files=files)
        self._filled.update(dict(zip(self._columns, filled, strict=True)))
        return int(total - unfit)

    @property
    def _lines(self) -> TextLines | None:
        """The lines of text that rows become, if any."""
        contract, place = self._contract, self._destination
        if place.format.lower() != "text" or (contract and is_raw(contract.schema)):
            return None
        names = ["value"] if contract is None else contract.schema.names
        left = [name for name in names if name not in place.partition_by]
        separator = option(place.options, "linesep") or None
        named = left[0] if left and contract is not None else None
        return TextLines(named, separator)

    @property
    def _folders(self) -> Sequence[StructField]:
        """The columns that become folders of this machine."""
        contract, place = self._contract, self._destination
        if contract is None or is_raw(contract.schema) or place.local is None:
            return ()
        return [contract.schema[name] for name in place.partition_by]

    def _splits(self, messages: pa.ChunkedArray) -> bool:
        """Return whether any message would become several lines of text."""
        lines = self._lines
        if lines is None:
            return False
        # A custom separator may span two lines: its first character is suspect.
        pattern = LINE_BREAK if lines.separator is None else lines.separator[0]
        test = (
            pc.match_substring_regex if lines.separator is None else pc.match_substring
        )
        return bool(pc.any(test(messages, pattern)).as_py())

    @property
    def _columns(self) -> list[str]:
        """The columns that are read from JSON objects."""
        contract = self._contract
        if contract is None or is_raw(contract.schema):
            return []
        return contract.schema.names

    def _filled_of(self) -> list[Column]:
        """Return, for each column, the number of fitting messages that have it."""
        row = sf.col("row")
        return [
            sf.count_if(~sf.col("unfit") & row.getField(name).isNotNull())
            for name in self._columns
        ]

    async def _write(
        self, rows: DataFrame, *, last: bool, files: int | None = None
    ) -> None:
        destination, first = self._destination, not (self.epochs or self._goes_on)
        created = False
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
            created = first and await anyio.to_thread.run_sync(
                create_unknown, spark, options, rows.schema
            )
        if files is not None:
            rows = rows.coalesce(files)
        # The mode is append then, which later epochs have, too. A table that is created
        # here must not make mode error fail.
        begins = first and not self._leaves_mark and not created
        last = last and not self._leaves_mark
        await watch_job(
            rows.sparkSession,
            lambda: destination.write(rows, first=begins, last=last),
            self._show_tasks,
        )
        if first:
            await self._supersede()

    async def _settle_epoch(self) -> int:
        self._flushed = await super()._settle_epoch()
        return self._flushed

    async def commit(self, note: str) -> None:
        """Have a database add what was flushed; other destinations do nothing."""
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
            # It is not committed, or that is unknown: the next run finds out.
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
        """Dead-letter unfit messages; raises if there are too many."""
        at_once = _AT_ONCE if self._policy.keeps else 1
        found = unfit_of(
            mine, self._contract, self._lines, self._folders, at_once=at_once
        )
        async for unfit in found:
            place = starts[unfit.partition] + unfit.place
            await self._refuse(unfit.message, unfit.why, place, counts, what)

    def _why(self, error: Exception) -> str:
        if isinstance(error, CommitRefused):
            return str(error)
        return explain(error, self._session.log_path)

    def _config(self, name: str, schema: str | None) -> dict[str, object]:
        """Return this stage's settings for dead letters, without values of options."""
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
