"""What a user may have meant by a word that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = ("guess",)


def guess(word: str, known: Sequence[str]) -> str:
    """Return `` (did you mean 'this'?)``, or nothing if no known word is close."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
