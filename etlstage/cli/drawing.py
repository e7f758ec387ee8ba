"""
The pictures of the report: what passed through the stages, and how fast, as SVG.

Colours come from the page's style sheet, by class: its policy allows no other styles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Final

from etlstage.cli.history import RunSpan
from etlstage.messages import StageKind, counted
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.telemetry.terminal import harmless

__all__ = ("clean", "graph", "plot")

WIDE: Final = 184  # of a box
HIGH: Final = 62
GAP: Final = 104
EDGE: Final = 10
NAME: Final = 20  # characters
BELOW: Final = 62  # for dead letters
ACROSS: Final = 1000  # a plot is stretched to whatever room there is
UP: Final = 100


def clean(text: str) -> str:
    """Return as HTML a text that came from outside: nothing hidden, nothing active."""
    return escape(harmless(text, lines=True))


def graph(ledger: Ledger) -> str:
    """Return the stages of a run in a row, with what passed between them."""
    width = 2 * EDGE + len(ledger) * WIDE + (len(ledger) - 1) * GAP
    dead = any(account.dead for account in ledger)
    height = 2 * EDGE + HIGH + (BELOW if dead else 0)
    parts = [
        (
            f'<svg id="graph" role="img" aria-label="stages and messages"'
            f' viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        ),
        (
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8"'
            ' markerHeight="8" orient="auto"><path class="tip" d="M0,0 8,4 0,8z"/></marker>'
            "</defs>"
        ),
    ]
    for number, account in enumerate(ledger):
        parts += _box(account, EDGE + number * (WIDE + GAP))
    for number, (start, end) in enumerate(pairwise(ledger), 1):
        parts += _edge(start, end, EDGE + number * (WIDE + GAP) - GAP)
    return "".join([*parts, "</svg>"])


def _box(account: Account, x: int) -> Iterator[str]:
    middle = x + WIDE // 2
    name = account.stage
    name = name if len(name) <= NAME else f"{name[: NAME - 1]}\N{HORIZONTAL ELLIPSIS}"
    bad = account.failed + account.unprocessed
    mark = " bad" if bad else ""
    yield (
        f'<rect class="stage{mark}" x="{x}" y="{EDGE}" width="{WIDE}" height="{HIGH}"'
        f' rx="8"><title>{clean(account.stage)}</title></rect>'
        f'<text class="name" x="{middle}" y="{EDGE + 25}">{clean(name)}</text>'
        f'<text class="about" x="{middle}" y="{EDGE + 45}">{_about(account)}</text>'
    )
    if account.dead:
        low = EDGE + HIGH
        yield (
            f'<line class="dead" x1="{middle}" y1="{low}" x2="{middle}" y2="{low + 40}"'
            ' marker-end="url(#end)"/>'
            f'<text class="deadly" x="{middle}" y="{low + 60}">'
            f"{counted(account.dead, 'dead letter')}</text>"
        )


def _about(account: Account) -> str:
    bad = [
        f"{count:,} {word}"
        for word, count in (
            ("failed", account.failed),
            ("unprocessed", account.unprocessed),
        )
        if count
    ]
    ends = {StageKind.EXTRACT: "extracted", StageKind.LOAD: "loaded"}
    if not bad and account.kind in ends:
        return f"{account.made:,} {ends[account.kind]}"
    return ", ".join(bad) or account.kind.value


def _edge(start: Account, end: Account, x: int) -> Iterator[str]:
    y, middle = EDGE + HIGH // 2, x + GAP // 2
    yield (
        f'<line class="edge" x1="{x}" y1="{y}" x2="{x + GAP - 2}" y2="{y}"'
        ' marker-end="url(#end)"/>'
        f'<text class="count" x="{middle}" y="{y - 8}">{end.received:,}</text>'
    )
    if missing := start.produced - end.received:
        text = f"{missing:,} undelivered"
        yield f'<text class="deadly" x="{middle}" y="{y + 18}">{text}</text>'


def plot(spans: Sequence[RunSpan], number: int) -> str:
    """
    Return how fast one stage was, as steps.

    Args:
        spans: The whole time, in parts.
        number: Of the stage.

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
