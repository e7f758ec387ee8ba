"""Clean names: drop the blanks around them, refuse a line without a name."""

from __future__ import annotations

from collections.abc import Iterator

from etlstage import worker


def clean(message: bytes) -> Iterator[bytes]:
    """Yield the name; yield nothing to drop a message, more to make several of it."""
    name = message.strip()
    if not name:
        raise worker.Refuse("no name")
    yield name


if __name__ == "__main__":
    worker.transform(clean)
