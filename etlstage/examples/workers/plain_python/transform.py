"""
Transform one message at a time, in plain Python.

Each word of a message becomes a message of its own, so there are none, one or
many replies. As a T stage: ``command: [python, transform.py]``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator


def transform(message: bytes) -> Iterable[bytes]:
    """Return the words of a message; none of them may contain a marker."""
    return message.split()


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
        # About to wait. What we still hold back is what the supervisor waits for:
        # without this flush both sides would wait forever.
        sys.stdout.buffer.flush()
        # Take what is there: sys.stdin.read(n) would wait until n bytes came.
        chunk = os.read(0, 65536)
        if not chunk:
            return
        # A chunk may end anywhere, also within a marker.
        *whole, tail = (tail + chunk).split(EOM)
        yield from whole


def main() -> None:
    """Answer each message with its replies and one EOP."""
    # Stdout belongs to the protocol: print() to stderr only.
    output = sys.stdout.buffer
    for message in messages():
        for reply in transform(message):
            output.write(reply + EOM)
        output.write(EOP)


if __name__ == "__main__":
    main()
