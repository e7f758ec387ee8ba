"""
The commands by name, and how their failures are reported.

A command is a module of this package, imported when it is called: it has a function
``main``, or an ``app`` of several commands. Exit codes: 0 done, 1 failed, 2 wrong usage
or file, 4 drained after a signal, 5 stopped by force.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

import etlstage
from etlstage.cli.options import new_app
from etlstage.cli.signals import FORCED
from etlstage.cli.streams import ReaderGone

__all__ = ("app", "run_command")

# Each command has a module of its name, unless that is a keyword in Python.
COMMANDS: Final = {
    "Run": {
        "run": "Run a pipeline.",
        "pipe": "Run a worker as a filter from stdin to stdout.",
        "demo": "Run an example from Spark through two workers to Spark.",
    },
    "Define": {
        "init": "Write a pipeline to start from, or all examples.",
        "validate": "Check a pipeline file and what it refers to.",
        "plan": "Show programs, edges, guarantees and memory of a run.",
        "graph": "Draw a pipeline.",
        "schema": "Print the JSON Schema of the pipeline file.",
        "cocaine": "Import Cocaine applications.",
        "kcl": "Import and simulate Kinesis record processors.",
    },
    "Test": {
        "test": "Run the tests of a pipeline file.",
        "expect": "Propose what replies must satisfy, from recordings.",
        "try": "Send a few messages to a worker and show its replies.",
        "check": "Check that a worker follows the protocol.",
        "fuzz": "Search for inputs that make a worker fail.",
        "replay": "Replay recorded conversations and failed cases.",
        "diff": "Compare the results of two engines or two ends.",
    },
    "Operate": {
        "dlq": "List, show, retry, drop or export dead letters.",
        "state": "Show, reset or take over the stored state.",
        "journal": "List, read, append, verify and trim journals.",
        "shards": "List, hand over, take or reset shared shards.",
    },
    "Manual": {"help": "Show a page of the manual, or list all."},
}
MODULES: Final = {"try": "try_"}


class _Interrupted(Exception):
    """A command was interrupted by the user."""


class _Group(TyperGroup):
    """Lists commands in groups; each is imported when it is called."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(**settings)
        self.commands = {
            name: TyperCommand(name, help=text)
            for group in COMMANDS.values()
            for name, text in group.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        if (name := args[0]) in self.commands:
            module = import_module(f"etlstage.cli.{MODULES.get(name, name)}")
            if (app := getattr(module, "app", None)) is None:
                app = new_app()
                app.command(name)(module.main)
            command = typer.main.get_command(app)
            command.help = command.help or self.commands[name].help
            self.commands[name] = command
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            # Typer would exit at once, with its own code and no message.
            raise _Interrupted from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        wide = max(map(len, self.commands))
        for title, group in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{n:<{wide}}", text) for n, text in group.items()]
                )


app: typer.Typer = new_app(name="etlstage", cls=_Group, add_completion=True)


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


def run_command() -> int:
    """Run the command of ``sys.argv``; return its exit code. Errors are a line each."""
    try:
        return int(app(standalone_mode=False, prog_name="etlstage") or 0)
    except ReaderGone:
        return 0
    except BaseException as error:
        if _is_interrupt(error):
            return _interrupted()
        if not isinstance(error, Exception):
            raise
        # The parser's errors have no public base class that all its versions share.
        if hasattr(error, "format_message"):
            return _wrong_usage(error)
        from etlstage.cli.failure import show_error

        return show_error(error, debug="--debug" in sys.argv)


def _is_interrupt(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_interrupt, error.exceptions))
    # Python wraps what is raised while a class is being made, as imports do.
    kinds = KeyboardInterrupt | _Interrupted
    return isinstance(error, kinds) or isinstance(error.__cause__, KeyboardInterrupt)


def _interrupted() -> int:
    from etlstage.cli.failure import complain

    complain("interrupted")
    return FORCED


def _wrong_usage(error: Exception) -> int:
    from etlstage.cli.failure import WRONG_USAGE, complain

    context = getattr(error, "ctx", None)
    command = context.command_path if context else "etlstage"
    text: str = getattr(error, "format_message")().rstrip(".")  # noqa: B009
    text = re.sub(r"\. Did you mean (.+\?)$", r" (did you mean \1)", text)
    complain(f"{text[:1].lower()}{text[1:]}; see '{command} --help'")
    return WRONG_USAGE
