"""
What a pipeline is doing, for whoever waits for it.

A table that renews itself on a terminal, a line every few seconds elsewhere. Both
read the counters of the ledger; nobody calls anything per message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import anyio
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from etlstage.messages import StageKind
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.pipeline.report import accounts

__all__ = ("Rates", "accounts_table", "show_lines", "show_table", "state_line")

REFRESH: Final = 0.25
LINE_EVERY: Final = 10.0
RATE_OVER: Final = 3.0
"""Seconds over which a rate is taken: long enough to be read."""


class Rates:
    """Messages per second of each stage, over the last seconds."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._samples: deque[tuple[float, list[int]]] = deque()

    def sample(self, now: float) -> list[float]:
        """Return the rates at the time ``now``, in seconds of any clock."""
        counts = [account.processed for account in self._ledger]
        self._samples.append((now, counts))
        while len(self._samples) > 2 and self._samples[1][0] <= now - RATE_OVER:
            self._samples.popleft()
        then, before = self._samples[0]
        if now <= then:
            return [0.0] * len(counts)
        return [(a - b) / (now - then) for a, b in zip(counts, before, strict=True)]


def accounts_table(ledger: Ledger, last: str, values: Iterable[str]) -> Table:
    """
    Return a ledger as a table.

    Args:
        ledger: The accounts.
        last: Heading of the last column.
        values: What stands in it, a text for each stage.

    """
    heads, rows = accounts(ledger, last, values)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        cells = (Text(text, "bold red" if alarming else "") for text, alarming in row)
        table.add_row(*cells)
    return table


def state_line(
    ledger: Ledger, seconds: float, rates: Sequence[float], activity: str = ""
) -> str:
    """
    Return a ledger as one line.

    Args:
        ledger: The accounts.
        seconds: Since the run began.
        rates: Messages per second, of each stage.
        activity: What is waited for, if anything is.

    """
    states = [_stage_state(a, rate) for a, rate in zip(ledger, rates, strict=True)]
    parts = [*(states if ledger.moving else ()), activity, _left(ledger, rates)]
    return f"{seconds:.0f} s: {'; '.join(filter(None, parts))}"


async def show_table(
    ledger: Ledger, activity: Callable[[], str], console: Console
) -> None:
    """Keep a table of ``ledger``, and the activity, on the console until cancelled."""
    rates = Rates(ledger)
    start = anyio.current_time()

    def table() -> Group:
        now = anyio.current_time()
        sample = rates.sample(now)
        parts = (f"{now - start:.0f} s", activity(), _left(ledger, sample))
        foot = Text("  ".join(filter(None, parts)))
        return Group(accounts_table(ledger, "per second", map(_rate, sample)), foot)

    with Live(table(), console=console, auto_refresh=False, transient=True) as live:
        while True:
            await anyio.sleep(REFRESH)
            live.update(table(), refresh=True)


async def show_lines(
    ledger: Ledger,
    activity: Callable[[], str],
    tell: Callable[[str], object],
    *,
    every: float = LINE_EVERY,
) -> None:
    """Tell a line about ``ledger``, and the activity, now and then until cancelled."""
    rates = Rates(ledger)
    start = anyio.current_time()
    rates.sample(start)
    while True:
        await anyio.sleep(every)
        now = anyio.current_time()
        tell(state_line(ledger, now - start, rates.sample(now), activity()))


def _left(ledger: Ledger, rates: Sequence[float]) -> str:
    """Say how long the rest takes, where it is known how much there is."""
    # What the first stage behind it makes of the messages may be more, or less.
    done, rate = ledger[1].moved, rates[1]
    if ledger.expected is None or rate < 1 or done >= ledger.expected:
        return ""
    seconds = (ledger.expected - done) / rate
    return f"about {seconds:.0f} s left" if seconds >= 1 else ""


def _stage_state(account: Account, rate: float) -> str:
    parts = [f"{account.stage}"]
    if account.kind is not StageKind.EXTRACT:
        parts.append(f"in {account.received:,}")
    parts.append(f"out {account.made:,}")
    parts += [
        f"{word} {count:,}"
        for word, count in (
            ("dead", account.dead),
            ("failed", account.failed),
            ("unprocessed", account.unprocessed),
            ("skipped", account.skipped),
        )
        if count
    ]
    if shown := _rate(rate):
        parts.append(f"({shown}/s)")
    return " ".join(parts)


def _rate(rate: float) -> str:
    """Return a rate; none is none, and not 0."""
    return f"{rate:,.0f}" if rate >= 0.5 else ""
