"""
The files of one load's epochs, in a path of this machine.

An epoch is written to a folder of its own, hidden from Spark, and sealed when it is
whole; from then on the record decides. After the record, its files are moved into the
path, or into the folders of its partitions, one by one, under names with load and
epoch::

    .epoch=5f2d01c3-17.3/part-00000-....parquet    by start 3 of the load, not whole
    .epoch=5f2d01c3-17/part-00000-....parquet      sealed
    part-5f2d01c3-17-00000-....parquet             moved

A run that is killed in between leaves a sealed folder: the next start moves the rest.
What was not recorded is removed before the load continues.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from etlstage.disk import sync, sync_all, sync_up
from etlstage.settings.units import is_hidden, local_path

__all__ = (
    "UNRECORDED",
    "EpochFiles",
    "has_output",
    "loaded_elsewhere",
    "same_output",
    "taken",
)

UNRECORDED: Final = "run-"
"""Prefix for the names of loads that are not recorded: no start finishes their moves."""
_MARK: Final = "_SUCCESS"
_PART: Final = "part-"
_SEALED: Final = re.compile(rf"\.epoch=(?!{UNRECORDED}).+-\d+")


def same_output(before: str, now: str) -> bool:
    """
    Return whether two outputs, as records have them, are the same.

    They are if their paths lead to the same place. A path that is gone may be on a disk
    that is not mounted, so it is not taken for one that was moved.
    """
    (kind, _, old), (what, _, new) = before.partition(" "), now.partition(" ")
    there, here = local_path(old), local_path(new)
    if before == now or kind != what or there is None or here is None:
        return before == now
    try:
        return os.path.samefile(there, here)
    except OSError:
        return False


def loaded_elsewhere(before: str, now: str) -> str:
    """Return the text of the error that a run can be completed only in its output."""
    text = f"it has loaded into {before}, not into {now}"
    (kind, _, old), (what, _, new) = before.partition(" "), now.partition(" ")
    if kind == what and os.path.isabs(old) and os.path.isabs(new):
        return f"{text} (if it was moved there, link its old path to the new one)"
    return text


def has_output(path: Path, *, sealed: bool = False) -> bool:
    """
    Return whether readers find anything in a folder; a file is output, too.

    Args:
        path: The folder.
        sealed: Whether epochs that are to be moved there count as well.

    """
    if os.path.isdir(path):
        return any(_is_output(name, sealed=sealed) for name in os.listdir(path))
    return os.path.exists(path)


def _is_output(name: str, *, sealed: bool) -> bool:
    return not is_hidden(name) or (sealed and _SEALED.fullmatch(name) is not None)


def taken(where: str, moved_from: str = "", *, remedy: str = "remove") -> str:
    """
    Return the text of the error that there is output already.

    Args:
        where: The output, for humans.
        moved_from: What was written before, if a load continues here: the output may
            be the same, whose rows are not read again.
        remedy: How to get rid of it.

    """
    if moved_from:
        return (
            f"{where} exists already, and nothing is replaced there, as the load"
            f" continues from {moved_from}: set mode to append, or another output"
        )
    return f"{where} exists already: {remedy} it, or set mode to append or overwrite"


class EpochFiles:
    """
    The epochs of one load on disk.

    Args:
        path: The folder of the output.
        load: Name of the load.
        start: Number of this start of the load: Spark may still be writing for another
            start that was taken over.

    """

    def __init__(self, path: Path, load: str, start: int = 0) -> None:
        self._path = path
        self._load = load
        self._start = start
        name = re.escape(load)
        self._folder = re.compile(rf"\.epoch={name}-(\d+)(\.\d+)?")
        self._file = re.compile(rf"{_PART}{name}-(\d+)-.+", re.DOTALL)

    def aside(self, number: int) -> Path:
        """Return the folder to which an epoch is written."""
        return self._path / f".epoch={self._load}-{number}.{self._start}"

    def others(self, *, hidden: bool = True) -> bool:
        """Return whether other loads have output, or if ``hidden``, any file there."""
        names = (path.relative_to(self._path).parts[0] for path in self._others())
        return any(hidden or _is_output(name, sealed=True) for name in names)

    def sweep(self, done: int, *, check: Callable[[], None]) -> list[int]:
        """
        Remove what interrupted starts left unsealed or unrecorded.

        Args:
            done: The last epoch on record.
            check: Raises if another run has taken over, which may have recorded more.

        Returns:
            The epochs that are recorded but not completely moved.

        """
        sealed: list[int] = []
        if not self._path.exists():
            return sealed
        for path in list(self._path.iterdir()):
            named = self._folder.fullmatch(path.name)
            if named is None:
                continue
            # A folder with the number of a start was never sealed, and may lack files.
            if named[2] or int(named[1]) > done:
                check()
                shutil.rmtree(path)
            else:
                sealed.append(int(named[1]))
        # Files of later epochs exist only if a record was lost, such as in a power
        # failure, or if they are of an attempt whose record is kept elsewhere.
        for path in list(self._files()):
            moved = self._file.fullmatch(path.name)
            if moved is not None and int(moved[1]) > done:
                check()
                self._remove([path])
        return sorted(sealed)

    def seal(self, number: int, *, always: bool, check: Callable[[], None]) -> None:
        """
        Seal an epoch that is whole, durably; do nothing if none was written.

        Args:
            number: Its number.
            always: Whether to seal it even if nothing was written.
            check: Raises if another run has taken over.

        Raises:
            OSError: If the epoch can't be sealed.

        """
        aside = self.aside(number)
        check()
        if always:
            aside.mkdir(parents=True, exist_ok=True)
        if not aside.exists():
            return
        # Contents before the name: after a crash a sealed folder is taken for whole.
        sync_all(aside)
        sealed = self._sealed(number)
        try:
            aside.rename(sealed)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # The folder is of a run from which we took over, or that took over from us.
            check()
            shutil.rmtree(sealed)
            aside.rename(sealed)
        sync_up([self._path])

    def move(self, number: int, *, replaces: bool, check: Callable[[], None]) -> None:
        """
        Move a recorded epoch to where readers find it, durably.

        It can be done again, even by two runs at a time: what was moved is skipped.

        Args:
            number: Its number.
            replaces: Whether it replaces everything that other loads have written.
            check: Raises if another run has taken over.

        Raises:
            OSError: If the epoch can't be moved.

        """
        sealed = self._sealed(number)
        if not sealed.exists():
            return
        check()
        if replaces:
            self._remove(self._others())
        changed = {self._path}
        for path in [
            Path(at, name) for at, _, names in os.walk(sealed) for name in names
        ]:
            # Skip Spark's checksum files, which have the old name of each file.
            if path.name.startswith((".", "_")):
                continue
            folder = self._path / path.parent.relative_to(sealed)
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{_PART}{self._load}-{number}-{path.name.removeprefix(_PART)}"
            # Another run may be moving the same file.
            with suppress(FileNotFoundError):
                path.rename(folder / name)
            while folder != self._path:
                changed.add(folder)
                folder = folder.parent
        for folder in changed:
            sync(folder)
        # Last: as long as it exists, each start looks for files that are still to move.
        shutil.rmtree(sealed, ignore_errors=True)

    def mark(self, *, whole: bool) -> None:
        """Mark the output as complete or incomplete, durably; raises OSError."""
        mark = self._path / _MARK
        if whole:
            self._path.mkdir(parents=True, exist_ok=True)
            mark.touch()
            sync_up([self._path])
            return
        with suppress(FileNotFoundError):
            mark.unlink()
            sync(self._path)

    def _sealed(self, number: int) -> Path:
        return self._path / f".epoch={self._load}-{number}"

    def _files(self) -> Iterator[Path]:
        """Yield all files that are not in a folder of an epoch."""
        for at, folders, names in os.walk(self._path):
            if Path(at) == self._path:
                mine = [name for name in folders if self._folder.fullmatch(name)]
                folders[:] = [name for name in folders if name not in mine]
            yield from (Path(at, name) for name in names)

    def _others(self) -> Iterator[Path]:
        """Yield the files, and folders without files, that are not of this load."""
        for path in list(self._path.iterdir()) if self._path.exists() else ():
            if self._folder.fullmatch(path.name) or self._file.fullmatch(path.name):
                continue
            if not path.is_dir() or path.is_symlink():
                yield path
                continue
            found = [Path(at, name) for at, _, names in os.walk(path) for name in names]
            others = [file for file in found if not self._file.fullmatch(file.name)]
            yield from others if found else [path]

    def _remove(self, paths: Iterable[Path]) -> None:
        """Remove files, and their folders once empty."""
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
                continue
            path.unlink(missing_ok=True)
            folder = path.parent
            with suppress(OSError):
                while folder != self._path:
                    folder.rmdir()
                    folder = folder.parent
