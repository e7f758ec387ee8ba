"""Errors of journals."""

from __future__ import annotations

from json import JSONDecodeError
from typing import Any, Final

from etlstage.errors import BlockDamaged, EtlstageError
from etlstage.sequencing import AppendUncertain, FrameError

__all__ = (
    "AT_EDGE",
    "SKIPPING",
    "AppendInDoubt",
    "JournalDamaged",
    "JournalError",
    "LimitReached",
    "OffsetGone",
    "ReaderBusy",
    "flaw_of",
    "located",
    "typed",
)


AT_EDGE: Final = (
    "at a durable edge, remove what the load has written, then start from the"
    " beginning with 'etlstage state reset --yes'"
)
"""The remedy for damage of journals that a pipeline keeps in its state."""

SKIPPING: Final = f"'on_damage: skip' reads what follows; {AT_EDGE}"
"""The remedies for what a pipeline can't read."""


class JournalError(EtlstageError):
    """Base of journals' errors; also raised if files are not a set of journals."""


class AppendInDoubt(JournalError, AppendUncertain):
    """Raised when a broker has not confirmed an append, which may have been made."""


class JournalDamaged(JournalError, BlockDamaged):
    """
    Raised when bytes of a journal are not what was written.

    Attributes:
        journal: Name of the journal.
        offset: Where the damage begins.
        end: Where sound bytes follow; None if that was not determined.

    """

    def __init__(self, journal: str, segment: str, offset: int, why: str) -> None:
        super().__init__(
            f"{journal}: damaged at offset {offset}, in segment {segment}: {why};"
            f" {SKIPPING}"
        )
        self.journal = journal
        self.offset = offset
        self.end: int | None = None


class OffsetGone(JournalError):
    """
    Raised when an offset to be read has been dropped.

    Attributes:
        journal: Name of the journal.
        asked: Offset that was to be read.
        first: First offset that is kept.

    """

    def __init__(self, journal: str, asked: int, first: int) -> None:
        super().__init__(
            f"{journal}: offset {asked} has been dropped, the first that is kept is"
            f" {first}; register a reader to keep what it has not read"
        )
        self.journal = journal
        self.asked = asked
        self.first = first


class LimitReached(JournalError):
    """
    Raised when an append has to wait until readers have read more.

    Attributes:
        reader: Name of the reader with the most unread bytes.

    """

    def __init__(self, journal: str, reader: str, unread: int, limit: int) -> None:
        super().__init__(
            f"{journal}: reader {reader!r} has {unread} bytes to read, expected no more"
            f" than {limit} bytes (limit) before more is appended; wait with room()"
        )
        self.reader = reader


class ReaderBusy(JournalError):
    """Raised when a reader of the same name is open, in this or another process."""


def flaw_of(error: Exception) -> str:
    """Return what is wrong with stored JSON, for an error of its interpretation."""
    if isinstance(error, JSONDecodeError | UnicodeDecodeError):
        return str(error)
    if isinstance(error, KeyError):
        return f"its key {error} is missing"
    return "its values are not of the right types"


def located(error: Exception) -> str:
    """Return an error's text; that of an invalid frame with its journal."""
    if isinstance(error, FrameError) and error.journal is not None:
        return (
            f"{error.journal}: invalid {error.framing} at offset {error.offset}:"
            f" {error.reason}"
        )
    return str(error)


def typed(value: object, *types: type) -> Any:  # noqa: ANN401 - of one of the types
    """Return a value of stored JSON; raises TypeError if it has none of the types."""
    if not isinstance(value, types):
        expected = " or ".join(one.__name__ for one in types)
        raise TypeError(f"found {type(value).__name__}, expected {expected}")
    return value
