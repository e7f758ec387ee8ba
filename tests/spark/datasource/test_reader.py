from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamReader

from etlstage import Stage, StageKind, WorkerProgram
from etlstage.errors import ConfigError
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.spark import register
from etlstage.spark.datasource.datasource import read_worker
from etlstage.spark.datasource.reader import ranges
from etlstage.stage import OffsetPolicy
from tests.spark.driver import Driver
from tests.spark.jobs import failure
from tests.spark.processes import are_gone

pytestmark = pytest.mark.spark

NUMBERS = "lambda a, b: (b'%d' % n for n in range(a, b))"
TOLD = "lambda: int(open(sys.argv[1]).read())"


def command(program: str, *arguments: object) -> str:
    """Return the command option for a worker that is ``program``."""
    source = f"import os, sys; from etlstage import worker; {program}"
    return json.dumps([sys.executable, "-c", source, *map(str, arguments)])


def numbers(*arguments: object, told: str = "None") -> str:
    """Return the command option for a worker that gives the numbers of a range."""
    call = f"worker.extract_cycle({NUMBERS}, offsets='supervisor', latest={told})"
    return command(call, *arguments)


def read(spark: SparkSession, schema: str = "", /, **options: object) -> DataFrame:
    """Return a DataFrame that the format reads."""
    register(spark)
    reader = spark.read.format("etlstage")
    for name, value in options.items():
        reader = reader.option(name.replace("__", "."), str(value))
    return (reader.schema(schema) if schema else reader).load()


# --- once -------------------------------------------------------------------------


@pytest.mark.any_client
def test_every_partition_of_a_plain_read_has_a_worker(spark: SparkSession) -> None:
    """The worker is given the partition's number."""
    about = "b'%s of %s' % (os.environb[b'ETLSTAGE_PARTITION'],"
    program = f"worker.extract(lambda: [{about} os.environb[b'ETLSTAGE_PARTITIONS'])])"
    frame = read(spark, command=command(program), partitions=3)
    assert frame.schema.simpleString() == "struct<value:string>"
    assert [row.value for row in frame.collect()] == ["0 of 3", "1 of 3", "2 of 3"]
    single = read(spark, command=command(program))
    assert [row.value for row in single.collect()] == ["0 of 1"]


def test_messages_are_columns_of_any_size(spark: SparkSession) -> None:
    """In more than one batch for Spark, and as bytes where asked for."""
    program = "worker.extract(lambda: (b'%d' % n for n in range(25_000)))"
    frame = read(spark, command=command(program))
    assert [row.value for row in frame.collect()] == [str(n) for n in range(25_000)]
    program = "worker.extract(lambda: [b'', bytes([255]), b'x' * 70_000])"
    frame = read(spark, command=command(program), values="binary")
    expected = [b"", b"\xff", b"x" * 70_000]
    assert [bytes(row.value) for row in frame.collect()] == expected
    frame = read(spark, "raw binary", command=command(program))
    assert [bytes(row.raw) for row in frame.collect()] == expected
    text = failure(read(spark, command=command(program)).collect)
    assert "stage extract: message 2 of a partition does not fit" in text
    assert "it is not UTF-8: read it with values=binary" in text


@pytest.mark.any_client
def test_ranges_are_read_in_parallel(spark: SparkSession, tmp_path: Path) -> None:
    """By step or evenly, up to the given end or the worker's latest offset."""
    options = {"command": numbers(), "mode": "cyclic", "start": 5, "end": 25}
    frame = read(spark, **options, step=8)
    assert [int(row.value) for row in frame.collect()] == list(range(5, 25))
    assert frame.selectExpr("spark_partition_id() as p").distinct().count() == 3
    frame = read(spark, **options, step=3, partitions=2)
    assert [int(row.value) for row in frame.collect()] == list(range(5, 25))
    assert frame.selectExpr("spark_partition_id() as p").distinct().count() == 2
    (tmp_path / "end").write_text("7")
    told = {"command": numbers(tmp_path / "end", told=TOLD), "mode": "cyclic"}
    assert [row.value for row in read(spark, **told, start=4).collect()] == list("456")
    assert read(spark, **told, start=7).collect() == []


@pytest.mark.any_client
def test_template_is_the_request(spark: SparkSession) -> None:
    """The worker gets the option's text, with the offsets filled in."""
    program = "worker.extract_cycle(lambda *a: a, offsets='supervisor', "
    program += "parse=lambda request: [request])"
    frame = read(
        spark,
        command=command(program),
        mode="cyclic",
        template="from {start} to {end}",
        end=4,
        step=2,
    )
    assert [row.value for row in frame.collect()] == ["from 0 to 2", "from 2 to 4"]


@pytest.mark.any_client
def test_json_becomes_typed_columns(spark: SparkSession) -> None:
    """Each message is an object; fields that are not in the schema are dropped."""
    documents = [
        {
            "id": 1,
            "title": "a}{b",
            "day": "2020-01-31",
            "tags": ["x"],
            "more": {},
            "counts": {"a": 1},
            "must": {"k": 5},
        },
        {"id": 2, "in": {"n": 0.5, "at": "2020-01-31T01:00:00+01:00"}},
    ]
    program = f"worker.extract(lambda: {[json.dumps(d).encode() for d in documents]})"
    schema = "id int NOT NULL, title string, day date, tags array<string>,"
    schema += " in struct<n: double, at: timestamp>, counts map<string,int>,"
    schema += " must struct<k: int not null>"
    frame = read(spark, schema, command=command(program))
    first, second = frame.selectExpr("*", "string(in.at) as at").collect()
    assert (first.id, first.title, first.tags) == (1, "a}{b", ["x"])
    assert (first.day, first["in"]) == (date(2020, 1, 31), None)
    assert (first.counts, first.must.k, second.must) == ({"a": 1}, 5, None)
    assert (second.id, second.title, second["in"].n) == (2, None, 0.5)
    ids = frame.where("in.at = timestamp'2020-01-31T00:00:00Z'").select("id").collect()
    assert ids == [(2,)]


@pytest.mark.any_client
def test_json_that_does_not_fit_fails_the_task(spark: SparkSession) -> None:
    """It does not become a row of nulls; the error has the message and the reason."""
    program = """worker.extract(lambda: [b'{"id": 1}', b'{"id": "1"}'])"""
    frame = read(spark, "id int", command=command(program))
    text = failure(frame.collect)
    assert "message 2 of a partition does not fit the schema struct<id:int>" in text
    assert "field 'id' is a string that is not of type int" in text


def test_read_that_makes_no_sense_is_refused_before_any_task(
    spark: SparkSession,
) -> None:
    """The driver reports what is wrong."""
    assert "(did you mean 'command'?)" in failure(
        lambda: read(spark, comand="x").collect()
    )
    frame = failure(lambda: read(spark, "m map<int,int>", command="x").collect())
    assert "column 'm' is of type map<int,int>, which can't be read from JSON" in frame
    many = {"command": numbers(), "mode": "cyclic", "end": 10**9, "step": 1}
    text = failure(lambda: read(spark, **many).collect())
    assert "make 1000000000 tasks, expected no more than 10000: raise step" in text
    text = failure(lambda: read(spark, command=numbers(), mode="cyclic").collect())
    assert 'request {"offsets": "latest"} with 0 messages' in text
    assert "set end, or have the worker answer this request" in text


def test_worker_that_fails_fails_the_task(spark: SparkSession) -> None:
    """The error has how the worker ended, and the offsets it was asked for."""
    program = "worker.extract_cycle(lambda a, b: os._exit(3), offsets='supervisor')"
    options = {"command": command(program), "mode": "cyclic", "start": 3, "end": 9}
    text = failure(read(spark, **options, restart__max=0).collect)
    assert "exited with status 3" in text
    assert "(offsets 3 to 9, partition 0)" in text


@pytest.mark.any_client
def test_limit_leaves_no_worker_behind(spark: SparkSession, tmp_path: Path) -> None:
    """A limit ends the task early, and that ends its worker."""
    pid = "open(sys.argv[1], 'w').write(str(os.getpid()))"
    program = f"from itertools import count; {pid}; worker.extract(lambda: (b'%d' % n"
    program += " for n in count()))"
    frame = read(spark, command=command(program, tmp_path / "pid"))
    assert frame.limit(3).count() == 3
    assert are_gone([int((tmp_path / "pid").read_text())])


KILLED = """
import os, sys
from etlstage import worker
def f(start, end):
    for n in range(start, end):
        yield b"%d" % n
        if n == 15_000:
            try:
                os.mkdir(sys.argv[1])
            except FileExistsError:
                continue
            os.kill(os.getpid(), 9)
worker.extract_cycle(f, offsets="supervisor")
"""


def test_read_that_is_retried_gives_the_same_rows(
    retrying: Driver, tmp_path: Path
) -> None:
    """A worker killed in the middle of its range costs an attempt, but no row."""
    worker = json.dumps([sys.executable, "-c", KILLED, str(tmp_path / "killed")])
    same = retrying.run(
        f"""
        from etlstage.spark import register
        register(spark)
        frame = (spark.read.format("etlstage").option("command", {worker!r})
            .option("mode", "cyclic").option("end", "20000").option("step", "20000")
            .option("restart.max", "0").load())
        result = [int(row.value) for row in frame.collect()] == list(range(20_000))
        """
    )
    assert same
    assert (tmp_path / "killed").exists()


def test_ranges_cover_all_and_nothing_twice() -> None:
    """Evenly by partitions, or else by steps; without offsets there are no tasks."""
    for start, end, step, count in (0, 10, 3, None), (-5, 6, 4, 3), (0, 2, 1, 5):
        parts = ranges("e", start, end, step, count)
        covered = [n for part in parts for n in range(part.start or 0, part.end or 0)]
        assert covered == list(range(start, end))
        assert [part.number for part in parts] == list(range(len(parts)))
        assert {part.of for part in parts} == {len(parts)}
    assert [p[2:] for p in ranges("e", 0, 10, 100, 3)] == [(0, 3), (3, 6), (6, 10)]
    assert ranges("e", 4, 4, 1, None) == ranges("e", 4, 4, 1, 2) == []


# --- a stage, without options -----------------------------------------------------


@pytest.mark.any_client
def test_stage_is_read_without_options(spark: SparkSession) -> None:
    """With all settings of the stage."""
    stage = Stage(
        name="fetch",
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.CYCLIC),
        worker=WorkerProgram(command=tuple(json.loads(numbers())), env={"LANG": "C"}),
    )
    offsets = OffsetPolicy(by="supervisor", start=1, end=8, step=2)
    frame = read_worker(spark, stage, offsets=offsets)
    assert sorted(int(row.value) for row in frame.collect()) == list(range(1, 8))
    with pytest.raises(
        ConfigError, match="fetch: mode cyclic and the given offsets don't"
    ):
        read_worker(spark, stage, offsets=OffsetPolicy(by="worker"))
    with pytest.raises(ConfigError, match="of kind transform, expected extract"):
        read_worker(spark, Stage(name="t", worker=("x",)))


# --- as a stream ------------------------------------------------------------------


def stream(spark: SparkSession, **options: object) -> DataStreamReader:
    """Return a reader of a stream."""
    register(spark)
    reader = spark.readStream.format("etlstage").option("mode", "cyclic")
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader


def drain(frame: DataFrame, place: Path) -> list[tuple[int, int]]:
    """Write all rows that exist now; return each batch's id and end offset."""
    writer = (
        frame.writeStream.format("parquet")
        .option("path", str(place / "rows"))
        .option("checkpointLocation", str(place / "checkpoint"))
        .trigger(availableNow=True)
    )
    while True:
        query = writer.start()
        try:
            query.awaitTermination()
            break
        except StreamingQueryException as error:
            # Spark waits only ten seconds for the process, however slow the machine is.
            if "failed to connect back" not in str(error):
                raise
    ends = []
    for progress in query.recentProgress:
        (source,) = progress["sources"]
        end = json.loads(str(source["endOffset"]).replace("'", '"'))
        ends.append((progress["batchId"], end["offset"]))
    return ends


def rows(spark: SparkSession, place: Path) -> list[int]:
    """Return the written rows, sorted."""
    found = spark.read.parquet(str(place / "rows")).collect()
    return sorted(int(row.value) for row in found)


def test_stream_reads_what_is_there_and_goes_on_from_its_checkpoint(
    spark: SparkSession, tmp_path: Path
) -> None:
    """In bounded batches; a second run begins where the first ended."""
    (tmp_path / "end").write_text("10")
    options = {"command": numbers(tmp_path / "end", told=TOLD), "start": 3, "step": 2}
    frame = stream(spark, **options, max_per_batch=4).load()
    assert drain(frame, tmp_path) == [(0, 7), (1, 10)]
    assert rows(spark, tmp_path) == list(range(3, 10))
    (tmp_path / "end").write_text("12")
    assert drain(frame, tmp_path)[0] == (2, 12)
    assert rows(spark, tmp_path) == list(range(3, 12))


@pytest.mark.any_client
def test_batch_that_failed_is_read_again_as_it_was(
    spark: SparkSession, tmp_path: Path
) -> None:
    """With the same offsets, though the worker has more by then."""
    (tmp_path / "end").write_text("6")
    log = "open(sys.argv[2], 'a').write(f'{a} {b}\\n')"
    fail = "os.path.exists(sys.argv[3]) and os._exit(9)"
    function = (
        f"lambda a, b: [b'%d' % n for n in range(a, b) if {log} and not ({fail})]"
    )
    call = f"worker.extract_cycle({function}, offsets='supervisor', latest={TOLD})"
    places = [tmp_path / "end", tmp_path / "log", tmp_path / "fail"]
    options = {"command": command(call, *places), "step": 6, "restart.delay": "10ms"}
    frame = stream(spark, **options).load()
    (tmp_path / "fail").touch()
    text = failure(lambda: drain(frame, tmp_path))
    assert "exited with status 9" in text
    assert set((tmp_path / "log").read_text().splitlines()) == {"0 6"}
    (tmp_path / "fail").unlink()
    (tmp_path / "log").write_text("")
    (tmp_path / "end").write_text("9")
    assert drain(frame, tmp_path)[0] == (0, 6)
    assert set((tmp_path / "log").read_text().splitlines()) == {"0 6", "6 9"}
    assert rows(spark, tmp_path) == list(range(9))


@pytest.mark.any_client
def test_worker_may_report_where_a_stream_begins(
    spark: SparkSession, tmp_path: Path
) -> None:
    """And a stream with an end needs no latest offset of the worker."""
    call = f"worker.extract_cycle({NUMBERS}, offsets='supervisor', initial=lambda: 5)"
    frame = stream(spark, command=command(call), start="initial", end=8).load()
    assert drain(frame, tmp_path) == [(0, 8)]
    assert rows(spark, tmp_path) == [5, 6, 7]


def test_stream_that_makes_no_sense_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A plain worker has no offsets, and a latest offset that falls back is a loss."""
    frame = stream(spark, command=numbers()).option("mode", "plain").load()
    text = failure(lambda: drain(frame, tmp_path / "a"))
    assert "of mode plain, expected cyclic: a stream is read by offsets" in text
    (tmp_path / "end").write_text("5")
    frame = stream(spark, command=numbers(tmp_path / "end", told=TOLD)).load()
    drain(frame, tmp_path)
    (tmp_path / "end").write_text("3")
    text = failure(lambda: drain(frame, tmp_path))
    assert "the latest offset is 3, but 5 was reached before" in text
