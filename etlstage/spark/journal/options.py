"""Options of ``format("etlstage-journal")``; those of a write are a pipeline file's."""

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
from etlstage.journal.reader import OnError
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
    """Its folder, which all executors see."""
    from_: Argument = "beginning"
    """Where to begin: beginning, end, or a time such as 2026-11-23T18:00:00Z."""
    key: Pointer | None = None
    """A JSON pointer such as /customer: what the column key has of a message."""
    on_damage: Literal["stop", "skip"] = "stop"
    """What becomes of bytes that are not what was written, or no message: skip logs
    them, and reads what follows."""
    read_uncommitted: bool = False
    """Whether all frames are read: also those of transactions that are open, or were
    rolled back, and duplicates."""
    partition_bytes: Size = 32 << 20
    """Bytes of the journals that one task reads, at most; a frame is not cut."""
    reader: Argument = ""
    """Of a stream: what it is called in the set, where what it has not read is kept."""
    max_messages: Count | None = None
    """Of a stream: messages of a batch, at most; a frame is not cut."""
    max_bytes: Size | None = None
    """Of a stream: bytes of a batch, at most; a frame is not cut."""

    @classmethod
    def rules(cls, given: Mapping[str, Any]) -> Iterable[Problem]:
        """Return what contradicts itself."""
        yield from start_problems(given)
        if given.get("reader") and given.get("read_uncommitted") is True:
            text = "needs committed messages: a position among others means nothing"
            yield broken(("reader",), text)

    @property
    def on_error(self) -> OnError | None:
        """What is done with what is passed over, if anything is."""
        return log_damage if self.on_damage == "skip" else None


def log_damage(error: FrameError | JournalDamaged) -> None:
    """Log what is passed over."""
    _LOG.warning("damage passed over: %s", error)


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalWriting(Appending):
    """A set of journals to append to."""

    path: Annotated[Path, SharedFolder()]
    """Its folder, which all executors see; a new set is made."""
    partitions: Count | None = None
    """Journals of a new set, by default 1; of a set that exists its number."""
    keep: str | None = None
    """Of a new set, what is kept besides what readers have not read."""


def read_options(model: type[T], options: Mapping[str, str]) -> T:
    """
    Return the settings in options.

    Raises:
        ConfigError: If one is unknown, can't be read, or contradicts another; all
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
        # On one line: of an error in its Python processes Spark shows the last.
        raise ConfigError(
            f"format {NAME}: {'; '.join(map(_say, error.problems))}"
        ) from None
    return found


def _say(problem: Problem) -> str:
    text = problem.shown().replace("unknown key", "unknown option", 1)
    return f"option {'.'.join(map(str, problem.loc))}: {text}"


class SetFolder(NamedTuple):
    """Where the driver sees a set of journals, and what identifies that folder."""

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
            JournalError: If this is no place where the driver's folder is seen.

        """
        if not self.path.exists() or self.path.stat().st_ino != self.inode:
            raise JournalError(
                f"host {socket.gethostname()} does not see the driver's journals in"
                f" {self.path}: tasks need the same folder, and a file system on which"
                " locks hold"
            )
        return Journals.open(self.path, create=False)
