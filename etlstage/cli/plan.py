"""``etlstage plan``: what a run would be; nothing is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from etlstage.cli.screen import Screen
from etlstage.config.loader import examine
from etlstage.config.plan import Plan, plan_of
from etlstage.config.reading import Changes
from etlstage.telemetry.terminal import harmless

__all__ = ("plan",)


def plan(file: Path, changes: Changes) -> int:
    """
    Say what a run of a pipeline would be; return the exit code.

    Args:
        file: The pipeline.
        changes: What is laid over it.

    Raises:
        ConfigError: If anything in the file is wrong, or missing on this machine.

    """
    screen = Screen()
    for style, text in _lines(plan_of(*examine(file, changes))):
        screen.print(Text(harmless(text), style), soft_wrap=True)
    return 0


def _lines(made: Plan) -> Iterator[tuple[str, str]]:
    """Yield a style and a line."""
    yield "bold", f"{made.name} on engine {made.engine}"
    for part in made.parts:
        yield "", ""
        kind = f"{part.kind.value} " if part.kind.value != part.name else ""
        yield "bold", f"{kind}{part.name}: {part.what}"
        for label, text in part.about:
            yield "", f"  {label:<10} {text}"
    yield "", ""
    yield "bold", "edges"
    for edge in made.edges:
        yield "", f"  {edge.start} -> {edge.end}: {edge.how}"
    for label, text in made.about:
        yield "", ""
        yield "bold", label
        for part_of in text.split("; "):
            yield "", f"  {part_of}"
