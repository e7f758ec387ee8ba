"""
Load one message at a time, in plain Python.

Each message becomes a line of a file. As an L stage:
``command: [python, load.py, out.txt]``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import BinaryIO


def load(message: bytes, target: BinaryIO) -> None:
    """Write one message; it is on the disk when this returns."""
    target.write(message + b"\n")
    target.flush()
    os.fsync(target.fileno())


def marker(name: str, default: str) -> bytes:
    r"""Return a marker; it comes escaped as ``\ooo``, so that even NUL can travel."""
    text = os.environ.get(name, default)
    return text.encode().decode("unicode_escape").encode("latin-1")


EOM = marker("ETLSTAGE_EOM", r"\012")
EOP = marker("ETLSTAGE_EOP", r"\000")


def messages() -> Iterator[bytes]:
    """Yield each whole message; what has no EOM when the input ends is dropped."""
    tail = b""
    while True:
        # About to wait: what we hold back is what the supervisor waits for.
        sys.stdout.buffer.flush()
        chunk = os.read(0, 65536)
        if not chunk:
            return
        *whole, tail = (tail + chunk).split(EOM)
        yield from whole


def main() -> None:
    """Answer each message with EOP alone."""
    with open(sys.argv[1], "ab") as target:
        for message in messages():
            load(message, target)
            # EOP is the receipt: the supervisor may forget the message now.
            sys.stdout.buffer.write(EOP)


if __name__ == "__main__":
    main()
