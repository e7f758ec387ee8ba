"""
Extract what is new whenever asked, in plain Python; the worker knows how far it got.

Each line that was appended to a log becomes a message. As an E stage,
``dialect: {mode: cyclic}``, ``offsets: {by: worker}``:
``command: [python, extract_cycle_worker_offsets.py, app.log, app.offset]``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path


def extract(log: Path, offset: Path) -> Iterator[list[bytes]]:
    """Yield the lines that are new, once per request; a line still open is not."""
    position = int(offset.read_text()) if offset.exists() else 0
    with log.open("rb") as source:
        while True:
            source.seek(position)
            new, newline, _ = source.read().rpartition(b"\n")
            yield new.split(b"\n") if newline else []
            # The next request is the receipt for the last reply, so the offset is
            # stored only now. When the supervisor dies in between, the same lines
            # are sent again: twice rather than never.
            position += len(new + newline)
            store(offset, position)


def store(offset: Path, position: int) -> None:
    """Replace the stored offset at once: a crash leaves the old one or the new one."""
    fresh = offset.with_name(offset.name + ".new")
    fresh.write_text(str(position))
    fresh.replace(offset)


def marker(name: str, default: str) -> bytes:
    r"""Return a marker; it comes escaped as ``\ooo``, so that even NUL can travel."""
    text = os.environ.get(name, default)
    return text.encode().decode("unicode_escape").encode("latin-1")


EOM = marker("ETLSTAGE_EOM", r"\012")
EOP = marker("ETLSTAGE_EOP", r"\000")


def requests() -> Iterator[bytes]:
    """Yield each request, an empty message, until the input ends."""
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
    """Answer each request with what is new, maybe nothing, and one EOP."""
    output = sys.stdout.buffer
    cycles = extract(Path(sys.argv[1]), Path(sys.argv[2]))
    for _ in requests():
        for message in next(cycles):
            output.write(message + EOM)
        output.write(EOP)


if __name__ == "__main__":
    main()
