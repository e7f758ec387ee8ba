"""
Spark at both ends of a pipeline.

:class:`Session` starts Spark, :class:`DataFrameSource` reads messages out of a
DataFrame and :class:`DataFrameSink` loads them into one; :func:`transform` runs a stage
inside the executors, where :func:`ship` sends its program; :func:`register` makes
workers a data source. Only Spark's DataFrame API is used, so that all of it also runs
over Spark Connect.

Only this package imports PySpark; the layers above import the package when a pipeline
asks for Spark.
"""

from __future__ import annotations

from importlib.util import find_spec

from etlstage.errors import SparkUnavailable

# mapInArrow uses nothing but Arrow, and still requires pandas.
for _package in ("pyspark", "pyarrow", "pandas"):
    if find_spec(_package) is None:
        raise SparkUnavailable(
            f"spark needs the package {_package}, which is not installed: "
            "pip install 'etlstage[spark]'"
        )

from etlstage.spark.dataframe.dead_letter import DeadLetterFrame  # noqa: E402
from etlstage.spark.dataframe.destination import Destination  # noqa: E402
from etlstage.spark.dataframe.read import read_frame  # noqa: E402
from etlstage.spark.dataframe.sink import DataFrameSink  # noqa: E402
from etlstage.spark.dataframe.source import DataFrameSource  # noqa: E402
from etlstage.spark.datasource.datasource import register  # noqa: E402
from etlstage.spark.session.java import Java, find_java  # noqa: E402
from etlstage.spark.session.session import Session  # noqa: E402
from etlstage.spark.ship.artifact import ship  # noqa: E402
from etlstage.spark.task.transform import transform  # noqa: E402

__all__ = (
    "DataFrameSink",
    "DataFrameSource",
    "DeadLetterFrame",
    "Destination",
    "Java",
    "Session",
    "find_java",
    "read_frame",
    "register",
    "ship",
    "transform",
)
