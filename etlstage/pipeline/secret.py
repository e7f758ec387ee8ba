"""
Texts that must not be shown in errors, logs, reports and dead letters.

A text may appear quoted, as a part of a command or of JSON, and a worker may print a
single line of a text with several lines. All of these forms are concealed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ("Secrets",)

_LEAST: Final = 4
"""Shorter texts are not treated as secrets: they occur in too many other texts."""


class Secrets:
    """
    Texts that must not be shown.

    Args:
        hidden: The texts, with the reference to show in place of each.

    """

    def __init__(self, hidden: Mapping[str, str] | None = None) -> None:
        texts: dict[str, str] = {}
        for text, reference in (hidden or {}).items():
            for form in _forms(text):
                if len(form) >= _LEAST:
                    texts.setdefault(form, reference)
        # The longest first, as one may contain another.
        self._texts = sorted(texts.items(), key=lambda pair: -len(pair[0]))

    def __repr__(self) -> str:
        return f"<Secrets texts={len(self._texts)}>"

    def __bool__(self) -> bool:
        """Whether there is anything to hide."""
        return bool(self._texts)

    def conceal(self, text: str) -> str:
        """Return ``text`` with hidden texts replaced by their references."""
        for value, reference in self._texts:
            text = text.replace(value, reference)
        return text

    def concealed(self, plain: Any) -> Any:  # noqa: ANN401 - any JSON, or a log event
        """Return values with all texts in them concealed."""
        if not self._texts:
            return plain
        if isinstance(plain, str):
            return self.conceal(plain)
        if isinstance(plain, Mapping):
            return {name: self.concealed(value) for name, value in plain.items()}
        if isinstance(plain, list | tuple):
            return [self.concealed(value) for value in plain]
        if isinstance(plain, Exception | Path):
            return self.conceal(str(plain))
        return plain


def _forms(text: str) -> Iterator[str]:
    """Yield all forms in which ``text`` may appear in our output."""
    yield text
    # Errors show commands quoted for a shell.
    yield shlex.quote(text).strip("'")
    yield repr(text)[1:-1]
    yield json.dumps(text)[1:-1]
    if "/" in text:
        yield str(Path(text))
    if "\n" in text:
        yield from map(str.strip, text.splitlines())
