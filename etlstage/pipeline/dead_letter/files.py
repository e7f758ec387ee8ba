"""
The files of dead letters.

Each stage has one append-only file in the state directory, shared by all runs; a
line is one letter, as JSON. A crash in the middle of an append leaves a torn line:
later letters are appended after it, and readers skip it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple
from urllib.parse import quote, unquote

from etlstage.disk import sync
from etlstage.errors import StateUnusable
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.delivery.folder import make_inside, make_ours, opened

__all__ = (
    "FOLDER",
    "SUFFIX",
    "LetterFile",
    "Torn",
    "cut",
    "files_in",
    "letter_file",
    "letter_files",
    "read_letters",
    "size_of",
    "stage_of_file",
)

FOLDER: Final = "dead_letters"
"""The folder of the letter files, in the state directory."""
SUFFIX: Final = ".jsonl"
_PIECE: Final = 1 << 20  # bytes
_TRIES: Final = 100  # to lock a file that is to be replaced
_PAUSE: Final = 0.05  # seconds between two of them


class Torn(NamedTuple):
    """An incomplete line: a run was stopped, or ran out of space, while writing it."""

    path: Path
    line: int
    """Counted from 1."""
    size: int
    """Bytes."""


class LetterFile:
    """
    The letters of one stage, open for appending.

    Args:
        state: The state directory; created, private to us, if it does not exist.
        stage: Name of the stage.
        check: Asserts that no other run has taken over. Called once the file is open: a
            run that takes over later replaces the file, see :func:`cut`.

    """

    def __init__(self, state: Path, stage: str, check: Callable[[], None]) -> None:
        self.path: Path = letter_file(state / FOLDER, stage)
        self._state = state
        self._check = check
        self._fd = self._open()
        self._first = os.fstat(self._fd)
        self._start = self._first.st_size
        self._written = self._durable = 0  # number of appends, and of synced ones

    @property
    def start(self) -> int:
        """Offset in bytes before which no letter of this run is."""
        return self._start if _is_at(self.path, self._first) else 0

    @property
    def dirty(self) -> bool:
        """Whether anything appended may not be durable yet."""
        return self._written != self._durable

    def append(self, line: bytes) -> None:
        """
        Append a line.

        Raises:
            OSError: If it can't be written; no part of it is left.
            StateUnusable: If the file was replaced, and another run has taken over.

        """
        try:
            self._lock()
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
        """Return when everything appended so far is durable; raises OSError."""
        # Read before syncing: a thread may append meanwhile, which is not durable then.
        written = self._written
        if written != self._durable:
            os.fsync(self._fd)
            self._durable = written

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        make_ours(self._state)
        make_inside(self.path.parent)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path, flags, 0o600)
        try:
            sync(self.path.parent)
            self._check()
        except (OSError, StateUnusable):
            os.close(fd)
            raise
        return fd

    def _lock(self) -> None:
        """Lock the file, as other runs may append to it; reopen it if replaced."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        while not _is_at(self.path, os.fstat(self._fd)):
            fd = self._open()
            # The descriptor stays the same: another thread may be about to sync it.
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            self._start = 0


def letter_file(folder: Path, stage: str) -> Path:
    """Return a stage's file in the folder of the letter files."""
    return folder / f"{quote(stage, safe=' ')}{SUFFIX}"


def stage_of_file(path: Path) -> str:
    """Return the name of the stage whose letters are in a file."""
    return unquote(path.name.removesuffix(SUFFIX))


def letter_files(state: Path) -> list[Path]:
    """Return the letter files of a state directory, ordered by stage name."""
    return files_in(state / FOLDER)


def files_in(folder: Path) -> list[Path]:
    """Return the files of letters in a folder, ordered by name."""
    # Path.glob() raises for a name that is too long; there can't be such a folder.
    return sorted(folder.glob(f"*{SUFFIX}")) if os.path.isdir(folder) else []


def size_of(state: Path, stage: str) -> int:
    """Return the size in bytes of a stage's file, 0 if it does not exist."""
    try:
        return letter_file(state / FOLDER, stage).stat().st_size
    except FileNotFoundError:
        return 0


def cut(
    path: Path,
    size: int,
    check: Callable[[], None],
    drops: Callable[[DeadLetter], bool],
) -> None:
    """
    Replace a file, durably, by a new file without a run's letters after its first bytes.

    The letters of other runs stay: those without ``state`` may use the same folder. A
    run that has the old file open appends to the new one, unless it was taken over. A
    letter is lost only if its run was stopped for seconds while it appended it.

    Args:
        path: The file.
        size: How many bytes to keep as they are.
        check: Asserts that no other run has taken over.
        drops: Whether a letter after these is to be dropped; incomplete lines are.

    Raises:
        OSError: If the file can't be read or written.

    """
    new = path.with_suffix(".new")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    with _locked(path) as old:
        new.unlink(missing_ok=True)  # left by a start that was killed
        with opened(new, flags) as file:
            while piece := old.read(min(size - file.tell(), _PIECE)):
                file.write(piece)
            for line in old:
                with suppress(ValueError):
                    if line == b"\n" or not drops(DeadLetter.from_line(line)):
                        file.write(line)
            file.flush()
            os.fsync(file.fileno())
        check()
        new.replace(path)
        sync(path.parent)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """
    Open and lock a letter file, so that no run appends to it or replaces it.

    A run that was taken over may be stopped with the lock: it is waited for only a while.
    """
    while True:
        with opened(path, os.O_RDWR) as file:
            for _ in range(_TRIES):
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_PAUSE)
            try:
                if _is_at(path, os.fstat(file.fileno())):
                    yield file
                    return
            finally:
                # A process that was forked meanwhile has the descriptor, too.
                fcntl.flock(file, fcntl.LOCK_UN)


def _is_at(path: Path, file: os.stat_result) -> bool:
    """Return whether a file is still at its path, and was not replaced."""
    try:
        return os.path.samestat(path.lstat(), file)
    except FileNotFoundError:
        return False


def read_letters(path: Path, *, start: int = 0) -> Iterator[DeadLetter | Torn]:
    """
    Yield the letters of a file, oldest first, one in memory at a time; blocks.

    Args:
        path: The file.
        start: Offset in bytes at which to begin.

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
