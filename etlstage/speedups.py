"""
The compiled functions, if there are any.

``_speedups.c`` finds boundaries several times as fast as Python can. It is built when
etlstage is installed and there is a C compiler; without one, in a zip, and with
``ETLSTAGE_PURE=1`` in the environment, Python does everything, with the same results.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol

__all__ = ("Compiled", "compiled", "find")


class Compiled(Protocol):
    """
    The functions of ``_speedups.c``.

    Each returns None for input that Python has to handle.
    """

    def measure(self, messages: list[bytes], /) -> int | None:
        """Return how many bytes the messages have, if each of them is bytes."""

    def bounds(self, messages: list[bytes], /) -> bytes | None:
        """Return the offsets of an Arrow array of the messages, if each is bytes."""

    def join_list(
        self, messages: list[bytes], markers: tuple[bytes | None, ...], limit: int, /
    ) -> bytes | None:
        """Return valid messages, each followed by its EOM."""

    def join_column(
        self,
        ends: Any,  # noqa: ANN401 - a buffer, as the next
        data: Any,  # noqa: ANN401
        first: int,
        count: int,
        markers: tuple[bytes | None, ...],
        limit: int,
        /,
    ) -> bytes | None:
        """Do the same with ``count`` elements of an Arrow array, from ``first`` on."""

    def split(
        self, data: bytes, eom: bytes, eop: bytes, columns: bool, /
    ) -> tuple[Any, Any, Any, int] | None:
        """
        Return the messages of valid replies, their bounds, and where the last ends.

        Messages are a list, or the data and the bounds of an Arrow array. Then come the
        replies: a list of tuples, or how many messages end before each reply does; None
        means that each reply is one message.
        """


def find() -> Compiled | None:
    """Return the compiled functions, or None if Python does everything."""
    if os.environ.get("ETLSTAGE_PURE"):
        return None
    try:
        module: Any = importlib.import_module("etlstage._speedups")
    except ImportError:
        return None
    found: Compiled = module
    return found


compiled: Compiled | None = find()
"""The compiled functions, or None; see :func:`find`."""
