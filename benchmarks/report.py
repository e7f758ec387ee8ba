"""
The rows as a page of HTML, with growth as a plot.

The page is one file, and needs no network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.growth import FIGURES, GROWTH, title
from benchmarks.harness import HEADINGS, Row, cells

__all__ = ("page",)

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 430, 230, 75, 40, 30
COLOURS = "#1f6f8b", "#c8553d", "#6a8d3a"
MIDDLE = 'text-anchor="middle"'
GROWS = "<p>What a message costs, as multiples of the smallest size:</p>\n"
STYLE = """
body {font: 15px/1.4 system-ui, sans-serif; margin: 2em}
table {border-collapse: collapse}
td, th {border-bottom: 1px solid #ccc; padding: .2em .6em; text-align: left}
svg {font-size: 12px; margin: 1em 1em 0 0}
"""


def page(rows: Sequence[Row], heading: str) -> str:
    """Return the page."""
    table = "".join(
        f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in line)}</tr>\n"
        for tag, line in (("th", HEADINGS), *(("td", cells(row)) for row in rows))
    )
    ratios = {row.what: row.ratio for row in rows}
    plots = "".join(
        _plot(what, sizes, ratios)
        for what, sizes in GROWTH.items()
        if title(sizes[-1], what, FIGURES[0][0]) in ratios
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">\n'
        f"<title>etlstage: benchmarks</title><style>{STYLE}</style>\n"
        f"<h1>{escape(heading)}</h1>\n{plots and GROWS}{plots}\n"
        f"<table>\n{table}</table>\n"
    )


def _plot(what: str, sizes: Sequence[int], ratios: Mapping[str, float]) -> str:
    """Return a plot of all figures, as multiples of those of the smallest size."""
    lines = [
        [1.0, *(ratios[title(size, what, figure)] for size in sizes[1:])]
        for figure, _ in FIGURES
    ]
    grid = _Grid(sizes, [ratio for line in lines for ratio in line])
    parts = [f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">', grid.drawn(what)]
    for place, (line, (figure, _)) in enumerate(zip(lines, FIGURES, strict=True)):
        points = " ".join(
            f"{grid.across(size):.1f},{grid.up(ratio):.1f}"
            for size, ratio in zip(sizes, line, strict=True)
        )
        stroke = f'stroke="{COLOURS[place]}" stroke-width="2"'
        parts += [
            f'<polyline points="{points}" fill="none" {stroke}/>',
            _text(LEFT + place * 130, 16, figure, f'fill="{COLOURS[place]}"'),
        ]
    return "".join([*parts, "</svg>\n"])


class _Grid:
    """Positions of sizes and ratios in a plot, on logarithmic axes."""

    def __init__(self, sizes: Sequence[int], ratios: Sequence[float]) -> None:
        self._sizes = sizes
        self._least = math.floor(math.log2(min(ratios)))
        self._most = max(math.ceil(math.log2(max(ratios))), self._least + 1)

    def across(self, size: int) -> float:
        first, last = self._sizes[0], self._sizes[-1]
        share = math.log(size / first) / math.log(last / first)
        return LEFT + share * (WIDTH - LEFT - 20)

    def up(self, ratio: float) -> float:
        share = (math.log2(ratio) - self._least) / (self._most - self._least)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def drawn(self, what: str) -> str:
        parts = [_text(WIDTH / 2, HEIGHT - 6, what, MIDDLE)]
        step = max(1, (self._most - self._least) // 5)
        for power in range(self._least, self._most + 1, step):
            at = self.up(2.0**power)
            parts += [
                f'<path d="M{LEFT} {at:.1f}H{WIDTH - 20}" stroke="#ddd"/>',
                _text(LEFT - 6, at + 4, f"{2.0**power:,g}", 'text-anchor="end"'),
            ]
        below = HEIGHT - BOTTOM + 16
        for size in self._sizes:
            parts.append(_text(self.across(size), below, _short(size), MIDDLE))
        return "".join(parts)


def _text(x: float, y: float, text: str, how: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {how}>{escape(text)}</text>'


def _short(size: int) -> str:
    for unit, name in (1_000_000, "M"), (1000, "k"):
        if size >= unit:
            return f"{size // unit}{name}"
    return str(size)
