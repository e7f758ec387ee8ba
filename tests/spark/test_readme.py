"""What the manual shows of Spark, as it stands there."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import structlog

from etlstage.cli.app import main
from etlstage.spark import Session
from tests.readme import BLOCKS_OF, Step, as_shown, runs, runs_whole, steps

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]

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


@runs(
    "Transform a DataFrame in a notebook 1",
    "On a cluster 1",
    "Read and write as a Spark data source 1",
)
def test_programs_for_spark(
    blocks: list[str],
    program: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """A stage as a function of DataFrames, sent to executors, and as a data source."""
    in_notebook, shipped, data_source = blocks
    parts = (
        BEFORE.format(files=FILES),
        in_notebook,
        "print([tuple(row) for row in cleaned.sort('id').collect()])",
        shipped,
        "shipped = transform(papers, clean, schema='title string, year int')",
        "print(shipped.count())",
        data_source,
        "query.processAllAvailable(); query.stop()",
        "print(papers.count(), spark.table('papers').count())",
        "lines = [p.read_text() for p in pathlib.Path('index').iterdir()]",
        "print(sum(text.count('id') for text in lines))",
    )
    ended = program("\n".join(parts))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "[(1, 'one', 1991), (2, 'two', 1992)]",
        "2",
        "2500 2500",
        "2500",
    ]


@runs_whole("tutorials/notebook.md")
def test_notebook(
    page: str,
    program: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    """Its cells are a program, which prints what is shown (issue 27)."""
    cells, shown = [], []
    for block in BLOCKS_OF[page]:
        if block.language == "text":
            shown.append(block.text)
        elif block.text.startswith("# clean.py"):
            (tmp_path / "cwd" / "clean.py").write_text(block.text)
        else:
            cells.append(block.text)
    ended = program("\n".join(cells))
    assert ended.stdout == "\n".join([*shown, ""]), ended.stderr


@pytest.fixture
def here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    session: Session,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[[Sequence[Step]], None]]:
    """Type commands of etlstage into this process, which has a session already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    for name in [name for name in os.environ if name.startswith("SPARK_")]:
        monkeypatch.delenv(name)

    def type_here(steps: Sequence[Step]) -> None:
        for command, shown in steps:
            monkeypatch.setattr(sys, "argv", shlex.split(command))
            with pytest.raises(SystemExit):
                main()
            said = capsys.readouterr()
            as_shown(said.out, shown, f"{command}\n{said.err}")

    yield type_here
    structlog.reset_defaults()


@pytest.mark.classic
@runs("etlstage 2", "etlstage 3", "etlstage 4", "Compare two engines 1")
def test_first_page(
    blocks: list[str], here: Callable[[Sequence[Step]], None], tmp_path: Path
) -> None:
    """It runs, and on the other engine, too, which leaves no trace (issue 11)."""
    worker, pipeline, run, diff = blocks
    (tmp_path / "shout.py").write_text(worker)
    (tmp_path / "pipeline.yaml").write_text(pipeline)
    (tmp_path / "names.txt").write_text("Ada\nAlan\nGrace\n")
    here(steps(run))
    before = set(tmp_path.rglob("*"))
    here(steps(diff))
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.classic
@runs("Test a pipeline 1", "Test a pipeline 2")
def test_tests_of_a_pipeline(
    blocks: list[str], here: Callable[[Sequence[Step]], None], tmp_path: Path
) -> None:
    """One fails, for its worker forgets to refuse; one has rows (issue 11)."""
    tests, dialogue = blocks
    for name, text in TESTED.items():
        (tmp_path / name).write_text(text)
    with (tmp_path / "pipeline.yaml").open("a") as file:
        file.write(tests)
    (tmp_path / "papers.ndjson").touch()
    here(steps(dialogue))
