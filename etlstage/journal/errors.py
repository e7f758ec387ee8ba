"""What goes wrong with journals."""

from __future__ import annotations

from etlstage.errors import BlockDamaged, EtlstageError
from etlstage.sequencing import AppendUncertain

__all__ = (
    "AppendInDoubt",
    "JournalDamaged",
    "JournalError",
    "LimitReached",
    "OffsetGone",
    "ReaderBusy",
)


class JournalError(EtlstageError):
    """Base of what goes wrong with journals, and what can't be read as a set of them."""


class AppendInDoubt(JournalError, AppendUncertain):
    """Raised when a broker has not confirmed an append, which may stand there."""


class JournalDamaged(JournalError, BlockDamaged):
    """
    Raised when bytes of a journal are not what was written.

    Attributes:
        journal: Name of the journal.
        offset: Where they begin.
        end: Where what follows is sound again; None where that was not looked for.

    """

    def __init__(self, journal: str, segment: str, offset: int, why: str) -> None:
        super().__init__(
            f"{journal}: damaged at offset {offset}, in segment {segment}: {why};"
            " on_damage='skip' reads what follows"
        )
        self.journal = journal
        self.offset = offset
        self.end: int | None = None


class OffsetGone(JournalError):
    """
    Raised when what is to be read has been dropped.

    Attributes:
        asked: Offset that was to be read.
        first: The first that there is.

    """

    def __init__(self, journal: str, asked: int, first: int) -> None:
        super().__init__(
            f"{journal}: offset {asked} has been dropped, the first that is kept is"
            f" {first}; register a reader to keep what it has not read"
        )
        self.asked = asked
        self.first = first


class LimitReached(JournalError):
    """
    Raised when more may not be appended before readers have read on.

    Attributes:
        reader: Name of the reader that is farthest behind.

    """

    def __init__(self, journal: str, reader: str, unread: int, limit: int) -> None:
        super().__init__(
            f"{journal}: reader {reader!r} has {unread} bytes to read, expected no more"
            f" than {limit} bytes (limit) before more is appended; wait with room()"
        )
        self.reader = reader


class ReaderBusy(JournalError):
    """Raised when another process, or this one, reads under the same name."""
