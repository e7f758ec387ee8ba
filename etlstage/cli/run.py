"""
``etlstage run``: run a pipeline to its end, and write its report to files.

Heavy modules are imported within :class:`Signals`: an interrupt meanwhile is reported,
and does not leave the report of an earlier run in place of this one's.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from etlstage.cli.failure import complain
from etlstage.cli.options import (
    Debug,
    File,
    Level,
    LogFormat,
    Overlays,
    Quiet,
    Values,
    Verbosity,
    changes_of,
)
from etlstage.cli.signals import FORCED, Signals
from etlstage.errors import ConfigError, os_reason

if TYPE_CHECKING:
    from etlstage.cli.history import History
    from etlstage.pipeline.report import Report
    from etlstage.pipeline.runner import Runner

__all__ = ("main",)


def main(
    file: File,
    *,
    overlays: Overlays = None,
    values: Values = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Extract at most N messages."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE", help="Print the outputs of this stage, and load nothing."
        ),
    ] = None,
    only_before: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE", help="Run only the part before this stage's durable edge."
        ),
    ] = None,
    only_behind: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE", help="Run only the part after this stage's durable edge."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the closing report as JSON."),
    ] = None,
    report_html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the closing report as HTML."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve /metrics, /live and /ready during the run; default host:"
            " loopback.",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder in which each worker's conversation is recorded, for replay.",
        ),
    ] = None,
    record_limit: Annotated[
        int,
        typer.Option(
            metavar="MIB", min=1, help="Maximum size of each recording, in MiB."
        ),
    ] = 256,
    faults: Annotated[
        bool,
        typer.Option(
            "--faults", help="Inject the faults in the pipeline file into its workers."
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Seed for faults with a probability.")
    ] = 0,
    quiet: Quiet = False,
    log_level: Annotated[
        Level, typer.Option(help="Lowest level of events that are logged.")
    ] = Level.INFO,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(
            help="Format of log lines; default: console on a terminal, else json.",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> int:
    """Run a pipeline to its end."""
    with Signals(begun=False) as signals, ExitStack() as stack:
        try:
            from etlstage.cli.history import History
            from etlstage.cli.metrics import MetricsServer
            from etlstage.cli.progress import exit_code, run_pipeline
            from etlstage.cli.trial import Trial
            from etlstage.config.build import Only

            trial = Trial(
                record,
                record_limit << 20,
                seed=seed if faults else None,
                most=limit,
                until=until,
                only=Only(only_before, only_behind),
            )
            server = MetricsServer(metrics) if metrics is not None else None
            meter = server.meter if server is not None else None
            changes = changes_of(overlays, values)
            pipeline = trial.build(file, changes, meter, stack)
            place = ReportFile(report) if report else None
            leaf = ReportFile(report_html) if report_html else None
            history = History(pipeline.ledger) if leaf else None
            signals.begin()
        except KeyboardInterrupt:
            signals.begin()  # the rest takes little time
            _report_nothing(file, report=report, html=report_html)
            return FORCED
        verbosity = Verbosity(debug, quiet, log_level, log_format)
        result = run_pipeline(
            pipeline, signals, verbosity, server, history, prints=until is not None
        )
        # The error of a run is printed even if the report can't be written, and the
        # report is written even if nothing can be printed.
        try:
            code = exit_code(result, debug=debug)
        finally:
            if not quiet:
                trial.tell()
            if place is not None:
                plain = result.to_dict() | trial.report()
                place.write(f"{json.dumps(plain, indent=2)}\n")
            if leaf is not None and history is not None:
                leaf.write(_page(result, pipeline, history))
        pipeline.settle()
        return code


def _page(report: Report, pipeline: Runner, history: History) -> str:
    from etlstage.cli.html import page  # few runs need it
    from etlstage.pipeline.dead_letter.letter import Causes

    causes = Causes()
    # Letters that were removed meanwhile must not prevent a report.
    with suppress(OSError):
        for letter in pipeline.letters():
            causes.add(letter)
    return page(report, history.spans(), causes.groups())


def _report_nothing(file: Path, *, report: Path | None, html: Path | None) -> None:
    """
    Report that a run was interrupted before it began, also in its report file.

    The report of an earlier run would be mistaken for this one's. An earlier page is
    removed.

    Args:
        file: The pipeline.
        report: Where the report goes, or None.
        html: Where the page would go, or None.

    """
    # Nothing is imported here: the interrupt may have left modules half imported.
    text = "interrupted before the run began"
    complain(text)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    plain: dict[str, object] = {
        "pipeline": str(file),
        "run": None,
        "status": "forced",
        "error": text,
        "started": now,
        "ended": now,
        "seconds": 0.0,
        "stages": [],
        "edges": [],
        "output": None,
        "dead_letters": {"messages": 0, "where": None, "command": None},
    }
    try:
        if report is not None:
            ReportFile(report).write(f"{json.dumps(plain, indent=2)}\n")
        if html is not None and html.is_file():
            html.unlink()
    except (ConfigError, OSError) as error:
        complain(str(error), as_="warning")


class ReportFile:
    """
    A place for a report, of which is known before the run that it can be written.

    The file appears whole or not at all, readable by its owner alone.

    Args:
        path: The file.

    Raises:
        ConfigError: If it can't be written.

    """

    def __init__(self, path: Path) -> None:
        try:
            # A link stays a link; what it points to is replaced.
            self._path = Path(os.path.realpath(path))
            if self._path.is_symlink():
                loop = OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                raise ConfigError(_unwritten(path, loop))
            if self._path.exists() and not self._path.is_file():
                raise ConfigError(f"report {path} is not a regular file")
            with self._part():
                pass
        except OSError as error:
            raise ConfigError(_unwritten(path, error)) from None

    def write(self, text: str) -> None:
        """
        Put a report in its place.

        If by now there is no space or no folder, a warning is printed, and no error is
        raised: the messages are loaded, and after a failure they would be loaded again.
        """
        try:
            # A name that is not UTF-8 must not prevent a report.
            with self._part() as file:
                file.write(text.encode(errors="backslashreplace"))
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, self._path)
        except OSError as error:
            complain(_unwritten(self._path, error), as_="warning")

    @contextmanager
    def _part(self) -> Iterator[IO[bytes]]:
        """Open a new file beside the report's, which is removed unless it was moved."""
        name = self._path.name
        with tempfile.NamedTemporaryFile(
            prefix=f".{name}.", dir=self._path.parent, delete=False
        ) as file:
            try:
                yield file
            finally:
                with suppress(OSError):
                    os.unlink(file.name)


def _unwritten(path: Path, error: OSError) -> str:
    return f"report {path} can't be written: {os_reason(error)}"
