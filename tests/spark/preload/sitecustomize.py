"""
Imports once, where Spark forks its Python processes, what each of them imports.

Python imports this file by its name, if its folder is on the path, as it is for what
the JVM of the tests starts. A read, write or batch of a data source takes four or more
processes, which Spark does not use again, and a second of imports for each.
"""

from __future__ import annotations

import sys

if "pyspark.daemon" in sys.orig_argv:
    import pandas  # type: ignore[import-untyped]  # noqa: F401

    import etlstage.spark.datasource.datasource
    import etlstage.spark.journal.datasource
    import etlstage.spark.task.transform  # noqa: F401
