"""A question in front of what can't be undone."""

from __future__ import annotations

import typer

from etlstage.errors import ConfigError

__all__ = ("confirm",)


def confirm(question: str) -> None:
    """
    Ask on the terminal, and return if the answer is yes.

    Raises:
        ConfigError: If there is no answer, as in a job without a terminal.
        Exit: If the answer is no.

    """
    try:
        agreed = typer.confirm(question)
    except typer.Abort:  # its input has ended
        typer.echo(err=True)  # the question has no end of line
        raise ConfigError(
            "no answer, as there is no terminal to ask on: pass --yes"
        ) from None
    if not agreed:
        typer.echo("nothing was changed", err=True)
        raise typer.Exit(1)
