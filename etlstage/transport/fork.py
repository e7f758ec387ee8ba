"""
Our ends of pipes and sockets, which a forked child of this process must not keep.

A worker sees the end of its input, or that its connection is closed, only once no
process has our end any more. Programs that we start don't inherit it, but a fork
without exec does, such as that of :mod:`multiprocessing`: there it is closed at once.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, Protocol, TypeVar
from weakref import WeakSet

__all__ = ("close_in_fork",)


class _Closable(Protocol):
    def close(self) -> None: ...


_End = TypeVar("_End", bound=_Closable)
_ENDS: Final[WeakSet[_Closable]] = WeakSet()


def close_in_fork(end: _End) -> _End:
    """Have a file or a socket closed in each child that is forked; return it."""
    _ENDS.add(end)
    return end


def _close_all() -> None:
    # Only our copy: nothing is shut down, and no event loop that is shared is changed.
    for end in list(_ENDS):
        with suppress(OSError):
            end.close()
    _ENDS.clear()


os.register_at_fork(after_in_child=_close_all)
