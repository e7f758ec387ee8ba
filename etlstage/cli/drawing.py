"""
Drawings as SVG: stages in a row with what passes between them, and rates over time.

Colours come from a style sheet, by class: the policy of the report's page allows no
other styles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

from etlstage.cli.history import RunSpan
from etlstage.telemetry.terminal import harmless

__all__ = ("Box", "Joint", "clean", "plot", "stages")

HIGH: Final = 62  # height of a box
EDGE: Final = 20
BELOW: Final = 76  # room below a box for dead letters
ACROSS: Final = 1000  # a plot is stretched to whatever room there is
UP: Final = 100
TIP: Final = (
    '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8"'
    ' markerHeight="8" orient="auto"><path class="tip" d="M0,0 8,4 0,8z"/></marker>'
    "</defs>"
)


class Box(NamedTuple):
    """A stage."""

    name: str
    about: str
    dead: str = ""
    """The label of its dead letters; empty: there is no arrow to them."""
    bad: bool = False
    whole: str = ""
    """The full name, if ``name`` was cut."""


class Joint(NamedTuple):
    """What is written at the arrow from a stage to the next."""

    above: str = ""
    below: str = ""


def clean(text: str) -> str:
    """Return a text from outside as HTML, with nothing hidden and nothing active."""
    return escape(harmless(text, lines=True))


def stages(
    boxes: Sequence[Box],
    links: Sequence[Joint] = (),
    *,
    attributes: str,
    head: str = "",
    wide: int,
    gap: int,
    across: int,
) -> Iterator[str]:
    """
    Yield lines of a drawing of stages.

    Args:
        boxes: The stages.
        links: Labels of the arrows between them, if any.
        attributes: Attributes of the outermost tag.
        head: What comes before everything else.
        wide: Width of a box.
        gap: Space between two boxes.
        across: Boxes in a row.

    """
    pitch = HIGH + (BELOW if any(box.dead for box in boxes) else 0) + 2 * EDGE
    rows = -(-len(boxes) // across)
    width = 2 * EDGE + min(len(boxes), across) * (wide + gap) - gap
    height = rows * pitch
    yield (
        f'<svg {attributes} viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}">{head}{TIP}'
    )
    for number, box in enumerate(boxes):
        row, place = divmod(number, across)
        x, y = EDGE + place * (wide + gap), EDGE + row * pitch
        yield from _box(box, x, y, wide)
        link = links[number - 1] if number and links else Joint()
        if place:
            yield from _link(link, x - gap, x, y + HIGH // 2)
        elif row:
            yield _arrow("edge", *_to_next_row(width, y - pitch, y))
    yield "</svg>"


def _box(box: Box, x: int, y: int, wide: int) -> Iterator[str]:
    middle = wide // 2
    mark = " bad" if box.bad else ""
    whole = f"<title>{clean(box.whole)}</title>" if box.whole else ""
    yield (
        f'<rect class="stage{mark}" x="{x}" y="{y}" width="{wide}" height="{HIGH}"'
        f' rx="8">{whole}</rect>'
    )
    # A nested <svg> clips text that is too long.
    yield (
        f'<svg x="{x}" y="{y}" width="{wide}" height="{HIGH}">'
        f'<text class="name" x="{middle}" y="25">{clean(box.name)}</text>'
        f'<text x="{middle}" y="45">{clean(box.about)}</text></svg>'
    )
    if box.dead:
        low = y + HIGH
        yield _arrow("dead", (x + middle, low), (x + middle, low + 40))
        yield f'<text class="deadly" x="{x + middle}" y="{low + 60}">{box.dead}</text>'


def _link(link: Joint, start: int, end: int, y: int) -> Iterator[str]:
    yield _arrow("edge", (start, y), (end, y))
    middle = (start + end) // 2
    if link.above:
        yield f'<text class="count" x="{middle}" y="{y - 8}">{link.above}</text>'
    if link.below:
        yield f'<text class="deadly" x="{middle}" y="{y + 18}">{link.below}</text>'


def _to_next_row(width: int, above: int, y: int) -> Iterator[tuple[int, int]]:
    """Yield the points of the line from a row's last box to the first of the next."""
    start, end, between = above + HIGH // 2, y + HIGH // 2, y - EDGE
    right, left = width - EDGE // 2, EDGE // 2
    yield width - EDGE, start
    yield from ((right, start), (right, between), (left, between), (left, end))
    yield EDGE, end


def _arrow(kind: str, *points: tuple[int, int]) -> str:
    way = " ".join(f"{x},{y}" for x, y in points)
    dash = ' stroke-dasharray="4"' if kind == "dead" else ""
    return (
        f'<polyline class="{kind}" points="{way}" fill="none"{dash}'
        ' marker-end="url(#end)"/>'
    )


def plot(spans: Sequence[RunSpan], number: int) -> str:
    """
    Return how fast one stage was, as steps.

    Args:
        spans: The whole run, in parts.
        number: Index of the stage.

    """
    end, most = spans[-1].end, max(span.rates[number] for span in spans)
    path = [f"M0,{UP}"]
    for span in spans:
        y = UP - (span.rates[number] / most * UP if most else 0)
        path.append(f"V{y:.1f}H{span.end / end * ACROSS:.1f}")
    path.append(f"V{UP}z")
    return (
        f'<svg class="plot" role="img" aria-label="messages per second"'
        f' viewBox="0 -2 {ACROSS} {UP + 4}" preserveAspectRatio="none">'
        f'<path d="{"".join(path)}"/></svg>'
    )
