"""
Whole screens, as they are in ``screens/``: on terminals of two widths, and in pipes.

With ``WRITE_SCREENS=1`` in the environment they are written anew, for review.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.cli.forked import PLAIN, Forks, environment
from tests.cli.terminal import Terminal, on_terminal

SCREENS: Final = Path(__file__).parent / "screens"
PIPELINE: Final = """\
name: letters
extract: {worker: {command: [./letters.sh]}}
transform:
  - name: capitals
    worker: {command: [./capitals.sh]}
    on_error: {ON_ERROR}
load: {worker: {command: [./keep.sh]}}
"""
LETTERS: Final = r"""
printf 'beta\ngamma\nalpha\n'
"""
CAPITALS: Final = r"""
while IFS= read -r line; do
  case $line in
  b*)
    printf 'no letter may begin with b: they are kept in another book, which is' >&2
    printf ' on the shelf behind the door\n' >&2
    exit 3
    ;;
  g*) printf 'this is a letter that nobody can read, %s\025' 'nor ever could';;
  *) printf '%s\n\0' "$line" | tr a-z A-Z;;
  esac
done
"""
KEEP: Final = r"""
while IFS= read -r line; do printf '\0'; done
"""
WRONG: Final = """\
name: letters
enigne: local
extract: {worker: {command: [./letters.sh]}}
transform:
  - name: capitals
    worker: {command: [./capital.sh, 'no line is as long as this'], limits: {memory: much}}
    workers: 0
load: {worker: {command: [./keep.sh]}, timeout: {message: 5 minutes}}
"""
FILES: Final = {
    "letters.yaml": PIPELINE.replace("ON_ERROR", "budget: 2"),
    "kept.yaml": PIPELINE.replace("ON_ERROR", "budget: 2").replace(
        "letters", "kept", 1
    ),
    "failing.yaml": PIPELINE.replace("ON_ERROR", "then: fail"),
    "wrong.yaml": WRONG,
    "letters.sh": f"#!/bin/sh{LETTERS}",
    "capitals.sh": f"#!/bin/sh{CAPITALS}",
    "keep.sh": f"#!/bin/sh{KEEP}",
}
COMMANDS: Final = {
    "run": ("run", "letters.yaml"),
    "failing-run": ("run", "failing.yaml"),
    "dlq-ls": ("dlq", "ls", "kept.yaml"),
    "plan": ("plan", "letters.yaml"),
    "validate": ("validate", "wrong.yaml"),
}


@pytest.fixture(scope="module")
def folder(forks: Forks) -> Iterator[Path]:
    """Make a folder with a name of constant length, as some lines contain the name."""
    folder = Path(tempfile.mkdtemp(prefix="etl-", dir="/tmp"))
    for name, text in FILES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    piped(forks, folder, "run", "kept.yaml")
    yield folder
    shutil.rmtree(folder)


def piped(forks: Forks, folder: Path, *arguments: str) -> str:
    """Run the command line with pipes for its output; return all of it."""
    done = forks.run(arguments, folder, environment(**{PLAIN: "1"}), "")
    return f"{done.stdout}-- stderr\n{done.stderr}"


def shown(
    forks: Forks, folder: Path, *arguments: str, width: int, **env: str
) -> Terminal:
    """Run the command line on a terminal; return the terminal."""
    command = [forks.program, *arguments]
    plain = environment(**env | {PLAIN: "1"})
    return on_terminal(command, width=width, folder=folder, env=plain)


def timeless(text: str, folder: Path) -> str:
    """Return a screen without times and names that differ from run to run."""
    text = text.replace(str(folder), "/tmp/etl-12345678")  # noqa: S108 - not a file
    for pattern, instead in {
        r"\d{4}-\d\d-\d\d(?=[ T]\d\d:)": "2026-01-02",
        r"(?<!\d)\d\d:\d\d:\d\d(\.\d+)?": "12:00:00",
        r"\b[0-9a-f]{8}(?=-\d+\b)": "af32b1c9",
        r"\bin \d+\.\d s$": "in 0.0 s",
    }.items():
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    column = re.compile(r" +\d+\.\d$", flags=re.MULTILINE)
    return column.sub(lambda found: "0.0".rjust(len(found[0])), text)


def compare(name: str, text: str) -> None:
    """Compare a screen with the reviewed one in ``screens/``."""
    path = SCREENS / f"{name}.txt"
    if os.environ.get("WRITE_SCREENS"):
        path.write_text(text)
    assert text.splitlines() == path.read_text().splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_screens(name: str, folder: Path, forks: Forks) -> None:
    """They fit the terminal's width; NO_COLOR changes only the colours (issue 11)."""
    for width in (80, 200):
        terminal = shown(forks, folder, *COMMANDS[name], width=width)
        styled = dict.fromkeys(timeless(line, folder) for line in terminal.styled)
        screen = [timeless(terminal.text, folder), "-- styles\n", "\n".join(styled)]
        compare(f"{name}-{width}", "".join(screen))
        if width == 80:
            sober = shown(forks, folder, *COMMANDS[name], width=width, NO_COLOR="1")
            assert timeless(sober.text, folder) == timeless(terminal.text, folder)
            assert all(re.match("[1-9](;[1-9])* ", line) for line in sober.styled)
    text = piped(forks, folder, *COMMANDS[name])
    compare(f"{name}-piped", timeless(text, folder))
