"""
A terminal for programs under test: a pty of a given width, and its screen's contents.

It knows the escape sequences that our commands write, and fails for others.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

__all__ = ("Terminal", "on_terminal", "output_on_terminal")

PARTS: Final = re.compile(
    r"\x1b\[(?P<modes>\?)?(?P<number>[0-9;]*)(?P<what>[A-Za-z])|[\r\n]|[^\x1b\r\n]+|\x1b"
)
HIGH: Final = 50


class Terminal:
    """What a screen of unlimited height shows of all that was written to it."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._lines: list[list[tuple[str, str]]] = [[]]
        self._row = self._column = 0
        self._style = ""

    def write(self, text: str) -> None:
        """Process output of a program."""
        for part in PARTS.finditer(text):
            if part["what"] is not None:
                self._obey(
                    part["what"], part["number"], modes=part["modes"] is not None
                )
            elif part[0] == "\r":
                self._column = 0
            elif part[0] == "\n":
                self._down()
            else:
                for character in part[0]:
                    self._put(character)

    @property
    def text(self) -> str:
        """The text on the screen."""
        rows = ("".join(cell for cell, _ in line).rstrip() for line in self._lines)
        return "\n".join(rows).rstrip("\n") + "\n"

    @property
    def styled(self) -> list[str]:
        """The texts that are not plain, each after its style: ``1;31 error``."""
        found = []
        for line in self._lines:
            for style, cells in groupby(line, key=lambda cell: cell[1]):
                text = "".join(character for character, _ in cells).strip()
                if style and text:
                    found.append(f"{style} {text}")
        return found

    def _obey(self, what: str, number: str, *, modes: bool) -> None:
        if what == "m":
            self._style = number.removeprefix("0")
        elif what == "A":
            self._row -= int(number or 1)
        elif what == "K" and number == "2":
            self._lines[self._row].clear()
        else:
            # Modes hide the cursor, and show it again.
            assert modes, f"unknown sequence {number}{what}"
        assert self._row >= 0

    def _put(self, character: str) -> None:
        assert character.isprintable(), repr(character)
        if self._column == self._width:
            self._column = 0
            self._down()
        line = self._lines[self._row]
        line += [(" ", "")] * (self._column + 1 - len(line))
        line[self._column] = character, self._style
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append([])


def on_terminal(
    command: Sequence[str],
    *,
    width: int,
    folder: Path,
    env: Mapping[str, str],
    given: str = "",
) -> Terminal:
    """Run a program to its end on a terminal of ``width`` columns."""
    _, text = output_on_terminal(
        command, width=width, folder=folder, env=env, given=given
    )
    terminal = Terminal(width)
    terminal.write(text)
    return terminal


def output_on_terminal(
    command: Sequence[str],
    *,
    width: int,
    folder: Path,
    env: Mapping[str, str],
    given: str = "",
) -> tuple[int, str]:
    """Run a program likewise; return its exit code and all of its output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HIGH, width, 0, 0))
    with subprocess.Popen(
        command,
        cwd=folder,
        env={"TERM": "xterm-256color", **env},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        data = b""
        with open(ours, "r+b", buffering=0) as file:
            file.write(f"{given}\n".encode() if given else b"")
            try:
                while chunk := file.read(65536):
                    data += chunk
            except OSError:
                pass  # no process has the other end open any more
    return process.returncode, data.decode()
