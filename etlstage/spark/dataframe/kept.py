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


def keep(spool: Path, parts: Sequence[Spooled], of: str) -> None:
    """
    Note that a spool is whole, durably; raises OSError.

    Args:
        spool: The folder.
        parts: Its files.
        of: Tells what was read from anything else that might be.

    """
    for part in parts:
        fd = os.open(spool / part.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sync(spool)
    store(spool / _LIST, {"of": of, "parts": [list(part) for part in parts]})


def find_kept(spool: Path) -> tuple[str, list[Spooled]] | None:
    """Return what was read into a spool that is whole, and its files; None: no such."""
    try:
        found = load(spool / _LIST)
        return found["of"], [Spooled(*part) for part in found["parts"]]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
