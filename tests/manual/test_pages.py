"""The manual as a whole: links, options, generated parts, length and words."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

from tests.manual.fences import DOCS, MANUAL, PAGES, ROOT
from tests.reference import PARTS, commands, part

PROJECT: Final = {path: path.read_text() for path in (ROOT / ".github").glob("*.md")}


def test_links_lead_somewhere() -> None:
    """Each leads to a page or heading that exists once (issues 11 and 27)."""
    anchors, links = list[tuple[Path, str]](), list[tuple[Path, str]]()
    for path, text in {**PAGES, **PROJECT}.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for heading in re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE):
            plain = re.sub(r"[^\w -]", "", heading.lower())
            anchors.append((path, plain.replace(" ", "-")))
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
            page, _, anchor = link.partition("#")
            target = (path.parent / page).resolve() if page else path
            links.append((target, anchor))
            # Only these pages come with the package.
            inside = path.is_relative_to(DOCS)
            assert target.is_relative_to(DOCS) or not inside, (path, link)
    assert len(set(anchors)) == len(anchors)
    assert {link for link in links if link[1]} - set(anchors) == set()
    assert [path for path, _ in links if not path.exists()] == []


SHORT: Final = [
    path
    for path in PAGES
    if path.name == "README.md" or path.parent.name == "tutorials"
]


@pytest.mark.parametrize("path", SHORT, ids=[path.stem for path in SHORT])
def test_page_for_newcomers_is_short(path: Path) -> None:
    """It has 220 lines at most, and 400 characters in a paragraph (issue 27)."""
    prose = re.sub(r"^```.*?^```$", "", PAGES[path], flags=re.MULTILINE | re.DOTALL)
    parts = re.split(r"\n\n|\n(?=[-|#])", prose)
    assert [part for part in parts if len(part) > 400] == []
    assert len(PAGES[path].splitlines()) <= 220


def test_contributing_is_short() -> None:
    """It shows where things are, and no more (issue 27)."""
    assert len(PROJECT[ROOT / ".github/CONTRIBUTING.md"].splitlines()) < 80


def test_every_option_is_documented() -> None:
    """The manual names no option that does not exist, either (issue 11)."""
    typed_so = {
        name: {o for p in command.params for o in p.opts}
        for name, command in commands().items()
    }
    known = {o for every in typed_so.values() for o in every if o.startswith("--")}
    told = re.compile(r"(?<![\w!])--[a-z][a-z-]+")
    assert known <= set(told.findall(MANUAL))
    typed = re.findall(r"(?:`|^\$ .*?)etlstage ([^`\n]+)", MANUAL, re.MULTILINE)
    ours = " ".join(re.split(r" -- |\|", each)[0] for each in typed)
    assert set(told.findall(ours)) <= known | {"--help"}
    assert [name for name in typed_so if name not in MANUAL] == []


@pytest.mark.parametrize("name", PARTS)
def test_what_is_generated_is_up_to_date(name: str) -> None:
    """If it is not, run python -m tests.reference (issue 11)."""
    (written,) = part(name).findall(PAGES[DOCS / f"{name}.md"])
    assert written.splitlines() == PARTS[name]().splitlines()


def test_index_lists_every_page() -> None:
    """Each link has the page's heading as its text (issue 27)."""
    links = {
        (DOCS / link).resolve(): text
        for text, link in re.findall(r"\[(.+)\]\((.+)\)", PAGES[DOCS / "index.md"])
    }
    pages = {
        path: text.partition("\n")[0].removeprefix("# ")
        for path, text in PAGES.items()
        if DOCS in path.parents and path.parent != DOCS
    }
    assert links == pages


PRIVATE: Final = (
    "takes? note|nobody|other dice|gives dice|tease|despair|patience|broke off"
    "|put aside|goes? on behind|whoever|told|unasked|owes|who was told|no worker is left"
    "|bring .* along|went both ways|does not stand|to make it short|win over ours"
    "|by default we|as the model does"
)
"""Words that the field does not use; the glossary has others."""


def test_words_are_those_of_the_field() -> None:
    """This includes the parts that are generated (issue 27)."""
    for path, text in {**PAGES, **PROJECT}.items():
        prose = text.replace("user: nobody", "")  # its name on Unix
        found = re.findall(
            rf".*\b(?:{PRIVATE}|says?|said|tells?)\b.*", prose, re.IGNORECASE
        )
        assert found == [], path


def test_texts_of_the_code_have_words_of_the_field() -> None:
    """Messages, docstrings and comments (issue 27)."""
    found = list[str]()
    for path in (ROOT / "etlstage").rglob("*.py"):
        text = path.read_text()
        constants = [
            n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)
        ]
        texts = [(n.lineno, str(n.value)) for n in constants]
        for number, line in enumerate(text.splitlines(), 1):
            texts += [(number, line)] if re.match(r".*(?:^|\s)# ", line) else []
        for number, each in texts:
            words = re.search(rf"\b(?:{PRIVATE}|says?|said)\b", each, re.IGNORECASE)
            found += [f"{path}:{number}: {each!r}"] if words else []
    assert found == []


def test_names_are_of_words_of_the_field() -> None:
    """This is about names of the package (issue 27)."""
    names = PRIVATE.replace("|owes", "")  # what a session is owed is our own term
    found = [
        f"{path}:{number}: {line}"
        for path in (ROOT / "etlstage").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"_(?:{names})|(?:{names})_", line, re.IGNORECASE)
    ]
    assert found == []
