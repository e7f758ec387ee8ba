"""Consoles on which commands write and ask; they survive the loss of a reader."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import typer
from rich.console import Console

from etlstage.cli.streams import ReaderGone
from etlstage.errors import ConfigError
from etlstage.telemetry.terminal import harmless

__all__ = ("Screen", "columns", "confirm")


class Screen(Console):
    """
    A console on stdout or stderr.

    It keeps working when the reader of a pipe is gone: other work of a command must not
    be left half done because ``head`` has seen enough.
    """

    @property
    def watched(self) -> bool:
        """Whether there is a terminal, whatever ``FORCE_COLOR`` is."""
        return self.file.isatty()

    @property
    def renews(self) -> bool:
        """Whether lines that were written can be overwritten."""
        return self.watched and not self.is_dumb_terminal

    def tell(self, line: str) -> None:
        """Print a line unchanged; on a terminal it is wrapped at words."""
        self.print(line, soft_wrap=not self.watched, highlight=False, markup=False)

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
        """Print as any console, or nothing to a reader that is gone."""
        with suppress(ReaderGone):
            super().print(*objects, **options)


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines with aligned cells, made harmless for a terminal."""
    cells = [[harmless(cell) for cell in row] for row in rows]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        line = (f"{cell:<{n}}" for cell, n in zip(row, wide, strict=True))
        yield "  ".join(line).rstrip()


def confirm(question: str, otherwise: str = "nothing was changed") -> None:
    """
    Ask on the terminal, and return if the answer is yes.

    Args:
        question: The question.
        otherwise: The text that is printed if the answer is no.

    Raises:
        ConfigError: If there is no answer, as in a job without a terminal, or
            stdout is closed, or has no reader.
        Exit: If the answer is no.

    """
    unseen = ConfigError("the question can't be shown: pass --yes")
    unanswered = ConfigError("no answer, as there is no terminal to ask on: pass --yes")
    if sys.stdout is None:
        raise unseen
    if sys.stdin is None:
        raise unanswered
    try:
        agreed = typer.confirm(question)
    except ReaderGone:
        raise unseen from None
    except typer.Abort:  # its input has ended
        typer.echo(err=True)  # the question has no end of line
        raise unanswered from None
    if not agreed:
        typer.echo(otherwise, err=True)
        raise typer.Exit(1)
