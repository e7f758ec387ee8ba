"""
Load batches.

Each batch becomes one transaction of a database: all of it is there, or nothing. As
an L stage whose supervisor closes the batches:
``command: [python, load_batch.py, out.sqlite]``; with a number after the file the
worker closes its batch when it holds that many messages.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing

from etlstage import worker


def main() -> None:
    """Insert batches into the database for as long as they come."""
    with closing(sqlite3.connect(sys.argv[1])) as database:
        database.execute("CREATE TABLE IF NOT EXISTS messages (message BLOB)")

        def load_batch(messages: list[bytes]) -> None:
            # When this function returns, the supervisor may forget the batch.
            with database:
                database.executemany(
                    "INSERT INTO messages VALUES (?)",
                    [(message,) for message in messages],
                )

        if sys.argv[2:]:
            worker.load_batch(load_batch, driver="worker", size=int(sys.argv[2]))
        else:
            worker.load_batch(load_batch)


if __name__ == "__main__":
    main()
