"""
The command line.

Nothing heavy is imported until a command needs it: ``--version`` answers at once.
"""

from __future__ import annotations

import atexit
import os
from typing import NoReturn

__all__ = ("main",)


def main() -> NoReturn:
    """Run the command line, then exit with its code."""
    from etlstage.cli.signals import deafen, keep_statuses, quit_at_once

    # Before all else is imported, which takes a while.
    quit_at_once()
    keep_statuses()
    from etlstage.cli.streams import flush_streams, guard_streams

    guard_streams()
    from etlstage.cli.app import run_command

    try:
        code = run_command()
    finally:
        deafen()
    # Exit without shutting the interpreter down, which takes longer than some commands:
    # if killed meanwhile, the process would have an exit code that belies its report.
    atexit._run_exitfuncs()
    flush_streams()
    os._exit(code)
