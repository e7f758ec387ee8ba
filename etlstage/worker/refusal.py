"""
Refusals: what a worker writes when it can't process a message.

The reason is sent in place of a reply, so it must not contain a marker: unprintable
characters become spaces. A reason that still contains a marker, as a word may be one,
is replaced by the exception's name, or by nothing.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from types import TracebackType
from typing import Final

from etlstage.errors import InvalidMessage
from etlstage.protocol.marker import Markers
from etlstage.protocol.marker.framing import encode_refusal

__all__ = ("Refuse", "Traces", "printable", "reason_of", "text_of")

_LONGEST: Final = 1000  # characters, as many as the supervisor takes
_PLACES: Final = 100  # places for which a traceback is shown, at most


class Refuse(Exception):
    """
    Raised by a function that can't process what it was given: the text is the reason.

    The message, or batch, is refused; the worker continues. Two instances with the same
    reason are equal, so that tests can compare them.
    """

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.args == self.args

    def __hash__(self) -> int:
        return hash((type(self), self.args))


def reason_of(error: BaseException, markers: Markers) -> str:
    """Return the reason of a refusal after ``error``, as text that can be sent."""
    return _sendable(text_of(error), type(error).__name__, markers)


def text_of(error: BaseException) -> str:
    """Return the text of a refusal, or the name and the text of another error."""
    name = type(error).__name__
    try:
        text = str(error)[:_LONGEST]
    except Exception:
        text = ""
    if isinstance(error, Refuse):
        return text
    return f"{name}: {text}" if text else name


def printable(text: str) -> str:
    """Return a text as one line that can be encoded; it is cut if it is long."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(text[:_LONGEST].split())


@lru_cache(128)
def _sendable(text: str, name: str, markers: Markers) -> str:
    # Cached, as often every message is refused for the same reason.
    for reason in printable(text), name:
        try:
            encode_refusal(reason.encode(), markers, limit=sys.maxsize)
        except InvalidMessage:
            continue
        return reason
    return ""


class Traces:
    """Records where exceptions were raised: one traceback for each place is enough."""

    def __init__(self) -> None:
        self._known: set[tuple[type[BaseException], str, int]] = set()

    def new(self, error: BaseException) -> bool:
        """Return whether it is the first of its type from its place."""
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
