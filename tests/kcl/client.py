"""
The published Python clients, unmodified, from their source archives.

They are downloaded once, into the cache folder of the user, and put on the path as they
are: to install them would download a hundred archives of Java that no child needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

from tests.cache import cached

__all__ = ("CURRENT", "OLD", "downloaded")

CURRENT: Final = "3.2.0"
"""Speaks to daemons since 2.1."""
OLD: Final = "1.5.1"
"""Speaks to daemons from 1.7.2 to 1.15."""


def downloaded(version: str) -> Path:
    """Return the folder of a client's source; download it, if need be."""
    name = f"amazon_kclpy-{version}"

    def download(folder: Path) -> None:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "-q", "--no-deps"),
                *("--no-input", "-d", os.fspath(folder)),
                *("--no-binary", "amazon_kclpy", f"amazon_kclpy=={version}"),
            ],
            check=True,
        )
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")

    return cached(name, download) / name
