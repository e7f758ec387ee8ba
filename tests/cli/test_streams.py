from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from etlstage.journal import Journals
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from tests.cli.conftest import UPPER, command
from tests.cli.forked import Forks, environment

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
REFUSING = UPPER.replace(r'b"\0"', r'(b"\x15" if line == b"c\n" else b"\0")')


class Into:
    """Runs commands with a given stdout; two of them are started, the others forked."""

    def __init__(self, folder: Path, program: str) -> None:
        self.folder = folder
        self._program = program

    def __call__(
        self, stdout: int, words: Sequence[str], given: str = ""
    ) -> tuple[int, str]:
        """Return the exit code, and stderr, of a command."""
        started = words in (["--version"], ["run", "pipeline.yaml"])
        done = subprocess.run(
            command(words) if started else [self._program, *words],
            cwd=self.folder,
            env=environment(),
            input=given,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr


@pytest.fixture
def into(pipeline: Path, forks: Forks) -> Into:
    """Run commands in the folder of a pipeline."""
    return Into(pipeline.parent, forks.program)


@pytest.fixture
def full() -> Iterator[int]:
    """Yield a file on a disk that is full."""
    with open("/dev/full", "w") as file:
        yield file.fileno()


@pytest.fixture
def unread() -> Iterator[int]:
    """Yield a pipe that no process reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_full_disk_is_one_clear_error(into: Into, words: list[str], full: int) -> None:
    """This holds for every command, in whichever way it prints."""
    text = "etlstage: error: stdout can't be written: no space left on device\n"
    assert into(full, words) == (1, text)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_reader_that_is_gone_is_no_error(
    into: Into, words: list[str], unread: int
) -> None:
    """It has read enough, as ``head`` has."""
    assert into(unread, words) == (0, "")


def test_run_whose_reader_is_gone_goes_to_its_end(into: Into, unread: int) -> None:
    """``etlstage run ... | head`` loads all."""
    words = ["run", "pipeline.yaml"]
    assert into(unread, words) == (0, "")
    assert (into.folder / "loaded.txt").read_text() == "A\nB\nC\n"


def test_run_that_can_print_no_report_is_done(into: Into, full: int) -> None:
    """All is loaded, and a failure would have it loaded again."""
    code, err = into(full, ["run", "pipeline.yaml"])
    assert code == 0
    text = "etlstage: warning: no closing report: stdout can't be written: no space"
    assert err.endswith(f"{text} left on device\n")


def test_question_that_nobody_reads_is_answered_no(
    into: Into, pipeline: Path, unread: int
) -> None:
    """An answer to a question that was never shown changes nothing."""
    (pipeline.parent / "state").mkdir()
    pipeline.write_text(f"state: state\n{pipeline.read_text()}")
    words = ["state", "reset", "pipeline.yaml"]
    code, err = into(unread, words, given="y\n")
    assert code == 2
    assert err.endswith("the question can't be shown: pass --yes\n")


def test_full_disk_of_a_log_ends_no_run(pipeline: Path, full: int) -> None:
    """The run goes on to its end, and its report is written."""
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
    """An error that can't be printed keeps its exit code."""
    done = subprocess.run(
        command(["run", "none.yaml"]),
        cwd=tmp_path,
        env=environment(),
        stderr=full,
        check=False,
    )
    assert done.returncode == 2


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-"])
@pytest.mark.parametrize(
    "words",
    [
        "pipe --dead-letters letters in.txt -- python upper.py",
        "run pipeline.yaml --until upper",
    ],
)
def test_no_event_is_on_stdout_where_stderr_is_closed(
    pipeline: Path, words: str, closed: str
) -> None:
    """Only messages are there (issue 26)."""
    (pipeline.parent / "in.txt").write_bytes(b"a\nb\nc\n")
    (pipeline.parent / "upper.py").write_text(REFUSING)
    done = subprocess.run(
        ["/bin/sh", "-c", f"{shlex.join(command([]))} {words} {closed}"],
        cwd=pipeline.parent,
        env=environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"A\nB\n")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("try <&- -- cat", "stdin is closed; redirect it, or pass --sample FILE"),
        ("journal append set <&-", "stdin is closed; redirect it, as in <FILE"),
        (
            "state reset state <&-",
            "no answer, as there is no terminal to ask on: pass --yes",
        ),
        ("state reset state >&-", "the question can't be shown: pass --yes"),
    ],
)
def test_stdin_that_is_closed_is_named(tmp_path: Path, words: str, error: str) -> None:
    """So is a stdout, where a question is asked; nothing is changed (issue 26)."""
    Journals.open(tmp_path / "set").close()
    with Delivery(tmp_path / "state") as delivery:
        delivery.begin("r0", stages=["a"], letters={})
        delivery.commit(17)
    done = subprocess.run(
        ["/bin/sh", "-c", f"{shlex.join(command([]))} {words}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"etlstage: error: {error}"
    assert "unexpected" not in done.stderr
    assert CommitRecord.latest(tmp_path / "state").epoch == 1


@pytest.mark.parametrize(
    ("encoding", "name", "shown"),
    [
        ("ascii", "früh", r"fr\xfch"),
        ("ascii:surrogateescape", "früh", r"fr\xfch"),
        ("utf-8", os.fsdecode(b"d\xff"), r"d\udcff"),
    ],
)
def test_report_shows_what_stdout_cannot_encode_as_escapes(
    pipeline: Path, encoding: str, name: str, shown: str
) -> None:
    """A run whose report names such a path is settled and ends as done (issue 26)."""
    folder = pipeline.parent / name
    folder.mkdir()
    pipeline.rename(folder / "p.yaml")
    (folder / "keep.py").write_text((pipeline.parent / "keep.py").read_text())
    (folder / "upper.py").write_text(REFUSING)
    done = subprocess.run(
        command(["run", folder / "p.yaml", "--report", "r.json"]),
        cwd=pipeline.parent,
        env=environment(PYTHONIOENCODING=encoding),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"etlstage dlq ls '{pipeline.parent}/{shown}/p.yaml'" in done.stdout.decode()
    report = json.loads((pipeline.parent / "r.json").read_text())
    assert report["status"] == "done"
