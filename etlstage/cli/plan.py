"""``etlstage plan``: show what a run would be; nothing is started."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final

from rich.text import Text

from etlstage.cli.options import File, Overlays, Values, changes_of
from etlstage.cli.screen import Screen
from etlstage.config.loader import examine
from etlstage.config.plan import Plan, plan_of
from etlstage.telemetry.terminal import harmless

__all__ = ("main",)

LABEL: Final = 10  # columns of a label


def main(file: File, *, overlays: Overlays = None, values: Values = None) -> int:
    """Show programs, edges, guarantees and memory of a run, and start nothing."""
    screen = Screen()
    for style, text, below in _lines(
        plan_of(*examine(file, changes_of(overlays, values)))
    ):
        lines = [harmless(text)]
        if screen.watched:  # in a pipe, lines are not wrapped
            lines = _wrapped(lines[0], screen.width, below)
        for line in lines:
            screen.print(Text(line, style), soft_wrap=True)
    return 0


def _wrapped(line: str, width: int, below: int) -> list[str]:
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * below,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]


def _lines(made: Plan) -> Iterator[tuple[str, str, int]]:
    """Yield lines: a style, the text, and the indentation of wrapped lines."""
    yield "bold", f"{made.name} on engine {made.engine}", 2
    for part in made.parts:
        yield "", "", 0
        kind = f"{part.kind.value} " if part.kind.value != part.name else ""
        yield "bold", f"{kind}{part.name}: {part.what}", 2
        for label, text in part.about:
            yield "", f"  {label:<{LABEL}} {text}", LABEL + 3
    yield "", "", 0
    yield "bold", "edges", 0
    for edge in made.edges:
        yield "", f"  {edge.start} -> {edge.end}: {edge.how}", 4
    for label, text in made.about:
        yield "", "", 0
        yield "bold", label, 0
        for part_of in text.split("; "):
            yield "", f"  {part_of}", 4
