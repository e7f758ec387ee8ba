"""
Transform batches.

Messages that occur more than once in a batch are passed on once. As a T stage whose
supervisor closes the batches: ``command: [python, transform_batch.py]``; with a
number as its argument the worker closes its batch when it holds that many.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from etlstage import worker


def transform_batch(messages: list[bytes]) -> Iterable[bytes]:
    """Return the messages without repetitions; there is at least one."""
    return dict.fromkeys(messages)


if __name__ == "__main__":
    if sys.argv[1:]:
        worker.transform_batch(transform_batch, driver="worker", size=int(sys.argv[1]))
    else:
        worker.transform_batch(transform_batch)
