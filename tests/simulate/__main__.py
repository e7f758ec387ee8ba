"""
``python -m tests.simulate``: run pipelines of workers, by seed.

It prints the story of each seed that fails, and exits with 1 if any did.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Final

from tests.simulate import divided, edge, shards
from tests.simulate.pipelines import any_pipeline
from tests.simulate.run import simulate, simulate_all

__all__ = ("PIECE", "main", "run_seeds")

RUNS: Final = {
    "pipelines": partial(simulate, any_pipeline),
    "edges": partial(edge.simulate, edge.any_halves),
    "divided": partial(divided.simulate, divided.any_divided),
    "shards": partial(shards.simulate, shards.any_runners),
}
PIECE: Final = 100  # seeds that a process runs at a time


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds of the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulate",
        description="Run pipelines of workers, with faults, in virtual time.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--edges",
        dest="what",
        action="store_const",
        const="edges",
        help="run two pipelines for each seed, with journals between them",
    )
    what.add_argument(
        "--divided",
        dest="what",
        action="store_const",
        const="divided",
        help="run a pipeline for each seed that is cut at a durable edge, by processes"
        " that are killed, taken over, or run one half each",
    )
    what.add_argument(
        "--shards",
        dest="what",
        action="store_const",
        const="shards",
        help="run loads by shards, with runners that share them",
    )
    parser.add_argument(
        "--seeds",
        type=_seeds,
        default=range(1000),
        metavar="FIRST:END",
        help="which to run, as 0:10000, or one, as 17; default: 0:1000",
    )
    parser.add_argument(
        "--jobs",
        type=_jobs,
        default=1,
        metavar="N",
        help="processes that run them; default: 1",
    )
    given = parser.parse_args(arguments)
    seeds, seconds, failed = given.seeds, 0.0, 0
    for stories, spent in run_seeds(seeds, given.jobs, given.what or "pipelines"):
        failed += len(stories)
        seconds += spent
        for story in stories:
            sys.stdout.write(f"{story}\n")
            sys.stdout.flush()
    found = f"{failed:,} failed" if failed else "none failed"
    sys.stdout.write(
        f"{len(seeds):,} seeds in {seconds:.1f} s of processor time: {found}\n"
    )
    return 1 if failed else 0


def run_seeds(
    seeds: range, jobs: int, what: str = "pipelines"
) -> Iterator[tuple[list[str], float]]:
    """Yield the stories of failed seeds, and the processor time, for each piece."""
    pieces = [seeds[at : at + PIECE] for at in range(0, len(seeds), PIECE)]
    run = partial(simulate_all, RUNS[what])
    if jobs == 1:
        yield from map(run, pieces)
        return
    # A forked process would inherit the state of this one.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, pieces)


def _seeds(text: str) -> range:
    first, found, end = text.partition(":")
    try:
        seeds = (
            range(int(first), int(end)) if found else range(int(text), int(text) + 1)
        )
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise argparse.ArgumentTypeError(
            f"expected FIRST:END, as 0:10000, got {text!r}"
        )
    return seeds


def _jobs(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
