"""
Import once, in the daemon that forks Spark's Python processes, what all of them need.

Python imports this file for its name, if its folder is on the path, as it is for the
processes of the tests' JVM. A read, write or batch of a data source takes four or more
processes, which Spark does not reuse, and a second of imports in each.
"""

from __future__ import annotations

import sys

if "pyspark.daemon" in sys.orig_argv:
    import gc
    from importlib import import_module

    for name in (
        "anyio._backends._asyncio",
        "etlstage.protocol.marker.columnar",
        "etlstage.spark.datasource.datasource",
        "etlstage.spark.journal.datasource",
        "etlstage.spark.task.transform",
        "opentelemetry.trace.propagation.tracecontext",
        "pandas",
        "pyarrow.pandas_compat",
        "pyspark.worker",
        # The module that Spark runs, such as pyspark.sql.worker.plan_data_source_read.
        sys.orig_argv[-1],
    ):
        import_module(name)
    # Otherwise each process copies the pages of all these as soon as it collects
    # garbage, as our tasks do at their start.
    gc.collect()
    gc.freeze()
