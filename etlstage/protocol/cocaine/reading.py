"""What frames say, as text for people; nothing here judges what may follow what."""

from __future__ import annotations

from typing import Final

from etlstage.protocol.base import Side
from etlstage.protocol.cocaine.frame import Version
from etlstage.protocol.cocaine.passing import Passed, Passing

__all__ = ("FrameReader",)

_LONG: Final = 48  # bytes of a string that are shown, half of them from its end


class FrameReader:
    """
    Reads what two sides say to each other, in the order in which they do.

    Args:
        version: Of the protocol; ``AUTO``: as the worker begins.

    """

    def __init__(self, version: Version) -> None:
        self._passing = Passing(version)

    def read(self, side: Side, data: bytes) -> list[str]:
        """Return what is complete now; what is no frame comes as it is."""
        return [_said(passed) for passed in self._passing.read(side, data)]


def _said(passed: Passed) -> str:
    raw, frame, name, session, arguments, headers = passed
    if not name:
        return f"no frame: {_shown(raw if frame is None else frame)}"
    said = name if session is None else f"{name} {session}"
    more = [f"headers {_shown(headers)}"] if headers else []
    return " ".join([said, *map(_shown, arguments), *more])


def _shown(value: object) -> str:
    match value:
        case bytes():
            if len(value) <= _LONG:
                return repr(value)[1:]
            half = _LONG // 2
            ends = repr(value[:half])[1:], repr(value[-half:])[1:]
            return f"{ends[0]}... {len(value):,} bytes ...{ends[1]}"
        case tuple():
            return f"[{', '.join(map(_shown, value))}]"
        case _:
            return repr(value)
