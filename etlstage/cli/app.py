"""
Commands, their options, and what a failure looks like from outside.

Exit codes: 0 done, 1 failed, 2 wrong usage or file, 4 drained after a signal,
5 stopped by force.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

import etlstage
from etlstage.cli.arguments import Batch, Dialect, Markers
from etlstage.cli.cocaine import cocaine
from etlstage.cli.failure import WRONG_USAGE, complain, show_error
from etlstage.cli.journals import journal
from etlstage.cli.kcl import kcl
from etlstage.cli.kept import dlq, state
from etlstage.cli.options import Debug, File, Overlays, Values, changes_of
from etlstage.cli.programs import programs
from etlstage.cli.signals import FORCED, Signals
from etlstage.cli.verbosity import Level, LogFormat, Verbosity

__all__ = ("app", "main")

app: typer.Typer = typer.Typer(
    name="etlstage",
    # A traceback is for --debug, and then the plain one.
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"etlstage {etlstage.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """Run external programs as the supervised stages of ETL pipelines."""


@app.command("run")
def _run(
    file: File,
    *,
    overlays: Overlays = None,
    values: Values = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Extract so many messages, at most."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE", help="Print what leaves this stage; load nothing."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the closing report as JSON."),
    ] = None,
    report_html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write it as a page: graph, plot, causes."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve /metrics, /live and /ready meanwhile; on loopback by default.",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep each worker's conversation in a file there, for replay.",
        ),
    ] = None,
    record_limit: Annotated[
        int,
        typer.Option(metavar="MIB", min=1, help="How much is kept of each, in MiB."),
    ] = 256,
    record_blank: Annotated[
        bool,
        typer.Option(
            "--record-blank",
            help="Keep lengths and markers, and nothing of what messages say.",
        ),
    ] = False,
    faults: Annotated[
        bool,
        typer.Option("--faults", help="Let the file's faults happen to its workers."),
    ] = False,
    seed: Annotated[
        int, typer.Option(metavar="N", help="For faults with a probability.")
    ] = 0,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Tell only what is wrong.")
    ] = False,
    log_level: Annotated[
        Level, typer.Option(help="From what level on events are logged.")
    ] = Level.INFO,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(
            help="How they are logged; default: console on a terminal, else json.",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> int:
    """Run a pipeline to its end."""
    with Signals(begun=False) as signals:
        try:
            from etlstage.cli.run import run_file
            from etlstage.cli.trial import Trial

            return run_file(
                file,
                changes_of(overlays, values),
                signals,
                report=report,
                html=report_html,
                metrics=metrics,
                trial=Trial(
                    record,
                    record_limit << 20,
                    blank=record_blank,
                    seed=seed if faults else None,
                    most=limit,
                    until=until,
                ),
                verbosity=Verbosity(debug, quiet, log_level, log_format),
            )
        except KeyboardInterrupt:
            signals.begin()  # what is left is short
            from etlstage.cli.closing import report_nothing

            report_nothing(file, report=report, html=report_html)
            return FORCED


class _Filter(TyperCommand):
    """Takes what is behind ``--`` for the command of the worker, and no argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Parse the options and arguments in front of it."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["command"] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401
        """Return the words of the line on usage."""
        return [*super().collect_usage_pieces(ctx), "-- COMMAND..."]


@app.command("pipe", cls=_Filter)
def _pipe(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Read it in place of stdin."),
    ] = None,
    *,
    workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Processes of the worker.")
    ] = 1,
    null: Annotated[
        bool,
        typer.Option("--null", "-0", help="Messages end in NUL, and not in a newline."),
    ] = False,
    batch: Batch = None,
    markers: Markers = None,
    dialect: Dialect = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of the stage, as in timeout.message=10s; may be repeated.",
        ),
    ] = None,
    dead_letters: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep messages there that the worker can't process, and go on.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no ledger; only log errors.")
    ] = False,
    log_level: Annotated[
        Level, typer.Option(help="From what level on events are logged.")
    ] = Level.WARNING,
    debug: Debug = False,
) -> int:
    """
    Run a worker as a supervised filter, from stdin to stdout.

    Each line is a message; replies are written in the order of the messages, and the
    ledger on stderr. Without Spark, and without a file:

    tail -F log | etlstage pipe --workers 4 -- ./enrich | gzip >out.gz
    """
    with Signals(begun=False) as signals:
        from etlstage.cli.pipe import pipe
        from etlstage.cli.subject import Options

        return pipe(
            ctx.meta["command"],
            Options(batch=batch, markers=markers, dialect=dialect),
            signals,
            file=file,
            separator=b"\0" if null else b"\n",
            values=[f"workers={workers}", *(values or ())],
            dead_letters=dead_letters,
            verbosity=Verbosity(debug, quiet, log_level),
        )


@app.command("validate")
def _validate(file: File, *, overlays: Overlays = None, values: Values = None) -> int:
    """Check a pipeline file, and look for all that it names; start nothing."""
    from etlstage.cli.validate import validate

    return validate(file, changes_of(overlays, values))


@app.command("plan")
def _plan(file: File, *, overlays: Overlays = None, values: Values = None) -> int:
    """Show what a run would be: programs, edges, guarantees, memory; start nothing."""
    from etlstage.cli.plan import plan

    return plan(file, changes_of(overlays, values))


@app.command("graph")
def _graph(
    file: File,
    *,
    kind: Annotated[
        str,
        typer.Option("--format", metavar="FORMAT", help="mermaid, dot or svg."),
    ] = "mermaid",
    overlays: Overlays = None,
    values: Values = None,
) -> int:
    """Print a picture of a pipeline."""
    from etlstage.cli.graph import graph

    return graph(file, changes_of(overlays, values), kind=kind)


@app.command("test")
def _test(
    file: File,
    *,
    overlays: Overlays = None,
    values: Values = None,
    junit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the outcomes as JUnit's XML."),
    ] = None,
    debug: Debug = False,
) -> int:
    """Run the tests of a pipeline file."""
    from etlstage.cli.test import test

    return test(file, changes_of(overlays, values), junit=junit, debug=debug)


@app.command("diff")
def _diff(
    file: File,
    *,
    overlays: Overlays = None,
    values: Values = None,
    engines: Annotated[
        str,
        typer.Option(
            "--on", metavar="A,B", help="The two engines, or ends, as in files,spark."
        ),
    ] = "local,spark",
    debug: Debug = False,
) -> int:
    """Run a pipeline on two engines without loading, and compare the results."""
    from etlstage.cli.diff import diff

    return diff(file, changes_of(overlays, values), engines=engines, debug=debug)


@app.command("init")
def _init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Target folder; created if missing.")
    ],
    *,
    worker: Annotated[
        str | None,
        typer.Option(
            metavar="LANGUAGE",
            help="Only a pipeline, a worker in python, sh or node, and tests.",
        ),
    ] = None,
) -> int:
    """Copy example pipelines, workers and data into a folder."""
    from etlstage.cli.scaffold import init, start

    return init(folder) if worker is None else start(folder, worker)


@app.command("schema")
def _schema() -> int:
    """Print the JSON Schema of the pipeline file, for editors."""
    from etlstage.config.schema import schema_text

    typer.echo(schema_text(), nl=False)
    return 0


@app.command("demo")
def _demo(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Target folder; default: a new one."),
    ] = None,
    *,
    debug: Debug = False,
) -> int:
    """Run a pipeline from Spark through two workers to Spark."""
    from etlstage.cli.demo import demo

    return demo(folder, debug=debug)


@app.command("help")
def _help(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="[TOPIC]", help="A page; without it all are listed."),
    ] = None,
) -> int:
    """Show a page of the manual."""
    from etlstage.cli.help import list_topics, show_topic

    return list_topics() if topic is None else show_topic(topic)


app.add_typer(programs)
app.add_typer(dlq)
app.add_typer(state)
app.add_typer(journal)
app.add_typer(cocaine)
app.add_typer(kcl)


def main() -> NoReturn:
    """Run the command of ``sys.argv``, then exit; errors are one clear line each."""
    sys.exit(_guarded())


def _guarded() -> int:
    try:
        return int(app(standalone_mode=False, prog_name="etlstage") or 0)
    except KeyboardInterrupt:
        complain("interrupted")
        return FORCED
    except Exception as error:
        # The parser's errors have no public base class that all its versions share.
        if hasattr(error, "format_message"):
            return _wrong_usage(error)
        return show_error(error, debug="--debug" in sys.argv)


def _wrong_usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "etlstage"
    said: str = getattr(error, "format_message")().rstrip(".")  # noqa: B009
    said = re.sub(r"\. Did you mean (.+\?)$", r" (did you mean \1)", said)
    complain(f"{said[:1].lower()}{said[1:]}; see '{command} --help'")
    return WRONG_USAGE
