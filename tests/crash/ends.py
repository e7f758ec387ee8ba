"""
Workers at both ends: numbers come from one, and go into files by epochs.

Arguments: ``extract``, how many there are, and how many keys they have; ``load``; ``commit`` and ``abort``, which
are given the epoch.
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
    """Keep rows apart, in a file that is this process's."""
    folder = Path("aside", f"{os.environ['ETLSTAGE_EPOCH']}")
    folder.mkdir(parents=True, exist_ok=True)
    with folder.joinpath(os.environ["ETLSTAGE_ATTEMPT"]).open("ab") as file:
        file.writelines(message + b"\n" for message in messages)


def commit(_: bytes) -> None:
    """Put the rows of this attempt where rows are read."""
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
