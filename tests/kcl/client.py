"""
The published Python clients, unmodified, from their source archives.

They are downloaded once, into the cache folder of the user, and put on the path as they
are: to install them would download a hundred archives of Java that no child needs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

__all__ = ("CURRENT", "OLD", "downloaded")

CURRENT: Final = "3.2.0"
"""Speaks to daemons since 2.1."""
OLD: Final = "1.5.1"
"""Speaks to daemons from 1.7.2 to 1.15."""


def downloaded(version: str) -> Path:
    """Return the folder of a client's source; download it, if need be."""
    at = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(at) / "etlstage-tests" / f"amazon_kclpy-{version}"
    done = folder / "done"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not done.exists():
            shutil.rmtree(folder)
            folder.mkdir()
            wanted = ["--no-binary", "amazon_kclpy", f"amazon_kclpy=={version}"]
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "download", "-q", "--no-deps"),
                    *("--no-input", "-d", os.fspath(folder)),
                    *wanted,
                ],
                check=True,
            )
            with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
                archive.extractall(folder, filter="data")
            done.touch()
    return folder / f"amazon_kclpy-{version}"
