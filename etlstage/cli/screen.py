"""Where a command writes: consoles that outlive whoever reads them."""

from __future__ import annotations

import os

from rich.console import Console

__all__ = ("Screen",)


class Screen(Console):
    """
    A console on stdout or stderr.

    When the reader of a pipe is gone it falls silent. Data is not to be lost because
    ``head`` has seen enough.
    """

    @property
    def watched(self) -> bool:
        """Whether there is a terminal, whatever ``FORCE_COLOR`` says."""
        return self.file.isatty()

    @property
    def renews(self) -> bool:
        """Whether what was written can be written over."""
        return self.watched and not self.is_dumb_terminal

    def on_broken_pipe(self) -> None:
        """Fall silent; Rich would end the process."""
        self.quiet = True
        # What is still in a buffer is written at the exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)
