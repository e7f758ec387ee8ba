"""
Transform batches, in plain Python.

Messages that occur more than once in a batch are passed on once. As a T stage whose
supervisor closes the batches: ``command: [python, transform_batch.py]``. With a
number as its argument the worker drives: it asks for one message after the other and
closes its batch when it holds that many.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator


def transform_batch(messages: list[bytes]) -> Iterable[bytes]:
    """Return the messages without repetitions; the batch may be empty."""
    return dict.fromkeys(messages)


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
    """Answer each batch, also an empty one, with its replies and one EOP."""
    output = sys.stdout.buffer
    for batch in batches(int(sys.argv[1]) if sys.argv[1:] else None):
        for reply in transform_batch(batch):
            output.write(reply + EOM)
        output.write(EOP)


if __name__ == "__main__":
    main()
