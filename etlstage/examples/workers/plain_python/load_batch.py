"""
Load batches, in plain Python.

Each batch becomes one transaction of a database: all of it is there, or nothing. As
an L stage whose supervisor closes the batches:
``command: [python, load_batch.py, out.sqlite]``. With a number after the file the
worker drives: it closes its batch when it holds that many messages.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing


def load_batch(messages: list[bytes], database: sqlite3.Connection) -> None:
    """Write a batch; it is on the disk when this returns."""
    with database:
        database.executemany(
            "INSERT INTO messages VALUES (?)", [(message,) for message in messages]
        )


def marker(name: str, default: str) -> bytes:
    r"""Return a marker; it comes escaped as ``\ooo``, so that even NUL can travel."""
    text = os.environ.get(name, default)
    return text.encode().decode("unicode_escape").encode("latin-1")


EOM = marker("ETLSTAGE_EOM", r"\012")
EOP = marker("ETLSTAGE_EOP", r"\000")
EOB = marker("ETLSTAGE_EOB", r"\027")
BNC = marker("ETLSTAGE_BNC", r"\005")


def requests() -> Iterator[bytes | None]:
    """Yield each whole message, and None where the supervisor closes a batch."""
    buffer = b""
    while True:
        # About to wait: what we hold back is what the supervisor waits for.
        sys.stdout.buffer.flush()
        chunk = os.read(0, 65536)
        if not chunk:
            return
        buffer += chunk
        position = 0
        while True:
            # EOB stands where a message would begin, and no EOM follows it.
            if buffer.startswith(EOB, position):
                position += len(EOB)
                yield None
            elif (end := buffer.find(EOM, position)) >= 0:
                yield buffer[position:end]
                position = end + len(EOM)
            else:
                break
        buffer = buffer[position:]


def batches(size: int | None) -> Iterator[list[bytes]]:
    """Yield whole batches; the end of the input closes the last one."""
    batch: list[bytes] = []
    for message in requests():
        if message is not None:
            batch.append(message)
            if size is None:
                continue
            if len(batch) < size:
                sys.stdout.buffer.write(BNC)
                continue
        yield batch
        batch = []
    if batch:
        yield batch


def main() -> None:
    """Answer each batch, also an empty one, with EOP alone."""
    with closing(sqlite3.connect(sys.argv[1])) as database:
        database.execute("CREATE TABLE IF NOT EXISTS messages (message BLOB)")
        for batch in batches(int(sys.argv[2]) if sys.argv[2:] else None):
            load_batch(batch, database)
            # EOP is the receipt: the supervisor may forget the batch now.
            sys.stdout.buffer.write(EOP)


if __name__ == "__main__":
    main()
