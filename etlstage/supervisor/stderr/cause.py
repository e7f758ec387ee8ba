"""What a program died of, where the end of its stderr says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

__all__ = ("cause_of",)

_ERROR: Final = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?")
"""The last line of a Python traceback, as ``KeyError: 'date'``."""
_FRAME: Final = '  File "'


def cause_of(lines: Sequence[str]) -> str:
    """
    Return the error of an uncaught exception in Python, or an empty text.

    Args:
        lines: The last ones that a program has written to stderr, oldest first. The
            traceback may begin before them.

    """
    for at in range(len(lines) - 1, 0, -1):
        # A frame, its line of code, or the marks below that.
        if lines[at - 1].startswith("  ") and _ERROR.fullmatch(lines[at]):
            framed = any(line.startswith(_FRAME) for line in lines[:at])
            return lines[at] if framed else ""
    return ""
