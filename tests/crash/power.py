"""Find out what a crash of the machine would undo."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ("Disk",)


class Disk:
    """Record of what ``fsync`` made durable: bytes of files, and names in folders."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, int]] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._sync = os.fsync

    def fsync(self, fd: int) -> None:
        """Record the current state of the file or folder, and sync it."""
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(f"/proc/self/fd/{fd}") as entries:
                self._names[found.st_ino] = {one.name: one.inode() for one in entries}
        else:
            self._files[found.st_ino] = found.st_size, found.st_mtime_ns
        self._sync(fd)

    def lost(self, *roots: Path) -> Iterator[str]:
        """Yield what a crash would undo now, except locks and their holders' files."""
        for root in roots:
            for path in root.rglob("*"):
                # Files that serve to take back an open epoch need not outlive a crash.
                if path.name.endswith(("lock", ".pid")) or "open" in path.parts[-2:]:
                    continue
                found, parent = path.lstat(), path.parent.stat().st_ino
                if self._names.get(parent, {}).get(path.name) != found.st_ino:
                    yield f"name of {path.relative_to(root)}"
                written = found.st_size, found.st_mtime_ns
                held = path.is_file() and found.st_size
                if held and self._files.get(found.st_ino) != written:
                    yield f"bytes of {path.relative_to(root)}"
