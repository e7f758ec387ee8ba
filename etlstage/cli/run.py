"""
``etlstage run``: one pipeline, watched, to its end.

The first SIGINT, SIGTERM or SIGHUP drains: no more is extracted, what is under way is
finished. The second stops at once, all others do nothing: what is left is bounded, and
ends with the report. The library itself touches no signals.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import anyio

from etlstage.cli.closing import EXIT_CODES, ReportFile, show_report
from etlstage.cli.failure import show_error
from etlstage.cli.history import History
from etlstage.cli.logs import configure
from etlstage.cli.metrics import MetricsServer
from etlstage.cli.progress import show_lines, show_table
from etlstage.cli.screen import Screen
from etlstage.cli.signals import Signals
from etlstage.cli.trial import PLAIN, Trial
from etlstage.cli.verbosity import NORMAL, Verbosity
from etlstage.config.reading import Changes
from etlstage.pipeline.dead_letter.letter import Causes
from etlstage.pipeline.report import KeptLetters, Report
from etlstage.pipeline.runner import Runner
from etlstage.telemetry.log import Log

__all__ = ("exit_code", "run_file", "run_pipeline", "watch")

_log = Log()


def run_file(
    file: Path,
    changes: Changes,
    signals: Signals,
    *,
    report: Path | None = None,
    html: Path | None = None,
    metrics: str | None = None,
    trial: Trial = PLAIN,
    verbosity: Verbosity = NORMAL,
) -> int:
    """
    Run the pipeline of a file; return the exit code.

    Args:
        file: The pipeline.
        changes: What is laid over it.
        signals: What it obeys, once it has begun.
        report: Where the closing report goes as JSON, or None.
        html: Where it goes as a page for people, or None.
        metrics: Address at which metrics are served meanwhile, or None.
        trial: Whether its workers are recorded, or have the faults in the file.
        verbosity: How much is told, and how.

    Raises:
        ConfigError: If the file is wrong, or the report can't be written there, or the
            metrics can't be served.
        KeyboardInterrupt: By a signal before the run has begun.

    """
    with ExitStack() as stack:
        server = MetricsServer(metrics) if metrics is not None else None
        meter = server.meter if server is not None else None
        pipeline = trial.build(file, changes, meter, stack)
        place = stack.enter_context(ReportFile(report)) if report else None
        leaf = stack.enter_context(ReportFile(html)) if html else None
        history = History(pipeline.ledger) if html else None
        signals.begin()
        result = run_pipeline(
            pipeline,
            signals,
            verbosity,
            server,
            history,
            prints=trial.until is not None,
        )
        # Why the run failed is told also if the report can't be written, and the
        # report is written also if nothing can be told.
        try:
            return exit_code(result, debug=verbosity.debug)
        finally:
            if not verbosity.quiet:
                trial.tell()
            if place is not None:
                plain = result.to_dict() | trial.report()
                place.write(f"{json.dumps(plain, indent=2)}\n")
            if leaf is not None and history is not None:
                leaf.write(_page(result, pipeline, history))


def _page(report: Report, pipeline: Runner, history: History) -> str:
    from etlstage.cli.html import page  # for few runs

    causes = Causes()
    # What was removed meanwhile is no reason to have no report.
    with suppress(OSError):
        for letter in pipeline.letters():
            causes.add(letter)
    return page(report, history.spans(), causes.groups())


def exit_code(report: Report, *, debug: bool) -> int:
    """Print the error of a run that failed; return the exit code of any."""
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

    Args:
        pipeline: The pipeline.
        signals: What it obeys.
        verbosity: How much is told, and how.
        server: What serves metrics meanwhile, if anything does.
        history: What is to sample it, if anything is.
        prints: Whether its messages are on stdout: then the report is on stderr, and
            its dead letters are not kept.

    """
    err = Screen(stderr=True)
    configure(err, verbosity, secrets=pipeline.secrets)
    shown = replace(verbosity, quiet=verbosity.quiet or prints)
    with server or nullcontext():
        if server is not None:
            server.ledger = pipeline.ledger
            _tell("metrics are served", address=server.url)
        report = watch(pipeline, signals, err, shown, history)
    if prints:
        report = replace(report, dead_letters=KeptLetters())
    if not verbosity.quiet:
        show_report(report, err if prints else Screen())
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

    Args:
        pipeline: The pipeline.
        signals: What it obeys.
        err: Where its progress is shown, and that it drains.
        verbosity: How much is told, and how: in a table that renews itself, as lines,
            or as events.
        history: What is to sample it, if anything is.

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
            report = await pipeline.run()
        tasks.cancel_scope.cancel()
    return pipeline.report("forced") if stop.cancelled_caught else report


def _tell_progress(line: str) -> None:
    _tell("progress", status=line)


def _tell(event: str, **values: object) -> None:
    # The disk of a log may be full: that ends no run.
    with suppress(OSError):
        _log.info(event, **values)


async def _obey(
    signals: Signals, pipeline: Runner, stop: anyio.CancelScope, err: Screen
) -> None:
    await signals.receive()
    pipeline.drain()
    err.print("draining: press Ctrl-C again to stop at once", highlight=False)
    await signals.receive()
    stop.cancel()
    err.print("stopping", highlight=False)
