"""
The fences in README and in the pages of ``etlstage/docs``, and how each is run.

Sybil finds the fences; what is done with one depends on its language:

- ``console``: the commands are typed, and print what is shown; ``...`` stands for lines
  left out. ``pytest --update`` (in one process) writes what they print into the page.
- ``python``: it is run, and a ``text`` after it is what it prints.
- ``yaml``: it is a pipeline, or a part of one that is completed, and is loaded; or a
  file of faults.
- any fence that begins with a comment naming a file is written to that file.

A comment before a fence is for one that can't be run like this: ``drawing``,
``dialogue`` (``tests/protocol/marker/test_document.py``), ``with stderr``, ``ci: NAME``
(``.ci/run``). There is no other exception: an unknown language fails.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
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
    *("DOCS", "FENCES", "MANUAL", "PAGES", "ROOT", "SECTIONS"),
    *("Fence", "run", "write"),
)

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "etlstage" / "docs"
PAGES: Final = {
    path: path.read_text() for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
}
MANUAL: Final = "\n".join(PAGES.values())
HEADING: Final = re.compile(r"^#+ (.+)\n\n", re.MULTILINE)
COMMENT: Final = re.compile(r"<!-- (.+) -->\n\Z")
FILE: Final = re.compile(r"(?:#!.*\n)?(?:#|//) ([\w./-]+\.\w+)\n")
STEP: Final = re.compile(r"^\$ (.*\n)((?:(?!\$ ).*\n)*)", re.MULTILINE)
MARK: Final = "-- step --"


class Fence(NamedTuple):
    """A fenced block, its section, and the comment before it."""

    language: str
    text: str
    section: str
    """The page and the heading; for a tutorial, which is read as a whole, the page."""

    comment: str
    file: str
    """The file that its first line names, if any."""


def write(file: str, text: str, folder: Path = Path()) -> None:
    """Write an executable file."""
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o700)


# --- by language ------------------------------------------------------------------


def _python(fence: Fence, example: Example) -> None:
    """Run it; it may await at its top level."""
    if fence.file:
        return  # a command runs it
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    text = "\n" * example.line + fence.text
    code = compile(text, example.path, "exec", flags, dont_inherit=True)
    printed = StringIO()

    async def main() -> None:
        await eval(code, example.namespace)  # noqa: S307 - the manual's own

    with redirect_stdout(printed):
        if code.co_flags & inspect.CO_COROUTINE:
            anyio.run(main)
        else:
            exec(code, example.namespace)  # noqa: S102 - likewise
    example.namespace["printed"] = printed.getvalue()


def _text(fence: Fence, example: Example) -> None:
    """Compare it with what was printed."""
    if fence.comment not in ("drawing", "dialogue"):
        assert example.namespace.get("printed") == fence.text


ENDS: Final = """\
name: p
extract: {worker: {command: [printf, '%s\\n', one, two, three]}}
load: {worker: {command: [sh, -c, 'while read -r word; do printf "\\0"; done']}}
"""


def _yaml(fence: Fence, _: Example) -> None:
    """Load it; a part of a file is completed, as ``pipeline.yaml``."""
    yaml = YAML(typ="safe", pure=True)
    data = yaml.load(fence.text)
    path = Path(fence.file or "pipeline.yaml").absolute()
    if "apiVersion" in data:
        return  # Kubernetes's, which has a name
    if fence.file and data.keys() <= {"faults", "seed"}:
        fault_plan(path)
        return
    if "name" not in data:
        path.write_text((path.read_text() if path.exists() else ENDS) + fence.text)
    elif not fence.file:
        path.write_text(fence.text)
    jsonschema.Draft202012Validator(pipeline_schema()).validate(yaml.load(path))
    load(path)


def _console(fence: Fence, example: Example) -> str | None:
    """Type it into one shell, and compare what each command prints."""
    wrong = list[str]()
    steps = STEP.findall(fence.text)
    type_in = example.namespace.get("shell", _shell)
    printed = type_in([step[0] for step in steps], fence.comment == "with stderr")
    for (command, shown), seen in zip(steps, printed, strict=True):
        seen = seen.replace(os.getcwd(), "/home/me")
        difference = _difference(seen, shown)
        if difference and example.namespace.get("update"):
            page = Path(example.path)
            old, new = f"$ {command}{shown}", f"$ {command}{seen}"
            page.write_text(page.read_text().replace(old, new, 1))
        elif difference:
            wrong.append(f"$ {command}{difference}")
    return "\n".join(wrong) or None


def _shell(commands: list[str], stderr: bool) -> list[str]:
    script = "".join(f"echo '{MARK}'; {command}" for command in commands)
    ended = subprocess.run(
        ["/bin/sh", "-c", f"exec 2>&1\n{script}" if stderr else script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # pytest shows the stderr of a failure
        text=True,
        check=False,
    )
    return ended.stdout.split(f"{MARK}\n")[1:]


def _difference(seen: str, shown: str) -> str:
    """Return how an output differs from a page's, in which ``...`` leaves out lines."""
    wanted, found = _timeless(shown), _timeless(seen)
    pattern = ["(?:.*\n)?" if line == "...\n" else re.escape(line) for line in wanted]
    if re.fullmatch("".join(pattern), "".join(found), re.DOTALL):
        return ""
    return "".join(difflib.ndiff(wanted, found))


def _timeless(text: str) -> list[str]:
    """Return the lines without what differs between runs, or the space it takes."""
    for pattern, instead in {
        r" *\(?\b\d+\.\d+(?= ?s\b|$|  std|  event)": " #",
        r"\b[0-9a-f]{8}(?=\.rec\b)": "#",
        r"\bpid \d+": "pid #",
        r"^found after .+ shrinking .+$": "found after #",
        r"^tried .+ cases, .+ messages": "tried #",
        r"\brefused [\d,]+ of [\d,]+": "refused #",
    }.items():
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return [f"{line}\n" for line in text.splitlines()]


def _bash(fence: Fence, _: Example) -> None:
    """Check that ``.ci/run`` runs it by its name: it needs a network."""
    named = fence.comment.partition("ci: ")[2]
    assert named, "no comment names it"
    assert f"command=$(readme_command {named})\n" in (ROOT / ".ci" / "run").read_text()


def _as_file(fence: Fence, _: Example) -> None:
    """Leave it to a command that runs it."""
    assert fence.file, "its first line names no file"


LANGUAGES: Final[dict[str, Callable[[Fence, Example], str | None]]] = {
    "bash": _bash,
    "console": _console,
    "json": lambda fence, _: json.loads(fence.text) and None,
    "python": _python,
    "text": _text,
    "yaml": _yaml,
    **dict.fromkeys(("c", "go", "ini", "js", "r", "sh"), _as_file),
}


# --- sections -----------------------------------------------------------------------


def _evaluate(example: Example) -> str | None:
    fence: Fence = example.parsed
    if fence.file:
        write(fence.file, fence.text)
    return LANGUAGES[fence.language](fence, example)


def _parse(document: Document) -> Iterable[Region]:
    """Find all fences."""
    path = Path(document.path)
    page = str(path.relative_to(DOCS)) if DOCS in path.parents else path.name
    for region in RawFencedCodeBlockLexer(re.compile("(?P<language>.*)\n"))(document):
        text = str(region.lexemes["source"])
        above = document.text[: region.start]
        *_, heading = HEADING.findall(above)
        comment, file = COMMENT.search(above), FILE.match(text)
        region.parsed = Fence(
            region.lexemes["language"],
            text,
            page if page.startswith("tutorials/") else f"{page}#{heading}",
            comment[1] if comment is not None else "",
            file[1] if file is not None else "",
        )
        region.evaluator = _evaluate
        yield region


SYBIL: Final = Sybil([_parse])
FENCES: Final = [
    example.parsed for path in PAGES for example in SYBIL.parse(path).examples()
]
SECTIONS: Final[dict[str, list[Fence]]] = {}
"""The fences of each section; a section is run in one folder."""
for _fence in FENCES:
    SECTIONS.setdefault(_fence.section, []).append(_fence)


def run(section: str, names: dict[str, Any], path: Path | None = None) -> None:
    """
    Run a section, with the files of the page's other sections in place.

    Args:
        section: Its page and heading.
        names: Names that its programs see. Names that they define are added, and as
            ``printed`` the output of the last one. With ``update`` outputs are written
            into the page; ``shell`` types the commands.
        path: Path of the page, if it is not one of the manual.

    """
    page = section.partition("#")[0]
    document = SYBIL.parse(path or (ROOT if page == "README.md" else DOCS) / page)
    document.namespace = names
    examples = list(document.examples())
    for example in examples:
        if example.parsed.file and example.parsed.section != section:
            write(example.parsed.file, example.parsed.text)
    for example in examples:
        if example.parsed.section == section:
            example.evaluate()
