"""
Extract the range that is asked for, in plain Python; the supervisor keeps the offset.

Each line of a file becomes a message, and line numbers are the offsets. As an E
stage, ``dialect: {mode: cyclic}``, ``offsets: {by: supervisor, start: 0, step: 1000}``:
``command: [python, extract_cycle_supervisor_offsets.py, in.txt]``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import islice


def extract(path: str, start: int, end: int) -> Iterator[bytes]:
    """
    Yield the lines from ``start`` up to, but not including, ``end``.

    Nothing is remembered: after a crash the supervisor asks for the same range
    again, and the same messages must come.
    """
    with open(path, "rb") as source:
        for line in islice(source, start, end):
            yield line.removesuffix(b"\n")


def latest(path: str) -> int:
    """Return how many lines there are; one that has no end yet is not counted."""
    with open(path, "rb") as source:
        return sum(line.endswith(b"\n") for line in source)


def marker(name: str, default: str) -> bytes:
    r"""Return a marker; it comes escaped as ``\ooo``, so that even NUL can travel."""
    text = os.environ.get(name, default)
    return text.encode().decode("unicode_escape").encode("latin-1")


EOM = marker("ETLSTAGE_EOM", r"\012")
EOP = marker("ETLSTAGE_EOP", r"\000")


def requests() -> Iterator[bytes]:
    """
    Yield each request until the input ends.

    It is ``{"start": 0, "end": 1000}``, or ``{"offsets": "latest"}``.
    """
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
    """Answer each request with its range, maybe nothing, or a number, and one EOP."""
    output = sys.stdout.buffer
    for request in requests():
        asked = json.loads(request)
        if "offsets" in asked:
            # Asked for the initial one, we have all from the first line on.
            number = 0 if asked["offsets"] == "initial" else latest(sys.argv[1])
            output.write(b"%d" % number + EOM)
        else:
            for message in extract(sys.argv[1], asked["start"], asked["end"]):
                output.write(message + EOM)
        output.write(EOP)


if __name__ == "__main__":
    main()
