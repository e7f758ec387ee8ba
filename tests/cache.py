"""Third-party programs that tests need, installed once into the user's cache folder."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ("cached",)


def cached(name: str, install: Callable[[Path], object]) -> Path:
    """Return a folder of the cache; ``install`` fills it, if that was never done."""
    at = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(at) / "etlstage-tests" / name
    done = folder / "done"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not done.exists():
            shutil.rmtree(folder)
            folder.mkdir()
            install(folder)
            done.touch()
    return folder
