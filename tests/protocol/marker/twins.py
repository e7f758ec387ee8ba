"""Both searches for boundaries: the compiled one, where built, and that in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from etlstage import speedups

__all__ = ("TWINS", "using")

TWINS = {"compiled": speedups.compiled, "in Python": None}
if speedups.compiled is None:
    del TWINS["compiled"]


@contextmanager
def using(twin: str) -> Iterator[None]:
    """Have boundaries searched for in the given way."""
    before = speedups.compiled
    speedups.compiled = TWINS[twin]
    try:
        yield
    finally:
        speedups.compiled = before
