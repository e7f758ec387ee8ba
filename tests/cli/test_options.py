"""How much a run logs, and how."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from etlstage.cli.options import Level, LogFormat, Verbosity
from etlstage.cli.screen import Screen
from tests.cli.conftest import Etlstage

NOISY = """\
import sys
for line in sys.stdin.buffer:
    print("WARNING: odd", file=sys.stderr)
    print("INFO: fine", file=sys.stderr, flush=True)
    sys.stdout.buffer.write(line.upper() + b"\\0")
    sys.stdout.flush()
"""


@pytest.fixture
def noisy(pipeline: Path) -> Path:
    """Return a pipeline whose worker writes to stderr."""
    (pipeline.parent / "upper.py").write_text(NOISY)
    return pipeline


def test_quiet_run_shows_what_is_wrong(etlstage: Etlstage, noisy: Path) -> None:
    """Warnings are logged, and nothing else (issue 11)."""
    result = etlstage("run", noisy, "--quiet")
    assert (result.returncode, result.stdout) == (0, "")
    events = [json.loads(line) for line in result.stderr.splitlines()]
    assert [event["line"] for event in events] == ["WARNING: odd"] * 3


def test_quiet_run_that_fails_shows_why(etlstage: Etlstage, pipeline: Path) -> None:
    """The error is printed whatever the log's level is."""
    (pipeline.parent / "upper.py").write_text("raise SystemExit(3)")
    result = etlstage("run", pipeline, "-q", "--log-level", "error", code=1)
    assert result.stdout == ""
    assert "etlstage: error: stage upper" in result.stderr


def test_level_of_the_log(etlstage: Etlstage, noisy: Path) -> None:
    """Events below it are left out; the report is printed all the same (issue 11)."""
    result = etlstage("run", noisy, "--log-level", "warning")
    events = [json.loads(line) for line in result.stderr.splitlines()]
    assert {event["level"] for event in events} == {"warning"}
    assert "3 loaded" in result.stdout


def test_log_for_people_where_there_is_no_terminal(
    etlstage: Etlstage, noisy: Path
) -> None:
    """It has plain lines, without colours (issue 11)."""
    result = etlstage("run", noisy, "--log-format", "console")
    assert "WARNING: odd" in result.stderr
    assert "{" not in result.stderr
    assert "\x1b" not in result.stderr


def test_wrong_level(etlstage: Etlstage, noisy: Path) -> None:
    """The error names the levels."""
    result = etlstage("run", noisy, "--log-level", "loud", code=2)
    for level in Level:
        assert level.value in result.stderr


@pytest.mark.parametrize(
    ("verbosity", "threshold"),
    [
        (Verbosity(), logging.INFO),
        (Verbosity(debug=True), logging.DEBUG),
        (Verbosity(quiet=True), logging.WARNING),
        (Verbosity(quiet=True, level=Level.ERROR), logging.ERROR),
        (Verbosity(level=Level.DEBUG), logging.DEBUG),
    ],
)
def test_threshold(verbosity: Verbosity, threshold: int) -> None:
    """The quieter of two options wins."""
    assert verbosity.threshold == threshold


@pytest.mark.parametrize(
    ("form", "people"),
    [(None, False), (LogFormat.CONSOLE, True), (LogFormat.JSON, False)],
)
def test_for_whom(form: LogFormat | None, people: bool) -> None:
    """By default a pipe is read by a program, not by people."""
    assert Verbosity(format=form).for_people(Screen(stderr=True)) is people
