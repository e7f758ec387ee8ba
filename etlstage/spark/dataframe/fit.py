"""
The rows that the messages of an epoch become, or why they don't.

Whether a message fits is decided here for a whole epoch, before anything of it is
written; ``schema.py`` says what fits.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from etlstage.spark.dataframe.epoch import Epoch
from etlstage.spark.dataframe.schema import fitted, is_raw, reason

__all__ = ("Misfits", "misfits_of", "rows_of")


class Misfits(NamedTuple):
    """Messages of an epoch that do not fit its schema."""

    total: int
    """How many they are."""
    place: int
    """Place of the first in the epoch, counted from zero."""
    why: str
    """Why the first does not fit."""


def rows_of(
    spark: SparkSession, epoch: Epoch, schema: StructType | None
) -> DataFrame | Misfits:
    """
    Return the rows that ``epoch`` becomes, or what keeps it from becoming rows.

    Args:
        spark: The session.
        epoch: The messages.
        schema: The columns, or None for the one column ``value``, a string.

    """
    if schema is None:
        return _texts(spark, epoch)
    if is_raw(schema):
        table = pa.table({schema.names[0]: epoch.binary()})
        return spark.createDataFrame(table, schema)
    return _objects(spark, epoch, schema)


def misfits_of(
    spark: SparkSession, epoch: Epoch, schema: StructType | None, *, limit: int
) -> list[tuple[int, str]]:
    """
    Return the places of the first messages that do not fit, and why each does not.

    Args:
        spark: The session.
        epoch: The messages.
        schema: As for :func:`rows_of`; it is not one that takes messages as they are.
        limit: How many to return, at most.

    """
    if schema is None:
        nulls = pc.indices_nonzero(epoch.strings().is_null())[:limit].to_pylist()
        return [(at, reason(epoch.message(at), {}, StructType())) for at in nulls]
    frame = _fitted(spark, epoch, schema).where("misfit")
    found = []
    for row in frame.select("place", "row").orderBy("place").limit(limit).collect():
        made = None if row["row"] is None else row["row"].asDict()
        at = int(row["place"])
        found.append((at, reason(epoch.message(at), made, schema)))
    return found


def _texts(spark: SparkSession, epoch: Epoch) -> DataFrame | Misfits:
    column = epoch.strings()
    if column.null_count:
        first = pc.index(column.is_null(), True).as_py()
        why = reason(epoch.message(first), {}, StructType())
        return Misfits(column.null_count, first, why)
    return spark.createDataFrame(pa.table({"value": column}), "value string")


def _objects(
    spark: SparkSession, epoch: Epoch, schema: StructType
) -> DataFrame | Misfits:
    frame = _fitted(spark, epoch, schema)
    misfit, place = sf.col("misfit"), sf.col("place")
    # Not a filter: Spark would parse the message anew for each test in it.
    first_place = sf.min(sf.when(misfit, place))
    found = frame.agg(sf.count_if(misfit), first_place).collect()[0]
    count, first = int(found[0]), found[1]
    if not count:
        fields = [sf.col("row").getField(name).alias(name) for name in schema.names]
        return frame.select(*fields)
    row = frame.where(place == first).select("row").collect()[0]["row"]
    made = None if row is None else row.asDict()
    return Misfits(count, int(first), reason(epoch.message(first), made, schema))


def _fitted(spark: SparkSession, epoch: Epoch, schema: StructType) -> DataFrame:
    places = pa.array(range(epoch.messages), pa.int64())
    table = pa.table({"place": places, "value": epoch.strings()})
    # Without a schema of its own an empty table is refused over Connect.
    messages = spark.createDataFrame(table, "place long, value string")
    return fitted(messages, schema)
