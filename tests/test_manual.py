"""The manual as a whole: what is in it is run, its links lead somewhere, no option lacks."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from typer.main import get_command

from etlstage.cli.app import app
from tests.readme import BLOCKS, CLAIMED, MANUAL, PAGES, ROOT, runs

TESTS: Final = Path(__file__).parent


@runs("Try it 1", "Development 1")
def test_commands_that_need_a_network(blocks: list[str]) -> None:
    """They have names, by which .ci/run finds and runs them (issue 11)."""
    script = (TESTS.parent / ".ci" / "run").read_text()
    for block in blocks:
        readme = PAGES[ROOT / "README.md"]
        named = re.search(rf"<!-- ci: (\w+) -->\n```bash\n{re.escape(block)}", readme)
        assert named
        assert f"command=$(readme_command {named[1]})\n" in script


def test_headings_can_be_linked() -> None:
    """Each has a name of its own, and links lead to one (issue 11)."""
    anchors, links = list[tuple[Path, str]](), list[tuple[Path, str]]()
    for path, text in PAGES.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for heading in re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE):
            anchors.append((path, heading.lower().replace(" ", "-")))
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose):
            page, _, anchor = link.partition("#")
            links.append(((path.parent / page).resolve() if page else path, anchor))
    assert len({anchor for _, anchor in anchors}) == len(anchors)
    assert {link for link in links if link[1]} <= set(anchors)
    assert [path for path, _ in links if not path.exists()] == []


def test_every_option_is_told() -> None:
    """And no command has one that is not there (issue 11)."""

    def options(command: Any, *names: str) -> Iterator[tuple[str, set[str]]]:  # noqa: ANN401 - Typer's own parser has no public type
        yield " ".join(names), {o for p in command.params for o in p.opts}
        for name, inner in getattr(command, "commands", {}).items():
            yield from options(inner, *names, name)

    commands = dict(options(get_command(app), "etlstage"))
    known = {o for every in commands.values() for o in every if o.startswith("--")}
    told = re.compile(r"(?<![\w!])--[a-z][a-z-]+")
    assert known <= set(told.findall(MANUAL))
    typed = re.findall(r"(?:`|^\$ .*?)etlstage ([^`\n]+)", MANUAL, re.MULTILINE)
    ours = " ".join(re.split(r" -- |\|", each)[0] for each in typed)
    assert set(told.findall(ours)) <= known | {"--help"}
    assert [name for name in commands if name not in MANUAL] == []


def test_every_block_is_run() -> None:
    """By the tests, or by what runs them all; one is a drawing (issue 11)."""
    for path in TESTS.rglob("test_*.py"):
        if "from tests.readme import" in path.read_text():
            importlib.import_module(".".join(path.relative_to(TESTS.parent).parts)[:-3])
    assert BLOCKS.keys() >= CLAIMED
    assert BLOCKS.keys() - CLAIMED == {"etlstage 1"}


def test_index_lists_every_page() -> None:
    """With its heading as the text of the link (issue 27)."""
    docs = ROOT / "etlstage" / "docs"
    links = {
        (docs / link).resolve(): text
        for text, link in re.findall(r"\[(.+)\]\((.+)\)", PAGES[docs / "index.md"])
    }
    pages = {
        path: text.partition("\n")[0].removeprefix("# ")
        for path, text in PAGES.items()
        if docs in path.parents and path.parent != docs
    }
    assert links == pages
