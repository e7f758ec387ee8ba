"""Refusals with errors that a test provides."""

from __future__ import annotations

from collections.abc import Iterable

from etlstage.errors import EtlstageError
from etlstage.supervisor.exchange.exchange import Refusals

__all__ = ("refusing",)


def refusing(found: Iterable[tuple[int, EtlstageError]]) -> Refusals:
    """Return refusals with these errors for the messages at these places."""
    pairs = list(found)
    numbers = list(map(str, range(len(pairs))))
    errors = dict(zip(numbers, (error for _, error in pairs), strict=True))
    return Refusals([place for place, _ in pairs], numbers, errors.__getitem__)
