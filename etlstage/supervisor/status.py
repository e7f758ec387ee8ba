"""
What a worker tells beside its replies, over ``ETLSTAGE_STATUS``.

Whatever it writes there is a sign of life. A line of JSON may say more; a line that is
none, or of which we do not know the meaning, is a sign of life and nothing else.
"""

from __future__ import annotations

import json
from typing import Final

__all__ = ("StatusReader",)

_LINE: Final = 4096  # bytes; of a longer line nothing is understood
_MOST: Final = 10**12  # messages: more would be a joke


class StatusReader:
    """Reads the lines of one worker."""

    def __init__(self) -> None:
        self._rest = b""
        self._too_long = False

    def receive(self, data: bytes) -> int:
        """Return how many messages the worker says that it has skipped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        skipped = 0
        for line in lines:
            if not self._too_long:
                skipped += _skipped(line)
            self._too_long = False
        if len(self._rest) > _LINE:
            self._rest, self._too_long = b"", True
        return skipped


def _skipped(line: bytes) -> int:
    if not line or len(line) > _LINE:
        return 0
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return 0
    match said:
        case {"metric": "skipped", "add": int(count)} if (
            count is not True and 0 < count <= _MOST
        ):
            return int(count)
    return 0
