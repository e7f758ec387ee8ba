"""
A spool that outlives a run that breaks off.

It is whole once its list of files is there, which is written last; one without is of a
job that was killed, and is made anew. It is named by the load: one of another load is of
no use to anybody.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Final

from etlstage.pipeline.delivery.folder import make, sync
from etlstage.pipeline.delivery.position import load, store
from etlstage.spark.dataframe.spool import Spooled

__all__ = ("find_kept", "keep", "kept_in", "make_kept")

_LIST: Final = "spool.json"


def kept_in(folder: Path, load: str) -> Path:
    """Return where the spool of a load is."""
    return (folder / f"spool-{load}").absolute()


def make_kept(folder: Path, load: str) -> Path:
    """Make the folder of a spool anew, and remove those of other loads."""
    if folder.exists():
        for path in folder.glob("spool-*"):
            rmtree(path, ignore_errors=True)
    spool = kept_in(folder, load)
    make(spool)
    return spool


def keep(spool: Path, parts: Sequence[Spooled]) -> None:
    """Note that a spool is whole, durably; raises OSError."""
    for part in parts:
        fd = os.open(spool / part.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sync(spool)
    store(spool / _LIST, [list(part) for part in parts])


def find_kept(spool: Path) -> list[Spooled] | None:
    """Return the files of a spool that is whole; None, if there is none."""
    try:
        return [Spooled(*part) for part in load(spool / _LIST)]
    except (FileNotFoundError, ValueError, TypeError):
        return None
