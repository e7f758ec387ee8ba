"""
Extract what is new whenever asked; the worker knows how far it got.

Each line that was appended to a log becomes a message. As an E stage,
``dialect: {mode: cyclic}``, ``offsets: {by: worker}``:
``command: [python, extract_cycle_worker_offsets.py, app.log, app.offset]``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from etlstage import worker


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


def main() -> None:
    """Answer each request with what is new."""
    cycles = extract(Path(sys.argv[1]), Path(sys.argv[2]))

    def cycle() -> Iterable[bytes]:
        return next(cycles)

    worker.extract_cycle(cycle, offsets="worker")


if __name__ == "__main__":
    main()
