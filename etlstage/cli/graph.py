"""``etlstage graph``: a picture of a pipeline, as text that other programs draw, or SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Annotated, Final

import typer

from etlstage.cli.options import File, Overlays, Values, changes_of, new_app
from etlstage.config.loader import load
from etlstage.config.plan import Part, Plan, plan_of
from etlstage.errors import ConfigError, guess
from etlstage.telemetry.terminal import harmless

__all__ = ("app",)

LONGEST: Final = 40  # characters of a line
LETTERS: Final = "dead letters"

app = new_app()


@app.command("graph")
def _graph(
    file: File,
    *,
    kind: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="mermaid, dot or svg.")
    ] = "mermaid",
    overlays: Overlays = None,
    values: Values = None,
) -> int:
    """Draw a pipeline; nothing that it refers to is looked for."""
    if kind not in FORMATS:
        expected = f", expected {' or '.join(map(repr, FORMATS))}"
        close = guess(kind, FORMATS) or expected
        raise ConfigError(f"--format: unknown format {kind!r}{close}")
    typer.echo(
        "\n".join(FORMATS[kind](plan_of(*load(file, changes_of(overlays, values)))))
    )
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
ACROSS: Final = 4  # boxes in a row
NAME: Final = 30  # characters, without the number of workers


def _svg(plan: Plan) -> Iterator[str]:
    dead = any(part.dead_letters for part in plan.parts)
    pitch = HIGH + (3 * GAP if dead else GAP)
    rows = -(-len(plan.parts) // ACROSS)
    width = min(len(plan.parts), ACROSS) * (WIDE + GAP) + GAP
    height = rows * pitch + GAP
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
        x = GAP + i % ACROSS * (WIDE + GAP)
        y = GAP + i // ACROSS * pitch
        yield from _box(part, x, y)
        if i % ACROSS:
            yield _arrow((x - GAP, y + HIGH // 2), (x, y + HIGH // 2))
        elif i:
            yield _arrow(*_next_row(width, y - pitch, y))
    yield "</svg>"


def _box(part: Part, x: int, y: int) -> Iterator[str]:
    name, what = _label(part, NAME)
    yield (
        f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="6"'
        ' fill="#eef3f8" stroke="#456"/>'
    )
    # In a picture of its own what is too long is cut.
    yield f'<svg x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" text-anchor="middle">'
    yield f'<text x="{WIDE // 2}" y="25" font-weight="bold">{escape(name)}</text>'
    yield f'<text x="{WIDE // 2}" y="45">{escape(what)}</text></svg>'
    if part.dead_letters:
        middle, low = x + WIDE // 2, y + HIGH
        yield _arrow((middle, low), (middle, low + GAP), dashed=True)
        yield (
            f'<text x="{middle}" y="{low + GAP + 16}" text-anchor="middle">'
            f"{LETTERS}</text>"
        )


def _next_row(width: int, above: int, y: int) -> Iterator[tuple[int, int]]:
    """Yield the way from the last box of a row to the first of the next."""
    start, end, between = above + HIGH // 2, y + HIGH // 2, y - GAP // 2
    right, left = width - GAP // 2, GAP // 2
    yield width - GAP, start
    yield from ((right, start), (right, between), (left, between), (left, end))
    yield GAP, end


def _arrow(*points: tuple[int, int], dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4"' if dashed else ""
    way = " ".join(f"{x},{y}" for x, y in points)
    return (
        f'<polyline points="{way}" fill="none" stroke="black"{dash}'
        ' marker-end="url(#end)"/>'
    )


def _label(part: Part, longest: int | None = None) -> tuple[str, str]:
    about = dict(part.about)
    many = about.get("workers", "1;").partition(";")[0]
    name = _cut(part.name, longest) if longest else part.name
    name = name if many == "1" else f"{name} x {many}"
    return name, _cut(harmless(part.what), LONGEST)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


FORMATS: Final[Mapping[str, Callable[[Plan], Iterator[str]]]] = {
    "mermaid": _mermaid,
    "dot": _dot,
    "svg": _svg,
}
