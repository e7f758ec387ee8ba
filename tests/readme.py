"""
The blocks of README and of the pages in ``etlstage/docs``, and which of them tests run.

A block is named by its heading and its number below that. A test says by ``@runs`` what
it runs; one of ``test_manual.py`` looks for blocks of which none says so.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

__all__ = (
    "BLOCKS",
    "CLAIMED",
    "MANUAL",
    "PAGES",
    "Step",
    "as_shown",
    "runs",
    "steps",
    "typed",
)

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = {
    path: path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "etlstage/docs").rglob("*.md")))
}
MANUAL: Final = "\n".join(PAGES.values())
PART: Final = re.compile(
    r"^(?:#+ (?P<heading>.+)|```(?P<language>\w*)\n(?P<text>(?s:.*?))```)$",
    re.MULTILINE,
)
MARK: Final = "-- step --"

Step = tuple[str, str]
"""What is typed, and what is shown then."""


def _blocks() -> dict[str, str]:
    found: dict[str, str] = {}
    heading, number = "", 0
    for part in PART.finditer(MANUAL):
        if part["heading"]:
            heading, number = part["heading"], 0
        else:
            number += 1
            found[f"{heading} {number}"] = part["text"]
    return found


BLOCKS: Final = _blocks()
CLAIMED: Final = set[str]()


def runs(*names: str) -> pytest.MarkDecorator:
    """Give a test these blocks, as ``blocks``, and know that they are run."""
    CLAIMED.update(names)
    blocks = [BLOCKS.get(name, f"the manual has no block {name}") for name in names]
    return pytest.mark.parametrize("blocks", [blocks], ids=[names[0]])


def steps(*blocks: str) -> list[Step]:
    """Return what is typed in dialogues."""
    typed = [
        step
        for block in blocks
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    ]
    return [
        (command, shown) for command, _, shown in (s.partition("\n") for s in typed)
    ]


def typed(steps: Sequence[Step], *, stderr: bool = False) -> None:
    """Type it, and see the same on stdout, or on stderr too."""
    script = "\n".join(f"echo '{MARK}'; {command}" for command, _ in steps)
    ended = subprocess.run(
        ["/bin/sh", "-c", f"exec 2>&1\n{script}" if stderr else script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    seen = ended.stdout.split(f"{MARK}\n")[1:]
    for (command, shown), said in zip(steps, seen, strict=True):
        as_shown(said, shown, f"{command}\n{ended.stderr}")


def as_shown(said: str, shown: str, what: str = "") -> None:
    """Compare an output with the manual's, in which ``...`` stands for lines left out."""
    wanted = _timeless(shown)
    lines = _timeless(said.replace(os.getcwd(), "/home/me"))
    assert _without_those_left_out(lines, wanted) == wanted, what


def _timeless(text: str) -> list[str]:
    """Return the lines without what no two runs have in common, nor its room."""
    for pattern, instead in {
        r" *\(?\b\d+\.\d+(?= s\b|$|  std|  event)": " #",
        r"\b[0-9a-f]{8}(?=\.rec\b)": "#",
        r"\bpid \d+": "pid #",
        r"^found after .+ more .+$": "found after #",
    }.items():
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text.splitlines()


def _without_those_left_out(lines: list[str], wanted: list[str]) -> list[str]:
    """Return the lines with ``...`` in place of those that ``wanted`` leaves out."""
    kept = list[str]()
    while "..." in wanted:
        at = wanted.index("...")
        kept += [*lines[:at], "..."]
        lines, wanted = lines[at:], wanted[at + 1 :]
        part = wanted[: wanted.index("...")] if "..." in wanted else wanted
        while (lines and lines[: len(part)] != part) or (not part and lines):
            lines = lines[1:]
    return kept + lines
