"""``etlstage graph``: draw a pipeline as SVG, or as text for other programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Final

import typer

from etlstage.cli.drawing import Box, Joint, clean, stages
from etlstage.cli.options import File, Overlays, Values, changes_of
from etlstage.config.loader import load
from etlstage.config.plan import Part, Plan, plan_of
from etlstage.errors import ConfigError, guess
from etlstage.telemetry.terminal import harmless

__all__ = ("main",)

LONGEST: Final = 40  # characters of a line
LETTERS: Final = "dead letters"
JOURNALS: Final = "journals"


def main(
    file: File,
    *,
    kind: Annotated[
        str,
        typer.Option("--format", metavar="FORMAT", help="Format: mermaid, dot or svg."),
    ] = "mermaid",
    overlays: Overlays = None,
    values: Values = None,
) -> int:
    """Draw a pipeline, without looking for anything that it refers to."""
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
        # Mermaid writes entities as numbers.
        lines = [re.sub(r"[^\w ./,:*-]", _entity, line) for line in _label(part)]
        label = "<br/>".join(lines)
        yield f'  {names[part.name]}["{label}"]'
    for edge in plan.edges:
        how = f"-- {JOURNALS} -->" if edge.durable else "-->"
        yield f"  {names[edge.start]} {how} {names[edge.end]}"
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
        how = f' [label="{JOURNALS}", style=bold]' if edge.durable else ""
        yield f"  {_quoted(edge.start)} -> {_quoted(edge.end)}{how};"
    if kept := [part for part in plan.parts if part.dead_letters]:
        # No stage has that name, as names of stages contain no slash.
        yield f'  "/dead" [label="{LETTERS}", shape=cylinder];'
        for part in kept:
            yield f'  {_quoted(part.name)} -> "/dead" [style=dashed];'
    yield "}"


def _quoted(*lines: str) -> str:
    escaped = (line.replace("\\", r"\\").replace('"', r"\"") for line in lines)
    return '"{}"'.format(r"\n".join(escaped))


NAME: Final = 30  # characters, without the number of workers
STYLE: Final = (
    "<style>text { text-anchor: middle; font: 13px sans-serif; }"
    " .name { font-weight: bold; } .stage { fill: #eef3f8; stroke: #456; }"
    " .edge, .dead { stroke: #000; }</style>"
)


def _svg(plan: Plan) -> Iterator[str]:
    boxes = []
    for part in plan.parts:
        name, what = _label(part, NAME)
        boxes.append(Box(name, what, LETTERS if part.dead_letters else ""))
    durable = any(edge.durable for edge in plan.edges)
    yield from stages(
        boxes,
        [Joint(JOURNALS if edge.durable else "") for edge in plan.edges],
        attributes='xmlns="http://www.w3.org/2000/svg"',
        head=f"<title>{clean(plan.name)}</title>{STYLE}",
        wide=300,  # fits the longest label
        gap=80 if durable else 40,
        across=4,
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
