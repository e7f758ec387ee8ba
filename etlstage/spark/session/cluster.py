"""
Where a cluster on this machine lives: master ``local-cluster[executors,cores,MiB]``.

Each executor is a process of its own, as on a real cluster. Spark lets executors write
into Spark's folder, which is part of an installed package, and starts them with the
options that ``launch.py`` drops for the driver. So Spark gets a folder that only links
to its own, and the executors get a Java that drops the same options.
"""

from __future__ import annotations

import atexit
from pathlib import Path

from pyspark.find_spark_home import _find_spark_home

from etlstage.spark.session.java import Java
from etlstage.spark.session.launch import write_java
from etlstage.transport.watchdog import discard_scratch, make_scratch

__all__ = ("ClusterHome",)


class ClusterHome:
    """
    A folder that Spark uses as its own; removed at the end of the process.

    Attributes:
        environ: Environment variables that lead the JVM to it.
        settings: Spark's settings that go with it.

    """

    def __init__(self, java: Java) -> None:
        home = make_scratch("cluster")
        # The JVM lives on until then, and may start more executors.
        atexit.register(discard_scratch, home)
        for path in Path(_find_spark_home()).iterdir():
            if path.name != "work":
                (home / path.name).symlink_to(path)
        self.environ: dict[str, str] = {"SPARK_HOME": str(home)}
        self.settings: dict[str, str] = {}
        if not java.has_vector:
            write_java(home / "java-of-executors", java)
            self.settings["spark.executorEnv.JAVA_HOME"] = str(
                home / "java-of-executors"
            )
