"""What a failure looks like: one clear line each, a traceback only if asked for."""

from __future__ import annotations

import traceback

import typer

from etlstage.errors import ConfigError, EtlstageError
from etlstage.telemetry.terminal import harmless

__all__ = ("FAILED", "WRONG_USAGE", "complain", "show_error")

FAILED = 1
WRONG_USAGE = 2


def show_error(error: Exception, *, debug: bool) -> int:
    """Print an error; return the exit code that goes with it."""
    if isinstance(error, ConfigError):
        for problem in error.problems:
            complain(problem)
        return WRONG_USAGE
    if debug:
        traceback.print_exception(error)
    if isinstance(error, EtlstageError):
        complain(str(error))
    else:
        remedy = "" if debug else "; --debug shows where"
        complain(f"unexpected {type(error).__name__}: {error}{remedy}")
    return FAILED


def complain(text: str) -> None:
    """Print a line about what is wrong."""
    typer.echo(f"etlstage: error: {harmless(text, lines=True)}", err=True)
