"""
Dead letters on disk, until somebody looks at them.

Each stage has one append-only file in the state directory, shared by all runs; a
line is one letter, as JSON. A crash in the middle of an append leaves a torn line:
later letters go on behind it, and who reads is told of it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from etlstage.errors import StateUnusable
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.delivery.folder import make_ours, opened, sync

__all__ = (
    "FOLDER",
    "SUFFIX",
    "LetterFile",
    "Torn",
    "cut",
    "letter_file",
    "letter_files",
    "read_letters",
    "size_of",
    "stage_of_file",
)

FOLDER: Final = "dead_letters"
"""Where the files are, in the state directory."""
SUFFIX: Final = ".jsonl"
_PIECE: Final = 1 << 20  # bytes


class Torn(NamedTuple):
    """A line that is no letter: a run was stopped, or ran out of space, in it."""

    path: Path
    line: int
    """Counted from 1."""
    size: int
    """Bytes."""


class LetterFile:
    """
    The letters of one stage, open for appending.

    Args:
        state: The state directory; made, for us alone, if it is not there.
        stage: Name of the stage.
        check: Asserts that nobody has taken over, once the file is open: whoever takes
            over later replaces it, see :func:`cut`.

    """

    def __init__(self, state: Path, stage: str, check: Callable[[], None]) -> None:
        folder = state / FOLDER
        make_ours(state)
        make_ours(folder)
        self.path: Path = letter_file(folder, stage)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self.path, flags, 0o600)
        self.start: int = os.fstat(self._fd).st_size
        """Where the letters of this run begin, at the earliest."""
        self._written = self._durable = 0  # calls that appended, and those synced
        try:
            sync(folder)
            check()
        except (OSError, StateUnusable):
            self.close()
            raise

    @property
    def dirty(self) -> bool:
        """Whether there is anything that may not be durable."""
        return self._written != self._durable

    def append(self, line: bytes) -> None:
        """Append a line; raises OSError, and leaves nothing of it then."""
        # Other runs may append to the same file, now.
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            size = os.fstat(self._fd).st_size
            torn = size and os.pread(self._fd, 1, size - 1) != b"\n"
            rest = memoryview(b"\n" + line if torn else line)
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._fd, size)
                raise
            self._written += 1
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def sync(self) -> None:
        """Return when what was appended is durable; raises OSError."""
        # Noted before: what another thread appends meanwhile is not durable by this.
        written = self._written
        if written != self._durable:
            os.fsync(self._fd)
            self._durable = written

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def letter_file(folder: Path, stage: str) -> Path:
    """Return the file of a stage in the folder of the files."""
    return folder / f"{quote(stage, safe=' ')}{SUFFIX}"


def stage_of_file(path: Path) -> str:
    """Return the name of the stage whose letters are in a file."""
    return unquote(path.name.removesuffix(SUFFIX))


def letter_files(state: Path) -> list[Path]:
    """Return the files in a state directory, in the order of the stages' names."""
    return sorted((state / FOLDER).glob(f"*{SUFFIX}"))


def size_of(state: Path, stage: str) -> int:
    """Return the bytes in the file of a stage, 0 if there is none."""
    try:
        return letter_file(state / FOLDER, stage).stat().st_size
    except FileNotFoundError:
        return 0


def cut(path: Path, size: int, check: Callable[[], None]) -> None:
    """
    Put the first bytes of a file in its place, durably, as a file of its own.

    A run that was taken over may have the old one open: it appends to what nobody looks
    at any more.

    Args:
        path: The file.
        size: Bytes that stay.
        check: Asserts that nobody has taken over.

    Raises:
        OSError: If it can't be read or written.

    """
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)  # of a start that was killed
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    with opened(path, os.O_RDONLY) as old, opened(new, flags) as file:
        while piece := old.read(min(size - file.tell(), _PIECE)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    check()
    # Who is taken over just here finds it gone: its name is the same for all.
    new.replace(path)
    sync(path.parent)


def read_letters(path: Path, *, start: int = 0) -> Iterator[DeadLetter | Torn]:
    """
    Yield the letters of a file, oldest first, one in memory at a time; blocks.

    Args:
        path: The file.
        start: Where to begin, in bytes.

    """
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            if line == b"\n":
                continue
            try:
                yield DeadLetter.from_line(line)
            except ValueError:
                yield Torn(path, number, len(line))
