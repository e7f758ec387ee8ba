"""
Durations and sizes as people write them, in a pipeline file or an option.

What is expected is in the error, what was found is not: it may be a secret's text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ("duration", "size")

_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+) *([A-Za-z]*)")
_SECONDS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES: Final = {
    "": 1.0, "B": 1.0,
    "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip


def duration(text: str) -> float:
    """
    Return how many seconds ``text`` is.

    Raises:
        ValueError: If it is none, or not positive; the text is what is expected.

    """
    return _measure(text, _SECONDS, "a duration such as 500ms, 30s or 2m")


def size(text: str) -> int:
    """
    Return how many bytes ``text`` is, one at least.

    Raises:
        ValueError: If it is none, or not positive; the text is what is expected.

    """
    amount = _measure(text, _BYTES, "a size such as 512KiB, 1MiB or 10MB")
    return max(1, round(amount))


def _measure(text: str, units: Mapping[str, float], expected: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(expected)
    amount = float(match[1]) * units[match[2]]
    if amount <= 0:
        raise ValueError("more than 0")
    return amount
