"""
Load one message at a time.

Each message becomes a line of a file. As an L stage:
``command: [python, load.py, out.txt]``.
"""

from __future__ import annotations

import os
import sys

from etlstage import worker


def main() -> None:
    """Append messages to the file for as long as they come."""
    with open(sys.argv[1], "ab") as target:

        def load(message: bytes) -> None:
            target.write(message + b"\n")
            # When this function returns, the supervisor may forget the message.
            target.flush()
            os.fsync(target.fileno())

        worker.load(load)


if __name__ == "__main__":
    main()
