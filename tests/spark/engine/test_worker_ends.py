"""Engines ``spark`` and ``streaming`` with workers as source and sink."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from pyspark.sql import SparkSession

from etlstage.pipeline import DeadLetter, Pipeline, Report
from etlstage.pipeline.dead_letter.files import letter_files, read_letters

pytestmark = [pytest.mark.spark, pytest.mark.anyio]

COUNT = """\
from etlstage import worker
from pathlib import Path
worker.extract_cycle(
    lambda start, end: (b"%d" % n for n in range(start, end)),
    offsets="supervisor",
    latest=lambda: int(Path("latest").read_text()),
)
"""
COCAINE = """\
import json
from etlstage.worker import cocaine
from pathlib import Path
def extract(request, response):
    asked = json.loads(request.read())
    if asked.get("offsets") == "latest":
        response.write(Path("latest").read_bytes())
        return
    for n in range(asked["start"], asked["end"]):
        response.write(b"%d" % n)
cocaine.run({"extract": extract})
"""
LOAD = """\
import os, sys
from etlstage import worker
file = open(f"loaded/{os.getpid()}", "ab", buffering=0)
def load(message):
    if message == b"13!":
        os._exit(3)
    if message in (b"7!", b"9!"):
        raise ValueError
    file.write(message + b"\\n")
worker.load(load, on_error="skip")
"""
FILE = """\
name: w
engine: {engine}
extract:
  worker: {{command: [python, count.py]}}
  dialect: {{mode: cyclic}}
  offsets: {{by: supervisor, start: 5, step: 10{end}}}
  restart: {{delay: 10ms}}
transform:
  - name: mark
    worker: {{command: [sh, -c, 'while read -r x; do printf "%s!\\n\\0" "$$x"; done']}}
load:
  worker: {{command: [python, load.py]}}
  restart: {{delay: 10ms}}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a pipeline and its workers, with a folder for loaded messages."""

    def write(engine: str, end: str = "") -> Path:
        (tmp_path / "count.py").write_text(COUNT)
        (tmp_path / "load.py").write_text(LOAD)
        (tmp_path / "loaded").mkdir(exist_ok=True)
        path = tmp_path / f"{engine}.yaml"
        path.write_text(FILE.format(engine=engine, end=end))
        return path

    return write


async def run(path: Path, spark: SparkSession) -> Report:
    """Run a pipeline, with a timeout."""
    with anyio.fail_after(150):
        return await Pipeline.from_yaml(path, spark=spark).run()


def loaded(folder: Path) -> Counter[int]:
    """Return the loaded numbers, with their counts."""
    files = (folder / "loaded").iterdir()
    lines = [x for path in files for x in path.read_text().splitlines()]
    return Counter(int(line.rstrip("!")) for line in lines)


def dead(folder: Path) -> list[DeadLetter]:
    """Return the dead letters."""
    found = []
    for path in letter_files(folder / ".etlstage" / "w"):
        for letter in read_letters(path):
            assert isinstance(letter, DeadLetter)
            found.append(letter)
    return found


async def test_engine_spark_runs_all_three_kinds(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """Ranges of offsets are read; one message is dead-lettered, all others loaded."""
    path = write("spark", ", end: 48")
    (tmp_path / "load.py").write_text(LOAD.replace("13!", "33!"))
    report = await run(path, spark)
    assert report.error is None
    assert loaded(tmp_path) == Counter(n for n in range(5, 48) if n not in (7, 9, 33))
    (letter,) = dead(tmp_path)
    assert (letter.stage, letter.message, letter.place) == ("load", b"33!", 28)
    assert (letter.kind, len(letter.attempts)) == ("WorkerLost", 3)
    load = report.ledger[2]
    assert (load.received, load.done, load.dead, load.skipped) == (43, 42, 1, 2)
    # One for each attempt at the dead-lettered message (issue 11).
    assert (load.restarts, load.failures) == (3, 3)
    assert report.landed == "42 messages loaded; output complete"


async def test_stream_asks_its_worker_how_far_it_can_go(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """A run reads what exists by then, and the next run what is new."""
    path = write("streaming")
    (tmp_path / "latest").write_text("20")
    report = await run(path, spark)
    assert report.error is None
    assert loaded(tmp_path) == Counter(n for n in range(5, 20) if n not in (7, 9, 13))
    assert [letter.message for letter in dead(tmp_path)] == [b"13!"]
    (tmp_path / "latest").write_text("31")
    report = await run(path, spark)
    assert report.error is None
    assert loaded(tmp_path) == Counter(n for n in range(5, 31) if n not in (7, 9, 13))
    assert report.ledger[0].produced == 11
    assert report.ledger[2].skipped == 0


@pytest.mark.parametrize("engine", ["local", "spark", "streaming"])
async def test_cocaine_worker_extracts_by_offsets(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path, engine: str
) -> None:
    """Up to the latest offset that it reports, on each engine (issue 23)."""
    pytest.importorskip("msgpack")
    path = write(engine)
    text = path.read_text()
    path.write_text(text.replace("dialect: {mode: cyclic}", "dialect: cocaine"))
    (tmp_path / "count.py").write_text(COCAINE)
    (tmp_path / "latest").write_text("27")
    report = await run(path, spark)
    assert report.error is None
    assert loaded(tmp_path) == Counter(n for n in range(5, 27) if n not in (7, 9, 13))
    assert [letter.message for letter in dead(tmp_path)] == [b"13!"]
    assert report.ledger[0].produced == 22


async def test_worker_that_can_not_load_fails_the_run(
    spark: SparkSession, write: Callable[..., Path], tmp_path: Path
) -> None:
    """The error is that of its stage."""
    path = write("spark", ", end: 48")
    path.write_text(path.read_text() + "  on_error: {then: fail}\n")
    report = await run(path, spark)
    assert report.status == "failed"
    assert "stage load: worker load-1" in str(report.error)
    assert "exited with status 3" in str(report.error)
    report.ledger.check(whole=False)
    assert not dead(tmp_path)
    path.write_text(path.read_text().replace("then: fail", "budget: 0"))
    report = await run(path, spark)
    assert "1 of 43 messages could not be processed" in str(report.error)
    assert [letter.message for letter in dead(tmp_path)] == [b"13!"]
    assert report.ledger[2].done == 42
    path.write_text(path.read_text().replace("count.py", "nowhere.py"))
    report = await run(path, spark)
    assert "stage extract: can't start its workers: there is no file" in str(
        report.error
    )


async def test_program_that_is_not_there_is_reported_with_its_host(
    spark: SparkSession, write: Callable[..., Path]
) -> None:
    """It is missing where it should run, at both ends; ``spark.files`` can send it."""
    path = write("spark", ", end: 48")
    whole = path.read_text()
    for stage, program in (("extract", "count"), ("load", "load")):
        path.write_text(whole.replace(f"[python, {program}.py]", "[./nowhere]"))
        report = await run(path, spark)
        assert f"stage {stage}: there is no program" in str(report.error)
        assert str(report.error).endswith(
            f"on host {socket.gethostname()}: put it there, or name it in spark.files"
        )
