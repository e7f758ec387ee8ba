"""
Extract everything and exit, in plain Python.

Each line of a file becomes a message. As an E stage, ``dialect: {mode: plain}``:
``command: [python, extract.py, in.txt]``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator


def extract(path: str) -> Iterator[bytes]:
    """Yield the lines of a file; none of them may contain a marker."""
    with open(path, "rb") as source:
        for line in source:
            yield line.removesuffix(b"\n")


def marker(name: str, default: str) -> bytes:
    r"""Return a marker; it comes escaped as ``\ooo``, so that even NUL can travel."""
    text = os.environ.get(name, default)
    return text.encode().decode("unicode_escape").encode("latin-1")


EOM = marker("ETLSTAGE_EOM", r"\012")


def main() -> None:
    """Write all messages; the end of the output means that these were all."""
    for message in extract(sys.argv[1]):
        sys.stdout.buffer.write(message + EOM)
    # No EOP here, and no flush: Python flushes at exit. Exit 0 means "complete";
    # an exception exits with 1, so half a source is never taken for all of it.


if __name__ == "__main__":
    main()
