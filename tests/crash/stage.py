"""
A stage that never does the same twice.

Each message is its number, to which a random one is added; of a hundred one is refused,
always the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from etlstage import worker


def answer(message: bytes) -> Iterator[bytes]:
    """Add a random number to a message, or refuse it."""
    number = int(message.split()[0])
    if number % 100 == 7 and b" " not in message:
        raise worker.Refuse("of a hundred one")
    yield message + b" %d" % random.randrange(10**6)  # noqa: S311


if __name__ == "__main__":
    worker.transform(answer)
