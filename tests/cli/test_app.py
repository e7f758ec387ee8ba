from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest

from etlstage.cli import app
from etlstage.cli.app import run_command
from etlstage.errors import ConfigError, EtlstageError, SparkUnavailable

Ended = Callable[..., tuple[object, str]]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ended:
    """Return exit code and stderr of a command that raises."""

    def end(error: BaseException, *arguments: str) -> tuple[object, str]:
        def fail(**_: object) -> None:
            raise error

        monkeypatch.setattr(app, "app", fail)
        monkeypatch.setattr(sys, "argv", ["etlstage", *arguments])
        return run_command(), capsys.readouterr().err

    return end


def test_wrong_file_is_exit_2(ended: Ended) -> None:
    """Each problem is one line, and there is never a traceback."""
    code, err = ended(ConfigError(["a:1:1: x", "a:2:1: y"]), "--debug")
    assert (code, err) == (2, "etlstage: error: a:1:1: x\netlstage: error: a:2:1: y\n")


@pytest.mark.parametrize("kind", [EtlstageError, SparkUnavailable])
def test_failure_is_exit_1(ended: Ended, kind: type[EtlstageError]) -> None:
    """The error is one line; ``--debug`` adds a traceback."""
    assert ended(kind("no java")) == (1, "etlstage: error: no java\n")
    code, err = ended(kind("no java"), "run", "--debug")
    assert code == 1
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("etlstage: error: no java\n")


def test_bug_names_itself(ended: Ended) -> None:
    """An unforeseen error is one line, too, which names its place (issue 26)."""
    code, err = ended(KeyError("x"))
    assert code == 1
    assert re.fullmatch(
        r"etlstage: error: unexpected KeyError: 'x' \(etlstage/cli/app\.py, line \d+\)\n",
        err,
    )


def test_interrupt_before_the_run_is_exit_5(ended: Ended) -> None:
    """Ctrl-C may come while modules are imported."""
    wrapped = RuntimeError("Error calling __set_name__")
    wrapped.__cause__ = KeyboardInterrupt()
    group = BaseExceptionGroup("", [KeyboardInterrupt(), wrapped])
    nested = BaseExceptionGroup("", [group, KeyboardInterrupt()])
    for error in (KeyboardInterrupt(), wrapped, nested):
        assert ended(error) == (5, "etlstage: error: interrupted\n")


def test_error_steers_no_terminal(ended: Ended) -> None:
    """Errors quote workers' stderr, which may hold escape sequences."""
    assert ended(EtlstageError("\x1b[2Jgone\x07")) == (
        1,
        "etlstage: error: gone\\x07\n",
    )
