from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cli.conftest import command
from tests.cli.forked import environment

COMMANDS = (
    ["--version"],
    ["--help"],
    ["help"],
    ["schema"],
    ["graph", "pipeline.yaml"],
    ["plan", "pipeline.yaml"],
    ["validate", "pipeline.yaml"],
    ["state", "show", "pipeline.yaml"],
    ["dlq", "ls", "pipeline.yaml"],
    ["check", "--list"],
    ["init", "here"],
)


def printing_into(
    stdout: int, folder: Path, words: Sequence[str], given: str = ""
) -> tuple[int, str]:
    """Return the exit code, and stderr, of a command with such a stdout."""
    done = subprocess.run(
        command(words),
        cwd=folder,
        env=environment(),
        input=given,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.fixture
def full() -> Iterator[int]:
    """Give a file on a disk that has no room."""
    with open("/dev/full", "w") as file:
        yield file.fileno()


@pytest.fixture
def unread() -> Iterator[int]:
    """Give a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_full_disk_is_one_clear_error(
    pipeline: Path, words: list[str], full: int
) -> None:
    """Whatever a command prints, and by whichever way."""
    text = "etlstage: error: stdout can't be written: no space left on device\n"
    assert printing_into(full, pipeline.parent, words) == (1, text)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_reader_that_is_gone_is_no_error(
    pipeline: Path, words: list[str], unread: int
) -> None:
    """It has seen enough, as ``head`` has."""
    assert printing_into(unread, pipeline.parent, words) == (0, "")


def test_run_whose_reader_is_gone_goes_to_its_end(pipeline: Path, unread: int) -> None:
    """``etlstage run ... | head`` loads all."""
    words = ["run", "pipeline.yaml"]
    assert printing_into(unread, pipeline.parent, words) == (0, "")
    assert (pipeline.parent / "loaded.txt").read_text() == "A\nB\nC\n"


def test_run_that_can_print_no_report_is_done(pipeline: Path, full: int) -> None:
    """It has loaded, and a failure would have it loaded again."""
    code, err = printing_into(full, pipeline.parent, ["run", "pipeline.yaml"])
    assert code == 0
    text = "etlstage: error: stdout can't be written: no space left on device\n"
    assert err.endswith(text)


def test_question_that_nobody_reads_is_answered_no(pipeline: Path, unread: int) -> None:
    """Nothing is changed on an answer to what was not asked."""
    (pipeline.parent / "state").mkdir()
    pipeline.write_text(f"state: state\n{pipeline.read_text()}")
    words = ["state", "reset", "pipeline.yaml"]
    code, err = printing_into(unread, pipeline.parent, words, given="y\n")
    assert code == 2
    assert err.endswith("the question can't be shown: pass --yes\n")


def test_full_disk_of_a_log_ends_no_run(pipeline: Path, full: int) -> None:
    """Nor does that nobody reads its report."""
    (pipeline.parent / "upper.py").write_text("import sys; sys.exit(3)")
    done = subprocess.run(
        command(["run", pipeline, "--report", "r.json"]),
        cwd=pipeline.parent,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=full,
        check=False,
    )
    assert done.returncode == 1
    report = json.loads((pipeline.parent / "r.json").read_text())
    assert report["status"] == "failed"


def test_exit_code_is_kept_where_stderr_is_full(tmp_path: Path, full: int) -> None:
    """The disk of a log is no reason for another one."""
    done = subprocess.run(
        command(["run", "none.yaml"]),
        cwd=tmp_path,
        env=environment(),
        stderr=full,
        check=False,
    )
    assert done.returncode == 2
