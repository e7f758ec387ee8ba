"""Files that earlier versions left on disk are read by this version (issue 27)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from etlstage.pipeline.dead_letter.files import read_letters
from etlstage.pipeline.dead_letter.letter import DeadLetter
from tests.cli.conftest import Etlstage
from tests.fixtures.make import WHERE
from tests.manual.fences import SECTIONS

VERSIONS: Final = sorted(
    path
    for path in Path(__file__).parents[1].glob("fixtures/*/")
    if path.name[0] in "0123456789"
)


@pytest.fixture(params=VERSIONS, ids=[path.name for path in VERSIONS])
def left(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Copy a version's files to the test's folder, as if they had been made there."""
    shutil.copytree(request.param, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("state/*/record.*.json"):
        plain = json.loads(path.read_text().replace(str(WHERE), str(tmp_path)))
        plain.pop("crc32", None)  # that of the content before
        path.write_text(json.dumps(plain))
    return tmp_path


def test_interrupted_run_is_resumed(left: Path, etlstage: Etlstage) -> None:
    """Nothing is lost or doubled, and dead letters are kept."""
    shown = etlstage("state", "show", "words.yaml")
    assert "epoch 2" in shown.stdout
    assert etlstage("run", "words.yaml").returncode == 0
    lines = [line for p in left.glob("out/*") for line in p.read_text().splitlines()]
    assert sorted(lines) == sorted(f"WORD {n}" for n in range(40) if n != 7)
    assert etlstage("dlq", "ls", "words.yaml").stdout.count("no seven") == 1


def test_dead_letters_are_read_and_retried(left: Path, etlstage: Etlstage) -> None:
    """All letters of the interrupted run are there, with attempts and config."""
    (path,) = left.glob("state/words/dead_letters/*.jsonl")
    letters = [
        letter for letter in read_letters(path) if isinstance(letter, DeadLetter)
    ]
    assert [letter.message for letter in letters] == [b"word 7", b"word 25"]
    assert all(letter.attempts and letter.config for letter in letters)
    assert etlstage("run", "words.yaml").returncode == 0
    worker = left / "upper.sh"
    worker.write_text(worker.read_text().replace("word 7", "none"))
    assert "1 dead letter passed" in etlstage("dlq", "retry", "words.yaml").stdout


def test_shards_continue(left: Path, etlstage: Etlstage) -> None:
    """No sequence number is used twice."""
    path = left / "state" / "clicks" / "shards.json"
    before = json.loads(path.read_text())["positions"]
    assert etlstage("run", "clicks.yaml").returncode == 0
    after = json.loads(path.read_text())["positions"]
    assert before.keys() == after.keys()
    highest = max(int(number) for number, _ in before.values())
    assert all(int(number) > highest for number, _ in after.values())


def test_journals_are_read(left: Path, etlstage: Etlstage) -> None:
    """All messages that were appended in transactions are read."""
    (left / "read.yaml").write_text(
        "name: read\n"
        "extract: {journal: {path: journals, reader: test}}\n"
        "load: {files: {path: read, format: text}}\n"
    )
    assert etlstage("run", "read.yaml").returncode == 0
    lines = [
        line for p in left.glob("read/part*") for line in p.read_text().split("\n")
    ]
    assert sorted(filter(None, lines)) == sorted(f"word {n}" for n in range(40))


def test_recordings_are_replayed(left: Path, etlstage: Etlstage) -> None:
    """A worker that died does so again, until it is mended."""
    recording = str(left / "recordings" / "upper-1.1.rec")
    command = ("replay", recording, "--", "/bin/sh", "upper.sh")
    assert "exited with status 3" in etlstage(*command).stdout
    (left / "broken").touch()
    assert etlstage(*command).returncode == 0


def test_reports_have_no_key_that_is_gone(left: Path) -> None:
    """Code that reads an old report can read a new one."""

    def keys(report: Mapping[str, Any]) -> set[str]:
        parts = [report, *report["stages"], *report["edges"], report["dead_letters"]]
        return {key for part in parts for key in part}

    (fence,) = SECTIONS["reference/report.md#The report"]
    assert keys(json.loads((left / "report.json").read_text())) <= keys(
        json.loads(fence.text)
    )
