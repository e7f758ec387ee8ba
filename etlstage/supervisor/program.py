"""
Whether what a command names is there, sought where its worker would run.

Only what is missing is found here, with what may have been meant; why a file that is
there can't be run the system says best, when it is started.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from etlstage.errors import guess
from etlstage.stage.stage import Stage

__all__ = (
    "absent",
    "absent_from_path",
    "missing",
    "on_path",
    "runs",
    "script",
    "search_path",
)

INTERPRETERS: Final = (
    (re.compile(r"(python|pypy)[0-9.]*"), "-u -B -E -I -O -OO -s -S"),
    (re.compile(r"(ba|da|z|k|a)?sh"), "-e -u -x -eu -ex -ux -eux"),
    (re.compile(r"node|ruby|perl|Rscript|php|lua[0-9.]*"), ""),
)
"""Programs whose first argument is a script, and flags that may stand before it."""


def missing(stage: Stage) -> str | None:
    """Return what the stage's command names and is not there; None if all is."""
    worker = stage.program
    folder = Path(worker.cwd or "")
    if not os.path.isdir(folder):
        return absent("folder", folder)
    program = worker.command[0]
    if "{" in program:
        pass  # a part of it is the dialect's
    elif "/" in program:
        if not os.path.exists(folder / program):
            return absent("file", folder / program)
    else:
        path = worker.env.get("PATH", search_path())
        if (text := absent_from_path(program, folder, path)) is not None:
            return text
    place = script(worker.command)
    if place is not None and not runs(folder / worker.command[place]):
        return absent("file", folder / worker.command[place])
    return None


def script(command: Sequence[str]) -> int | None:
    """Return which word of a command is the script that its program interprets."""
    name = os.path.basename(command[0])
    flags = [f.split() for known, f in INTERPRETERS if known.fullmatch(name)]
    for place, word in enumerate(command) if flags else ():
        if place and word not in flags[0]:
            # What begins with a dash may have the program behind it, as -c and -m do.
            return None if word.startswith("-") or "{" in word else place
    return None


def runs(path: Path) -> bool:
    """Return whether an interpreter finds a script there."""
    # A pipe is one, too: `sh <(...)`.
    found = os.path.exists(path) and not os.path.isdir(path)
    return found or os.path.isfile(path / "__main__.py")


def absent(what: str, place: Path) -> str:
    """Return that there is no such file, and which one may have been meant."""
    close = guess(place.name, names(place.parent))
    return f"there is no {what} {place.absolute()}{close}"


def names(folder: str | Path) -> list[str]:
    """Return what is in a folder, if it can be read."""
    # pathlib raises for a name that is too long, os.path does not.
    with suppress(OSError, ValueError):
        return os.listdir(folder)
    return []


def search_path() -> str:
    """Return the PATH of a worker that is given no other."""
    return os.environ.get("PATH", os.defpath)


def on_path(program: str, folder: Path, path: str) -> str | None:
    """Return the program that a name on the PATH stands for, seen from ``folder``."""
    return shutil.which(program, path=os.pathsep.join(_folders(folder, path)))


def absent_from_path(
    program: str, folder: Path, path: str, known: Iterable[str] = ()
) -> str | None:
    """
    Return why a name on the PATH can't be run; None if it can.

    Args:
        program: The name.
        folder: Where the worker runs.
        path: The PATH that it has.
        known: Names that are understood besides.

    """
    if on_path(program, folder, path):
        return None
    folders = _folders(folder, path)
    if any(os.path.isfile(os.path.join(place, program)) for place in folders):
        return f"the program {program!r} on PATH is not executable"
    if os.path.exists(folder / program):
        close = f" (did you mean {'./' + program!r}?)"
    else:
        there = {name for place in folders for name in names(place)}
        close = guess(program, there | set(known))
    return f"there is no program {program!r} on PATH{close}"


def _folders(folder: Path, path: str) -> list[str]:
    # A relative folder of the PATH is seen from where the worker runs.
    return [os.path.join(folder, name) for name in path.split(os.pathsep)]
