"""``etlstage pipe``: run a program as a supervised filter, from stdin to stdout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from etlstage.cli.failure import naming
from etlstage.cli.logs import configure
from etlstage.cli.options import (
    Batch,
    Debug,
    Dialect,
    Level,
    Markers,
    Verbosity,
    new_app,
)
from etlstage.cli.progress import exit_code, show_report, watch
from etlstage.cli.screen import Screen
from etlstage.cli.signals import Signals
from etlstage.cli.streams import check_stdin, check_stdout
from etlstage.cli.subject import Options, program_of
from etlstage.errors import ConfigError, StateUnusable, os_reason
from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.descriptor import DescriptorSink, DescriptorSource
from etlstage.pipeline.pipeline import Pipeline
from etlstage.stage import Order

__all__ = ("app",)

_STDIN, _STDOUT = 0, 1

app: typer.Typer = new_app()


class _Filter(TyperCommand):
    """Takes what follows ``--`` as the worker's command, not as arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["command"] = args[at + 1 :]
        # Without --, what else there is may be a command: the error shows how it is given.
        ctx.allow_extra_args = at == len(args)
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401
        return [*super().collect_usage_pieces(ctx), "-- COMMAND..."]


@app.command("pipe", cls=_Filter)
def _pipe(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="File to read in place of stdin."),
    ] = None,
    *,
    workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of worker processes.")
    ] = 1,
    null: Annotated[
        bool,
        typer.Option(
            "--null", "-0", help="End messages with NUL instead of a newline."
        ),
    ] = False,
    batch: Batch = None,
    markers: Markers = None,
    dialect: Dialect = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Key of the stage to set, as in timeout.message=10s; may be repeated.",
        ),
    ] = None,
    dead_letters: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for messages that can't be processed; the run continues, within"
            " on_error.budget (1% by default; fewer than 100 messages count as 100).",
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Show no ledger, and log only warnings and errors."
        ),
    ] = False,
    log_level: Annotated[
        Level, typer.Option(help="Lowest level of events that are logged.")
    ] = Level.WARNING,
    debug: Debug = False,
) -> int:
    """
    Run a worker as a supervised filter, from stdin to stdout.

    Each line is a message. Replies are written in the order of the messages, and the
    ledger is written to stderr. Neither Spark nor a pipeline file is needed:

    tail -F log | etlstage pipe --workers 4 -- ./enrich | gzip >out.gz
    """
    options = Options(batch=batch, markers=markers, dialect=dialect)
    settings = [f"workers={workers}", *(values or ())]
    verbosity = Verbosity(debug, quiet, log_level)
    with Signals(begun=False) as signals, ExitStack() as stack:
        _check_settings(settings)
        stage = program_of(ctx.meta["command"], options, settings).stage
        if stage.order is Order.KEY and stage.key is None:
            raise ConfigError("--set order=key needs a key: --set key=/POINTER")
        letters = None
        if dead_letters is not None:
            letters = _letters(dead_letters)
        err = Screen(stderr=True)
        configure(err, verbosity)
        separator = b"\0" if null else b"\n"
        if file is None:
            check_stdin("name a FILE")
        check_stdout()
        pipeline = Pipeline(
            name="pipe",
            source=DescriptorSource(
                _STDIN if file is None else _opened(file, stack),
                separator,
                max_message=stage.max_message,
                name="stdin" if file is None else str(file),
            ),
            stages=[stage],
            sink=DescriptorSink(_STDOUT, separator),
            dead_letters=letters,
        )
        signals.begin()
        report = watch(pipeline, signals, err, verbosity)
        if not quiet:
            show_report(report, err)
            account = report.ledger[1]
            if not stage.on_error.budget.allows(account.dead, account.received):
                err.tell(
                    "to allow more dead letters: --set on_error.budget=100%"
                    " (fewer than 100 messages count as 100)"
                )
        return exit_code(report, debug=debug)


def _check_settings(values: Sequence[str]) -> None:
    """Refuse keys of a stage that would have no effect in a filter."""
    for key in (value.partition("=")[0] for value in values):
        if key.partition(".")[0].partition("[")[0] == "durable":
            raise ConfigError(
                f"--set {key}: not supported by pipe, which has no state for the"
                " journals; use a pipeline file and etlstage run"
            )


def _letters(folder: Path) -> DeadLetters:
    letters = DeadLetters(folder, pipeline="pipe")
    try:
        letters.check()
    except StateUnusable as error:
        cause = error.__cause__
        assert isinstance(cause, OSError)
        raise ConfigError(
            f"--dead-letters: can't use {folder}: {os_reason(cause)}; name another folder"
        ) from None
    return letters


def _opened(file: Path, stack: ExitStack) -> int:
    with naming(f"{file} can't be read"):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor
