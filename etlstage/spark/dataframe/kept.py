"""
A spool that outlives a run that breaks off.

It is named by the load: one of another load is of no use to anybody. Each start writes
one of its own, for Spark may still write what another has begun that was taken over,
and renames it when it is whole; the first that is there is the one that is read.

Others may have theirs in the same folder. So the state directory notes where it is,
and nothing is removed but what is noted there.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Final

from etlstage.pipeline.delivery.folder import make, sync, sync_all
from etlstage.pipeline.delivery.position import load, store
from etlstage.pipeline.interfaces import Epochs
from etlstage.spark.dataframe.spool import Spooled

__all__ = ("KeptSpool",)

_LIST: Final = "spool.json"


class KeptSpool:
    """
    The spool of one load.

    Args:
        state: The state directory.
        folder: Where spools go.
        epochs: Of the load.

    Attributes:
        path: Where it is when it is whole.

    """

    def __init__(self, state: Path, folder: Path, epochs: Epochs) -> None:
        name = f"spool-{epochs.load}"
        self.path: Path = folder.absolute() / name
        self._aside = self.path.with_name(f"{name}.{epochs.start}")
        self._state = state
        self._note = state / f"{name}.json"
        self._check = epochs.check

    def make(self) -> Path:
        """
        Make the folder that this start writes into, and remove all that is noted.

        Raises:
            OSError: If that can't be done.
            StateUnusable: If another run has taken over, which may read from one.

        """
        for note in self._state.glob("spool-*.json"):
            self._remove(note)
        store(self._note, str(self.path.parent))
        make(self._aside)
        return self._aside

    def keep(self, parts: Sequence[Spooled], of: str) -> None:
        """
        Put what was written in place, durably.

        Args:
            parts: The files.
            of: Tells what was read from anything else that might be.

        Raises:
            OSError: If that can't be done.
            StateUnusable: If another run has taken over.

        """
        sync_all(self._aside)
        store(self._aside / _LIST, {"of": of, "parts": [list(part) for part in parts]})
        self._check()
        try:
            self._aside.rename(self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Of a run that was taken over, by us or from us: it is whole, too.
            self._check()
            rmtree(self._aside, ignore_errors=True)
        sync(self.path.parent)

    def find(self) -> tuple[str, list[Spooled]] | None:
        """Return what was read into it and its files; None if it is not whole."""
        try:
            found = load(self.path / _LIST)
            parts = [Spooled(*part) for part in found["parts"]]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None
        sync(self.path.parent)  # who was killed may not have come to it
        return found["of"], parts

    def remove(self) -> None:
        """Remove it; raises StateUnusable if another run has taken over."""
        if self._note.exists():
            self._remove(self._note)

    def _remove(self, note: Path) -> None:
        try:
            folder = Path(load(note))
        except (ValueError, TypeError):
            folder = self.path.parent
        self._check()
        rest = f"{note.stem}.[0-9]*"  # of starts that broke off
        for path in (folder / note.stem, *folder.glob(rest)):
            rmtree(path, ignore_errors=True)
        note.unlink(missing_ok=True)
