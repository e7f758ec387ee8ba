"""
Extract everything and exit.

Each line of a file becomes a message. As an E stage, ``dialect: {mode: plain}``:
``command: [python, extract.py, in.txt]``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from etlstage import worker


def extract() -> Iterable[bytes]:
    """Yield the lines of the file."""
    with open(sys.argv[1], "rb") as source:
        for line in source:
            yield line.removesuffix(b"\n")


if __name__ == "__main__":
    worker.extract(extract)
