"""
Run the whole crash matrix: ``python -m tests.crash``; this takes long.

A cell is a pair of ends around the stages, and the stages' order. The whole process, a
worker, the JVM or Spark's Python worker is killed: first at every step of the commit in
each cell, then at random moments, in one cell after the other. After each start that
was killed the pipeline is started again, with the next kills, until everything is
recorded as committed; then every message must be there once.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random, randrange
from typing import Final

import tests.conftest  # noqa: F401 - has JVMs start quickly
from tests.crash.cell import Cell
from tests.crash.matrix import ENDS, EXECUTORS, ORDERS, Case, Kill
from tests.database import PostgreSQL, postgresql

ENOUGH: Final = 3  # failures of a cell, after which no more trials of it are run


def main() -> int:
    """Kill, start again, and check; return 1 if anything was wrong."""
    chosen = arguments()
    seed = randrange(10**6) if chosen.seed is None else chosen.seed  # noqa: S311
    names = [
        (ends, order)
        for ends in chosen.ends or ENDS
        for order in chosen.order
        or (["total"] if ends.startswith(EXECUTORS) else ORDERS)
    ]
    while chosen.first and "-".join(names[0]) != chosen.first:
        names.append(names.pop(0))
    with served(ends for ends, _ in names) as server:
        cells = [
            Cell(
                Case(
                    order,
                    ends,
                    server.another(f"{ends}-{order}")
                    if server and "postgresql" in ends
                    else None,
                    chosen.messages,
                    chosen.epoch,
                ),
                Random(f"{seed} {ends} {order}"),  # noqa: S311
                tell,
            )
            for ends, order in names
        ]
        if chosen.no_steps:
            for cell in cells:
                cell.steps.clear()
        tell(f"seed {seed}, cells {', '.join(map(str, cells))}")
        try:
            if chosen.again is not None:
                cells[0].trial(chosen.again)
            else:
                run(cells, chosen.moments, chosen.jobs)
        except KeyboardInterrupt:
            tell("interrupted")
        finally:
            report(cells)
            if chosen.write is not None:
                chosen.write.write_text(json.dumps([cell.figures() for cell in cells]))
    return any(cell.failures for cell in cells)


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--epoch", type=int, default=10_000)
    parser.add_argument("--moments", type=int, default=200, help="in each cell")
    parser.add_argument("--no-steps", action="store_true", help="moments alone")
    parser.add_argument("--jobs", type=int, default=2, help="cells at the same time")
    parser.add_argument("--order", choices=ORDERS, action="append")
    parser.add_argument("--ends", choices=ENDS, action="append")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--first", metavar="CELL", help="begin with this one")
    parser.add_argument("--write", metavar="FILE", type=Path, help="figures, as JSON")
    parser.add_argument(
        "--again",
        metavar="KILLS",
        nargs="*",
        type=lambda text: [Kill.of(kill) for kill in text.split(",") if kill],
        help="one trial: what is killed in each start, as a trial that failed has told",
    )
    chosen = parser.parse_args()
    if chosen.first and chosen.first.rpartition("-")[0] not in (chosen.ends or ENDS):
        parser.error(f"no cell {chosen.first}")
    return chosen


@contextmanager
def served(ends: Iterator[str]) -> Iterator[PostgreSQL | None]:
    """Yield a PostgreSQL server if any of the ends needs one, otherwise None."""
    wanted = any("postgresql" in end for end in ends)
    with postgresql() if wanted else nullcontext() as server:
        yield server


def run(cells: Sequence[Cell], moments: int, jobs: int) -> None:
    """Kill at every step in each cell, then at random moments, the cells in turn."""
    waiting = list(cells)
    lock = threading.Lock()
    stopped = threading.Event()

    def take() -> Cell | None:
        with lock:
            left = [
                cell
                for cell in waiting
                if (cell.steps or cell.moments < moments) and cell.failures < ENOUGH
            ]
            # Kills at steps first, and those of the first cell before the next cell's.
            cell = min(
                left, key=lambda cell: (not cell.steps, cell.moments), default=None
            )
            if cell is not None:
                waiting.remove(cell)
            return cell

    def work() -> None:
        while not stopped.is_set() and (cell := take()):
            cell.trial()
            with lock:
                waiting.append(cell)

    threads = ThreadPoolExecutor(jobs)
    try:
        for done in [threads.submit(work) for _ in range(jobs)]:
            done.result()
    finally:
        # An interrupt reaches the processes of the trials in progress, too.
        stopped.set()
        threads.shutdown(wait=False)


def report(cells: Sequence[Cell]) -> None:
    """Print how often each kind of process was killed."""
    tell("done:")
    for cell in cells:
        sys.stdout.write(cell.summary())
    total = sum(cell.killed.total() for cell in cells)
    failed = sum(cell.failures for cell in cells)
    sys.stdout.write(f"{total} kills, {failed} failures\n")


def tell(text: str) -> None:
    """Print a line of progress."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # A background process of a shell would ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
