"""
Extract the range that is asked for; the supervisor keeps the offset.

Each line of a file becomes a message, and line numbers are the offsets. As an E
stage, ``dialect: {mode: cyclic}``, ``offsets: {by: supervisor, start: 0, step: 1000}``:
``command: [python, extract_cycle_supervisor_offsets.py, in.txt]``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import islice

from etlstage import worker


def extract(start: int, end: int) -> Iterable[bytes]:
    """
    Yield the lines from ``start`` up to, but not including, ``end``.

    Nothing is remembered: after a crash the supervisor asks for the same range
    again, and the same messages must come.
    """
    with open(sys.argv[1], "rb") as source:
        for line in islice(source, start, end):
            yield line.removesuffix(b"\n")


def latest() -> int:
    """Return how many lines there are; one that has no end yet is not counted."""
    with open(sys.argv[1], "rb") as source:
        return sum(line.endswith(b"\n") for line in source)


if __name__ == "__main__":
    worker.extract_cycle(extract, offsets="supervisor", latest=latest)
