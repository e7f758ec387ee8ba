"""
Makes JVMs of the tests start in half the time.

``python -m tests.spark.archive`` runs a little of Spark, and has the JVM write down the
classes that took part as it holds them in memory: some 170 MB beside the environment's
programs. JVMs of other versions ignore it; without it everything runs, slower.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ("ARCHIVE", "OPTIONS")

ARCHIVE: Final = Path(sys.prefix) / "spark.jsa"
# One that lives for a minute spends half its time on compiling for the long run.
OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"
"""Of JVMs in tests, with the archive or without."""


def main() -> None:
    """Make the archive, unless it is there."""
    if ARCHIVE.exists():
        return
    os.environ["JDK_JAVA_OPTIONS"] = OPTIONS
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:ArchiveClassesAtExit={ARCHIVE}.part"
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]")
    session = builder.config("spark.ui.enabled", "false").getOrCreate()
    counted = session.range(1000).groupBy("id").count()
    counted.mapInPandas(lambda frames: frames, counted.schema).collect()
    with tempfile.TemporaryDirectory() as folder:
        learn(session, Path(folder))
    session.stop()
    gateway = session.sparkContext._gateway
    assert gateway is not None
    with suppress(Exception):  # it goes before it has answered
        gateway.jvm.java.lang.System.exit(0)
    gateway.proc.wait()
    Path(f"{ARCHIVE}.part").rename(ARCHIVE)


def learn(session: SparkSession, folder: Path) -> None:
    """Read and write as tests do: at once, and as a stream."""
    files, found = str(folder / "files"), str(folder / "found")
    session.range(10).selectExpr("cast(id as string) value").write.text(files)
    session.read.text(files).write.parquet(found)
    texts = session.readStream.text(files)
    changed = texts.mapInArrow(lambda batches: batches, texts.schema)
    writer = changed.writeStream.option("checkpointLocation", str(folder / "state"))
    writer = writer.foreachBatch(
        lambda frame, _: frame.write.mode("append").parquet(found)
    )
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main()
