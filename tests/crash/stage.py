"""
A stage that never gives the same output twice.

Each message is a list of a key and a number, to which a random number is added. One
message of a hundred is refused, always the same ones, until there is a file ``mended``.
With an argument the stage takes batches.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from etlstage import worker


def answer(message: bytes) -> Iterator[bytes]:
    """Add a random number to a message, or refuse it."""
    key, number, *others = json.loads(message)
    if number % 100 == 7 and not others and not Path("mended").exists():
        raise worker.Refuse("of a hundred one")
    added = random.randrange(10**6)  # noqa: S311
    yield json.dumps([key, number, *others, added]).encode()


def answers(messages: Sequence[bytes]) -> list[bytes]:
    """Call :func:`answer` for each message of a batch."""
    return [output for message in messages for output in answer(message)]


if __name__ == "__main__":
    worker.transform_batch(answers) if sys.argv[1:] else worker.transform(answer)
