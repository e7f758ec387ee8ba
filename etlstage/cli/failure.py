"""What a failure looks like: one clear line each, a traceback only if asked for."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import typer

from etlstage.errors import ConfigError, EtlstageError
from etlstage.telemetry.terminal import harmless

if TYPE_CHECKING:
    from etlstage.pipeline.secret import Secrets

__all__ = ("FAILED", "WRONG_USAGE", "complain", "show_error")

FAILED = 1
WRONG_USAGE = 2


def show_error(error: Exception, *, debug: bool, secrets: Secrets | None = None) -> int:
    """Print an error, without secrets; return the exit code that goes with it."""
    conceal = secrets.conceal if secrets is not None else str
    if isinstance(error, ConfigError):
        for problem in error.problems:
            complain(conceal(problem))
        return WRONG_USAGE
    if debug:
        trace = "".join(traceback.format_exception(error))
        typer.echo(conceal(trace), err=True, nl=False)
    if isinstance(error, EtlstageError):
        complain(conceal(str(error)))
    else:
        remedy = "" if debug else "; --debug shows where"
        complain(conceal(f"unexpected {type(error).__name__}: {error}{remedy}"))
    return FAILED


def complain(text: str, *, as_: str = "error") -> None:
    """Print a line about what is wrong."""
    typer.echo(f"etlstage: {as_}: {harmless(text, lines=True)}", err=True)
