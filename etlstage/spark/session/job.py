"""
A Spark job that the event loop waits for, and can cancel.

PySpark's calls block, so each runs in a thread; a job whose caller was cancelled is
interrupted by its tag.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import anyio
import anyio.to_thread
from pyspark import SparkContext
from pyspark.sql import SparkSession

__all__ = ("over_connect", "run_job", "watch_job")

T = TypeVar("T")

_AGAIN: Final = 0.2
_LOOK: Final = 0.5  # seconds between two looks at the tasks of a job
_GROUP: Final = "spark.jobGroup.id"


def over_connect(spark: SparkSession) -> bool:
    """Return whether ``spark`` talks to a server rather than to our own JVM."""
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
        # An interrupt misses a job that is just about to be submitted, so repeat it.
        while begun.is_set() and not ended.wait(_AGAIN):
            cancel(tag)

    try:
        return await anyio.to_thread.run_sync(tagged, abandon_on_cancel=True)
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(call_off)
        raise


async def watch_job(
    spark: SparkSession, job: Callable[[], T], progress: Callable[[int, int], None]
) -> T:
    """
    Return what ``job`` returns, as :func:`run_job`.

    Args:
        spark: The session.
        job: The job; it blocks.
        progress: Called now and then, in a thread, with the number of tasks of the job
            that are done, and of all its tasks; not called over Connect, which does not
            count them.

    """
    if over_connect(spark):
        return await run_job(spark, job)
    context, group = spark.sparkContext, f"etlstage-{uuid.uuid4().hex}"

    def grouped() -> T:
        context.setLocalProperty(_GROUP, group)
        try:
            return job()
        finally:
            context.setLocalProperty(_GROUP, None)  # type: ignore[arg-type] # removes

    made: list[T] = []
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch, context, group, progress)
        try:
            made.append(await run_job(spark, grouped))
        except Exception as error:  # not to be raised in a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return made[0]


async def _watch(
    context: SparkContext, group: str, progress: Callable[[int, int], None]
) -> None:
    """Report the progress of a group of jobs until cancelled."""

    def look() -> None:
        tracker = context.statusTracker()
        jobs = [tracker.getJobInfo(n) for n in tracker.getJobIdsForGroup(group)]
        ids = {number for job in jobs if job is not None for number in job.stageIds}
        stages = [s for s in map(tracker.getStageInfo, ids) if s is not None]
        if total := sum(stage.numTasks for stage in stages):
            progress(sum(stage.numCompletedTasks for stage in stages), total)

    # Progress is only shown: if the JVM is gone, the job fails. The call runs in a
    # thread of the pool, since each thread that talks to the JVM has another one there.
    with suppress(Exception):
        while True:
            await anyio.sleep(_LOOK)
            await anyio.to_thread.run_sync(look)
