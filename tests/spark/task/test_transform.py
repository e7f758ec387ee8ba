from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.spark import transform
from etlstage.stage import ErrorPolicy, RestartPolicy, Stage, Timeouts
from tests.spark.jobs import failure
from tests.spark.processes import HANGING, are_gone, runs, wait_for_pids

pytestmark = pytest.mark.spark


def stage(function: str, **options: object) -> Stage:
    """Return a stage whose worker replies with ``function`` of ``m``."""
    program = f"import os; from etlstage import worker; worker.transform({function})"
    command = (sys.executable, "-c", program)
    return Stage(name="t", worker=command, **options)  # type: ignore[arg-type]


def hanging(place: Path, **options: object) -> Stage:
    """Return a stage whose worker writes its pids to a file, and never replies."""
    (program := place / "hanging.py").write_text(HANGING)
    command = (sys.executable, "-S", str(program), str(place))
    return Stage(name="t", worker=command, **options)  # type: ignore[arg-type]


def test_rows_pass_through_workers_in_order(spark: SparkSession) -> None:
    """Each partition has a worker, and its rows keep their order across batches."""
    frame = spark.range(0, 45_000, 1, 3).selectExpr("concat('row ', id) as text")
    made = transform(frame, stage("lambda m: (m.upper(),)"))
    assert made.schema.simpleString() == "struct<value:string>"
    assert [row.value for row in made.collect()] == [f"ROW {n}" for n in range(45_000)]


@pytest.mark.any_client
def test_reply_of_none_or_many_becomes_rows_with_what_is_kept(
    spark: SparkSession,
) -> None:
    """Each result has the kept columns of its message's row."""
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


@pytest.mark.any_client
def test_binary_message_gives_binary_rows(spark: SparkSession) -> None:
    """Bytes that are no text are unchanged."""
    payloads = [b"", b"\xff\xfe", b"x" * 70_000]
    frame = spark.createDataFrame([(bytearray(p),) for p in payloads], "m binary")
    made = transform(frame, stage("lambda m: (m,)"))
    assert made.schema.simpleString() == "struct<value:binary>"
    assert [bytes(row.value) for row in made.collect()] == payloads
    made = transform(frame, stage("lambda m: (m,)"), schema="raw binary")
    assert [bytes(row.raw) for row in made.collect()] == payloads


@pytest.mark.any_client
def test_replies_in_json_become_typed_columns(spark: SparkSession) -> None:
    """By default a message is the row as JSON; with a schema, so is the reply."""
    frame = spark.range(0, 4, 1, 2).selectExpr("id", "id * 0.5D as half")
    made = transform(frame, stage("lambda m: (m,)"), schema="half double")
    assert made.schema.simpleString() == "struct<half:double>"
    assert [row.half for row in made.collect()] == [0.0, 0.5, 1.0, 1.5]
    made = transform(
        frame, stage("lambda m: (m,)"), schema="half double", keep=["id"]
    ).where("half > 0.5")
    assert sorted(made.groupBy("id").count().collect()) == [(2, 1), (3, 1)]


def test_nothing_runs_before_it_is_asked_for(spark: SparkSession) -> None:
    """A missing program fails the job, not the plan."""
    frame = spark.range(0, 2, 1, 1).selectExpr("cast(id as string)")
    made = transform(frame, Stage(name="t", worker=("no-such-program",)))
    assert "there is no program 'no-such-program' on PATH" in failure(made.collect)
    empty = frame.where("false")
    assert transform(empty, stage("lambda m: (m,)")).collect() == []


def test_message_that_fails_fails_its_task(spark: SparkSession) -> None:
    """The error has the message, its partition, and how the worker ended."""
    frame = spark.range(0, 9, 1, 1).selectExpr("cast(id as string)")
    policy = ErrorPolicy(retries=0)
    failing = stage("lambda m: os._exit(3) if m == b'5' else (m,)", on_error=policy)
    text = failure(transform(frame, failing).collect)
    assert "exited with status 3" in text
    assert "(message 6 of partition 0)" in text


def test_errors_have_a_column(spark: SparkSession) -> None:
    """With kept columns; a reply that does not fit the schema is an error, too."""
    frame = spark.range(0, 30, 1, 2).selectExpr("id", "cast(id as string) as m")
    function = (
        "lambda m: (b'{}' if m == b'7' else b'{\"n\": %d}' % (100 // (int(m) - 5)),)"
    )
    policy = ErrorPolicy(retries=0)
    made = transform(
        frame,
        stage(function, on_error=policy),
        message="m",
        schema="n int",
        keep=["id"],
        errors="column",
    )
    assert made.schema.simpleString() == "struct<id:bigint,n:int,error:string>"
    found = {row.id: (row.n, row.error) for row in made.collect()}
    assert found.pop(5) == (
        None,
        "ZeroDivisionError: integer division or modulo by zero",
    )
    assert found.pop(7) == (
        None,
        "stage t: a reply does not fit the schema struct<n:int>",
    )
    assert found == {n: (100 // (n - 5), None) for n in range(30) if n not in (5, 7)}
    made = transform(frame, stage(function), message="m", errors="column")
    assert made.columns == ["value", "error"]
    assert [row.value for row in made.where("error is not null").collect()] == [None]


TWICE = """
import sys
if sys.argv[1]:
    print(sys.argv[1], flush=True)
for line in sys.stdin:
    print(line, end="\\0\\0" if int(line) % 100 == 99 else "\\0", flush=True)
"""


@pytest.mark.any_client
def test_no_value_comes_into_another_row(spark: SparkSession) -> None:
    """A worker that replies twice, or greets, can't shift later replies (issue 10)."""
    frame = spark.range(0, 400, 1, 2).selectExpr("id", "cast(id as string) as m")
    command = (sys.executable, "-c", TWICE)
    again = RestartPolicy(delay=0.01)
    twice = Stage(name="t", worker=(*command, ""), restart=again)
    made = transform(frame, twice, message="m", keep=["id"], errors="column").collect()
    found = {row.id: row.value for row in made if row.error is None}
    assert {row.id for row in made} - set(found) == {99, 199, 299, 399}
    assert found == {n: str(n) for n in range(400) if n % 100 != 99}
    assert all("1 reply too many" in row.error for row in made if row.error)
    greeting = Stage(
        name="t", worker=(*command, "hello"), restart=RestartPolicy(max=1, delay=0.01)
    )
    text = failure(transform(frame, greeting, message="m").collect)
    assert "wrote unsolicited output: hello" in text


def test_column_of_errors_must_be_the_only_one(spark: SparkSession) -> None:
    """Otherwise the columns could not be told apart."""
    frame = spark.range(1).selectExpr("id as error", "cast(id as string) as m")
    with pytest.raises(ConfigError, match="'error' would appear twice: errors='col"):
        transform(frame, stage(""), message="m", keep=["error"], errors="column")
    with pytest.raises(ConfigError, match="'error' would appear twice: errors='col"):
        transform(frame, stage(""), message="m", schema="error int", errors="column")
    with pytest.raises(ConfigError, match="errors is 'row', expected 'column' or None"):
        transform(frame, stage(""), message="m", errors="row")  # type: ignore[arg-type]


def test_columns_that_differ_in_case_alone_are_refused(spark: SparkSession) -> None:
    """For Spark they are one column, unless its session minds case (issue 23)."""
    frame = spark.range(1).selectExpr("id as n")
    one = partial(transform, frame, stage(""), keep=["n"], schema="N long")
    two = partial(transform, frame, stage(""), schema="Error string", errors="column")
    with pytest.raises(ConfigError, match="'n' would appear twice, also as 'N': it is"):
        one()
    with pytest.raises(
        ConfigError, match=r"'Error' would .*, also as 'error': errors="
    ):
        two()
    spark.conf.set("spark.sql.caseSensitive", "TRUE")
    try:
        assert one().columns == ["n", "N"]
        assert two().columns == ["Error", "error"]
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


def test_column_twice_within_keep_or_schema_is_refused(spark: SparkSession) -> None:
    """By us, who name the argument, and not by Spark (issue 23)."""
    frame = spark.range(1).selectExpr("id as n")
    with pytest.raises(ConfigError, match="'n' would appear twice: keep has it twice"):
        transform(frame, stage(""), keep=["n", "n"])
    with pytest.raises(
        ConfigError, match=r"'n' would .*, also as 'N': schema has it tw"
    ):
        transform(frame, stage(""), schema="n long, i int, N long")


@pytest.mark.parametrize("schema", ["", StructType()])
def test_schema_without_columns_is_refused(
    spark: SparkSession, schema: str | StructType
) -> None:
    """Its rows would have no values (issue 23)."""
    with pytest.raises(ConfigError, match="schema '' names no columns, expected 'id "):
        transform(spark.range(1), stage(""), schema=schema)


@pytest.mark.any_client
def test_reply_that_does_not_fit_fails_its_task(spark: SparkSession) -> None:
    """Invalid UTF-8 is not taken for text, nor any JSON for any schema."""
    frame = spark.range(0, 1, 1, 1).selectExpr("cast(id as string)")
    text = failure(transform(frame, stage("lambda m: (bytes([255]),)")).collect)
    assert "stage t: a reply is not UTF-8 (message 1 of partition 0)" in text
    text = failure(transform(frame, stage("lambda m: (m,)"), schema="n int").collect)
    assert "stage t: a reply does not fit the schema struct<n:int>" in text


@pytest.mark.any_client
def test_message_that_can_not_be_sent_fails_its_task(spark: SparkSession) -> None:
    """A null is not taken for an empty message; a marker is named."""
    frame = spark.createDataFrame([("a",), (None,)], "m string").coalesce(1)
    text = failure(transform(frame, stage("lambda m: (m,)")).collect)
    assert "stage t: message is null in 1 of 2 rows" in text
    frame = spark.createDataFrame([("a\nb",)], "m string")
    text = failure(transform(frame, stage("lambda m: (m,)")).collect)
    assert r"message contains marker eom '\012' at offset 1" in text


def test_stage_that_does_not_fit_is_refused(spark: SparkSession) -> None:
    """The call raises, not a task."""
    frame = spark.range(1).selectExpr("id", "cast(id as string) as m")
    load = stage("", kind=StageKind.LOAD)
    with pytest.raises(ConfigError, match="of kind load, expected transform"):
        transform(frame, load)
    batches = stage("", dialect=MarkerDialect(mode=Mode.BATCH_SUPERVISOR))
    with pytest.raises(ConfigError, match="t answers in batches: outputs"):
        transform(frame, batches, keep=["id"])
    with pytest.raises(
        ConfigError, match=r"keep is the string 'id', .* list: \['id'\]"
    ):
        transform(frame, stage(""), message="m", keep="id")
    with pytest.raises(ConfigError, match="column 'id' would appear twice"):
        transform(frame, stage(""), schema="id int", keep=["id"])
    with pytest.raises(ConfigError, match="schema 'int' names no columns"):
        transform(frame, stage(""), schema="int", message="m")
    with pytest.raises(TypeError, match="message 'id' is bigint, expected string"):
        transform(frame, stage(""), message="id")


def test_input_columns_of_one_name_are_refused(spark: SparkSession) -> None:
    """A JSON parser would keep one value; ``a`` and ``A`` are two keys (issue 23)."""
    frame = spark.range(1).selectExpr("id as a", "id + 1 as a")
    with pytest.raises(TypeError, match="column 'a' appears 2 times, but JSON can"):
        transform(frame, stage(""))
    assert transform(frame, stage(""), message="'m'").columns == ["value"]
    frame = frame.toDF("a", "A")
    assert transform(frame, stage("")).columns == ["value"]


@pytest.mark.any_client
def test_worker_does_not_see_secrets_of_spark(spark: SparkSession) -> None:
    """Its environment has what it needs, but nothing that gives access to Spark."""
    frame = spark.range(0, 1, 1, 1).selectExpr("cast(id as string)")
    made = transform(frame, stage("lambda m: (name.encode() for name in os.environ)"))
    names = {row.value for row in made.collect()}
    assert "PATH" in names
    assert not [n for n in names if "SECRET" in n or "SPARK" in n or n[:4] == "JAVA"]
    assert not [n for n in names if "TOKEN" in n]


def test_limit_leaves_no_worker_behind(spark: SparkSession, tmp_path: Path) -> None:
    """A limit ends the task early, and that ends its worker."""
    frame = spark.range(0, 10**9, 1, 1).selectExpr("cast(id as string)")
    made = transform(frame, stage("lambda m: (b'%d' % os.getpid(),)"))
    (row,) = made.limit(1).collect()
    assert are_gone([int(row.value)])


@pytest.mark.parametrize("end", ["kill -9", "cancel"])
@pytest.mark.any_client
def test_nothing_outlives_the_task(
    spark: SparkSession, tmp_path: Path, end: str
) -> None:
    """Neither the worker nor its child, if Spark's worker is killed or cancelled."""
    frame = spark.range(0, 10, 1, 1).selectExpr("cast(id as string)")
    made = transform(frame, hanging(tmp_path, timeout=Timeouts(message=None)))
    errors: list[str] = []
    job = threading.Thread(target=lambda: errors.append(failure(made.collect)))
    job.start()
    host, *pids = wait_for_pids(tmp_path)
    assert all(map(runs, [host, *pids]))
    if end == "kill -9":
        os.kill(host, signal.SIGKILL)
    else:
        spark.interruptAll()
    assert are_gone(pids)
    job.join(60)
    assert errors


@pytest.mark.any_client
def test_worker_that_hangs_is_named(spark: SparkSession, tmp_path: Path) -> None:
    """It is replaced after its deadline, as is the next; then the task fails."""
    frame = spark.range(0, 10, 1, 1).selectExpr("cast(id as string)")
    policy = ErrorPolicy(retries=1)
    timeout = Timeouts(message=1, stop=0.2)
    hangs = hanging(tmp_path, timeout=timeout, on_error=policy)
    text = failure(transform(frame, hangs).collect)
    assert "did not answer a message within 1 s" in text
    # It reads nothing, so makes no progress: the limit of restarts ends the stage.
    assert "restarts without progress" in text
    assert "(message 1 of partition 0)" in text
    pids = wait_for_pids(tmp_path, 2)
    assert are_gone([pid for n, pid in enumerate(pids) if n % 3])
