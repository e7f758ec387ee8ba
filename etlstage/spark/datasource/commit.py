"""
Where attempts of a write leave their files, and how these get to their place.

Under the folder that is written to, ``_etlstage`` holds a folder for each attempt
until its write is committed or aborted; readers of Spark look into no folder that is
called so. A file is moved by renaming it, under a name that tells write and
partition: so what a commit that was torn in the middle has moved can be found again.

A batch of a stream may be committed twice: when the driver dies between our commit
and Spark's note of it. What was committed last, and whether to its end, is therefore
stored for each query, and a batch that is in place is not moved again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from etlstage.pipeline.delivery.folder import sync_all, sync_up
from etlstage.pipeline.delivery.position import PositionFile

__all__ = ("AttemptFiles",)

_OURS: Final = "_etlstage"


class AttemptFiles:
    """
    The staged files of one write.

    Args:
        path: The folder that is written to.
        write: What tells this write from all others.

    """

    def __init__(self, path: Path, write: str) -> None:
        self._path = path
        self._write = write
        self._folder = path / _OURS / "staging" / write

    def make(self, attempt: str) -> Path:
        """Return a new folder for an attempt."""
        folder = self._folder / attempt
        folder.mkdir(parents=True)
        return folder

    def discard(self, attempt: str) -> None:
        """Remove the folder of one attempt."""
        shutil.rmtree(self._folder / attempt, ignore_errors=True)

    def publish(self, attempts: Sequence[tuple[int, str]]) -> None:
        """
        Move the files of attempts into place, durably; remove those of all others.

        Args:
            attempts: Of each partition the one that counts.

        """
        places: set[Path] = set()
        for partition, attempt in attempts:
            folder = self._folder / attempt
            sync_all(folder)
            for file in list(_files(folder)):
                new = self._named(file.relative_to(folder), partition)
                new.parent.mkdir(parents=True, exist_ok=True)
                file.replace(new)
                places.add(new.parent)
        sync_up(places)
        self.clear()

    def clear(self) -> None:
        """Remove what is staged."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for empty in (self._folder.parent, self._path / _OURS):
            try:
                empty.rmdir()
            except OSError:
                return  # others have something there

    def undo(self) -> None:
        """Remove what is staged, and what of it is in place already."""
        self.clear()
        self._remove_moved()

    def publish_once(
        self, attempts: Sequence[tuple[int, str]], query: str, batch: int
    ) -> None:
        """Do as :meth:`publish`, for a batch of a stream that may come again."""
        file = self._file(query)
        last, whole = _stored(file)
        if batch < last or (batch == last and whole):
            self.clear()
            return
        if batch == last:
            self._remove_moved()  # the files of another attempt may have other names
        file.store({"batch": batch, "whole": False})
        self.publish(attempts)
        file.store({"batch": batch, "whole": True})

    def undo_once(self, query: str, batch: int) -> None:
        """Do as :meth:`undo`, unless the batch is in place."""
        last, whole = _stored(self._file(query))
        if batch == last and not whole:
            self._remove_moved()
        self.clear()

    def _file(self, query: str) -> PositionFile:
        return PositionFile(self._path / _OURS / "streams", query)

    def _remove_moved(self) -> None:
        places: set[Path] = set()
        for file in list(self._path.rglob(f"part-*-{self._write}-*")):
            if _OURS not in file.relative_to(self._path).parts:
                file.unlink(missing_ok=True)
                places.add(file.parent)
        sync_up(places)

    def _named(self, staged: Path, partition: int) -> Path:
        name = f"part-{partition:05}-{self._write}-{staged.name}"
        return self._path / staged.parent / name


def _stored(file: PositionFile) -> tuple[int, bool]:
    """Return the batch that was committed last, and whether to its end."""
    match file.load():
        case {"batch": int(last), "whole": bool(whole)}:
            return last, whole
    return -1, True


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names)
