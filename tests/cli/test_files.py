"""Pipelines from files to files, without Spark."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from etlstage.pipeline.delivery.record import CommitRecord
from tests.cli.conftest import Etlstage, Started, run_in
from tests.cli.forked import environment
from tests.cli.test_kills import wait_until

PIPELINE = """\
name: names
state: state
{more}
extract: {{files: {{path: in, format: csv, options: {{header: "true"}}}}}}
transform:
  - name: clean
    worker: {{command: [python, clean.py]}}
    on_error: {{budget: 90%}}
load:
  files: {{path: out, format: json, schema: "id string, n int", epoch: {{messages: 2}}}}
  on_error: {{budget: 90%}}
"""
CLEAN = """\
import json
from pathlib import Path
from etlstage import worker
def clean(message):
    row = json.loads(message)
    if row["n"] == "x" and not Path("mended").exists():
        raise worker.Refuse("no number")
    n = {"x": 7, "y": "y"}.get(row["n"], row["n"])
    yield json.dumps({"id": row["id"], "n": int(n) if n != "y" else n}).encode()
worker.transform(clean)
"""


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Write a pipeline from files to files."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("id,n\na,1\nb,x\nc,3\nd,y\n")
    (tmp_path / "clean.py").write_text(CLEAN)
    (tmp_path / "p.yaml").write_text(PIPELINE.format(more="delivery: exactly-once"))
    return tmp_path


def rows_of(folder: Path) -> list[tuple[str, int]]:
    """Return the rows that were loaded."""
    lines = [
        line
        for part in (folder / "out").glob("part-*")
        for line in part.read_text().splitlines()
    ]
    return sorted((row["id"], row["n"]) for row in map(json.loads, lines))


def test_dead_letters_of_files_are_retried(etlstage: Etlstage, pipeline: Path) -> None:
    """Each is loaded once, into the same folder (issue 23)."""
    assert etlstage("validate", "p.yaml").returncode == 0
    done = etlstage("run", "p.yaml", code=0)
    assert rows_of(pipeline) == [("a", 1), ("c", 3)]
    said = etlstage("dlq", "ls", "p.yaml").stdout
    assert "field 'n' is a string that is not of type int" in said.replace("\n", " ")
    (pipeline / "mended").touch()
    done = etlstage("dlq", "retry", "p.yaml")
    assert "1 dead letter passed, 1 failed again" in done.stdout
    assert rows_of(pipeline) == [("a", 1), ("b", 7), ("c", 3)]
    assert {p.name.split("-")[1] for p in (pipeline / "out").glob("part-retry*")} == {
        "retry"
    }


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_run_that_is_killed_while_it_prints_its_report(
    start: Started, etlstage: Etlstage, pipeline: Path, delivery: str
) -> None:
    """The next run completes it and loads nothing; the one after that loads anew."""
    text = PIPELINE.format(more=f"delivery: {delivery}")
    (pipeline / "p.yaml").write_text(
        text.replace("path: out", "path: out, mode: append")
    )
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, bytes(4096))
    process = start("run", "p.yaml", stdout=writing)
    wait_until(lambda: CommitRecord.latest(pipeline / "state").pending)
    process.kill()
    process.wait()
    for end in (reading, writing):
        os.close(end)
    for times in (1, 2):
        assert etlstage("run", "p.yaml").returncode == 0
        assert rows_of(pipeline) == sorted([("a", 1), ("c", 3)] * times)


@pytest.mark.parametrize("schema", ['schema: "id string, n int", ', ""])
def test_nothing_of_spark_is_imported(pipeline: Path, schema: str) -> None:
    """Nor is pandas, whose import takes longer than a small pipeline (issue 23)."""
    (pipeline / "site").mkdir()
    for name in ("pyspark", "pandas", "py4j"):
        (pipeline / "site" / f"{name}.py").write_text(f"raise SystemExit('{name}')\n")
    found = os.pathsep.join([str(pipeline / "site"), environment()["PYTHONPATH"]])
    text = (
        (pipeline / "p.yaml")
        .read_text()
        .replace('schema: "id string, n int", ', schema)
    )
    (pipeline / "p.yaml").write_text(text)
    done = run_in(pipeline, "run", "p.yaml", env={"PYTHONPATH": found})
    assert done.returncode == 0, done.stderr
    assert f"{2 if schema else 3} loaded" in done.stdout


def test_what_files_can_not(etlstage: Etlstage, pipeline: Path) -> None:
    """Each error names the setting, and what works instead (issue 23)."""
    text = PIPELINE.format(more="engine: spark")
    (pipeline / "p.yaml").write_text(text)
    said = etlstage("validate", "p.yaml").stderr
    for stage in ("extract", "load"):
        only = f"{stage}.files: works only with engine: local"
        assert f"{only}; for engine: spark use {stage}.spark or" in said
    wrong = (
        text.replace('header: "true"', 'header: "maybe", sep: "", inferSchema: "true"')
        .replace("path: out", "path: s3://b/out")
        .replace("id string, n int", "id string, n variant")
    )
    (pipeline / "p.yaml").write_text(wrong)
    said = etlstage("validate", "p.yaml").stderr
    for line in (
        "extract.files.options.header: expected true or false",
        "extract.files.options.sep: expected one character or more between two cells",
        "extract.files.options.inferSchema: is not an option of files, expected header",
        "load.files.path: is not on this machine: use Spark's end for such paths",
        "load.files.schema: type variant of column 'n' is only for Spark's end",
    ):
        assert line in said
    csv = PIPELINE.format(more="").replace(
        'json, schema: "id string, n int"',
        'csv, schema: "a array<int>", partition_by: [a]',
    )
    (pipeline / "p.yaml").write_text(csv)
    said = etlstage("validate", "p.yaml").stderr
    assert "load.files.partition_by: leaves no column for the files themselves" in said
    (pipeline / "p.yaml").write_text(csv.replace(", partition_by: [a]", ""))
    said = etlstage("validate", "p.yaml").stderr
    assert "load.files.format: csv can't hold column 'a', array<int>" in said


def test_rows_of_a_test(etlstage: Etlstage, pipeline: Path) -> None:
    """They are given and expected as with a DataFrame (issue 23)."""
    tests = """\
tests:
  - name: row
    input_rows: ['{"id":"a","n":"1"}', '{"id":"b","n":"x"}']
    output_rows: [{json: '{"id":"a","n":1}'}]
    dead_letters: [{reason: no number}]
"""
    with (pipeline / "p.yaml").open("a") as file:
        file.write(tests)
    done = etlstage("test", "p.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_are_compared_as_json(etlstage: Etlstage, pipeline: Path) -> None:
    """Spaces and the order of members do not matter, other values do (issue 26)."""
    (pipeline / "p.yaml").write_text("""\
name: rows
extract: {files: {path: in, format: text}}
load: {files: {path: out, format: json, schema: "id double, n long"}}
tests:
  - name: same
    input: ['{"id": 1, "n": 2}', '{"id": 1, "n": 2}', '{"id": 2, "n": 3}']
    output_rows: ['{"n": 3, "id": 2}', '{"id": 1, "n": 2.0}', '{"id":1.0,"n":2}']
  - name: other
    input: ['{"id": 1, "n": 2}', '{"id": 2, "n": 3}']
    output_rows: ['{"id": 1, "n": 2}', '{"id": 1, "n": 2}', '{"id": 2, "n": true}', '{']
""")
    lines = etlstage("test", "p.yaml").stdout.splitlines()
    assert lines[0].startswith("ok   same")
    assert lines[1].startswith("FAIL other")
    assert lines[2:6] == [
        "     p.yaml:10:18: rows differ",
        '       - {"id": 1, "n": 2}',
        '       - {"id": 2, "n": true}',
        "       - {",
    ]


def test_ends_that_can_not_be_compared(etlstage: Etlstage, pipeline: Path) -> None:
    """Only ends that turn rows into messages can replace one another (issue 23)."""
    done = etlstage("diff", "p.yaml", "--on", "files,fils")
    assert "--on: unknown end 'fils' (did you mean 'files'?)" in done.stderr
    text = PIPELINE.format(more="").replace(
        '{files: {path: in, format: csv, options: {header: "true"}}}',
        "{worker: {command: [seq, '3']}}",
    )
    (pipeline / "p.yaml").write_text(text)
    done = etlstage("diff", "p.yaml", "--on", "files,spark")
    assert (
        "p.yaml:4:10: the extract stage is a worker: only ends for rows" in done.stderr
    )


@pytest.mark.spark
def test_files_agree_with_spark(etlstage: Etlstage, pipeline: Path) -> None:
    """``files`` and ``spark`` make the same messages of the same files (issue 23)."""
    done = etlstage("diff", "p.yaml", "--on", "files,spark")
    assert done.stdout.startswith("files and spark agree: 3 messages"), done.stderr
