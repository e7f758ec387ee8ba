"""
A stage inside Spark's executors: rows in, rows out.

:func:`transform` only makes a plan. When Spark runs it, each task starts the stage's
workers in the Python worker that serves it, supervised as anywhere else, and stops
them when its partition ends. ``task.py`` is what runs there.

Spark runs a task again when it fails, may run it twice at once, and may run it ahead
of a ``limit``: a stage is asked to transform, never to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import BinaryType, StringType, StructType

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.spark.dataframe.read import message_column
from etlstage.spark.dataframe.schema import Contract, fitted, is_raw
from etlstage.spark.task.task import ERROR, KEPT, Task
from etlstage.stage import Order, Stage

__all__ = ("transform",)

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

    Nothing runs before the result is asked for; then every task has workers of its
    own. A row gives as many rows as its reply has messages, none included; those of a
    partition stay in order. A message that is refused, or fails after its retries,
    fails its task, unless ``errors`` says otherwise.

    Args:
        frame: Of a classic session or of Spark Connect.
        stage: A transform stage. Its program, and etlstage, must be where Spark's
            executors are: installed, or by :func:`~etlstage.spark.ship`. A command
            that names a shipped file runs in the folder of these, without a ``cwd``.
        message: Spark SQL expression, string or binary, that makes a message of a
            row. By default the only column if that is string or binary, else
            ``to_json(struct(*))``.
        schema: Columns of the result, as DDL: replies are JSON objects then, or, if
            it is one binary column, its values. By default one column ``value``, a
            string if messages are strings, else binary.
        keep: Columns of ``frame`` that each row of the result has, too, in front.
        errors: ``"column"`` adds a column ``error`` at the end, a string: null, or why
            a message was refused, lost for good, or not sent, or why its reply is not
            what ``schema`` says; such a message is a row without values.

    Raises:
        ConfigError: If the stage does not transform, or can't keep columns, or a
            column would be there twice.
        TypeError: If the message is neither string nor binary.

    """
    _check(stage, keep or ())
    if errors not in (None, "column"):
        raise ConfigError(f"errors is {errors!r}, expected 'column' or None")
    chosen = message_column(frame, message)
    # Text stays text: to make binary of it Spark copies each, and for Arrow the two
    # are the same bytes.
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
    # In the order of the input: so the k-th answer is that of the k-th row.
    ordered = replace(stage, order=Order.TOTAL, key=None)
    task = Task(ordered, texts=texts, errors=errors is not None)
    made = given.mapInArrow(task.run, returned)
    return _columns(made, stage, wanted, keep or (), errors=errors is not None)


def _check(stage: Stage, keep: Sequence[str]) -> None:
    if stage.kind is not StageKind.TRANSFORM:
        raise ConfigError(
            f"stage {stage.name} is of kind {stage.kind.value}, expected transform:"
            " Spark may run a task twice, or ahead of a limit"
        )
    if isinstance(keep, str):
        # Its letters would be the columns.
        raise ConfigError(f"keep is the text {keep!r}, expected a list: [{keep!r}]")
    if keep and stage.dialect.shape.batches:
        raise ConfigError(
            f"stage {stage.name} answers in batches: outputs can't be matched to rows,"
            " so keep is not supported"
        )


def _schema(schema: str | StructType | None) -> StructType | None:
    if schema is None or isinstance(schema, StructType):
        return schema
    parsed = StructType.fromDDL(schema)
    if not isinstance(parsed, StructType):
        raise ConfigError(f"schema {schema!r} names no columns, expected 'id int, ...'")
    return parsed


def _columns(
    made: DataFrame,
    stage: Stage,
    schema: StructType | None,
    keep: Sequence[str],
    *,
    errors: bool,
) -> DataFrame:
    """Return the columns of the result: what is kept, the replies, what went wrong."""
    kept = made.schema[KEPT].dataType if keep else StructType()
    assert isinstance(kept, StructType)
    names = ["value"] if schema is None else schema.names
    if both := sorted(set(kept.names) & set(names)):
        raise ConfigError(
            f"column {both[0]!r} would be there twice: it is kept, and made by stage"
            f" {stage.name}; rename it in front, or in schema"
        )
    if errors and _ERROR in {*kept.names, *names}:
        raise ConfigError(
            f"column {_ERROR!r} would be there twice: errors='column' makes one; rename"
            " the other in front, or in schema"
        )
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
