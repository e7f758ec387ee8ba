"""
Transform one message at a time.

Each word of a message becomes a message of its own. As a T stage:
``command: [python, transform.py]``.
"""

from __future__ import annotations

from collections.abc import Iterable

from etlstage import worker


def transform(message: bytes) -> Iterable[bytes]:
    """Return the words of a message: none, one or many."""
    return message.split()


if __name__ == "__main__":
    worker.transform(transform)
