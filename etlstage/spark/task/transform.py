"""
A stage inside Spark's executors: rows in, rows out.

:func:`transform` only makes a plan. When Spark runs the plan, each :class:`Task` starts
workers of the stage in a Python worker of Spark's, supervised as anywhere else, and
stops them when its partition ends. The supervisor is on the other side of a bridge,
while Spark's thread reads rows from Spark and hands back results.

Spark runs a task again when it fails, may run it twice at once, and may run it ahead of
a ``limit``: so a stage must transform, and never load.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import BinaryType, StringType, StructType

from etlstage.columns import Replies, array_of, strings_of
from etlstage.errors import ConfigError, StageFailed, WorkerRefusal
from etlstage.messages import AnnotatedRun, Run, StageKind
from etlstage.pipeline.dead_letter.letter import first_clause
from etlstage.pipeline.dead_letter.policy import OF_A_MESSAGE
from etlstage.spark.dataframe.read import column_of, message_column
from etlstage.spark.dataframe.schema import Contract, fitted, is_raw
from etlstage.spark.ship.artifact import place
from etlstage.spark.task.chain import Given, message_of_partition
from etlstage.spark.task.portal import Bridge, bridged
from etlstage.spark.task.rows import RowBuilder
from etlstage.stage import Order, Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.supervisor.exchange.exchange import Outcome

__all__ = (
    "ERROR",
    "KEPT",
    "Task",
    "transform",
)

_ERROR: Final = "error"  # the column with what went wrong, as a user sees it


def transform(
    frame: DataFrame,
    stage: Stage,
    *,
    message: str | None = None,
    schema: str | StructType | None = None,
    keep: Sequence[str] | None = None,
    errors: Literal["column"] | None = None,
) -> DataFrame:
    """
    Return what the workers of ``stage`` make of the rows of ``frame``.

    ::

        cleaned = transform(frame, Stage(name="clean", worker=("./clean.py",)))

    Nothing runs before the result is requested; then every task has workers of its own.
    A row becomes as many rows as its reply has messages, possibly none; the rows of a
    partition stay in order. A message that is rejected, or fails after its retries,
    fails its task, unless ``errors`` is set.

    Args:
        frame: A DataFrame of a classic session or of Spark Connect.
        stage: A transform stage. Its program, and etlstage, must be available to
            Spark's executors: installed there, or sent by :func:`~etlstage.spark.ship`.
            Without a ``cwd``, a command that names a shipped file runs in the folder of
            these files.
        message: Spark SQL expression, string or binary, that makes a message of a
            row. By default the only column if that is string or binary, else
            ``to_json(struct(*))``.
        schema: Columns of the result, as DDL. Replies are then JSON objects, or, for a
            single binary column, its values. By default one column ``value``, a string
            if messages are strings, else binary.
        keep: Columns of ``frame`` to copy to the front of each row of the result.
        errors: ``"column"`` adds a string column ``error`` at the end: null, or why a
            message was rejected, lost for good, or not sent, or why its reply does not
            fit ``schema``; such a message becomes a row without values.

    Raises:
        ConfigError: If the stage does not transform, or can't keep columns, or a
            column would occur twice.
        TypeError: If the message is neither string nor binary, or columns of one name
            would become a JSON object.

    """
    _check(stage, keep or ())
    if errors not in (None, "column"):
        raise ConfigError(f"errors is {errors!r}, expected 'column' or None")
    chosen = message_column(frame, message)
    # Text stays text: Spark would copy each value to convert it to binary, and in Arrow
    # both are the same bytes.
    kind = "string" if chosen.is_text else "binary"
    columns: list[Column] = [sf.expr(chosen.expression).cast(kind).alias("message")]
    if keep:
        columns.append(sf.struct(*keep).alias(KEPT))
    given = frame.select(*columns)
    wanted = _schema(schema)
    texts = chosen.is_text if wanted is None else not is_raw(wanted)
    returned = StructType().add("value", StringType() if texts else BinaryType())
    if keep:
        returned = returned.add(given.schema[KEPT])
    if errors:
        returned = returned.add(ERROR, StringType())
    # In the order of the input, so that the k-th answer is that of the k-th row.
    ordered = replace(stage, order=Order.TOTAL, key=None)
    task = Task(ordered, texts=texts, errors=errors is not None)
    made = given.mapInArrow(task.run, returned)
    return _columns(made, stage, wanted, keep or (), errors=errors is not None)


def _check(stage: Stage, keep: Sequence[str]) -> None:
    if stage.kind is not StageKind.TRANSFORM:
        raise ConfigError(
            f"stage {stage.name} is of kind {stage.kind.value}, expected transform:"
            " Spark may run a task twice, or for rows beyond a limit"
        )
    if isinstance(keep, str):
        # Each letter would be taken for a column.
        raise ConfigError(f"keep is the string {keep!r}, expected a list: [{keep!r}]")
    if keep and stage.dialect.shape.batches:
        raise ConfigError(
            f"stage {stage.name} answers in batches: outputs can't be matched to rows,"
            " so keep is not supported"
        )


def _schema(schema: str | StructType | None) -> StructType | None:
    if schema is None:
        return None
    parsed = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(parsed, StructType) or not parsed.names:
        ddl = schema if isinstance(schema, str) else ""
        raise ConfigError(f"schema {ddl!r} names no columns, expected 'id int, ...'")
    return parsed


def _columns(
    made: DataFrame,
    stage: Stage,
    schema: StructType | None,
    keep: Sequence[str],
    *,
    errors: bool,
) -> DataFrame:
    """Return the columns of the result: those kept, the replies, the error."""
    kept = made.schema[KEPT].dataType if keep else StructType()
    assert isinstance(kept, StructType)
    names = ["value"] if schema is None else schema.names
    _check_names(made.sparkSession, stage, kept.names, names, errors=errors)
    front = [sf.col(KEPT).getField(name).alias(name) for name in kept.names]
    error = [sf.col(ERROR)] if errors else []
    if schema is None or is_raw(schema):
        value = sf.col("value").alias(names[0])
        return made.select(*front, value, *(e.alias(_ERROR) for e in error))
    text = sf.lit(
        f"stage {stage.name}: a reply does not fit the schema {schema.simpleString()}"
    )
    parsed, unfit = fitted(made, Contract(schema)), sf.col("unfit")
    instead = sf.lit(None) if errors else sf.raise_error(text)
    row = sf.when(unfit, instead).otherwise(sf.col("row"))
    fields = [row.getField(name).alias(name) for name in names]
    why = [sf.coalesce(e, sf.when(unfit, text)).alias(_ERROR) for e in error]
    return parsed.select(*front, *fields, *why)


def _check_names(
    spark: SparkSession,
    stage: Stage,
    kept: Sequence[str],
    made: Sequence[str],
    *,
    errors: bool,
) -> None:
    """Assert that Spark can tell the columns of the result apart."""
    sensitive = str(spark.conf.get("spark.sql.caseSensitive", "false"))
    fold = str if sensitive.lower() == "true" else str.lower
    for where, names in (("keep", kept), ("schema", made)):
        seen: dict[str, str] = {}
        for name in names:
            if fold(name) in seen:
                raise ConfigError(
                    f"{_twice(seen[fold(name)], name)}: {where} has it twice; leave one"
                    " out, or rename it"
                )
            seen[fold(name)] = name
    replies = {fold(name): name for name in made}
    for name in kept:
        if fold(name) in replies:
            raise ConfigError(
                f"{_twice(name, replies[fold(name)])}: it is kept, and made by stage"
                f" {stage.name}; rename it in the input, or in schema"
            )
    for name in (*kept, *made):
        if errors and fold(name) == _ERROR:
            raise ConfigError(
                f"{_twice(name, _ERROR)}: errors='column' adds one; rename the other in"
                " the input, or in schema"
            )


def _twice(name: str, other: str) -> str:
    also = "" if other == name else f", also as {other!r}"
    return f"column {name!r} would appear twice{also}"


KEPT: Final = "_etlstage_kept"
"""Column with a struct of the kept columns."""
ERROR: Final = "_etlstage_error"
"""Column with the reason why there is no reply, or it is not text."""


class Task:
    """
    The function for :meth:`DataFrame.mapInArrow`.

    Args:
        stage: A stage that answers in the order of its input.
        texts: Whether replies are text.
        errors: Whether a message without a reply becomes a row with the reason, instead
            of failing the task.

    """

    def __init__(self, stage: Stage, *, texts: bool, errors: bool = False) -> None:
        self._stage = stage
        self._texts = texts
        self._errors = errors

    def run(
        self, batches: Iterator[pa.RecordBatch]
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the replies to the messages in the first column, in order."""
        rows: RowBuilder | None = None  # made once the columns are known
        with bridged(partial(_answer_all, place(self._stage))) as bridge:
            for answer in bridge.cross(_messages(b) for b in batches if b.num_rows):
                for part in answer.parts():
                    columns = self._columns_of(part)
                    rows = rows or RowBuilder([*columns])
                    yield from rows.add([*columns.values()], part.reply_size)
            if rows is not None:
                yield from rows.rest()

    def _columns_of(self, answer: Outcome) -> dict[str, pa.Array]:
        """
        Return the rows for an answer, by column.

        Raises:
            StageFailed: If a message has no reply, or one that is not text, unless the
                error column can report that.

        """
        error, errors = answer.error, None
        if error is not None and not (self._errors and isinstance(error, OF_A_MESSAGE)):
            raise _refused(self._stage.name, str(error), answer) from error
        kept: pa.StructArray | None = None
        if isinstance(answer.messages, AnnotatedRun):
            kept = answer.messages.columns["kept"]
        if error is not None:
            count = len(answer.messages)
            values = pa.nulls(count, pa.string() if self._texts else pa.binary())
            errors = array_of([_why(error)] * count, pa.string())
        else:
            replies = Replies.of(answer.groups)
            values = strings_of(replies.values) if self._texts else replies.values
            if self._texts and values.null_count:
                text = f"stage {self._stage.name}: a reply is not UTF-8"
                if not self._errors:
                    raise _refused(self._stage.name, text, answer)
                errors = pc.if_else(values.is_null(), text, None)
            if kept is not None and replies.owners is not None:
                kept = kept.take(replies.owners)
        made = {"value": values}
        if kept is not None:
            made[KEPT] = kept
        if self._errors:
            none = pa.nulls(len(values), pa.string())
            made[ERROR] = none if errors is None else errors
        return made


def _messages(batch: pa.RecordBatch) -> Run:
    """Return the messages of some rows, with the columns that are kept, if any."""
    run = column_of(batch.column(0))
    return run if batch.num_columns == 1 else AnnotatedRun(run, kept=batch.column(1))


def _refused(stage: str, text: str, answer: Outcome) -> StageFailed:
    """Return the error for an answer, with the place of its messages."""
    which = message_of_partition(answer.start, len(answer.messages))
    return StageFailed(f"{text} ({which})", stage=stage)


async def _answer_all(stage: Stage, bridge: Bridge[Outcome]) -> None:
    given = Given(f"stage {stage.name}", bridge.runs())
    async with (
        AsyncSupervisor(stage) as supervisor,
        aclosing(supervisor.answers(given.runs())) as answers,
    ):
        async for answer in answers:
            await bridge.put(answer, answer.reply_size)
    if (doubt := supervisor.doubt) is not None:
        raise doubt


def _why(error: Exception) -> str:
    """Return in short why a message failed."""
    if isinstance(error, WorkerRefusal):
        return error.reason or "refused"
    return first_clause(str(error)) or type(error).__name__
