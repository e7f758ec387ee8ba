"""``etlstage help``: show the pages of the manual, which come with the package."""

from __future__ import annotations

import os
import re
from importlib import resources
from typing import Annotated, Final

import typer

from etlstage.cli.screen import Screen
from etlstage.errors import ConfigError, guess

__all__ = ("GROUPS", "list_topics", "main", "show_topic", "topics")


GROUPS: Final = {
    "tutorials": "Tutorials",
    "how-to": "How-to guides",
    "reference": "Reference",
    "explanation": "Explanation",
}
"""The folders of ``etlstage/docs``, in the order of reading."""
LINK: Final = re.compile(r"\[([^]]+)\]\((?:[.\w/-]*/)?([\w-]+)\.md(?:#[\w-]+)?\)")


def main(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOPIC]", help="Page to show; default: list all pages."
        ),
    ] = None,
) -> int:
    """Show a page of the manual, or list all pages."""
    return list_topics() if topic is None else show_topic(topic)


def topics(group: str) -> dict[str, str]:
    """Return the pages of a group by topic, which is the name of the file."""
    pages = (resources.files("etlstage") / "docs" / group).iterdir()
    return {
        page.name.removesuffix(".md"): page.read_text(encoding="utf-8")
        for page in sorted(pages, key=lambda page: page.name)
    }


def list_topics() -> int:
    """Print all topics with their headings; return the exit code."""
    groups = {title: topics(group) for group, title in GROUPS.items()}
    width = max(len(topic) for pages in groups.values() for topic in pages)
    screen = Screen()
    for title, pages in groups.items():
        screen.tell(title)
        for topic, page in pages.items():
            heading = page.partition("\n")[0].removeprefix("# ")
            screen.tell(f"  {topic:{width}}  {heading}")
    screen.tell("to show one: etlstage help TOPIC")
    return 0


def show_topic(topic: str) -> int:
    """
    Show a page, on a terminal formatted and in a pager; return the exit code.

    Raises:
        ConfigError: If there is no such page.

    """
    known = {name: page for group in GROUPS for name, page in topics(group).items()}
    name = "-".join(topic.lower().split())
    if name not in known:
        close = guess(name, known) or "; 'etlstage help' lists all"
        raise ConfigError(f"unknown topic {topic!r}{close}")
    screen = Screen()
    if not screen.watched:
        typer.echo(known[name], nl=False)  # byte for byte: Rich would expand tabs
        return 0
    from rich.markdown import Markdown

    # A terminal can't follow a link into the package, but it can ask for a topic.
    page = LINK.sub(r"\1 (`etlstage help \2`)", known[name])
    page = re.sub(r"^<!-- .* -->\n", "", page, flags=re.MULTILINE)
    # As git does: colours, and no pager for what fits on one screen.
    os.environ.setdefault("LESS", "-FRX")
    with screen.pager(styles=True):
        screen.print(Markdown(page))
    return 0
