"""
A run on the screen: its progress, its closing report, and the signals that it obeys.

Progress is a table that updates itself on a terminal, and a line every few seconds
elsewhere. Both read the counters of the ledger; nothing is called per message.

The first SIGINT, SIGTERM or SIGHUP drains the run: nothing more is extracted, and
messages in flight are finished. The second stops it at once; any others do nothing, as
the rest takes limited time and ends with the report. The library itself touches no
signals.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import anyio
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from etlstage.cli.failure import complain, show_error
from etlstage.cli.logs import configure
from etlstage.cli.options import NORMAL, Verbosity
from etlstage.cli.screen import Screen
from etlstage.cli.signals import Signals
from etlstage.errors import EtlstageError
from etlstage.messages import StageKind, counted
from etlstage.pipeline.ledger import Account, Ledger
from etlstage.pipeline.report import KeptLetters, Report, accounts, closing_lines
from etlstage.pipeline.runner import Runner
from etlstage.telemetry.log import Log
from etlstage.telemetry.terminal import harmless

if TYPE_CHECKING:
    from etlstage.cli.history import History
    from etlstage.cli.metrics import MetricsServer

__all__ = (
    "EXIT_CODES",
    "Rates",
    "accounts_table",
    "exit_code",
    "run_pipeline",
    "show_lines",
    "show_report",
    "show_table",
    "state_line",
    "watch",
)

EXIT_CODES: Final = {"done": 0, "failed": 1, "drained": 4, "forced": 5}

REFRESH: Final = 0.25
LINE_EVERY: Final = 10.0
RATE_OVER: Final = 3.0
"""Seconds over which a rate is averaged: long enough for it to be readable."""
_GAP: Final = 2  # cells between two columns

_log = Log()


def exit_code(report: Report, *, debug: bool) -> int:
    """Print the error of a failed run; return the exit code of any run."""
    if report.error is not None:
        show_error(report.error, debug=debug, secrets=report.secrets)
    return EXIT_CODES[report.status]


def run_pipeline(
    pipeline: Runner,
    signals: Signals,
    verbosity: Verbosity = NORMAL,
    server: MetricsServer | None = None,
    history: History | None = None,
    *,
    prints: bool = False,
) -> Report:
    """
    Run a pipeline, show its progress on stderr and its closing report on stdout.

    The caller has to end the load with :meth:`Runner.settle`.

    Args:
        pipeline: The pipeline.
        signals: The signals that it obeys.
        verbosity: How much is shown, and how.
        server: Serves metrics during the run; None: nothing does.
        history: Samples the run; None: nothing does.
        prints: Whether its messages are on stdout: then the report is on stderr, and
            its dead letters are not kept.

    """
    err = Screen(stderr=True)
    configure(err, verbosity, secrets=pipeline.secrets)
    shown = replace(verbosity, quiet=verbosity.quiet or prints)
    with server or nullcontext():
        if server is not None:
            server.ledger = pipeline.ledger
            _log.info("metrics are served", address=server.url)
        report = watch(pipeline, signals, err, shown, history)
    if prints:
        report = replace(report, dead_letters=KeptLetters())
    if not verbosity.quiet:
        try:
            show_report(report, err if prints else Screen())
        except EtlstageError as error:
            # Not a failure, after which the messages would be loaded again.
            complain(f"no closing report: {error}", as_="warning")
    return report


def watch(
    pipeline: Runner,
    signals: Signals,
    err: Screen,
    verbosity: Verbosity = NORMAL,
    history: History | None = None,
) -> Report:
    """
    Run a pipeline; meanwhile show its progress and obey signals.

    The caller has to end the load with :meth:`Runner.settle`.

    Args:
        pipeline: The pipeline.
        signals: The signals that it obeys.
        err: Where its progress is shown, and the fact that it drains.
        verbosity: How much is shown, and how: in a table that updates itself, as lines,
            or as events.
        history: Samples the run; None: nothing does.

    """
    return anyio.run(_watched, pipeline, signals, err, verbosity, history)


async def _watched(
    pipeline: Runner,
    signals: Signals,
    err: Screen,
    verbosity: Verbosity,
    history: History | None,
) -> Report:
    ledger = pipeline.ledger

    def activity() -> str:
        return pipeline.activity

    async with anyio.create_task_group() as tasks:
        stop = anyio.CancelScope()
        tasks.start_soon(_obey, signals, pipeline, stop, err)
        if not verbosity.for_people(err):
            tasks.start_soon(show_lines, ledger, activity, _tell_progress)
        elif err.renews and not verbosity.quiet:
            tasks.start_soon(show_table, ledger, activity, err)
        elif not verbosity.quiet:
            tasks.start_soon(show_lines, ledger, activity, err.tell)
        if history is not None:
            tasks.start_soon(history.keep)
        with stop:
            report = await pipeline.run(settle=False)
        tasks.cancel_scope.cancel()
    return pipeline.report("forced") if stop.cancelled_caught else report


def _tell_progress(line: str) -> None:
    _log.info("progress", status=line)


async def _obey(
    signals: Signals, pipeline: Runner, stop: anyio.CancelScope, err: Screen
) -> None:
    await signals.receive()
    pipeline.drain()
    err.print(_draining(pipeline), highlight=False)
    await signals.receive()
    stop.cancel()
    err.print("stopping", highlight=False)


def _draining(pipeline: Runner) -> str:
    waiting, limit = pipeline.ledger.waiting, pipeline.drain_limit
    text = f"{counted(waiting, 'message')} in progress, " if waiting else ""
    if waiting and limit < math.inf:
        text += f"those that still wait after {limit:g} s are left unprocessed; "
    return f"draining: {text}press Ctrl-C again to stop at once"


def show_report(report: Report, screen: Screen) -> None:
    """Print the closing report."""
    seconds = [f"{account.seconds:.1f}" for account in report.ledger]
    screen.print(
        accounts_table(report.ledger, "seconds", seconds, screen.width), crop=False
    )
    for line in closing_lines(report):
        screen.tell(harmless(line, lines=True))


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


def accounts_table(
    ledger: Ledger, last: str, values: Iterable[str], room: int
) -> Table:
    """
    Return a ledger as a table.

    Args:
        ledger: The accounts.
        last: Heading of the last column.
        values: The texts in that column, one for each stage.
        room: Width of the screen, in cells. Where it is too narrow, the names of the
            stages are shortened, but never a count.

    """
    heads, rows = accounts(ledger, last, values)
    columns = zip(heads, *([text for text, _ in row] for row in rows), strict=True)
    name, *counts = (max(map(cell_len, column)) for column in columns)
    others = sum(_GAP + count for count in counts)
    name = min(name, max(room - others, len(heads[0])))
    table = Table(
        box=None, padding=(0, _GAP, 0, 0), pad_edge=False, width=name + others
    )
    for number, head in enumerate(heads):
        table.add_column(
            head,
            justify="right" if number else "left",
            no_wrap=True,
            max_width=None if number else name,
        )
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
        seconds: Seconds since the run began.
        rates: Messages per second, of each stage.
        activity: What the run is waiting for, if anything.

    """
    states = [_stage_state(a, rate) for a, rate in zip(ledger, rates, strict=True)]
    parts = [*(states if ledger.moving else ()), activity, _left(ledger, rates)]
    return harmless(f"{seconds:.0f} s: {'; '.join(filter(None, parts))}")


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
        foot = Text(harmless("  ".join(filter(None, parts))))
        return Group(
            accounts_table(ledger, "per second", map(_rate, sample), console.width),
            foot,
        )

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
    """Report ``ledger`` and the activity, a line at intervals, until cancelled."""
    rates = Rates(ledger)
    start = anyio.current_time()
    rates.sample(start)
    while True:
        await anyio.sleep(every)
        now = anyio.current_time()
        tell(state_line(ledger, now - start, rates.sample(now), activity()))


def _left(ledger: Ledger, rates: Sequence[float]) -> str:
    """Return how long the rest will take; empty if it is unknown how much it is."""
    # Input of the first stage is counted, as its output may be more or fewer messages.
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
    """Return a rate as text; empty, not 0, if it is almost none."""
    return f"{rate:,.0f}" if rate >= 0.5 else ""
