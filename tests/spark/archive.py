"""
Makes JVMs of the tests start in half the time.

``python -m tests.spark.archive`` runs a little of Spark, and has the JVM write down the
classes that took part as it holds them in memory: some 170 MB beside the environment's
programs. JVMs of other versions ignore it; without it everything runs, slower.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

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
    session.stop()
    gateway = session.sparkContext._gateway
    assert gateway is not None
    with suppress(Exception):  # it goes before it has answered
        gateway.jvm.java.lang.System.exit(0)
    gateway.proc.wait()
    Path(f"{ARCHIVE}.part").rename(ARCHIVE)


if __name__ == "__main__":
    main()
