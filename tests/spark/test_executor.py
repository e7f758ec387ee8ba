from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.spark import transform
from etlstage.spark.problem import explain
from etlstage.supervisor import ErrorPolicy, Stage, Timeouts

pytestmark = pytest.mark.spark

HANGING = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
own = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"
child = subprocess.Popen([sys.executable, "-S", "-c", own], start_new_session=True)
name = f"{sys.argv[1]}/{os.getpid()}"
with open(name + ".part", "w") as file:
    print(os.getppid(), os.getpid(), child.pid, file=file)
os.rename(name + ".part", name + ".pids")
time.sleep(3600)
"""


def stage(function: str, **options: object) -> Stage:
    """Return a stage whose worker answers with ``function`` of ``m``."""
    program = f"import os; from etlstage import worker; worker.transform({function})"
    command = (sys.executable, "-c", program)
    return Stage(name="t", command=command, **options)  # type: ignore[arg-type]


def failure(frame: DataFrame) -> str:
    """Return why ``frame`` can't be computed."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - its text is the point
        frame.collect()
    return explain(raised.value)


def hanging(place: Path, **options: object) -> Stage:
    """Return a stage whose worker tells its pids in a file, and never answers."""
    command = (sys.executable, "-S", "-c", HANGING, str(place))
    return Stage(name="t", command=command, **options)  # type: ignore[arg-type]


def wait_for_pids(place: Path, count: int = 1) -> list[int]:
    """Return the pids that ``count`` workers told: each host's, its own, its child's."""
    deadline = time.monotonic() + 60
    while len(found := list(place.glob("*.pids"))) < count:
        assert time.monotonic() < deadline, "no worker was started"
        threading.Event().wait(0.05)
    return [int(pid) for path in found for pid in path.read_text().split()]


def are_gone(pids: list[int], seconds: float = 20) -> bool:
    """Return whether the processes end in time."""
    deadline = time.monotonic() + seconds
    while any(map(runs, pids)):
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.05)
    return True


def runs(pid: int) -> bool:
    """Return whether a process is there, and no zombie."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


def test_rows_pass_through_workers_in_order(spark: SparkSession) -> None:
    """Each partition has a worker, its rows keep their order, more than one batch."""
    frame = spark.range(0, 45_000, 1, 3).selectExpr("concat('row ', id) as text")
    made = transform(frame, stage("lambda m: (m.upper(),)"))
    assert made.schema.simpleString() == "struct<value:string>"
    assert [row.value for row in made.collect()] == [f"ROW {n}" for n in range(45_000)]


def test_reply_of_none_or_many_becomes_rows_with_what_is_kept(
    spark: SparkSession,
) -> None:
    """Kept columns stand beside every row that their message became."""
    frame = spark.range(0, 25_000, 1, 2).selectExpr(
        "id", "named_struct('a', id, 'b', null) as nested", "repeat('x', id % 4) as m"
    )
    made = transform(
        frame, stage("lambda m: [m] * len(m)"), message="m", keep=["id", "nested"]
    )
    assert made.columns == ["id", "nested", "value"]
    assert [(row.id, row.nested.a, row.value) for row in made.collect()] == [
        (n, n, "x" * (n % 4)) for n in range(25_000) for _ in range(n % 4)
    ]


def test_binary_message_gives_binary_rows(spark: SparkSession) -> None:
    """What is no text stays as it is."""
    payloads = [b"", b"\xff\xfe", b"x" * 70_000]
    frame = spark.createDataFrame([(bytearray(p),) for p in payloads], "m binary")
    made = transform(frame, stage("lambda m: (m,)"))
    assert made.schema.simpleString() == "struct<value:binary>"
    assert [bytes(row.value) for row in made.collect()] == payloads
    made = transform(frame, stage("lambda m: (m,)"), schema="raw binary")
    assert [bytes(row.raw) for row in made.collect()] == payloads


def test_replies_in_json_become_typed_columns(spark: SparkSession) -> None:
    """The message is the row in JSON by default, and so is the reply by schema."""
    frame = spark.range(0, 4, 1, 2).selectExpr("id", "id * 0.5D as half")
    made = transform(frame, stage("lambda m: (m,)"), schema="half double")
    assert made.schema.simpleString() == "struct<half:double>"
    assert [row.half for row in made.collect()] == [0.0, 0.5, 1.0, 1.5]
    made = transform(
        frame, stage("lambda m: (m,)"), schema="half double", keep=["id"]
    ).where("half > 0.5")
    assert sorted(made.groupBy("id").count().collect()) == [(2, 1), (3, 1)]


def test_nothing_runs_before_it_is_asked_for(spark: SparkSession) -> None:
    """A program that is not there is missed by the job, and not by the plan."""
    frame = spark.range(0, 2, 1, 1).selectExpr("cast(id as string)")
    made = transform(frame, Stage(name="t", command=("no-such-program",)))
    assert "there is no program 'no-such-program' on PATH" in failure(made)
    empty = frame.where("false")
    assert transform(empty, stage("lambda m: (m,)")).collect() == []


def test_message_that_fails_fails_its_task(spark: SparkSession) -> None:
    """The error says which message, where, and what the worker's fate was."""
    frame = spark.range(0, 9, 1, 1).selectExpr("cast(id as string)")
    policy = ErrorPolicy(retries=0)
    failing = stage("lambda m: os._exit(3) if m == b'5' else (m,)", on_error=policy)
    text = failure(transform(frame, failing))
    assert "exited with status 3" in text
    assert "(message 6 of partition 0)" in text


def test_reply_that_does_not_fit_fails_its_task(spark: SparkSession) -> None:
    """Neither what is no text passes for text, nor any JSON for any schema."""
    frame = spark.range(0, 1, 1, 1).selectExpr("cast(id as string)")
    text = failure(transform(frame, stage("lambda m: (bytes([255]),)")))
    assert "stage t: a reply is not UTF-8 (message 1 of partition 0)" in text
    text = failure(transform(frame, stage("lambda m: (m,)"), schema="n int"))
    assert "stage t: a reply does not fit the schema struct<n:int>" in text


def test_message_that_can_not_be_sent_fails_its_task(spark: SparkSession) -> None:
    """A null is told from nothing, and a marker is named."""
    frame = spark.createDataFrame([("a",), (None,)], "m string").coalesce(1)
    text = failure(transform(frame, stage("lambda m: (m,)")))
    assert "stage t: message is null in 1 of 2 rows" in text
    frame = spark.createDataFrame([("a\nb",)], "m string")
    text = failure(transform(frame, stage("lambda m: (m,)")))
    assert r"message contains marker eom '\012' at offset 1" in text


def test_stage_that_does_not_fit_is_refused(spark: SparkSession) -> None:
    """At the call, not in a task."""
    frame = spark.range(1).selectExpr("id", "cast(id as string) as m")
    load = stage("", kind=StageKind.LOAD)
    with pytest.raises(ConfigError, match="of kind load, expected transform"):
        transform(frame, load)
    batches = stage("", mode=Mode.BATCH_SUPERVISOR)
    with pytest.raises(ConfigError, match="t answers in batches: which of their rows"):
        transform(frame, batches, keep=["id"])
    with pytest.raises(ConfigError, match="column 'id' would be there twice"):
        transform(frame, stage(""), schema="id int", keep=["id"])
    with pytest.raises(ConfigError, match="schema 'int' names no columns"):
        transform(frame, stage(""), schema="int", message="m")
    with pytest.raises(TypeError, match="message 'id' is bigint, expected string"):
        transform(frame, stage(""), message="id")


def test_worker_does_not_see_secrets_of_spark(spark: SparkSession) -> None:
    """Its environment has what it needs, and nothing by which to reach Spark."""
    frame = spark.range(0, 1, 1, 1).selectExpr("cast(id as string)")
    made = transform(frame, stage("lambda m: (name.encode() for name in os.environ)"))
    names = {row.value for row in made.collect()}
    assert "PATH" in names
    assert not [n for n in names if "SECRET" in n or "SPARK" in n or n[:4] == "JAVA"]


def test_limit_leaves_no_worker_behind(spark: SparkSession, tmp_path: Path) -> None:
    """Whoever has enough rows ends the task, and that ends its worker."""
    frame = spark.range(0, 10**9, 1, 1).selectExpr("cast(id as string)")
    made = transform(frame, stage("lambda m: (b'%d' % os.getpid(),)"))
    (row,) = made.limit(1).collect()
    assert are_gone([int(row.value)])


@pytest.mark.parametrize("end", ["kill -9", "cancel"])
def test_nothing_outlives_the_task(
    spark: SparkSession, tmp_path: Path, end: str
) -> None:
    """Neither the worker nor what it has started, when Spark's worker is killed."""
    frame = spark.range(0, 10, 1, 1).selectExpr("cast(id as string)")
    made = transform(frame, hanging(tmp_path, timeout=Timeouts(message=None)))
    errors: list[str] = []
    job = threading.Thread(target=lambda: errors.append(failure(made)))
    job.start()
    host, *pids = wait_for_pids(tmp_path)
    assert all(map(runs, [host, *pids]))
    if end == "kill -9":
        os.kill(host, signal.SIGKILL)
    else:
        spark.sparkContext.cancelAllJobs()
    assert are_gone(pids)
    job.join(60)
    assert errors


def test_nothing_outlives_a_session_over_connect(
    program: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The same over Connect, and the end of its server in the middle of a task."""
    done = program(
        f"""
        import pathlib, sys, threading
        from pyspark.sql import SparkSession
        from etlstage.spark import transform
        from etlstage.supervisor import Stage, Timeouts

        UPPER = "from etlstage import worker; worker.transform(lambda m: (m.upper(),))"
        spark = SparkSession.builder.remote("local[2]").getOrCreate()
        frame = spark.range(0, 3, 1, 2).selectExpr("id", "concat('row ', id) as text")
        stage = Stage(name="t", command=(sys.executable, "-c", UPPER))
        made = transform(frame, stage, message="text", keep=["id"])
        print([tuple(row) for row in made.collect()])
        made = transform(frame, stage, message="to_json(struct(text))",
            schema="TEXT string")
        print([tuple(row) for row in made.collect()])

        def fail():
            try:
                transform(frame, stage, message="text").collect()
            except BaseException:
                print("failed", flush=True)

        stage = Stage(name="t", timeout=Timeouts(message=None),
            command=(sys.executable, "-S", "-c", {HANGING!r}, {str(tmp_path)!r}))
        threading.Thread(target=fail, daemon=True).start()
        while len(list(pathlib.Path({str(tmp_path)!r}).glob("*.pids"))) < 2:
            threading.Event().wait(0.05)
        spark.stop()
        """,
        PYSPARK_PYTHON=sys.executable,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        "[(0, 'ROW 0'), (1, 'ROW 1'), (2, 'ROW 2')]",
        "[('ROW 0',), ('ROW 1',), ('ROW 2',)]",
    ]
    assert are_gone(wait_for_pids(tmp_path, 2))
