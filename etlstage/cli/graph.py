"""``etlstage graph``: a picture of a pipeline, as text that other programs draw, or SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Final

import typer

from etlstage.config.loader import load
from etlstage.config.plan import Part, Plan, plan_of
from etlstage.config.reading import Changes
from etlstage.errors import ConfigError, guess
from etlstage.telemetry.terminal import harmless

__all__ = ("graph",)

LONGEST: Final = 40  # characters of a line
LETTERS: Final = "dead letters"


def graph(file: Path, changes: Changes, *, kind: str) -> int:
    """
    Print a picture of a pipeline; return the exit code.

    Args:
        file: The pipeline; nothing of what it names is looked for.
        changes: What is laid over it.
        kind: What draws it: ``mermaid``, ``dot`` or ``svg``.

    Raises:
        ConfigError: If anything in the file is wrong, or there is no such format.

    """
    if kind not in FORMATS:
        expected = f", expected {' or '.join(map(repr, FORMATS))}"
        close = guess(kind, FORMATS) or expected
        raise ConfigError(f"--format: unknown format {kind!r}{close}")
    typer.echo("\n".join(FORMATS[kind](plan_of(*load(file, changes)))))
    return 0


def _mermaid(plan: Plan) -> Iterator[str]:
    names = {part.name: f"s{i}" for i, part in enumerate(plan.parts)}
    yield "flowchart LR"
    for part in plan.parts:
        # Its entities have numbers.
        lines = [re.sub(r"[^\w ./,:*-]", _entity, line) for line in _label(part)]
        label = "<br/>".join(lines)
        yield f'  {names[part.name]}["{label}"]'
    for edge in plan.edges:
        yield f"  {names[edge.start]} --> {names[edge.end]}"
    if kept := [part for part in plan.parts if part.dead_letters]:
        yield f"  dead[({LETTERS})]"
        for part in kept:
            yield f"  {names[part.name]} -.-> dead"


def _entity(found: re.Match[str]) -> str:
    return f"#{ord(found[0])};"


def _dot(plan: Plan) -> Iterator[str]:
    yield f"digraph {_quoted(plan.name)} {{"
    yield "  rankdir=LR; node [shape=box];"
    for part in plan.parts:
        yield f"  {_quoted(part.name)} [label={_quoted(*_label(part))}];"
    for edge in plan.edges:
        yield f"  {_quoted(edge.start)} -> {_quoted(edge.end)};"
    if kept := [part for part in plan.parts if part.dead_letters]:
        # No stage has that name: theirs have no slash.
        yield f'  "/dead" [label="{LETTERS}", shape=cylinder];'
        for part in kept:
            yield f'  {_quoted(part.name)} -> "/dead" [style=dashed];'
    yield "}"


def _quoted(*lines: str) -> str:
    escaped = (line.replace("\\", r"\\").replace('"', r"\"") for line in lines)
    return '"{}"'.format(r"\n".join(escaped))


WIDE: Final = 300  # of a box, for as many characters as there may be
HIGH: Final = 60
GAP: Final = 40


def _svg(plan: Plan) -> Iterator[str]:
    width = len(plan.parts) * (WIDE + GAP) + GAP
    kept = [i for i, part in enumerate(plan.parts) if part.dead_letters]
    height = 2 * GAP + HIGH + (2 * GAP if kept else 0)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}" font-family="sans-serif" font-size="13">'
    )
    yield (
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8"'
        ' markerHeight="8" orient="auto"><path d="M0,0 8,4 0,8z"/></marker></defs>'
    )
    yield f"<title>{escape(plan.name)}</title>"
    for i, part in enumerate(plan.parts):
        x = GAP + i * (WIDE + GAP)
        name, what = _label(part)
        middle = f'x="{x + WIDE // 2}" text-anchor="middle"'
        yield (
            f'<rect x="{x}" y="{GAP}" width="{WIDE}" height="{HIGH}" rx="6"'
            ' fill="#eef3f8" stroke="#456"/>'
        )
        yield f'<text {middle} y="{GAP + 25}" font-weight="bold">{escape(name)}</text>'
        yield f'<text {middle} y="{GAP + 45}">{escape(what)}</text>'
        if i:
            yield _arrow(x - GAP, GAP + HIGH // 2, x, GAP + HIGH // 2)
    for i in kept:
        x = GAP + i * (WIDE + GAP) + WIDE // 2
        yield _arrow(x, GAP + HIGH, x, GAP + HIGH + GAP, dashed=True)
        yield (
            f'<text x="{x}" y="{2 * GAP + HIGH + 16}" text-anchor="middle">'
            f"{LETTERS}</text>"
        )
    yield "</svg>"


def _arrow(*points: int, dashed: bool = False) -> str:
    x1, y1, x2, y2 = points
    dash = ' stroke-dasharray="4"' if dashed else ""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="black"{dash}'
        ' marker-end="url(#end)"/>'
    )


def _label(part: Part) -> tuple[str, str]:
    about = dict(part.about)
    many = about.get("workers", "1;").partition(";")[0]
    name = part.name if many == "1" else f"{part.name} x {many}"
    what = harmless(part.what)
    return name, what if len(what) <= LONGEST else f"{what[: LONGEST - 3]}..."


FORMATS: Final[Mapping[str, Callable[[Plan], Iterator[str]]]] = {
    "mermaid": _mermaid,
    "dot": _dot,
    "svg": _svg,
}
