"""Engine ``spark`` gives the same results from the same file, on executors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from pyspark.sql import SparkSession

from etlstage.errors import SinkFailed, SourceFailed, StageError
from etlstage.pipeline import DeadLetter, Pipeline, Report
from etlstage.pipeline.dead_letter.files import letter_files, read_letters
from etlstage.spark.dataframe import sink as sink_module
from tests.spark.jobs import running
from tests.spark.processes import HANGING, are_gone, wait_for_pids

pytestmark = [pytest.mark.spark, pytest.mark.anyio]

WORKER = """\
import json, os, sys
from etlstage import worker

def clean(message):
    row = json.loads(message)
    if row["id"] == DIES:
        os._exit(3)
    for _ in range(row["id"] % 3):
        yield json.dumps({"id": row["id"], "text": row["text"].upper()}).encode()

DIES = int(sys.argv[1])
worker.transform(clean)
"""
LOAD = """\
import os, sys
from etlstage import worker
file = open(f"{sys.argv[1]}/loaded-{os.getpid()}", "ab", buffering=0)
worker.load(lambda message: file.write(message + b"\\n") and None)
"""
FILE = """\
name: p
engine: {engine}
extract:
  spark: {{format: json, path: in.ndjson, schema: "id long, text string"{source}}}
transform:
  - name: clean
    worker: {{command: [python, worker.py, "{dies}"]}}
    restart: {{delay: 10ms}}
    {stage}
  - name: count
    worker: {{command: [sh, -c, 'while IFS= read -r x; do printf "%s\\n\\0" "$$x"; done']}}
load:
  spark: {{format: parquet, path: out-{engine}, schema: "{schema}"}}
  {load}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a pipeline with 3,000 rows of input in three files."""

    def write(
        engine: str = "spark",
        *,
        source: str = "",
        dies: int = -1,
        stage: str = "",
        schema: str = "id long NOT NULL, text string",
        load: str = "",
    ) -> Path:
        (tmp_path / "worker.py").write_text(WORKER)
        (tmp_path / "in.ndjson").mkdir(exist_ok=True)
        for part in range(3):
            rows = (
                {"id": n, "text": f"row {n}"}
                for n in range(part * 1000, part * 1000 + 1000)
            )
            lines = "\n".join(map(json.dumps, rows))
            (tmp_path / "in.ndjson" / f"{part}.json").write_text(lines)
        path = tmp_path / f"{engine}.yaml"
        text = FILE.format(
            engine=engine,
            source=source,
            dies=dies,
            stage=stage,
            schema=schema,
            load=load,
        )
        path.write_text(text)
        return path

    return write


async def run(path: Path, spark: SparkSession) -> Report:
    """Run a pipeline, with a timeout."""
    with anyio.fail_after(120):
        return await Pipeline.from_yaml(path, spark=spark).run()


def letters(folder: Path) -> list[DeadLetter]:
    """Return the dead letters in the state of pipeline ``p``."""
    found = []
    for path in letter_files(folder / ".etlstage" / "p"):
        for letter in read_letters(path):
            assert isinstance(letter, DeadLetter)
            found.append(letter)
    return found


def counts(report: Report) -> list[tuple[int, ...]]:
    """Return, by stage: received, done, dead, failed, unprocessed, produced."""
    return [
        (a.received, a.done, a.dead, a.failed, a.unprocessed, a.produced)
        for a in report.ledger
    ]


async def test_same_file_gives_the_same_results(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """The same rows, ledger and dead letters, with a message that kills workers."""
    made = {}
    for engine in ("local", "spark"):
        report = await run(write(engine, dies=1234), spark)
        assert report.error is None
        rows = spark.read.parquet(str(tmp_path / f"out-{engine}")).collect()
        (letter,) = letters(tmp_path)
        (tmp_path / ".etlstage/p/dead_letters/clean.jsonl").unlink()
        made[engine] = (
            report.status,
            counts(report),
            Counter((row.id, row.text) for row in rows),
            (letter.stage, letter.message, letter.place, letter.kind, letter.config),
            len(letter.attempts),
        )
        assert (tmp_path / f"out-{engine}" / "_SUCCESS").exists()
    assert made["local"] == made["spark"]
    out = sum(n % 3 for n in range(3000)) - 1234 % 3
    assert made["spark"][1] == [
        (0, 0, 0, 0, 0, 3000),
        (3000, 2999, 1, 0, 0, out),
        (out, out, 0, 0, 0, out),
        (out, out, 0, 0, 0, 0),
    ]


async def test_message_that_does_not_fit_is_dead_lettered(
    spark: SparkSession,
    write: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If nothing is dead-lettered, nothing is loaded."""
    schema = "id decimal(3) NOT NULL, text string"
    budget = "on_error: {budget: 100%}"
    monkeypatch.setattr(sink_module, "_AT_ONCE", 700)
    report = await run(write(schema=schema, load=budget), spark)
    assert report.error is None
    good = sum(n % 3 for n in range(1000))
    assert counts(report)[-1] == (3000, good, 3000 - good, 0, 0, 0)
    assert spark.read.parquet(str(tmp_path / "out-spark")).count() == good
    found = letters(tmp_path)
    assert len(found) == 3000 - good
    assert len({letter.place for letter in found}) == 3000 - good
    # Spark reads files of the same size in the order in which the folder lists them.
    assert b'{"id": 1000, "text": "ROW 1000"}' in {letter.message for letter in found}
    assert "field 'id' is a number that is not of type decimal(3,0)" in found[0].error

    load = "on_error: {then: fail}"
    path = write(schema=schema, load=load)
    path.write_text(path.read_text().replace("out-spark", "other"))
    report = await run(path, spark)
    assert isinstance(report.error, SinkFailed)
    assert str(report.error) == (
        f"load: {3000 - good:,} of 3,000 messages do not fit the schema '{schema}':"
        f" message {min(letter.place for letter in found) + 1} is the first, field 'id' is a number that is not of type decimal(3,0);"
        " nothing is loaded"
    )
    assert "nothing was written to" in report.landed
    assert not (tmp_path / "other").exists()


async def test_run_that_fails_loads_nothing(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Dead letters are kept, and unprocessed messages are in the ledger."""
    stage = "on_error: {then: fail, retries: 0}"
    report = await run(write(dies=1234, stage=stage), spark)
    assert report.status == "failed"
    assert "stage clean: worker clean-1" in str(report.error)
    assert "exited with status 3" in str(report.error)
    assert not (tmp_path / "out-spark").exists()
    report.ledger.check(whole=False)

    path = write(dies=1234, stage="on_error: {budget: 0}")
    text = path.read_text() + "dead_letters: {spark: {format: json, path: letters}}\n"
    path.write_text(text)
    report = await run(path, spark)
    assert isinstance(report.error, StageError)
    assert "messages could not be processed, on_error.budget" in str(report.error)
    assert "etlstage dlq ls" in str(report.error)
    assert not (tmp_path / "out-spark").exists()
    assert [b":1234," in letter.message for letter in letters(tmp_path)] == [True]
    assert spark.read.json(str(tmp_path / "letters")).count() == 1


async def test_budget_holds_for_all_tasks_together(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Failures that each task's budget allows may exceed that of the run."""
    path = write(stage="on_error: {retries: 0, budget: 20}")
    text = WORKER.replace("DIES:", "DIES or row['id'] % 100 == 0:")
    (tmp_path / "worker.py").write_text(text)
    report = await run(path, spark)
    assert "stage clean: 30 of 3,000 messages could not be processed" in str(
        report.error
    )
    assert len(letters(tmp_path)) == 30


async def test_what_is_wrong_is_reported_as_by_engine_local(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Such as a missing program, a missing path, or output that exists already."""
    path = write()
    path.write_text(path.read_text().replace("[python, ", "[no-such-program, "))
    report = await run(path, spark)
    assert isinstance(report.error, StageError)
    assert "stage clean: there is no program" in str(report.error)
    assert "Traceback" not in str(report.error)

    path = write()
    path.write_text(path.read_text().replace("in.ndjson", "nowhere"))
    report = await run(path, spark)
    assert isinstance(report.error, SourceFailed)
    assert str(report.error).startswith("extract: path does not exist")

    for engine in ("local", "spark"):
        report = await run(write(engine, source=", message: nope"), spark)
        assert isinstance(report.error, SourceFailed)
        assert str(report.error).startswith("extract: ")
        assert "`nope` cannot be resolved" in str(report.error)
        assert len(str(report.error).splitlines()) == 1
        assert not (tmp_path / f"out-{engine}").exists()

    (tmp_path / "out-spark").mkdir()
    report = await run(write(), spark)
    assert "out-spark exists already" in str(report.error)


async def test_drained_run_loads_nothing(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """A DataFrame is read as a whole, so the job is cancelled."""
    path = write()
    text = (tmp_path / "worker.py").read_text()
    started = tmp_path / "started"
    waiting = f"open({str(started)!r}, 'w').close(); import time; time.sleep(3600)"
    (tmp_path / "worker.py").write_text(waiting + "\n" + text)
    runner = Pipeline.from_yaml(path, spark=spark)
    async with running(runner) as reports:
        with anyio.fail_after(60):
            while not started.exists():  # noqa: ASYNC110 - it's another process that acts
                await anyio.sleep(0.05)
        runner.drain()
    (report,) = reports
    assert report.status == "drained"
    assert not (tmp_path / "out-spark").exists()
    assert "nothing was written to" in report.landed


async def test_load_is_broken_off_behind_the_drain_limit(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """The next start loads the staged messages; no stage runs again (issue 23)."""
    path = write()
    front = path.read_text().partition("load:")[0]
    load = "load: {worker: {command: [python, load.py, pids]}}"
    path.write_text(f"{front}{load}\nstate: state\ndrain: 10ms\n")
    (tmp_path / "load.py").write_text(HANGING)
    (tmp_path / "pids").mkdir()
    runner = Pipeline.from_yaml(path, spark=spark)
    async with running(runner) as reports:
        pids = await anyio.to_thread.run_sync(wait_for_pids, tmp_path / "pids")
        runner.drain()
    (report,) = reports
    assert (report.status, report.error) == ("drained", None)
    assert await anyio.to_thread.run_sync(are_gone, pids[1:])
    (tmp_path / "load.py").write_text(LOAD)
    (tmp_path / "worker.py").write_text("raise SystemExit(3)")
    report = await run(path, spark)
    assert (report.status, report.error) == ("done", None)
    rows = [path.read_text() for path in (tmp_path / "pids").glob("loaded-*")]
    ids = Counter(json.loads(line)["id"] for row in rows for line in row.splitlines())
    assert ids == Counter({n: n % 3 for n in range(3000) if n % 3})


async def test_drained_before_its_start_it_reads_nothing(
    spark: SparkSession, write: Callable[..., Path]
) -> None:
    """As on engine local."""
    runner = Pipeline.from_yaml(write(), spark=spark)
    runner.drain()
    report = await runner.run()
    assert report.status == "drained"
    assert counts(report)[0] == (0, 0, 0, 0, 0, 0)


async def test_program_that_was_sent_runs(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """It runs in the folder where Spark has put it, not in that of the file."""
    path = write()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sent.py").write_text(
        WORKER.replace('row["text"].upper()', "os.getcwd()")
    )
    text = path.read_text().replace("worker.py", "bin/sent.py")
    path.write_text(f"{text}spark: {{files: [bin/sent.py]}}\n")
    report = await run(path, spark)
    assert report.error is None
    rows = spark.read.parquet(str(tmp_path / "out-spark"))
    (folder,) = {row.text for row in rows.select("text").distinct().collect()}
    assert Path(folder) not in (tmp_path, tmp_path / "bin", Path.cwd())


async def test_rows_without_schema_are_text(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Keys of the source reach the first stage."""
    path = write(source=", key: id % 7", stage="order: key\n    workers: 2")
    text = path.read_text().replace(', schema: "id long NOT NULL, text string"', "")
    path.write_text(text)
    report = await run(path, spark)
    assert report.error is None
    frame = spark.read.parquet(str(tmp_path / "out-spark"))
    assert frame.dtypes == [("value", "string")]
    expected = {f'{{"id": {n}, "text": "ROW {n}"}}' for n in range(3000) if n % 3}
    assert {row.value for row in frame.collect()} == expected


async def test_staging_that_is_nowhere_is_reported_in_a_line(
    spark: SparkSession, write: Callable[..., Path]
) -> None:
    """The error is about rows that can't be written, not about removing them."""
    path = write()
    text = path.read_text() + "spark: {staging: 'nosuch://host/x'}\n"
    path.write_text(text)
    report = await run(path, spark)
    assert isinstance(report.error, StageError)
    assert 'no FileSystem for scheme "nosuch"' in str(report.error)
    assert len(str(report.error).splitlines()) == 1


@pytest.mark.parametrize("inside", ["in", "i?"])
@pytest.mark.parametrize("engine", ["local", "spark", "streaming"])
async def test_folder_of_the_file_is_no_pattern(
    spark: SparkSession, tmp_path: Path, engine: str, inside: str
) -> None:
    """Input, staging and sink are in it, whatever its name; path is one (issue 23)."""
    for name in ("v1x", r"v[12]{x,y}\*?]"):
        folder = tmp_path / name
        place = folder / "in" / "k=1" if inside == "in" else folder / "in"
        place.mkdir(parents=True)
        (place / "a.txt").write_text(f"{name}\n")
    path = folder / "p.yaml"
    path.write_text(
        rf"""
name: p
engine: {engine}
state: state
extract:
  spark: {{path: "{inside}", format: text, schema: value string, message: value}}
transform:
  - worker: {{command: [sh, -c, 'while IFS= read -r x; do printf "%s\n\0" "$$x"; done']}}
load: {{spark: {{path: out, format: text}}}}
"""
    )
    report = await run(path, spark)
    assert report.error is None
    parts = [part.read_text() for part in (folder / "out").rglob("part-*.txt")]
    assert "".join(parts) == f"{name}\n"
