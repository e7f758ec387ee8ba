"""
Folders that hold messages for as long as this process runs, however it ends.

The watchdog removes them behind our end. Should it have ended before, the next process
that makes such a folder at the same place removes what it finds there of the dead: a
folder is named after who made it, by pid, start time, and where that pid counts, for
``/tmp`` may be shared with another container or machine.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from etlstage.transport.descent import started_at
from etlstage.transport.guard import remove
from etlstage.transport.watchdog import WATCHDOG

__all__ = ("discard", "make", "scratch", "sweep")

_NAME: Final = re.compile(r"etlstage-[a-z]+-(\d+)-(\d+)-([0-9a-f]{8})-\w+")


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """Give a folder of that kind for a while."""
    path = make(kind)
    try:
        yield path
    finally:
        discard(path)


def make(kind: str, parent: Path | None = None) -> Path:
    """
    Make a folder for us alone, and remove what the dead have left beside it.

    Args:
        kind: What it is for, a word; what is in a ``warehouse`` is the user's.
        parent: Where; by default where temporary files are.

    """
    place = Path(tempfile.gettempdir() if parent is None else parent).absolute()
    sweep(place)
    pid = os.getpid()
    prefix = f"etlstage-{kind}-{pid}-{started_at(pid) or 0}-{_where()}-"
    path = tempfile.mkdtemp(prefix=prefix, dir=place)
    WATCHDOG.add_folder(path)
    return Path(path)


def discard(path: Path) -> None:
    """Remove a folder, as far as that can be done."""
    remove(os.fspath(path))
    if not path.exists():
        WATCHDOG.drop_folder(os.fspath(path))


def sweep(parent: Path) -> None:
    """Remove the folders in there of processes that are dead, if they were ours."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            named = _NAME.fullmatch(entry.name)
            if named is None or named[3] != _where():
                continue
            alive = started_at(int(named[1])) in (int(named[2]), None)
            if alive and os.path.exists(f"/proc/{named[1]}"):
                continue
            with suppress(OSError):
                ours = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                if ours and entry.is_dir(follow_symlinks=False):
                    remove(entry.path)


def _where() -> str:
    """Return a word for this boot of this machine, and our container."""
    said = []
    for name in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            said.append(os.readlink(name) if "/ns/" in name else _text(name))
    return sha256(" ".join(said).encode()).hexdigest()[:8]


def _text(name: str) -> str:
    return Path(name).read_text(encoding="ascii")
