"""
What a worker tells beside its replies, over ``ETLSTAGE_STATUS``.

Whatever it writes there is a heartbeat. A line of JSON may say more::

    {"metric": "rows_skipped", "add": 3}
    {"progress": 0.4}

A line that is no JSON, or of which we do not know the meaning, is a heartbeat and
nothing else.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

__all__ = ("SKIPPED", "StatusReader", "Told")

SKIPPED: Final = "skipped"
"""The metric of messages that were answered without a look at them."""
_LINE: Final = 4096  # bytes; of a longer line nothing is understood
_MOST: Final = 10**12  # at once: more would be a joke
_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")


@dataclass
class Told:
    """What a worker has told in some lines."""

    counts: Counter[str] = field(default_factory=Counter)
    """How much is to be added to its metrics, by name."""
    progress: float | None = None
    """How much is done of what it does now, from 0 to 1, as far as it says so."""


class StatusReader:
    """Reads the lines of one worker."""

    def __init__(self) -> None:
        self._rest = b""
        self._too_long = False

    def receive(self, data: bytes) -> Told:
        """Return what the worker tells in the lines that end in ``data``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        told = Told()
        for line in lines:
            if line and not self._too_long and len(line) <= _LINE:
                _understand(line, told)
            self._too_long = False
        if len(self._rest) > _LINE:
            self._rest, self._too_long = b"", True
        return told


def _understand(line: bytes, told: Told) -> None:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return
    match said:
        case {"metric": str(name), "add": int(count)} if (
            _NAME.fullmatch(name) and count is not True and 0 < count <= _MOST
        ):
            told.counts[name] += count
        case {"progress": float(share) | int(share)} if (
            not isinstance(share, bool) and 0 <= share <= 1
        ):
            told.progress = float(share)
