from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import pytest

from etlstage.cli.screen import Screen
from etlstage.errors import EtlstageError
from tests.cli.conftest import command, environment


class Terminal(io.StringIO):
    """A file that claims to be a terminal."""

    def isatty(self) -> bool:
        """Claim it."""
        return True


@pytest.mark.parametrize(
    ("file", "term", "watched", "renews"),
    [
        (Terminal(), "xterm", True, True),
        (Terminal(), "dumb", True, False),
        (io.StringIO(), "xterm", False, False),
    ],
)
def test_what_a_screen_can_do(
    monkeypatch: pytest.MonkeyPatch,
    file: io.StringIO,
    term: str,
    watched: bool,
    renews: bool,
) -> None:
    """Colours may be forced into a pipe, a table that renews itself may not."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = Screen(file=file)
    assert (screen.watched, screen.renews) == (watched, renews)


def test_reader_that_is_gone_is_no_error() -> None:
    """A long run must not end because of its progress lines."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        screen = Screen(file=file)
        screen.print("nobody reads this")
        screen.print("nor this")
        assert screen.quiet


def test_full_disk_is_an_error_once() -> None:
    """Behind it the screen is silent."""
    with open("/dev/full", "w") as file:
        screen = Screen(file=file)
        with pytest.raises(EtlstageError, match="stdout can't be written: no space"):
            screen.print("a line")
        screen.print("another")
        assert screen.quiet


@pytest.mark.parametrize(("words", "code"), [(["plan"], 1), (["run"], 0)])
def test_command_that_can_not_print(
    pipeline: Path, words: list[str], code: int
) -> None:
    """It fails, but for a run, which has loaded and would load again."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command([*words, pipeline]),
            cwd=pipeline.parent,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == code
    text = "etlstage: error: stdout can't be written: no space left on device\n"
    assert done.stderr.endswith(text)
