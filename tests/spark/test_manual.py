"""The manual's examples of Spark, run as they are printed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from etlstage.cli.app import run_command
from etlstage.spark import Session
from tests.manual.fences import SECTIONS, run, write

pytestmark = pytest.mark.spark

FILES = {
    "papers.ndjson": '{"id": 1, "title": " one "}\n{"id": 2, "title": "two"}\n',
    "clean.py": """\
#!/usr/bin/env python3
import json
from etlstage import worker

def clean(message):
    row = json.loads(message)
    yield json.dumps({"title": row["title"].strip(), "year": 1990 + row["id"]}).encode()

worker.transform(clean)
""",
    "fetch.py": """\
import json
from etlstage import worker

def fetch(start, end):
    for n in range(start, end):
        yield json.dumps({"id": n, "title": f"title {n}"}).encode()

worker.extract_cycle(fetch, offsets="supervisor", latest=lambda: 2500)
""",
    "index.py": """\
import os
from etlstage import worker

name = os.environ["ETLSTAGE_PARTITION"]
with open(os.path.join(os.environ["ETLSTAGE_STAGING"], name), "wb") as file:
    worker.load(lambda message: file.write(message + b"\\\\n") and None)
""",
}
TESTED = {
    "pipeline.yaml": """\
name: papers
extract: {spark: {format: json, path: papers.ndjson}}
transform:
  - {name: clean, worker: {command: [python, clean.py]}}
  - {name: index, worker: {command: [python, index.py]}, batch: {}}
load: {worker: {command: [python, load.py]}}
""",
    "clean.py": """\
import json
from etlstage import worker

def clean(message):
    if message.startswith(b"{"):
        row = json.loads(message)
        row |= {"title": row["title"].strip()} if "title" in row else {}
        yield json.dumps(row).encode()
    elif message != b"undated":
        yield message.strip()

worker.transform(clean)
""",
    "index.py": """\
from etlstage import worker

worker.transform_batch(lambda messages: [b" ".join(messages)])
""",
    "load.py": """\
import os
from etlstage import worker

with open(os.environ["OUT"], "wb", buffering=0) as out:
    worker.load(lambda message: out.write(message + b"\\n") and None)
""",
}
BEFORE = """
import pathlib, tarfile
from pyspark.sql import SparkSession

for name, text in {files!r}.items():
    pathlib.Path(name).write_text(text)
pathlib.Path("clean.py").chmod(0o755)
with tarfile.open("tools.tar.gz", "w:gz") as archive:
    archive.add("clean.py")
spark = SparkSession.builder.master("local[2]").getOrCreate()
"""


def text_of(name: str, file: str = "") -> str:
    """Return a code block of a section: its only one, or that of a file."""
    (text,) = (f.text for f in SECTIONS[name] if f.file == file)
    return text


def test_programs_for_spark(
    program: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """A stage as a function of DataFrames, on executors, and as a data source."""
    parts = (
        BEFORE.format(files=FILES),
        text_of("how-to/transform.md#Transform a DataFrame in a notebook"),
        "print([tuple(row) for row in cleaned.sort('id').collect()])",
        text_of("how-to/transform.md#On a cluster"),
        "shipped = transform(papers, clean, schema='title string, year int')",
        "print(shipped.count())",
        text_of("how-to/data-source.md#Read and write as a Spark data source"),
        "query.processAllAvailable(); query.stop()",
        "print(papers.count(), spark.table('papers').count())",
        "lines = [p.read_text() for p in pathlib.Path('index').iterdir()]",
        "print(sum(text.count('id') for text in lines))",
        text_of("how-to/journals.md#With Spark"),
        "copies.start('copies').awaitTermination()",
        "copied = spark.read.format('etlstage-journal').load('copies')",
        "print(copied.count())",
    )
    ended = program("\n".join(parts))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "[(1, 'one', 1991), (2, 'two', 1992)]",
        "2",
        "2500 2500",
        "2500",
        "2500",
    ]


def test_notebook(
    program: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    """Its cells are one program, which prints the output that is shown (issue 27)."""
    cells, shown = [], []
    for block in SECTIONS["tutorials/notebook.md"]:
        if block.language == "text":
            shown.append(block.text)
        elif block.file:
            write(block.file, block.text, tmp_path / "cwd")
        else:
            cells.append(block.text)
    ended = program("\n".join(cells))
    assert ended.stdout == "\n".join([*shown, ""]), ended.stderr


Shell = Callable[[list[str], bool], list[str]]


@pytest.fixture
def shell(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    session: Session,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Shell]:
    """Run commands of etlstage in this process, which has a session already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    for name in [name for name in os.environ if name.startswith("SPARK_")]:
        monkeypatch.delenv(name)

    def printed(command: str) -> str:
        if not command.startswith("etlstage "):
            return subprocess.check_output(["/bin/sh", "-c", command], text=True)
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        run_command()
        seen = capsys.readouterr()
        sys.stderr.write(seen.err)  # pytest shows it for a failed test
        return seen.out

    yield lambda commands, _: [printed(command) for command in commands]
    structlog.reset_defaults()


@pytest.mark.classic
def test_first_page(shell: Shell, tmp_path: Path) -> None:
    """It runs, as does the comparison of engines, which leaves no files (issue 11)."""
    run("README.md#etlstage", {"shell": shell})
    before = set(tmp_path.rglob("*"))
    run("how-to/compare-engines.md#Compare two engines", {"shell": shell})
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.classic
def test_tests_of_a_pipeline(shell: Shell) -> None:
    """One fails, as its worker forgets to refuse; one has rows (issue 11)."""
    for name, text in TESTED.items():
        write(name, text)
    write("papers.ndjson", "")
    run("how-to/test-a-pipeline.md#Test a pipeline", {"shell": shell})
