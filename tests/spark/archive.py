"""
Make the tests' JVMs start in half the time.

``python -m tests.spark.archive`` runs a little of Spark, and has the JVM archive the
classes that took part as it holds them in memory: some 170 MB, stored in the
environment. JVMs of other versions ignore the archive; without it tests are slower.
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
# A JVM that lives for a minute spends half its time on optimizing compilation. Mapped
# at the address that it was written for, the archive is used as it is; at any other
# address, which is the default, each JVM reads and relocates all of it.
OPTIONS: Final = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"
    " -XX:+UnlockDiagnosticVMOptions -XX:ArchiveRelocationMode=0"
)
"""Options of the tests' JVMs, with the archive or without."""


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
    with suppress(Exception):  # the JVM exits before it has answered
        gateway.jvm.java.lang.System.exit(0)
    gateway.proc.wait()
    Path(f"{ARCHIVE}.part").rename(ARCHIVE)


def learn(session: SparkSession, folder: Path) -> None:
    """Read and write as tests do, as a batch and as a stream."""
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
