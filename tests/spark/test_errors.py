from __future__ import annotations

from pathlib import Path

import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkRuntimeError

from etlstage.errors import SparkUnavailable
from etlstage.spark.errors import explain

STACK = "\n\tat org.apache.spark.X.y(X.scala:1)\n\tat z\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param(
            "[PATH_NOT_FOUND] Path does not exist: file:/nope. SQLSTATE: 42K03",
            "path does not exist: file:/nope (PATH_NOT_FOUND)",
            id="classic",
        ),
        pytest.param(
            "[PATH_NOT_FOUND] Path does not exist: file:/nope. SQLSTATE: 42K03"
            "\n\nJVM stacktrace:\norg.apache.spark.sql.AnalysisException" + STACK,
            "path does not exist: file:/nope (PATH_NOT_FOUND)",
            id="connect",
        ),
        pytest.param(
            "(org.apache.hadoop.fs.UnsupportedFileSystemException) No FileSystem for "
            'scheme "nosuch"',
            'no FileSystem for scheme "nosuch"',
            id="connect-java",
        ),
        pytest.param(
            "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `titel` cannot be "
            "resolved. Did you mean one of the following? [`title`]. SQLSTATE: 42703; "
            "line 1 pos 0;\n'Project ['titel]\n+- Relation [title#0] json\n",
            "a column with name `titel` cannot be resolved. Did you mean one of the "
            "following? [`title`] (UNRESOLVED_COLUMN.WITH_SUGGESTION)",
            id="suggestion",
        ),
        pytest.param(
            "\n[PARSE_SYNTAX_ERROR] Syntax error at or near end of input. SQLSTATE: "
            "42601 (line 1, pos 17)\n\n== SQL ==\nto_json(struct(*)\n-----^^^\n",
            "syntax error at or near end of input (PARSE_SYNTAX_ERROR)",
            id="syntax",
        ),
        pytest.param(
            "An error occurred while calling o405.load.\n: org.apache.spark."
            "SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] Failed to find the "
            "data source: nofmt. Make sure it is registered. SQLSTATE: 42K02" + STACK,
            "failed to find the data source: nofmt. Make sure it is registered "
            "(DATA_SOURCE_NOT_FOUND)",
            id="py4j",
        ),
        pytest.param(
            "An error occurred while calling o1.save.\n: java.lang.ClassNotFoundException:"
            " org.nobody.Driver" + STACK + "\tat org.apache.spark.sql.execution."
            "datasources.jdbc.DriverRegistry$.register(DriverRegistry.scala:46)",
            "there is no driver org.nobody.Driver: put its jar into spark.config, as in"
            " {spark.jars: driver.jar}",
            id="driver",
        ),
        pytest.param(
            "An error occurred while calling None.x.JdbcOptionsInWrite.\n: java.sql."
            "SQLException: No suitable driver" + STACK,
            "there is no driver for this url: set the option driver, and put its jar"
            " into spark.config, as in {spark.jars: driver.jar}",
            id="no-driver",
        ),
        pytest.param(
            "An error occurred while calling o2.save.\n: org.apache.spark.SparkException:"
            " Job aborted: Lost task 0.0 in stage 1.0 (TID 1) (x executor driver): java."
            "sql.BatchUpdateException: Batch entry 0 with the values ('secret') was"
            " aborted"
            + STACK
            + "\nCaused by: org.postgresql.util.PSQLException: ERROR:"
            ' null value in column "a"\n  Detail: Failing row contains (secret).',
            'ERROR: null value in column "a"',
            id="database",
        ),
        pytest.param(
            "An error occurred while calling o490.parquet.\n: org.apache.spark."
            "SparkException: Job aborted due to stage failure: Task 0 in stage 45.0 "
            "failed 1 times, most recent failure: Lost task 0.0 in stage 45.0 (TID 80) "
            "(localhost executor driver): java.io.IOException: Mkdirs failed to create "
            "file:/proc/x (exists=false, cwd=file:/tmp)" + STACK,
            "mkdirs failed to create file:/proc/x (exists=false, cwd=file:/tmp)",
            id="lost-task",
        ),
        pytest.param(
            "An exception was thrown from the Python worker:\nTraceback (most recent "
            'call last):\n  File "/x.py", line 56, in boom\n    raise OSError()\n'
            "OSError: [Errno 28] No space left on device",
            "OSError: [Errno 28] No space left on device",
            id="python",
        ),
        pytest.param(
            "\n  An exception was thrown from the Python worker.\n[PYTHON_EXCEPTION] "
            "An exception: Traceback (most recent call last):\n  File x\n"
            "ValueError: bad\n\n\tat org.apache" + STACK + "\n\nJVM stacktrace:\nX",
            "ValueError: bad",
            id="python-connect",
        ),
        pytest.param(
            "[STREAM_FAILED] Query terminated with exception: Traceback (most recent "
            'call last):\n  File "/x.py", line 5, in boom\nValueError: bad\n'
            "=== Streaming Query ===\nIdentifier: [id = 1]\nSTATE: ACTIVE",
            "ValueError: bad",
            id="stream",
        ),
        pytest.param(
            "[STREAM_FAILED] Query q [id = 1-a, runId = 2-b] terminated with exception: "
            "No space left SQLSTATE: XXKST\n=== Streaming Query ===\nIdentifier: q "
            "[id = 1-a]\nLogical Plan:\nProject [ID] x\n",
            "no space left",
            id="stream-java",
        ),
        pytest.param(
            "[STREAM_FAILED] Query [id = 1-a, runId = 2-b] terminated with exception: "
            "[FAILED_READ_FILE.NO_HINT] Can't read x. SQLSTATE: KD001\n=== Streaming "
            "Query ===\nIdentifier: [id = 1-a]\n\nJVM stacktrace:\nX"
            + STACK
            + "Caused "
            "by: java.io.IOException: It is torn" + STACK,
            "can't read x: it is torn (FAILED_READ_FILE.NO_HINT)",
            id="stream-connect",
        ),
        pytest.param(
            "Schema must be specified when creating a streaming source DataFrame. If "
            "some files already exist, you may be able to create a static DataFrame.",
            "a stream of files has no schema of its own: set schema, as in 'id long, "
            "title string'",
            id="stream-without-schema",
        ),
        pytest.param(
            "[STREAM_FAILED] Query [id = 1] terminated with exception: Option 'basePath' "
            "must be a directory SQLSTATE: XXKST\n=== Streaming Query ===\nIdentifier: q",
            "the path of a stream is a file, expected a folder",
            id="stream-of-a-file",
        ),
        pytest.param(
            "[STREAM_FAILED] Query [id = 1] terminated with exception: Wrong basePath /b "
            "for the root path: file:/a/x SQLSTATE: XXKST\n=== Streaming Query ===\nI: q",
            "the state belongs to a stream from file:/a/x, not from /b: set that path, or "
            "another state",
            id="stream-from-elsewhere",
        ),
        pytest.param(
            "[UNABLE_TO_INFER_SCHEMA] Unable to infer schema for JSON. It must be "
            "specified manually. SQLSTATE: 42KD9",
            "there is no file in the path to infer the schema of JSON from: set schema, "
            "as in 'id long, title string', or another path (UNABLE_TO_INFER_SCHEMA)",
            id="empty-folder",
        ),
        pytest.param(
            "Job aborted due to stage failure: Task 0 failed 1 times, most recent "
            "failure: Lost task 0.0 in stage 0.0 (TID 0) (localhost executor driver): "
            "org.apache.spark.SparkException: Python worker exited unexpectedly "
            "(crashed). Consider setting 'x'" + STACK + "Caused by: "
            "java.net.SocketException: Connection reset" + STACK,
            "a Python process of Spark's executors crashed, or was killed: they may "
            "have too little memory",
            id="killed-python",
        ),
        pytest.param(
            "[TASK_WRITE_FAILED] Task failed while writing rows to file:/o. SQLSTATE: "
            "58030" + STACK + "Caused by: java.io.IOException: No space left" + STACK,
            "task failed while writing rows to file:/o: no space left "
            "(TASK_WRITE_FAILED)",
            id="vague",
        ),
        pytest.param(
            "An exception was thrown from the Python worker:\nTraceback (most recent "
            'call last):\n  File "/x.py", line 56, in boom\n    loads()\n'
            "ModuleNotFoundError: No module named 'etlstage'",
            "etlstage is not on Spark's executors, which have no module 'etlstage': "
            "call etlstage.spark.ship(spark) before transform(), or install it there",
            id="not-shipped",
        ),
        pytest.param(
            "An exception was thrown from the Python worker:\nTraceback (most recent "
            'call last):\n  File "/x.py", line 56, in boom\n    import mine\n'
            "ModuleNotFoundError: No module named 'mine'",
            "ModuleNotFoundError: No module named 'mine'",
            id="not-ours",
        ),
        pytest.param(
            "An exception was thrown from the Python worker:\nTraceback (most recent "
            'call last):\n  File "/x.py", line 56, in boom\n    raise E()\n'
            "pyspark.errors.exceptions.base.PySparkRuntimeError: "
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9 than "
            "that in driver: 3.12, PySpark cannot run with different minor versions.\n"
            "Please check environment variables PYSPARK_PYTHON and "
            "PYSPARK_DRIVER_PYTHON are correctly set.",
            "Spark's executors run Python 3.9, this is Python 3.12: set "
            "spark.pyspark.python to a Python 3.12 on the executors",
            id="other-python",
        ),
        pytest.param("", "RuntimeError", id="nothing"),
    ],
)
def test_one_line_is_cut_out(text: str, line: str) -> None:
    """Each form of Spark's exceptions gives the line that a user can act on."""
    assert explain(RuntimeError(text)) == line


def test_unknown_problem_names_the_log() -> None:
    """Spark's log may have more on a problem without a name; it is named only once."""
    line = explain(RuntimeError("Something broke.\nmore"), Path("/log/s.log"))
    assert line == "something broke; Spark's log is /log/s.log"
    assert explain(SparkUnavailable(line), Path("/log/s.log")) == line


@pytest.mark.parametrize(
    "raised", [ConnectionRefusedError(111, "x"), BrokenPipeError()]
)
def test_jvm_that_has_ended_is_reported(raised: OSError) -> None:
    """Whichever error tells of it, even one that is raised by formatting another."""

    class Unknown(Exception):
        def __str__(self) -> str:
            raise raised

    for error in (raised, Unknown()):
        text = explain(error, Path("/logs/spark.log"))
        assert text == "the JVM of Spark has exited; Spark's log is /logs/spark.log"


@pytest.mark.parametrize(
    "said",
    [
        "An error occurred while calling o38.read",
        "org.apache.spark.sql.SparkSession does not exist in the JVM",
    ],
)
def test_call_that_the_jvm_did_not_outlive(said: str) -> None:
    """A Py4J error without a trace means so; a trace has more (issue 14)."""
    text = explain(Py4JError(said), Path("/logs/spark.log"))
    assert text == "the JVM of Spark has exited; Spark's log is /logs/spark.log"
    traced = Py4JError(f"{said}.\n: java.lang.IllegalStateException: no{STACK}")
    assert "no" in explain(traced)
    assert "exited" not in explain(traced)


def test_schema_that_the_jvm_did_not_outlive() -> None:
    """PySpark takes any failure there for a wrong data type (issue 14)."""
    said = "An error occurred while calling o54.schema"
    error = PySparkRuntimeError(
        errorClass="CANNOT_PARSE_DATATYPE", messageParameters={"msg": said}
    )
    assert explain(error) == "the JVM of Spark has exited"
