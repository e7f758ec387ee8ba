"""
The command line.

Nothing heavy is imported until a command needs it: ``--version`` answers at once.
"""

from __future__ import annotations

__all__ = ("main",)


def main() -> None:
    """Run the command line, then exit with its code."""
    from etlstage.cli.signals import deafen, quit_at_once

    # Before all else is imported, which takes a while.
    quit_at_once()
    from etlstage.cli.app import main as run

    try:
        run()
    finally:
        deafen()
