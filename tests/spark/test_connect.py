from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

Program = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_all_of_it_runs_over_connect(program: Program) -> None:
    """Source, sink, errors and cancellation work where there is no SparkContext."""
    done = program(
        """
        import os
        import anyio
        from pyspark.sql import SparkSession
        from etlstage.errors import SinkFailed, SourceFailed
        from etlstage.spark import DataFrameSink, DataFrameSource, Session, read_frame
        from etlstage.spark import source as module

        async def read(source):
            return [m async for run in source.runs() for m in run]

        async def main():
            own = SparkSession.builder.remote("local[2]").getOrCreate()
            async with Session(own) as session:
                spark = session.spark
                assert "connect" in type(spark).__module__
                frame = spark.range(0, 25_000, 1, 3)
                expected = [b'{"id":%d}' % n for n in range(25_000)]
                print("spooled", await read(DataFrameSource(frame)) == expected)
                nonce, module.NONCE = module.NONCE, "another"
                print("packed", await read(DataFrameSource(frame)) == expected)
                module.NONCE = nonce
                async with DataFrameSink(
                    spark, path="out", schema="id long", epoch_messages=10_000
                ) as sink:
                    await sink.write(expected)
                    print("marked", os.path.exists("out/_SUCCESS"))
                    await sink.finish()
                    print(sink.landed(), os.path.exists("out/_SUCCESS"))
                print(spark.read.parquet("out").distinct().count())
                for try_ in (
                    lambda: read(DataFrameSource(
                        lambda: read_frame(spark, format="json", path="/nope"))),
                    lambda: read(DataFrameSource(frame, message="upper(idd)")),
                    lambda: load(DataFrameSink(spark, path="bad", schema="id long")),
                ):
                    try:
                        await try_()
                    except (SourceFailed, SinkFailed) as error:
                        print(error)
                endless = spark.range(0, 10**12, 1, 2).selectExpr(
                    "sha2(repeat(id, 500), 512)")
                os.mkdir("spool")
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(
                        read, DataFrameSource(endless, spool_dir="spool"))
                    while not any(name.endswith(".part")
                        for _, _, names in os.walk("spool") for name in names):
                        await anyio.sleep(0.05)
                    tasks.cancel_scope.cancel()
                print("cancelled", os.listdir("spool"))
                print(spark.range(3).count())
            async with Session(remote="sc://localhost") as session:
                print(session.spark is own, session.log_path)
            own.stop()

        async def load(sink):
            async with sink:
                await sink.write([b'{"id":1}', b'{"id":"x"}'])
                await sink.finish()

        anyio.run(main)
        """,
        PYSPARK_PYTHON=sys.executable,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:5] == [
        "spooled True",
        "packed True",
        "marked False",
        "3 epochs with 25000 messages in place at out, the output is whole True",
        "25000",
    ]
    assert lines[5] == "extract: path does not exist: file:/nope (PATH_NOT_FOUND)"
    assert "Did you mean one of the following? [`id`]" in lines[6]
    assert "message 2 is the first, field 'id' is a string that is no" in lines[7]
    assert lines[8:] == ["cancelled []", "3", "True None"], done.stderr
