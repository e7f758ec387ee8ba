"""
Messages in a DataFrame: which of them fit the schema, and the rows that they become.

That is decided for all of them before anything is written; ``schema.py`` says what
fits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from etlstage.spark.dataframe.schema import Contract, fitted, is_raw, reason
from etlstage.spark.session.job import run_job

__all__ = ("Unfit", "judged", "rows_of", "unfit_of", "with_text")


class Unfit(NamedTuple):
    """A message that does not fit."""

    partition: int
    place: int
    message: bytes
    why: str


def with_text(messages: DataFrame) -> DataFrame:
    """
    Return messages as a sink takes them.

    Args:
        messages: Has the columns ``partition`` and ``place``, which together give their
            order, and the messages as ``raw``, binary.

    Returns:
        These, and ``value``: the message as a string, null where it is no UTF-8.

    """
    text = sf.col("raw").cast("string")
    value = sf.when(sf.is_valid_utf8(text), text).alias("value")
    return messages.select("partition", "place", "raw", value)


def judged(messages: DataFrame, contract: Contract | None) -> DataFrame:
    """
    Return the messages with the column ``unfit``, a boolean.

    Args:
        messages: As :func:`with_text` returns them.
        contract: What is asked of them, or None: to be the string ``value``.

    """
    if contract is None:
        return messages.withColumn("unfit", sf.col("value").isNull())
    if is_raw(contract.schema):
        return messages.withColumn("unfit", sf.lit(False))
    return fitted(messages, contract)


def rows_of(messages: DataFrame, contract: Contract | None) -> DataFrame:
    """Return the rows that messages become, judged ones that fit."""
    if contract is None:
        return messages.select("value")
    schema = contract.schema
    if is_raw(schema):
        return messages.select(sf.col("raw").alias(schema.names[0]))
    fields = [sf.col("row").getField(name).alias(name) for name in schema.names]
    return messages.select(*fields)


async def unfit_of(
    messages: DataFrame, contract: Contract | None, *, at_once: int
) -> AsyncIterator[Unfit]:
    """Yield what does not fit of judged messages, in order, collected in turns."""
    found = messages.where("unfit")
    if "row" not in found.columns:
        found = found.withColumn("row", sf.lit(None))
    partition, place = sf.col("partition"), sf.col("place")
    part = found
    while True:
        top = part.select("partition", "place", "raw", "row")
        top = top.orderBy("partition", "place").limit(at_once)
        rows = await run_job(messages.sparkSession, top.collect)
        for row in rows:
            made = None if row["row"] is None else row["row"].asDict()
            message = bytes(row["raw"])
            why = reason(message, made, contract or Contract(StructType()))
            yield Unfit(row["partition"], row["place"], message, why)
        if len(rows) < at_once:
            return
        last = rows[-1]
        part = found.where(
            (partition > last["partition"])
            | ((partition == last["partition"]) & (place > last["place"]))
        )
