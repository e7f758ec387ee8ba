"""Options of ``format("etlstage-journal")``; a write has those of a pipeline file."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from etlstage.errors import ConfigError
from etlstage.journal import Journals
from etlstage.journal.errors import JournalDamaged, JournalError
from etlstage.journal.messages import OnError
from etlstage.pipeline.journal_settings import Appending, start_problems
from etlstage.sequencing import FrameError
from etlstage.settings.definition import Definition, Section, broken
from etlstage.settings.problem import Invalid, Problem
from etlstage.settings.units import Argument, Count, Pointer, Size
from etlstage.spark.datasource.options import SPARKS_OWN, SharedFolder

__all__ = (
    "NAME",
    "JournalReading",
    "JournalWriting",
    "SetFolder",
    "log_damage",
    "read_options",
)

_LOG: Final = logging.getLogger("etlstage.journal")
NAME: Final = "etlstage-journal"

T = TypeVar("T", bound="JournalReading | JournalWriting")


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalReading(Definition):
    """A set of journals to read."""

    path: Annotated[Path, SharedFolder()]
    """Folder of the set, which all executors see."""
    from_: Argument = "beginning"
    """Where to begin: beginning, end, or a time such as 2026-11-23T18:00:00Z. Of a
    transaction that is open there, only the messages after that place are read."""
    key: Pointer | None = None
    """JSON pointer such as /customer to the part of a message that column key
    contains."""
    on_damage: Literal["stop", "skip"] = "stop"
    """What to do about damaged bytes and malformed messages: stop, or log them and read
    what follows (skip)."""
    read_uncommitted: bool = False
    """Whether all frames are read, including duplicates and those of transactions that
    are open or were rolled back."""
    partition_bytes: Size = 32 << 20
    """Maximum number of bytes of the journals that one task reads; a frame is not
    cut."""
    reader: Argument = ""
    """For a stream: name of the reader in the set, which keeps what this reader has not
    read yet."""
    max_messages: Count | None = None
    """For a stream: maximum number of messages in a batch; a frame is not cut."""
    max_bytes: Size | None = None
    """For a stream: maximum number of bytes in a batch; a frame is not cut."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Yield contradictions among the options."""
        yield from start_problems(given)
        if given.get("reader") and given.get("read_uncommitted") is True:
            text = "needs committed messages: a position among others has no meaning"
            yield broken(("reader",), text)

    @property
    def on_error(self) -> OnError | None:
        """The handler of damage that is skipped; None: damage is an error."""
        return log_damage if self.on_damage == "skip" else None


def log_damage(error: FrameError | JournalDamaged) -> None:
    """Log damage that is skipped."""
    _LOG.warning("damage skipped: %s", error)


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalWriting(Appending):
    """A set of journals to append to."""

    path: Annotated[Path, SharedFolder()]
    """Folder of the set, which all executors see; a new set is created."""
    partitions: Count | None = None
    """Number of journals: of a new set, by default 1; must match that of an existing
    set."""
    keep: str | None = None
    """What a new set keeps besides what readers have not read."""


def read_options(model: type[T], options: Mapping[str, str]) -> T:
    """
    Return the settings in options.

    Raises:
        ConfigError: If an option is unknown, can't be read, or contradicts another; all
            that are wrong are named.

    """
    section = Section.of(model)
    other: type[Definition] = JournalWriting
    does = "writing"
    if model is JournalWriting:
        other, does = JournalReading, "reading"
    section.moved = dict.fromkeys(Section.of(other).keys, f"is only for {does}")
    given = {name: text for name, text in options.items() if name not in SPARKS_OWN}
    try:
        found: T = section.read(given)
    except Invalid as error:
        # On one line: Spark shows the last line of an error in its Python processes.
        raise ConfigError(
            f"format {NAME}: {'; '.join(map(_say, error.problems))}"
        ) from None
    return found


def _say(problem: Problem) -> str:
    text = problem.shown().replace("unknown key", "unknown option", 1)
    return f"option {'.'.join(map(str, problem.loc))}: {text}"


class SetFolder(NamedTuple):
    """Where the driver sees a set of journals, and the inode of that folder."""

    path: Path
    inode: int

    @classmethod
    def seen(cls, path: Path) -> SetFolder:
        """
        Return the folder of a set as it is seen here.

        Raises:
            JournalError: If there is no set.

        """
        Journals.open(path, create=False).close()
        return cls(path, path.stat().st_ino)

    def opened(self) -> Journals:
        """
        Return the set.

        Raises:
            JournalError: If the driver's folder is not seen here.

        """
        if not self.path.exists() or self.path.stat().st_ino != self.inode:
            raise JournalError(
                f"host {socket.gethostname()} can't access the driver's journals in"
                f" {self.path}: tasks need the same folder, on a file system on which"
                " locks work"
            )
        return Journals.open(self.path, create=False)
