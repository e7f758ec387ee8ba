from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etlstage.config.build import pipeline_from_yaml
from etlstage.errors import ConfigError
from etlstage.messages import StageKind
from etlstage.pipeline.pipeline import Pipeline

WORKERS = """\
name: letters
extract: {worker: {command: [printf, 'a\\nb\\n']}}
transform:
  - worker: {command: [sh, -c, 'while read x; do printf "$$x$${x}\\n\\0"; done']}
  - name: same
    worker: {command: [sh, -c, 'while read x; do printf "$$x\\n\\0"; done']}
load:
  name: end
  worker: {command: [sh, -c, 'while read x; do echo "$$x" >>out; printf "\\0"; done']}
"""
FRAMES = """\
name: frames
spark: {master: "local[1]", config: {spark.sql.shuffle.partitions: 1}}
extract:
  spark: {format: text, path: in.txt, spool: .}
transform:
  - worker: {command: [sh, -c, 'while read x; do printf "$$x$${x}\\n\\0"; done']}
load:
  spark: {format: text, path: out, mode: overwrite, epoch: {messages: 1}}
"""
OFFSETS = """\
name: offsets
state: .etlstage
extract:
  name: rounds
  worker: {command: [python, rounds.py]}
  mode: cyclic
  offsets: {by: supervisor, start: 5, step: 10, end: 17, template: "{start}-{end}"}
load: {worker: {command: [sh, -c, 'while read x; do echo "$$x" >>out; printf "\\0"; done']}}
"""
ROUNDS = """\
import sys
for line in sys.stdin:
    sys.stdout.write(f"{line.strip()}\\n\\0")
    sys.stdout.flush()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Name a pipeline file."""
    return tmp_path / "pipeline.yaml"


def write(path: Path, text: str) -> None:
    """Write a file, and a worker that answers rounds beside it."""
    path.write_text(text)
    (path.parent / "rounds.py").write_text(ROUNDS)


def in_python(code: str, folder: Path) -> list[str]:
    """Return what ``code`` prints last in an interpreter of its own."""
    found = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=dict(os.environ, PYTHONPATH=found),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    # Before it come events: nobody has told structlog where to.
    return result.stdout.splitlines()[-2:]


def test_stages_have_their_names_or_numbers(path: Path) -> None:
    """The ledger shows what the builder made."""
    path.write_text(WORKERS)
    pipeline = pipeline_from_yaml(path)
    assert pipeline.name == "letters"
    assert [(a.stage, a.kind) for a in pipeline.ledger] == [
        ("extract", StageKind.EXTRACT),
        ("transform-1", StageKind.TRANSFORM),
        ("same", StageKind.TRANSFORM),
        ("end", StageKind.LOAD),
    ]


async def test_workers_run_in_the_folder_of_the_file(path: Path) -> None:
    """From end to end, without Spark, on both event loops."""
    write(path, WORKERS)
    report = await Pipeline.from_yaml(path).run()
    assert (report.status, report.error) == ("done", None)
    assert (path.parent / "out").read_text() == "aa\nbb\n"


async def test_offsets_reach_the_worker(path: Path) -> None:
    """And the state is kept beside the file."""
    write(path, OFFSETS)
    report = await Pipeline.from_yaml(path).run()
    assert (report.status, report.error) == ("done", None)
    assert (path.parent / "out").read_text() == "5-15\n15-17\n"
    assert [p.name for p in (path.parent / ".etlstage").iterdir()] == [
        "rounds.position.json"
    ]


def test_wrong_file_is_said_at_once(path: Path) -> None:
    """Building is where it shows, not running."""
    path.write_text("name: x\n")
    with pytest.raises(ConfigError, match="extract: missing, but needed"):
        Pipeline.from_yaml(path)


def test_spark_is_not_imported_without_need(path: Path) -> None:
    """A pipeline of workers needs no PySpark."""
    path.write_text(WORKERS)
    code = """
import sys
from etlstage.pipeline.pipeline import Pipeline
Pipeline.from_yaml("pipeline.yaml")
print(sorted(n for n in sys.modules if n in ("pyspark", "pyarrow", "etlstage.spark")))
"""
    assert in_python(code, path.parent) == ["[]"]


@pytest.mark.spark
@pytest.mark.timeout(180)
def test_building_starts_no_spark(path: Path) -> None:
    """A JVM takes seconds; whoever only builds a pipeline does not wait for it."""
    path.write_text(FRAMES)
    code = """
from etlstage.pipeline.pipeline import Pipeline
from pyspark import SparkContext
Pipeline.from_yaml("pipeline.yaml")
print(SparkContext._gateway)
"""
    assert in_python(code, path.parent) == ["None"]
    assert [p.name for p in path.parent.iterdir()] == ["pipeline.yaml"]


@pytest.mark.spark
@pytest.mark.timeout(180)
def test_session_of_the_file_ends_with_the_run(path: Path) -> None:
    """Both ends use one session; it is there for the run and not after it."""
    path.write_text(FRAMES)
    (path.parent / "in.txt").write_text("a\nb\n")
    code = """
import anyio
from pyspark import SparkContext
from etlstage.pipeline.pipeline import Pipeline
report = anyio.run(Pipeline.from_yaml("pipeline.yaml").run)
print(report.status, report.error, report.ledger[2].done)
print(SparkContext._active_spark_context)
"""
    assert in_python(code, path.parent) == ["done None 2", "None"]
    files = (path.parent / "out").glob("part-*")
    assert "".join(sorted(f.read_text() for f in files)) == "aa\nbb\n"


@pytest.mark.spark
@pytest.mark.timeout(180)
def test_session_that_was_handed_in_lives_on(path: Path) -> None:
    """It is the embedder's, and the file's settings are not looked at."""
    path.write_text(FRAMES)
    (path.parent / "in.txt").write_text("a\n")
    code = """
import anyio
from pyspark.sql import SparkSession
from etlstage.pipeline.pipeline import Pipeline
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False)
spark = builder.appName("mine").getOrCreate()
report = anyio.run(Pipeline.from_yaml("pipeline.yaml", spark=spark).run)
print(report.status, report.error)
print(spark.conf.get("spark.app.name"), spark.range(3).count())
"""
    assert in_python(code, path.parent) == ["done None", "mine 3"]
