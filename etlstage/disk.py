"""Make files and their names durable, so that they outlive a crash of the machine."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ("make", "sync", "sync_all", "sync_up")


def make(folder: Path, mode: int = 0o777) -> None:
    """
    Make a folder and its parents; existing ones are left unchanged.

    The names of the new folders are durable afterwards.

    Args:
        folder: The folder.
        mode: Mode of the new folders, subject to the umask.

    Raises:
        OSError: If it can't be made.

    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    # From the top: a record in a folder whose own name is lost would be lost, too.
    for path in reversed(missing):
        path.mkdir(mode=mode, exist_ok=True)
        sync(path.parent)


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    _fsync(folder, os.O_DIRECTORY)


def sync_all(folder: Path) -> None:
    """
    Make everything in a folder and its subfolders durable; links are not followed.

    What is removed meanwhile is skipped.
    """
    for inner, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(inner, name)
            with suppress(FileNotFoundError):
                # A link may be dangling, and opening a pipe would block.
                if stat.S_ISREG(os.lstat(path).st_mode):
                    _fsync(path)
        with suppress(FileNotFoundError):
            sync(Path(inner))


def sync_up(folders: Iterable[Path]) -> None:
    """Make the names in folders durable, and those of the folders themselves."""
    done: set[Path] = set()
    for folder in map(Path.resolve, folders):
        sync(folder)
        device = folder.stat().st_dev
        # Another device holds the mount point, which existed before.
        for path in folder.parents:
            if path in done or path.stat().st_dev != device:
                break
            with suppress(PermissionError):  # an existing folder that others made
                sync(path)
            done.add(path)


def _fsync(path: Path | str, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
