"""
Workers at both ends: one extracts numbers, the others load them into files by epoch.

Arguments: ``extract``, the number of messages, and the number of keys; or ``load``; or
``commit`` or ``abort``, and the epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import rmtree

from etlstage import worker


def numbers(start: int, end: int) -> Iterator[bytes]:
    """Yield the messages of a range."""
    keys = int(sys.argv[3])
    yield from (b"[%d, %d]" % (n % keys, n) for n in range(start, end))


def load(messages: Sequence[bytes]) -> None:
    """Append rows to a file of this attempt, apart from the output."""
    folder = Path("aside", f"{os.environ['ETLSTAGE_EPOCH']}")
    folder.mkdir(parents=True, exist_ok=True)
    with folder.joinpath(os.environ["ETLSTAGE_ATTEMPT"]).open("ab") as file:
        file.writelines(message + b"\n" for message in messages)


def commit(_: bytes) -> None:
    """Move the rows of this attempt into the output."""
    epoch = sys.argv[2]
    aside = Path("aside", epoch, os.environ["ETLSTAGE_ATTEMPT"])
    if aside.exists():
        Path("out").mkdir(exist_ok=True)
        aside.rename(Path("out", f"epoch={epoch}"))
        aside.parent.rmdir()


def abort(_: bytes) -> None:
    """Remove the rows of all attempts."""
    epoch = sys.argv[2]
    rmtree(Path("aside", epoch), ignore_errors=True)
    Path("out", f"epoch={epoch}").unlink(missing_ok=True)


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "extract":
        most = int(sys.argv[2])
        worker.extract_cycle(numbers, offsets="supervisor", latest=lambda: most)
    elif what == "load":
        worker.load_batch(load)
    else:
        worker.load(commit if what == "commit" else abort)
