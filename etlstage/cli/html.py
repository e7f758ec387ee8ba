"""
The report of a run as an HTML page.

The page is self-contained: it has no script, font or picture from elsewhere, and its
policy keeps browsers from fetching any. All texts that came from outside, names
included, are escaped, and characters that hide or reverse text are made visible.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final

from etlstage.cli.drawing import Box, Joint, clean, plot, stages
from etlstage.cli.history import RunSpan
from etlstage.messages import StageKind, counted
from etlstage.pipeline.dead_letter.letter import LetterGroup, first_clause
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.pipeline.report import (
    ENDINGS,
    Cell,
    Report,
    accounts,
    balance,
    mismatches,
)

__all__ = ("page",)

_LIGHT: Final = """
--back: #f6f7f9; --card: #fff; --text: #1c2430; --soft: #5b6675; --line: #d9dee5;
--main: #2563a8; --fill: #dbe8f6; --good: #1b7f4b; --warn: #9a5b00; --bad: #b3261e;
color-scheme: light;"""

STYLE: Final = f"""
:root {{{_LIGHT}}}
@media (prefers-color-scheme: dark) {{ :root {{
--back: #12161c; --card: #1b2129; --text: #e4e9f0; --soft: #9aa6b5; --line: #333d4a;
--main: #74b0f0; --fill: #24405f; --good: #5fcf95; --warn: #f0b35a; --bad: #ff8a80;
color-scheme: dark; }} }}
@media print {{ :root {{{_LIGHT} --back: #fff; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--back); color: var(--text);
font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }}
h1 {{ font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.05rem; margin: 0 0 .6rem; }}
h3 {{ font-size: .95rem; margin: 1rem 0 .4rem; }}
p {{ margin: .5rem 0 0; overflow-wrap: anywhere; }}
header p, .note, figcaption span, .axis {{ color: var(--soft); }}
section, .tiles li {{ background: var(--card); border: 1px solid var(--line);
border-radius: 10px; }}
section {{ padding: 1rem 1.1rem; margin-top: 1rem; break-inside: avoid; }}
.badge {{ font-size: .8rem; font-weight: 600; vertical-align: middle; padding: .15rem .6rem;
border-radius: 1rem; border: 1px solid currentcolor; color: var(--bad); }}
.badge.done {{ color: var(--good); }}
.badge.drained {{ color: var(--warn); }}
.error {{ border-color: var(--bad); }}
.error h2, .bad {{ color: var(--bad); }}
.warn {{ color: var(--warn); }}
pre {{ margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }}
pre, code {{ font: .86em/1.5 ui-monospace, monospace; }}
.tiles {{ list-style: none; display: grid; gap: .7rem; margin: 1rem 0 0; padding: 0;
grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); }}
.tiles li {{ padding: .6rem .9rem; }}
.tiles b {{ display: block; font-size: 1.45rem; line-height: 1.3;
font-variant-numeric: tabular-nums; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th {{ text-align: left; font-weight: 600; color: var(--soft); }}
th, td {{ padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
vertical-align: top; }}
td {{ white-space: nowrap; }}
.wrap {{ white-space: normal; }}
.long {{ white-space: normal; overflow-wrap: anywhere; min-width: 14rem; width: 60%; }}
.number {{ text-align: right; }}
tbody tr:last-child td {{ border-bottom: 0; }}
#graph {{ display: block; margin: 0 auto; max-width: 100%; height: auto; }}
#graph text {{ text-anchor: middle; fill: var(--soft); font-size: 13px; }}
#graph .name {{ fill: var(--text); font-size: 14px; font-weight: 600; }}
#graph .count {{ fill: var(--text); font-variant-numeric: tabular-nums; }}
#graph .deadly {{ fill: var(--bad); }}
.stage {{ fill: var(--fill); stroke: var(--main); }}
.stage.bad {{ stroke: var(--bad); }}
.edge, .dead {{ stroke: var(--soft); }}
.tip {{ fill: var(--soft); }}
figure {{ margin: .6rem 0 0; }}
figcaption {{ display: flex; flex-wrap: wrap; gap: 0 1rem;
justify-content: space-between; }}
.plot {{ display: block; width: 100%; height: 4rem; border-bottom: 1px solid var(--line); }}
.plot path {{ fill: var(--fill); stroke: var(--main); stroke-width: 1.5;
vector-effect: non-scaling-stroke; }}
.axis {{ display: flex; justify-content: space-between; margin-top: .2rem;
font-size: .85rem; font-variant-numeric: tabular-nums; }}
@media (max-width: 40rem) {{ #graph {{ max-width: none; margin: 0; }} }}
@media print {{ main {{ max-width: none; padding: 0; }} .wide {{ overflow: visible; }}
td {{ white-space: normal; }} .long {{ min-width: 0; width: auto; }} }}
"""

CAUSES: Final = 50
"""Maximum number of causes that are shown, the most frequent ones."""
FAULTS: Final = 20
"""Maximum number of worker failures that are shown, the last ones."""
DIGEST: Final = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{DIGEST}'; base-uri 'none';"
    " form-action 'none'"
)
TICKS: Final = 5  # times below a plot
NAME: Final = 20  # characters of a stage's name
NUMBER: Final = ' class="number"'
LONG: Final = ' class="long"'
COLUMNS: Final = {
    **dict.fromkeys(("stage", "worker"), ' class="wrap"'),
    **dict.fromkeys(("time (UTC)", "first (UTC)", "last (UTC)", "example"), ""),
    **dict.fromkeys(("cause", "what happened"), LONG),
}
"""Attributes of the table columns that do not hold numbers."""


def page(
    report: Report, spans: Sequence[RunSpan], causes: Sequence[LetterGroup]
) -> str:
    """
    Return a report as HTML.

    Args:
        report: The report.
        spans: How fast the stages were; empty if that was not sampled.
        causes: The dead letters of the run, by cause.

    """
    title = f"{clean(report.name)}: {report.status}"
    sections = [
        *_head(report),
        *_tiles(report),
        _section("Stages", f'<div class="wide">{_graph(report.ledger)}</div>'),
        _section("Ledger", *_ledger(report)),
        _section("Messages per second", *_plots(report, spans)),
        _section("Workers", *_workers(report)),
        _section("Dead letters", *_letters(report, causes)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(heading: str, *parts: str) -> str:
    return f"<section>\n<h2>{heading}</h2>\n" + "\n".join(parts) + "\n</section>"


def _head(report: Report) -> Iterator[str]:
    ending = ENDINGS[report.status].format(f"{report.seconds:.1f} s")
    yield (
        f'<header><h1>{clean(report.name)} <span class="badge {report.status}">'
        f"{report.status}</span></h1>"
        f"<p>run {clean(report.run)}, {_when(report.started)} to"
        f" {_when(report.ended)} UTC: {clean(ending)}</p></header>"
    )
    if report.error is not None:
        lines = [str(report.error), *getattr(report.error, "story", ())]
        text = clean(report.secrets.conceal("\n  ".join(lines)))
        yield f'<section class="error"><h2>Error</h2><pre>{text}</pre></section>'


def _tiles(report: Report) -> Iterator[str]:
    ledger = list(report.ledger)
    tiles = [
        ("loaded", ledger[-1].made, ""),
        ("dead-lettered", sum(a.dead for a in ledger), "warn"),
        ("failed", sum(a.failed for a in ledger), "bad"),
        ("unprocessed", sum(a.unprocessed for a in ledger) + report.undelivered, "bad"),
        ("worker restarts", sum(a.restarts for a in ledger), "warn"),
    ]
    yield '<ul class="tiles">'
    for word, count, mark in tiles:
        yield f'<li class="{mark if count else ""}"><b>{count:,}</b> {word}</li>'
    yield "</ul>"


def _graph(ledger: Ledger) -> str:
    """Return the stages in a row, with what passed between them."""
    links = []
    for end, missing in zip(list(ledger)[1:], ledger.gaps, strict=True):
        below = f"{missing:,} undelivered" if missing else ""
        links.append(Joint(f"{end.received:,}", below))
    return "".join(
        stages(
            [*map(_box, ledger)],
            links,
            attributes='id="graph" role="img" aria-label="stages and messages"',
            wide=184,
            gap=104,
            across=len(ledger),
        )
    )


def _box(account: Account) -> Box:
    whole = account.stage
    name = (
        whole if len(whole) <= NAME else f"{whole[: NAME - 1]}\N{HORIZONTAL ELLIPSIS}"
    )
    dead = counted(account.dead, "dead letter") if account.dead else ""
    bad = [
        f"{count:,} {word}"
        for word, count in (
            ("failed", account.failed),
            ("unprocessed", account.unprocessed),
        )
        if count
    ]
    ends = {StageKind.EXTRACT: "extracted", StageKind.LOAD: "loaded"}
    about = ", ".join(bad) or account.kind.value
    if not bad and account.kind in ends:
        about = f"{account.made:,} {ends[account.kind]}"
    return Box(name, about, dead, bool(bad), whole)


def _ledger(report: Report) -> Iterator[str]:
    ledger = list(report.ledger)
    heads, table = accounts(
        report.ledger, "seconds", (f"{a.seconds:.1f}" for a in ledger)
    )
    rows = [[_cell(cell) for cell in row] for row in table]
    if any(a.began is not None for a in ledger):
        heads[-1:] = ["started", "ended"]
        for a, row in zip(ledger, rows, strict=True):
            row[-1:] = ["-" if a.began is None else f"{a.began:.1f} s", f"{row[-1]} s"]
    if any(a.busy for a in ledger):
        # The share of the run in which a worker held a message: most in slow stages.
        heads.append("busy")
        for a, row in zip(ledger, rows, strict=True):
            row.append(f"{min(1.0, a.busy / report.seconds):.0%}" if a.busy else "-")
    yield _table(heads, rows)
    yield f"<p>{clean(report.secrets.conceal(balance(report)))}</p>"
    yield from (f"<p>{clean(line)}</p>" for line in mismatches(ledger))
    yield f"<p>{clean(report.secrets.conceal(report.landed))}</p>"


def _cell(cell: Cell) -> str:
    text = clean(cell.text)
    return f'<span class="bad">{text}</span>' if cell.alarming else text


def _plots(report: Report, spans: Sequence[RunSpan]) -> Iterator[str]:
    if not spans:
        yield "<p>The run was too short.</p>"
        return
    whole = spans[-1].end
    for number, account in enumerate(report.ledger):
        rates = [span.rates[number] for span in spans]
        # Not of all its messages: a resumed run has those of its first start as well.
        moved = sum(s.rates[number] * (s.end - s.start) for s in spans)
        mean = moved / whole
        yield (
            f"<figure><figcaption><b>{clean(account.stage)}</b> <span>up to"
            f" {max(rates):,.0f}, on average {mean:,.0f}</span></figcaption>"
            f"{plot(spans, number)}</figure>"
        )
    ticks = (whole * n / (TICKS - 1) for n in range(TICKS))
    yield f'<p class="axis">{"".join(f"<span>{_time(t, whole)}</span>" for t in ticks)}</p>'
    yield '<p class="note">Each stage has its own scale.</p>'


def _time(seconds: float, whole: float) -> str:
    if whole < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _workers(report: Report) -> Iterator[str]:
    rows = [
        [clean(a.stage), f"{a.restarts:,}", f"{a.failures:,}"]
        for a in report.ledger
        if a.restarts or a.failures
    ]
    if not rows:
        yield "<p>No worker failed or was restarted.</p>"
        return
    yield _table(["stage", "restarts", "failures"], rows)
    faults = sorted(fault for account in report.ledger for fault in account.faults)
    if faults:
        conceal = report.secrets.conceal
        yield "<h3>The last failures</h3>"
        rows = [
            [_short(f.time), clean(f.worker), clean(conceal(first_clause(f.what)))]
            for f in faults[-FAULTS:]
        ]
        yield _table(["time (UTC)", "worker", "what happened"], rows)


def _letters(report: Report, causes: Sequence[LetterGroup]) -> Iterator[str]:
    if not report.dead_letters.messages:
        yield "<p>No message was dead-lettered.</p>"
        return
    rows = [
        [
            f"{group.count:,}",
            clean(group.stage),
            clean(group.cause),
            _short(group.first),
            _short(group.last),
            f"<code>{clean(group.example)}</code>",
        ]
        for group in causes[:CAUSES]
    ]
    heads = ["count", "stage", "cause", "first (UTC)", "last (UTC)", "example"]
    yield _table(heads, rows)
    if len(causes) > CAUSES:
        yield f"<p>{counted(len(causes) - CAUSES, 'more cause')}</p>"
    look = report.secrets.conceal(str(report.dead_letters.command))
    yield f"<p>To see them: <code>{clean(look)}</code></p>"


def _table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of cells that are HTML already."""

    def cells(tag: str, values: Iterable[str]) -> str:
        return "".join(
            f"<{tag}{COLUMNS.get(head, NUMBER)}>{value}</{tag}>"
            for head, value in zip(heads, values, strict=True)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table>\n<thead><tr>{cells("th", heads)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _when(time: datetime) -> str:
    return time.isoformat(" ", "seconds").removesuffix("+00:00")


def _short(time: str) -> str:
    return clean(time[:19].replace("T", " "))
