"""Where a command writes and asks: consoles that survive a reader that is gone."""

from __future__ import annotations

import os
from typing import Any

import typer
from rich.console import Console

from etlstage.errors import ConfigError, EtlstageError, os_reason

__all__ = ("Screen", "confirm")


class Screen(Console):
    """
    A console on stdout or stderr.

    When the reader of a pipe is gone it falls silent. Data is not to be lost because
    ``head`` has seen enough; nor because the disk of a log is full.
    """

    @property
    def watched(self) -> bool:
        """Whether there is a terminal, whatever ``FORCE_COLOR`` is."""
        return self.file.isatty()

    @property
    def renews(self) -> bool:
        """Whether what was written can be written over."""
        return self.watched and not self.is_dumb_terminal

    def tell(self, line: str) -> None:
        """Print a line as it is; on a terminal in as many as it takes, of words."""
        self.print(line, soft_wrap=not self.watched, highlight=False, markup=False)

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
        """
        Print as any console, or fall silent.

        Raises:
            EtlstageError: If stdout can't be written.

        """
        try:
            super().print(*objects, **options)
        except OSError as error:
            self.on_broken_pipe()
            if not self.stderr:
                text = f"stdout can't be written: {os_reason(error)}"
                raise EtlstageError(text) from None

    def on_broken_pipe(self) -> None:
        """Fall silent; Rich would end the process."""
        self.quiet = True
        # What is still in a buffer is written at the exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


def confirm(question: str, otherwise: str = "nothing was changed") -> None:
    """
    Ask on the terminal, and return if the answer is yes.

    Args:
        question: What is asked.
        otherwise: The error if the answer is no.

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
        typer.echo(otherwise, err=True)
        raise typer.Exit(1)
