"""
The worker of the service: answers a line with its words in reverse order.

It dies of the word ``crash``, so that you can see what happens to other lines.
"""

from __future__ import annotations

import os

from etlstage import worker


def answer(line: bytes) -> list[bytes]:
    """Return the words of a line, the last one first."""
    words = line.split()
    if b"crash" in words:
        os.abort()
    if not words:
        raise worker.Refuse("it contains no words")
    return [b" ".join(reversed(words))]


if __name__ == "__main__":
    worker.transform(answer)
