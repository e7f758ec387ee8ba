"""
The blocks of README and of the pages in ``etlstage/docs``, and which of them tests run.

A block is named by its heading and its number below that, in a tutorial also by the
page. A test says by ``@runs`` what it runs; one of ``test_manual.py`` looks for blocks of which none says so.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

__all__ = (
    "BLOCKS",
    "BLOCKS_OF",
    "CLAIMED",
    "DOCS",
    "MANUAL",
    "PAGES",
    "ROOT",
    "Step",
    "as_shown",
    "follow",
    "runs",
    "runs_below",
    "runs_whole",
    "steps",
    "typed",
)

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "etlstage" / "docs"
PAGES: Final = {
    path: path.read_text() for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
}
MANUAL: Final = "\n".join(PAGES.values())
PART: Final = re.compile(
    r"^(?:#+ (?P<heading>.+)|```(?P<language>\w*)\n(?P<text>(?s:.*?))```)$",
    re.MULTILINE,
)
FILE: Final = re.compile(r"(?:#!.*\n)?(?:#|//) ([\w./-]+\.\w+)\n")
MARK: Final = "-- step --"

Step = tuple[str, str]
"""What is typed, and what is shown then."""


class Block(NamedTuple):
    """What is fenced."""

    name: str
    language: str
    text: str


def _blocks(path: Path, page: str) -> list[Block]:
    found = list[Block]()
    place = f"{path.stem}: " if path.parent.name == "tutorials" else ""
    heading, number = "", 0
    for part in PART.finditer(page):
        if part["heading"]:
            heading, number = part["heading"], 0
        else:
            number += 1
            name = f"{place}{heading} {number}"
            found.append(Block(name, part["language"], part["text"]))
    return found


BLOCKS_OF: Final = {
    str(path.relative_to(DOCS if DOCS in path.parents else ROOT)): _blocks(path, text)
    for path, text in PAGES.items()
}
BLOCKS: Final = {
    block.name: block.text for blocks in BLOCKS_OF.values() for block in blocks
}
CLAIMED: Final = set[str]()


def runs(*names: str) -> pytest.MarkDecorator:
    """Give a test these blocks, as ``blocks``, and know that they are run."""
    CLAIMED.update(names)
    blocks = [BLOCKS.get(name, f"the manual has no block {name}") for name in names]
    return pytest.mark.parametrize("blocks", [blocks], ids=[names[0]])


def runs_whole(*pages: str) -> pytest.MarkDecorator:
    """Give a test each of these pages, as ``page``, and know that it is run."""
    for page in pages:
        CLAIMED.update(block.name for block in BLOCKS_OF[page])
    return pytest.mark.parametrize("page", pages)


def runs_below(page: str, *headings: str) -> pytest.MarkDecorator:
    """Give a test these headings of a page, as ``heading``; it runs what is below."""
    for block in BLOCKS_OF[page]:
        if block.name.rpartition(" ")[0] in headings:
            CLAIMED.add(block.name)
    return pytest.mark.parametrize("heading", headings)


def follow(page: str, folder: Path, *, below: str = "") -> None:
    """
    Do what a page says, in the current folder: write files, type commands.

    A block whose first line is a comment with the name of a file is that file. What is
    in no such block, and in no dialogue, is for the reader.

    Args:
        page: Its path below ``etlstage/docs``.
        folder: Where the files are written.
        below: The heading that they stand below; default: any.

    """
    for block in BLOCKS_OF[page]:
        named = FILE.match(block.text)
        if below and block.name.rpartition(" ")[0] != below:
            continue
        if block.language == "console":
            typed(steps(block.text))
        elif named is not None:
            (folder / named[1]).parent.mkdir(exist_ok=True)
            (folder / named[1]).write_text(block.text)
            (folder / named[1]).chmod(0o700)
        else:
            assert block.language == "text", block


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
        r" *\(?\b\d+\.\d+(?= ?s\b|$|  std|  event)": " #",
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
