"""
``etlstage run``: one pipeline, watched, to its end.

The first SIGINT, SIGTERM or SIGHUP drains: no more is extracted, what is under way is
finished. The second stops at once, all others do nothing: what is left is bounded, and
ends with the report. The library itself touches no signals.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import anyio

from etlstage.cli.closing import EXIT_CODES, ReportFile, show_report
from etlstage.cli.failure import show_error
from etlstage.cli.logs import configure
from etlstage.cli.progress import show_lines, show_table
from etlstage.cli.screen import Screen
from etlstage.cli.signals import Signals
from etlstage.config.build import pipeline_from_here
from etlstage.config.reading import Changes
from etlstage.pipeline.report import Report
from etlstage.pipeline.runner import Runner

__all__ = ("exit_code", "run_file", "run_pipeline", "watch")


def run_file(file: Path, changes: Changes, *, report: Path | None, debug: bool) -> int:
    """
    Run the pipeline of a file; return the exit code.

    Args:
        file: The pipeline.
        changes: What is laid over it.
        report: Where the closing report goes as JSON, or None.
        debug: Whether to log everything and show tracebacks.

    Raises:
        ConfigError: If the file is wrong, or the report can't be written there.

    """
    with ExitStack() as stack:
        pipeline = pipeline_from_here(file, changes)
        signals = stack.enter_context(Signals())
        place = stack.enter_context(ReportFile(report)) if report else None
        result = run_pipeline(pipeline, signals, debug=debug)
        # Why the run failed is told also if the report can't be written, and the
        # report is written also if nothing can be told.
        try:
            return exit_code(result, debug=debug)
        finally:
            if place is not None:
                place.write(result)


def exit_code(report: Report, *, debug: bool) -> int:
    """Print the error of a run that failed; return the exit code of any."""
    if report.error is not None:
        show_error(report.error, debug=debug, secrets=report.secrets)
    return EXIT_CODES[report.status]


def run_pipeline(pipeline: Runner, signals: Signals, *, debug: bool = False) -> Report:
    """Run a pipeline, show its progress and its closing report."""
    out = Screen()
    err = Screen(stderr=True)
    configure(err, debug=debug, secrets=pipeline.secrets)
    report = watch(pipeline, signals, err if err.renews else out, err)
    show_report(report, out)
    return report


def watch(pipeline: Runner, signals: Signals, progress: Screen, err: Screen) -> Report:
    """
    Run a pipeline; meanwhile show its progress and obey signals.

    Args:
        pipeline: The pipeline.
        signals: What it obeys.
        progress: Where its progress is shown: on ``err``, if that renews itself, in
            a table, else as lines.
        err: Where it says that it drains.

    """
    return anyio.run(_watched, pipeline, signals, progress, err)


async def _watched(
    pipeline: Runner, signals: Signals, progress: Screen, err: Screen
) -> Report:
    show = show_table if progress is err and err.renews else show_lines
    async with anyio.create_task_group() as tasks:
        stop = anyio.CancelScope()
        tasks.start_soon(_obey, signals, pipeline, stop, err)
        tasks.start_soon(show, pipeline.ledger, progress)
        with stop:
            report = await pipeline.run()
        tasks.cancel_scope.cancel()
    return pipeline.report("forced") if stop.cancelled_caught else report


async def _obey(
    signals: Signals, pipeline: Runner, stop: anyio.CancelScope, err: Screen
) -> None:
    await signals.receive()
    pipeline.drain()
    err.print("draining: press Ctrl-C again to stop at once", highlight=False)
    await signals.receive()
    stop.cancel()
    err.print("stopping", highlight=False)
