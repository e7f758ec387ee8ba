"""
A Spark job that the event loop waits for, and can call off.

PySpark's calls block, so each runs in a thread; a job whose caller has gone is
interrupted by its tag.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread
from pyspark.sql import SparkSession

__all__ = ("over_connect", "run_job")

T = TypeVar("T")

_AGAIN: Final = 0.2


def over_connect(spark: SparkSession) -> bool:
    """Return whether ``spark`` talks to a server rather than to a JVM of ours."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


async def run_job(spark: SparkSession, job: Callable[[], T]) -> T:
    """
    Return what ``job`` returns, run in a thread.

    On cancellation Spark's jobs of ``job`` are interrupted and the thread is waited
    for, so that nothing of it goes on after this coroutine has ended.

    """
    tag = f"etlstage-{uuid.uuid4().hex}"
    begun, ended = threading.Event(), threading.Event()

    # A session's tags are bound to the thread that added them in classic Spark
    # (4.3: interruptTag() from another thread finds nothing), a context's are not.
    cancel: Callable[[str], object]
    if over_connect(spark):
        add, remove, cancel = spark.addTag, spark.removeTag, spark.interruptTag
    else:
        context = spark.sparkContext
        add, remove = context.addJobTag, context.removeJobTag
        cancel = context.cancelJobsWithTag

    def tagged() -> T:
        begun.set()
        add(tag)
        try:
            return job()
        finally:
            try:
                remove(tag)
            finally:
                ended.set()

    def call_off() -> None:
        # A job that is just about to be submitted escapes one interrupt.
        while begun.is_set() and not ended.wait(_AGAIN):
            cancel(tag)

    try:
        return await anyio.to_thread.run_sync(tagged, abandon_on_cancel=True)
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(call_off)
        raise
