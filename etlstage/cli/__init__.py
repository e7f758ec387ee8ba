"""
The command line.

Nothing heavy is imported until a command needs it: ``--version`` answers at once.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

__all__ = ("main",)


def main() -> NoReturn:
    """Run the command line, then exit with its code."""
    from etlstage.cli.signals import deafen, quit_at_once

    # Before all else is imported, which takes a while.
    quit_at_once()
    from etlstage.cli.app import run_command

    try:
        code = run_command()
    finally:
        deafen()
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit without taking the interpreter down, which takes longer than some commands."""
    # A process that is killed meanwhile has an exit code that belies its report.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            code = code or 1
    os._exit(code)
