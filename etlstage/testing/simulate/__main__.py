"""
``python -m etlstage.testing.simulate``: run pipelines of three stages, by seed.

It prints the story of each seed that fails, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from etlstage.testing.simulate.pipelines import three_stages
from etlstage.testing.simulate.run import SimulationFailed, simulate

__all__ = ("main",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m etlstage.testing.simulate",
        description="Run pipelines of three stages, with faults, in virtual time.",
    )
    parser.add_argument(
        "--seeds",
        type=_seeds,
        default=range(1000),
        metavar="FIRST:END",
        help="which to run, as 0:10000, or one, as 17; default: 0:1000",
    )
    seeds = parser.parse_args(arguments).seeds
    began, failed = time.process_time(), 0
    rest = seeds
    while rest:
        try:
            simulate(three_stages, rest)
        except SimulationFailed as error:
            failed += 1
            sys.stdout.write(f"{error}\n")
            rest = range(error.seed + 1, rest.stop)
        else:
            break
    seconds = time.process_time() - began
    found = f"{failed:,} failed" if failed else "none failed"
    sys.stdout.write(
        f"{len(seeds):,} seeds in {seconds:.1f} s of processor time: {found}\n"
    )
    return 1 if failed else 0


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


if __name__ == "__main__":
    sys.exit(main())
