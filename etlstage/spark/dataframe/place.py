"""
The folders of one load's epochs, in a path of this machine.

An epoch is written aside, beside the others and hidden from Spark, and renamed when it
is whole: what can be read is whole, and is never written to again. What was not recorded
is removed before the load goes on.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from etlstage.pipeline.delivery.folder import sync_all, sync_up

__all__ = ("EpochFolders",)

_MARK: Final = "_SUCCESS"


class EpochFolders:
    """
    Where the epochs of one load are.

    Args:
        path: The folder of the output.
        load: What they are called after.
        start: What sets this start of it apart: Spark may still write what another has
            begun that was taken over.

    """

    def __init__(self, path: Path, load: str, start: int = 0) -> None:
        self._path = path
        self._load = load
        self._start = start
        self._named = re.compile(rf"(\.?)epoch={re.escape(load)}-(\d+)(\.\d+)?")

    def aside(self, number: int) -> Path:
        """Return where an epoch is written."""
        return self._path / f".epoch={self._load}-{number}.{self._start}"

    def others(self) -> list[Path]:
        """Return what there is of others than this load."""
        if not self._path.exists():
            return []
        return [
            path for path in self._entries() if not self._named.fullmatch(path.name)
        ]

    def sweep(self, done: int, *, check: Callable[[], None]) -> None:
        """
        Remove what a start left that broke off: asides, and what is not recorded.

        Args:
            done: The last epoch that is.
            check: Raises if another run has taken over, which may have recorded more.

        """
        if not self._path.exists():
            return
        for path in self._entries():
            named = self._named.fullmatch(path.name)
            if named is not None and (named[1] or int(named[2]) > done):
                check()
                shutil.rmtree(path)

    def settle(self, number: int, *, replaces: bool, check: Callable[[], None]) -> None:
        """
        Put an epoch where it is read, durably; nothing, if none was written.

        Args:
            number: Its number.
            replaces: Whether it takes the place of all that others have loaded.
            check: Raises if another run has taken over.

        Raises:
            OSError: If that can't be done.

        """
        aside = self.aside(number)
        check()
        if replaces:
            for path in self.others():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not aside.exists():
            return
        sync_all(aside)
        target = self._path / f"epoch={self._load}-{number}"
        try:
            aside.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Of a run that was taken over, by us or from us.
            check()
            shutil.rmtree(target)
            aside.rename(target)
        sync_up([self._path])

    def mark(self, *, whole: bool) -> None:
        """Mark the output as complete, durably, or as not; raises OSError."""
        mark = self._path / _MARK
        if whole:
            self._path.mkdir(parents=True, exist_ok=True)
            mark.touch()
            sync_up([self._path])
        else:
            mark.unlink(missing_ok=True)

    def _entries(self) -> Iterator[Path]:
        return iter(list(self._path.iterdir()))
