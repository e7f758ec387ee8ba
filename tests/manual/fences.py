"""
What is fenced in README and in the pages of ``etlstage/docs``, and how each is run.

Sybil finds the fences; this is what is done with one, by its language:

- ``console``: the commands are typed, and print what is shown; ``...`` stands for lines
  left out. ``pytest --update`` writes what they print into the page.
- ``python``: it is run, and a ``text`` behind it is what it prints.
- ``yaml``: it is a pipeline, or a part of one that gets the rest, and is loaded; or a
  file of faults.
- whatever begins with a comment that names a file is written there.

A comment in front of a fence is for what can't be run so: ``drawing``, ``dialogue``
(``tests/protocol/marker/test_document.py``), ``with stderr``, ``ci: NAME``
(``.ci/run``). There is no other way round: an unknown language fails.
"""

from __future__ import annotations

import ast
import difflib
import fcntl
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from inspect import CO_COROUTINE
from io import StringIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import jsonschema
from ruamel.yaml import YAML
from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from etlstage.config.fault import fault_plan
from etlstage.config.loader import load
from etlstage.config.schema import pipeline_schema

__all__ = (
    "DOCS",
    "MANUAL",
    "PAGES",
    "ROOT",
    "SECTIONS",
    "SYBIL",
    "Fence",
    "Here",
    "Section",
    "Step",
    "as_shown",
    "fences_of",
    "section",
    "steps",
    "typed",
)

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "etlstage" / "docs"
PAGES: Final = {
    path: path.read_text() for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
}
MANUAL: Final = "\n".join(PAGES.values())
LEXER: Final = RawFencedCodeBlockLexer(re.compile(r"(?P<language>.*)\n"))
HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMMENT: Final = re.compile(r"<!-- (.+) -->\n\Z")
FILE: Final = re.compile(r"(?:#!.*\n)?(?:#|//) ([\w./-]+\.\w+)\n")
MARK: Final = "-- step --"

Step = tuple[str, str]
"""What is typed, and what is shown then."""


class Fence(NamedTuple):
    """What is fenced, below which heading, and the comment in front of it."""

    language: str
    text: str
    heading: str
    comment: str

    @property
    def file(self) -> str:
        """The file that it is, if its first line names one."""
        named = FILE.match(self.text)
        return named[1] if named is not None else ""

    def write(self, folder: Path) -> None:
        """Write it, as a program."""
        path = folder / self.file
        path.parent.mkdir(exist_ok=True)
        path.write_text(self.text)
        path.chmod(0o700)


@dataclass
class Here:
    """Where a section is run."""

    folder: Path
    update: bool = False
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "manual"})
    """What its programs know, and what they have defined."""

    printed: str = ""
    """What its last program printed."""

    def write(self, name: str, text: str) -> None:
        """Write a file that is not on the page."""
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o700)


# --- by language ------------------------------------------------------------------


def _python(fence: Fence, here: Here, example: Example) -> None:
    """Run it; it may wait at its top level."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    text = "\n" * example.line + fence.text
    code = compile(text, example.path, "exec", flags, dont_inherit=True)
    printed = StringIO()

    async def main() -> None:
        await eval(code, here.names)  # noqa: S307 - the manual's own

    with redirect_stdout(printed):
        if code.co_flags & CO_COROUTINE:
            anyio.run(main)
        else:
            exec(code, here.names)  # noqa: S102 - likewise
    here.printed = printed.getvalue()


def _text(fence: Fence, here: Here, _: Example) -> None:
    """Compare it with what was printed."""
    if fence.comment not in ("drawing", "dialogue"):
        assert here.printed == fence.text


ENDS: Final = """\
name: p
extract: {worker: {command: [printf, '%s\\n', one, two, three]}}
load: {worker: {command: [sh, -c, 'while read -r word; do printf "\\0"; done']}}
"""


def _yaml(fence: Fence, here: Here, _: Example) -> None:
    """Load it; a part of a file gets the rest, and is ``pipeline.yaml`` then."""
    data = YAML(typ="safe", pure=True).load(fence.text)
    if "apiVersion" in data:
        return  # Kubernetes's, which has a name
    path = here.folder / (fence.file or "pipeline.yaml")
    if fence.file and data.keys() <= {"faults", "seed"}:
        fault_plan(path)
        return
    if "name" not in data:
        path.write_text((path.read_text() if path.exists() else ENDS) + fence.text)
    elif not fence.file:
        path.write_text(fence.text)
    whole = YAML(typ="safe", pure=True).load(path)
    jsonschema.Draft202012Validator(pipeline_schema()).validate(whole)
    load(path)


def _console(fence: Fence, here: Here, example: Example) -> str | None:
    """Type it, and see what is shown."""
    wrong = list[str]()
    shown = steps(fence.text)
    for (command, wanted), seen in zip(
        shown, typed(shown, stderr=fence.comment == "with stderr"), strict=True
    ):
        difference = as_shown(seen, wanted)
        if difference and here.update:
            _rewrite(Path(example.path), f"$ {command}\n", wanted, seen)
        elif difference:
            wrong.append(f"$ {command}\n{difference}")
    return "\n".join(wrong) or None


def _rewrite(page: Path, command: str, wanted: str, seen: str) -> None:
    """Put what was printed into a page, which others may be writing to."""
    with page.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        seen = seen.replace(os.getcwd(), "/home/me")
        file.seek(0)
        file.write(text.replace(command + wanted, command + seen, 1))
        file.truncate()


def _bash(fence: Fence, _: Here, example: Example) -> None:
    """Find its name, by which ``.ci/run`` runs it: it needs a network."""
    named = fence.comment.partition("ci: ")[2]
    assert named, f"{example.path}:{example.line}: no comment names it"
    assert f"command=$(readme_command {named})\n" in (ROOT / ".ci" / "run").read_text()


def _as_file(fence: Fence, _: Here, example: Example) -> None:
    """Leave it to a command that runs it."""
    assert fence.file, f"{example.path}:{example.line}: its first line names no file"


LANGUAGES: Final[dict[str, Callable[[Fence, Here, Example], str | None]]] = {
    "bash": _bash,
    "console": _console,
    "json": lambda fence, _, __: json.loads(fence.text) and None,
    "python": _python,
    "text": _text,
    "yaml": _yaml,
    **dict.fromkeys(("c", "go", "ini", "js", "r", "sh"), _as_file),
}


def _evaluate(example: Example) -> str | None:
    fence, here = example.parsed, example.namespace["here"]
    if fence.file:
        fence.write(here.folder)
        if fence.language == "python":
            return None  # as the others: a command runs it
    return LANGUAGES[fence.language](fence, here, example)


def _parse(document: Document) -> Iterable[Region]:
    """Find all that is fenced."""
    regions = list(LEXER(document))
    headings = [
        match
        for match in HEADING.finditer(document.text)
        if not any(region.start < match.start() < region.end for region in regions)
    ]
    for region in regions:
        above = [match[1] for match in headings if match.start() < region.start]
        comment = COMMENT.search(
            document.text, max(region.start - 100, 0), region.start
        )
        region.parsed = Fence(
            region.lexemes["language"],
            str(region.lexemes["source"]),
            above[-1],
            comment[1] if comment is not None else "",
        )
        region.evaluator = _evaluate
        yield region


SYBIL: Final = Sybil([_parse])


# --- sections -----------------------------------------------------------------------


class Section(NamedTuple):
    """What is run in one folder: below a heading, or on the whole page if it has none."""

    page: str
    heading: str = ""

    def __str__(self) -> str:
        """As it is linked to."""
        return f"{self.page}#{self.heading}" if self.heading else self.page

    @property
    def fences(self) -> list[Fence]:
        """What it has, in order."""
        return [f for f in fences_of(self.page) if self.heading in ("", f.heading)]

    def run(self, here: Here) -> None:
        """Run each, with the files of the page's other sections in place."""
        document = SYBIL.parse(_path(self.page))
        document.namespace["here"] = here
        mine, others = list[Example](), list[Fence]()
        for example in document.examples():
            if self.heading in ("", example.parsed.heading):
                mine.append(example)
            else:
                others.append(example.parsed)
        for fence in others:
            if fence.file:
                fence.write(here.folder)
        for example in mine:
            example.evaluate()


def _path(page: str) -> Path:
    return (ROOT if page == "README.md" else DOCS) / page


def fences_of(page: str) -> list[Fence]:
    """Return what a page has."""
    return [example.parsed for example in SYBIL.parse(_path(page)).examples()]


def _sections() -> list[Section]:
    found = list[Section]()
    for path in PAGES:
        page = str(path.relative_to(DOCS if DOCS in path.parents else ROOT))
        whole = page.startswith("tutorials/")  # read from the first line to the last
        headings = ["" if whole else fence.heading for fence in fences_of(page)]
        found += [Section(page, heading) for heading in dict.fromkeys(headings)]
    return found


SECTIONS: Final = _sections()


def section(name: str) -> Section:
    """Return the one of a name."""
    (found,) = (section for section in SECTIONS if str(section) == name)
    return found


# --- dialogues ----------------------------------------------------------------------


def steps(*texts: str) -> list[Step]:
    """Return what is typed in dialogues."""
    parts = (
        part
        for text in texts
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    )
    return [
        (command, shown) for command, _, shown in (p.partition("\n") for p in parts)
    ]


def typed(steps: Sequence[Step], *, stderr: bool = False) -> list[str]:
    """Type it, into one shell; return what each step prints on stdout, or stderr too."""
    script = "\n".join(f"echo '{MARK}'; {command}" for command, _ in steps)
    ended = subprocess.run(
        ["/bin/sh", "-c", f"exec 2>&1\n{script}" if stderr else script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # what is on stderr pytest shows of a failure
        text=True,
        check=False,
    )
    return ended.stdout.split(f"{MARK}\n")[1:]


def as_shown(seen: str, shown: str) -> str:
    """Return how an output differs from the manual's, in which ``...`` leaves out lines."""
    wanted = _timeless(shown)
    found = _timeless(seen.replace(os.getcwd(), "/home/me"))
    pattern = ["(?:.*\n)?" if line == "...\n" else re.escape(line) for line in wanted]
    if re.fullmatch("".join(pattern), "".join(found), re.DOTALL):
        return ""
    return "".join(difflib.ndiff(wanted, found))


def _timeless(text: str) -> list[str]:
    """Return the lines without what no two runs have in common, nor its room."""
    for pattern, instead in {
        r" *\(?\b\d+\.\d+(?= ?s\b|$|  std|  event)": " #",
        r"\b[0-9a-f]{8}(?=\.rec\b)": "#",
        r"\bpid \d+": "pid #",
        r"^found after .+ more .+$": "found after #",
        r"^tried .+ cases, .+ messages": "tried #",
        r"\brefused [\d,]+ of [\d,]+": "refused #",
    }.items():
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return [f"{line}\n" for line in text.splitlines()]
