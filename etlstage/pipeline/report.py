"""The outcome of a run, for humans and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from html import escape
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from etlstage.errors import EtlstageError, LedgerImbalance
from etlstage.messages import StageKind
from etlstage.pipeline.interfaces import Output
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.pipeline.secret import Secrets
from etlstage.telemetry.terminal import harmless

__all__ = (
    "ENDINGS",
    "Cell",
    "EdgeReport",
    "KeptLetters",
    "Report",
    "Status",
    "accounts",
    "as_html",
    "as_text",
    "balance",
    "closing_lines",
    "mismatches",
)

Status: TypeAlias = Literal["done", "failed", "drained", "forced"]


ENDINGS: Final = {
    "done": "done in {}",
    "failed": "failed in {}",
    "drained": "drained in {}; run it again for the rest",
    "forced": "stopped by force in {}",
}
"""How a run ended, by its status."""


class Cell(NamedTuple):
    """A cell in the table of accounts."""

    text: str
    alarming: bool = False
    """Whether it should be highlighted."""


LISTED: Final = 20
"""Number of dead letters up to which a plain list of them is useful."""


class KeptLetters(NamedTuple):
    """The dead letters of a run."""

    messages: int = 0
    where: str | None = None
    """Their folder, if there are any."""
    command: str | None = None
    """The command that shows them."""


class EdgeReport(NamedTuple):
    """What passed a durable edge in a run, and what waits there."""

    stage: str
    """The stage whose messages the edge holds; ``next`` reads them."""
    next: str
    appended: int
    """Messages that were made durable there."""
    read: int
    """Messages that were read, including those appended by earlier runs."""
    messages: int | None = None
    """Messages that wait there at the end; None: they were not counted."""
    bytes: int = 0
    """Bytes of the journals that are not read."""
    seconds: float = 0.0
    """Seconds since the oldest of these messages was appended."""

    def __str__(self) -> str:
        text = f"edge {self.stage} -> {self.next}: {self.appended:,} appended, {self.read:,} read"
        if self.messages is None:
            return text
        wait = f"{self.messages:,} {'waits' if self.messages == 1 else 'wait'}"
        age = f" for up to {self.seconds:.0f} s" if self.messages else ""
        return f"{text}, {wait}{age}"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Report:
    """
    What a run did, and what it loaded.

    As text it is the closing table of the command line; a notebook shows it as HTML.
    """

    name: str
    run: str
    """Identifies the run; its dead letters have the same value."""
    status: Status
    """``done``: everything loaded. ``failed``: see ``error``. ``drained``: extraction
    was stopped, what was extracted is loaded. ``forced``: stopped in the middle."""
    error: Exception | None
    started: datetime
    """In UTC."""
    ended: datetime
    """In UTC."""
    seconds: float
    ledger: Ledger
    landed: str
    """What reached the destination, in one line."""
    output: Output
    """The destination."""
    durable: Sequence[EdgeReport] = ()
    """The durable edges."""
    dead_letters: KeptLetters = field(default_factory=KeptLetters)
    secrets: Secrets = field(default_factory=Secrets, repr=False)
    """Texts to conceal in ``error``, ``landed`` and paths."""

    @property
    def undelivered(self) -> int:
        """Messages in flight between two stages when the run ended."""
        return self.ledger.undelivered

    def __repr__(self) -> str:
        loaded = self.ledger[-1].made
        return f"<Report {self.name!r} run={self.run} {self.status} loaded={loaded}>"

    def __str__(self) -> str:
        """Return the closing table, what was loaded, and the error if there is one."""
        return "\n".join([as_text(*self._table()), *self._lines()])

    def _repr_html_(self) -> str:
        """Return the same as HTML for a notebook."""
        return as_html(*self._table(), self._lines())

    def _table(self) -> tuple[list[str], list[list[Cell]]]:
        seconds = [f"{account.seconds:.1f}" for account in self.ledger]
        return accounts(self.ledger, "seconds", seconds)

    @property
    def _story(self) -> tuple[str, ...]:
        return self.error.story if isinstance(self.error, EtlstageError) else ()

    def _lines(self) -> list[str]:
        lines = closing_lines(self)
        if self.error is not None:
            conceal = self.secrets.conceal
            lines.append(f"error: {conceal(str(self.error))}")
            lines += (f"  {conceal(line)}" for line in self._story)
        return [harmless(line, lines=True) for line in lines]

    def _edges(self) -> Iterator[dict[str, Any]]:
        durable = {edge.stage: edge for edge in self.durable}
        for (a, b), gap in zip(pairwise(self.ledger), self.ledger.gaps, strict=True):
            edge: dict[str, Any] = {
                "name": f"{a.stage} -> {b.stage}",
                "from": a.stage,
                "to": b.stage,
                "messages": b.received,
                "undelivered": gap,
            }
            if (found := durable.get(a.stage.partition("/")[0])) is not None:
                edge["journals"] = found._asdict()
            yield edge

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON, without secrets."""
        concealed = self.secrets.concealed
        return {
            "pipeline": self.name,
            "run": self.run,
            "status": self.status,
            "error": concealed(str(self.error)) if self.error is not None else None,
            "story": concealed(list(self._story)),
            "started": self.started.isoformat(timespec="milliseconds"),
            "ended": self.ended.isoformat(timespec="milliseconds"),
            "seconds": round(self.seconds, 3),
            "stages": [_stage(account, self.started) for account in self.ledger],
            "edges": list(self._edges()),
            "output": {
                **concealed(self.output._asdict()),
                "messages": self.ledger[-1].made,
                "text": concealed(self.landed),
            },
            "dead_letters": concealed(self.dead_letters._asdict()),
        }


def accounts(
    ledger: Ledger, last: str, values: Iterable[str]
) -> tuple[list[str], list[list[Cell]]]:
    """
    Return the headings and the rows of a run's table.

    Args:
        ledger: The accounts.
        last: Heading of the last column.
        values: Texts of the last column, one for each stage.

    """
    # Restarts are shown even if nothing was lost, so that a healthy report has them.
    seldom = ("skipped", "mismatched", "doubtful", "restarts")
    shown = [name for name in seldom if any(getattr(a, name) for a in ledger)]
    bad = ["dead", "failed", "unprocessed", *shown]
    rows = []
    for account, value in zip(ledger, values, strict=True):
        taken = account.kind is not StageKind.EXTRACT
        counts = [int(getattr(account, name)) for name in bad]
        rows.append(
            [
                Cell(harmless(account.stage)),
                Cell(f"{account.received:,}" if taken else "-"),
                Cell(f"{account.made:,}"),
                *(Cell(f"{count:,}", alarming=bool(count)) for count in counts),
                Cell(value),
            ]
        )
    return ["stage", "in", "out", *bad, last], rows


def as_text(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table with its first column left-aligned, the others right-aligned."""
    lines = [heads, *([cell.text for cell in row] for row in rows)]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        "  ".join(
            [
                stage.ljust(first),
                *(t.rjust(w) for t, w in zip(rest, others, strict=True)),
            ]
        ).rstrip()
        for stage, *rest in lines
    )


def as_html(
    heads: Sequence[str], rows: Sequence[Sequence[Cell]], lines: Iterable[str]
) -> str:
    """Return a table, and lines below it, as an HTML fragment; texts are escaped."""

    def cell(tag: str, text: str, *, left: bool, alarming: bool = False) -> str:
        style = f"text-align:{'left' if left else 'right'}"
        style += ";color:#c00;font-weight:bold" * alarming
        return f'<{tag} style="{style}">{escape(text)}</{tag}>'

    head = "".join(cell("th", text, left=not i) for i, text in enumerate(heads))
    body = "".join(
        "<tr>"
        + "".join(
            cell("td", one.text, left=not i, alarming=one.alarming)
            for i, one in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    below = "".join(f"<div>{escape(line)}</div>" for line in lines)
    return (
        f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        f"{below}</div>"
    )


def closing_lines(report: Report) -> list[str]:
    """Return the lines below the table, except the error, without secrets."""
    conceal = report.secrets.conceal
    lines = [balance(report), *mismatches(report.ledger), *map(str, report.durable)]
    lines.append(conceal(report.landed))
    if report.dead_letters.messages:
        look = conceal(str(report.dead_letters.command))
        look += " --group" if report.dead_letters.messages > LISTED else ""
        lines.append(f"to see the dead letters: {look}")
    ending = ENDINGS[report.status].format(f"{report.seconds:.1f} s")
    return [*lines, f"{report.name}: {ending}"]


def mismatches(ledger: Iterable[Account]) -> list[str]:
    """Return one line for each stage whose replies have broken promises."""
    return [
        f"{a.stage}: replies not as expected: "
        + ", ".join(f"{count:,} by {name}" for name, count in a.mismatches.items())
        for a in ledger
        if a.mismatches
    ]


def balance(report: Report) -> str:
    """Return the ledger of a run in one line, or why it does not balance."""
    whole = report.status in ("done", "drained")
    try:
        report.ledger.check(whole=whole)
    except LedgerImbalance as error:
        return f"ledger not balanced: {error}"
    *_, last = report.ledger
    counts = {
        "skipped": sum(account.skipped for account in report.ledger),
        "doubtful": sum(account.doubtful for account in report.ledger),
        "dead-lettered": sum(account.dead for account in report.ledger),
        "failed": sum(account.failed for account in report.ledger),
        "unprocessed": sum(account.unprocessed for account in report.ledger)
        + report.undelivered,
    }
    others = [f"{count:,} {what}" for what, count in counts.items() if count]
    became = "printed" if report.output.what == "stdout" else "loaded"
    return f"accounted for: {', '.join((f'{last.done:,} {became}', *others))}"


def _stage(account: Account, started: datetime) -> dict[str, Any]:
    def at(seconds: float) -> str | None:
        if account.began is None:
            return None
        return (started + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")

    return {
        "stage": account.stage,
        "kind": account.kind.value,
        "in": None if account.kind is StageKind.EXTRACT else account.received,
        "out": account.made,
        "done": account.done,
        "dead": account.dead,
        "failed": account.failed,
        "unprocessed": account.unprocessed,
        "skipped": account.skipped,
        "doubtful": account.doubtful,
        "mismatches": account.mismatches,
        "restarts": account.restarts,
        "failures": account.failures,
        "started": at(account.began or 0.0),
        "ended": at(account.seconds),
        "seconds": round(account.seconds, 3),
        "busy": round(account.busy, 3),
    }
