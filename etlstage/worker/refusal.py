"""
Refusals: what a worker writes when it can't process a message.

The reason travels in the place of a reply, so it may contain no marker: what is not
printable becomes a blank, and a reason that contains a marker all the same, as a word
may be one, is cut down to the exception's name, or to nothing.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from types import TracebackType
from typing import Final

from etlstage.errors import InvalidMessage
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.framing import encode_refusal

__all__ = ("Refuse", "Traces", "reason_of")

_LONGEST: Final = 1000  # characters, as many as the supervisor takes
_PLACES: Final = 100  # whose traceback is shown


class Refuse(Exception):
    """
    Raised by a function that can't process what it was given: the text is the reason.

    The message, or batch, is refused; the worker goes on. Two for the same reason are
    equal, for what tests compare.
    """

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.args == self.args

    def __hash__(self) -> int:
        return hash((type(self), self.args))


def reason_of(error: BaseException, markers: Markers) -> str:
    """Return why ``error`` refuses, in words that can be sent."""
    name = type(error).__name__
    try:
        text = str(error)[:_LONGEST]
    except Exception:
        text = ""
    if not isinstance(error, Refuse):
        text = f"{name}: {text}" if text else name
    return _sendable(text, name, markers)


@lru_cache(128)
def _sendable(text: str, name: str, markers: Markers) -> str:
    # A bad column is bad in every row, for the same reason.
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    for reason in " ".join(text[:_LONGEST].split()), name:
        try:
            encode_refusal(reason.encode(), markers, limit=sys.maxsize)
        except InvalidMessage:
            continue
        return reason
    return ""


class Traces:
    """Knows the places where exceptions were raised: one traceback of each is enough."""

    def __init__(self) -> None:
        self._known: set[tuple[type[BaseException], str, int]] = set()

    def new(self, error: BaseException) -> bool:
        """Return whether it is the first of its kind from its place."""
        trace: TracebackType | None = error.__traceback__
        file, line = "", 0
        while trace is not None:
            file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
            trace = trace.tb_next
        place = (type(error), file, line)
        if place in self._known or len(self._known) >= _PLACES:
            return False
        self._known.add(place)
        return True
