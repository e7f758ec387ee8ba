from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from etlstage.config.build import pipeline_from_here, pipeline_from_yaml, state_folder
from etlstage.config.reading import Changes, read
from etlstage.errors import ConfigError
from etlstage.journal import Journals
from etlstage.messages import StageKind
from etlstage.pipeline.dead_letter.files import read_letters
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.pipeline import Pipeline
from etlstage.sequencing.clock import Flags, flags_of

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
GROWING = """\
name: growing
state: state
extract:
  worker: {command: COMMAND}
  dialect: {mode: cyclic}
  offsets: {by: supervisor, step: 1000}
load:
  worker: {command: [sh, -c, 'while read -r x; do echo "$$x" >>out; printf "\\0"; done']}
"""
OFFSETS = """\
name: offsets
state: .etlstage
extract:
  name: rounds
  worker: {command: [python, rounds.py]}
  dialect: {mode: cyclic}
  offsets: {by: supervisor, start: 5, step: 10, end: 17, template: "{start}-{end}"}
load: {worker: {command: [sh, -c, 'while read x; do echo "$$x" >>out; printf "\\0"; done']}}
"""
EPOCHS = """\
name: epochs
delivery: exactly-once
state: state
extract:
  worker: {command: [python, rounds.py]}
  dialect: {mode: cyclic}
  offsets: {by: supervisor, start: 0, step: 1, end: 5}
load:
  worker: {command: [sh, -c, 'while read x; do printf "\\0"; done']}
  commit: [sh, -c, 'read told; echo "$$told" >>commits; printf "\\0"', commit]
  abort: [sh, -c, 'read told; printf "\\0"', abort]
  epoch: {messages: 2}
"""
JOURNALS = """\
name: journals
delivery: exactly-once
state: state
extract: {files: {path: new, format: text}}
load: {journal: {path: set, epoch: {messages: 2}}}
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
    """Write a pipeline file, and beside it the cyclic worker ``rounds.py``."""
    path.write_text(text)
    (path.parent / "rounds.py").write_text(ROUNDS)


def in_python(code: str, folder: Path) -> list[str]:
    """Run ``code`` in a new interpreter; return the last two lines it prints."""
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
    # Log events come first: structlog is not configured yet.
    return result.stdout.splitlines()[-2:]


def test_stages_have_their_names_or_numbers(path: Path) -> None:
    """The ledger lists the stages that were built."""
    path.write_text(WORKERS)
    pipeline = pipeline_from_yaml(path)
    assert pipeline.name == "letters"
    assert [(a.stage, a.kind) for a in pipeline.ledger] == [
        ("extract", StageKind.EXTRACT),
        ("transform-1", StageKind.TRANSFORM),
        ("same", StageKind.TRANSFORM),
        ("end", StageKind.LOAD),
    ]


@pytest.mark.process
async def test_workers_run_in_the_folder_of_the_file(path: Path) -> None:
    """The whole pipeline runs without Spark, on both event loops."""
    write(path, WORKERS)
    report = await Pipeline.from_yaml(path).run()
    assert (report.status, report.error) == ("done", None)
    assert (path.parent / "out").read_text() == "aa\nbb\n"


@pytest.mark.process
async def test_epochs_of_workers_are_bounded(path: Path) -> None:
    """The commit program is called for each epoch of the size set (issue 23)."""
    write(path, EPOCHS)
    report = await Pipeline.from_yaml(path).run()
    assert (report.status, report.error) == ("done", None)
    commits = (path.parent / "commits").read_text().splitlines()
    assert [json.loads(told)["messages"] for told in commits] == [2, 2, 1]


async def test_epochs_of_journals_are_bounded(path: Path) -> None:
    """Five messages in epochs of two are three transactions (issue 24)."""
    (path.parent / "new").write_text("a\nb\nc\nd\ne\n")
    write(path, JOURNALS)
    report = await Pipeline.from_yaml(path).run()
    assert (report.status, report.error) == ("done", None)
    with Journals.open(path.parent / "set") as journals:
        (spec,) = journals.partitions()
        messages = [one.message for one in journals.read_uncommitted(spec.name)]
    ends = [one for one in messages if flags_of(one.uuid) is Flags.ACK_TXN]
    assert len(ends) == 3


@pytest.mark.process
async def test_offsets_reach_the_worker(path: Path) -> None:
    """The worker gets each range of offsets; the state is kept beside the file."""
    write(path, OFFSETS)
    report = await Pipeline.from_yaml(path).run()
    assert (report.status, report.error) == ("done", None)
    assert (path.parent / "out").read_text() == "5-15\n15-17\n"
    assert {p.name for p in (path.parent / ".etlstage").iterdir()} == {
        "lock",
        "record.1.json",
    }


@pytest.mark.process
async def test_lines_that_were_appended_are_read_by_the_next_run(path: Path) -> None:
    """The shipped worker resumes in the middle of a step, too (issue 10)."""
    lines, state = path.parent / "in.txt", path.parent / "state"
    worker = files("etlstage") / "examples/workers/sdk"
    command = f"[python, {worker}/extract_cycle_supervisor_offsets.py, {lines}]"
    write(path, GROWING.replace("COMMAND", command))
    for number, (start, end) in enumerate([(0, 1500), (1500, 1600)], 1):
        with lines.open("a") as file:
            file.writelines(f"{n}\n" for n in range(start, end))
        report = await Pipeline.from_yaml(path).run()
        assert (report.status, report.error) == ("done", None)
        stored = (state / f"record.{number}.json").read_text()
        assert json.loads(stored)["position"] == end
    assert (path.parent / "out").read_text() == lines.read_text()


def test_wrong_file_is_reported_at_once(path: Path) -> None:
    """The error is raised when the pipeline is built, not when it runs."""
    path.write_text("name: x\n")
    with pytest.raises(ConfigError, match="extract: required key is missing"):
        Pipeline.from_yaml(path)


@pytest.mark.process
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
def test_building_starts_no_spark(path: Path) -> None:
    """A JVM takes seconds to start; merely building a pipeline must not wait for it."""
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
def test_session_of_the_file_ends_with_the_run(path: Path) -> None:
    """Both ends share one session, which is stopped when the run ends."""
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


@pytest.mark.parametrize(
    ("state", "folder"),
    [("", ".etlstage/letters"), ("state: there\n", "there"), ("state: /abs\n", "/abs")],
)
def test_state_has_a_default(path: Path, state: str, folder: str) -> None:
    """Dead letters need a folder even if the file names none."""
    path.write_text(state + WORKERS)
    assert state_folder(read(path)) == path.parent / folder


@pytest.mark.process
async def test_dead_letters_know_commands_as_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpolated value may be a secret: dead letters hold its reference."""
    monkeypatch.setenv("TOKEN", "hunter2")
    monkeypatch.setenv("N", "7")
    write(
        path,
        OFFSETS.replace('"$$x"', '"$$x ${TOKEN} ${N}"').replace("printf", "exit 3;"),
    )
    report = await Pipeline.from_yaml(path).run()
    assert report.ledger[1].dead == 2
    letter, _ = read_letters(path.parent / ".etlstage/dead_letters/load.jsonl")
    assert isinstance(letter, DeadLetter)
    assert letter.config["worker"]["command"][0] == "sh"
    assert "${TOKEN} ${N}" in letter.config["worker"]["command"][2]
    assert "hunter2" not in str(letter)
    assert str(path) in str(report.dead_letters.command)


@pytest.mark.parametrize("engine", ["local", "spark", "streaming"])
def test_state_is_held_on_all_engines(path: Path, engine: str) -> None:
    """Otherwise two runs of a file at once would load everything twice (issue 10)."""
    frames = FRAMES.replace("overwrite", "append")
    path.write_text(f"engine: {engine}\nstate: there\n{frames}")
    runner = Pipeline.from_yaml(path)
    assert runner._delivery is not None
    assert runner._delivery.folder == path.parent / "there"


@pytest.mark.parametrize(
    ("values", "shown"), [([], "pipeline.yaml"), (["state=there"], "there")]
)
def test_letters_are_found_again(path: Path, values: list[str], shown: str) -> None:
    """The command shown finds the letters, even if ``--set`` moved the state folder."""
    path.write_text(WORKERS)
    runner = pipeline_from_here(path, Changes(values=values))
    assert runner._dead_letters is not None
    assert runner._dead_letters.look == f"etlstage dlq ls {path.parent / shown}"
