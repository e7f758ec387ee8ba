"""Run the benchmarks that are named, or all."""

from __future__ import annotations

import argparse
import importlib
import logging
from pathlib import Path

import structlog

from benchmarks.against import compare
from benchmarks.harness import machine, show
from benchmarks.report import page

QUESTIONS = (
    "framing",
    "stream",
    "lockstep",
    "cocaine",
    "cocaine_sdk",
    "kcl",
    "leases",
    "heartbeats",
    "sdk_worker",
    "refusals",
    "pairing",
    "supervision",
    "sequencer",
    "journal",
    "journal_spark",
    "growth",
    "import_time",
    "pipe",
    "local_engine",
    "files",
    "exactly_once",
    "executor",
    "executor_chain",
    "executor_growth",
    "executor_memory",
    "driver_memory",
)
COMPARABLE = (
    "framing",
    "stream",
    "lockstep",
    "cocaine",
    "kcl",
    "sdk_worker",
    "sequencer",
    "journal",
    "local_engine",
    "executor",
)
"""Questions with ``JOBS``, which can be timed by themselves."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument(
        "questions",
        nargs="*",
        metavar="QUESTION",
        help=f"one or more of {', '.join(QUESTIONS)}; default: all",
    )
    parser.add_argument("--json", type=Path, help="also write the JSON to this file")
    parser.add_argument(
        "--html",
        type=Path,
        help="also write a page to this file, with growth as a plot",
    )
    parser.add_argument(
        "--against",
        metavar="COMMIT",
        help="compare with the package of that commit;"
        f" default questions: {', '.join(COMPARABLE)}",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="with --against; default: 5"
    )
    args = parser.parse_args()
    known = COMPARABLE if args.against else QUESTIONS
    if unknown := set(args.questions) - set(known):
        parser.error(f"no such question: {', '.join(sorted(unknown))}")
    quiet = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=quiet)
    questions = args.questions or known
    if args.against:
        rows = compare(args.against, questions, args.rounds)
    else:
        rows = []
        for name in questions:
            rows += importlib.import_module(f"benchmarks.{name}").measure()
    show(rows, args.json)
    if args.html is not None:
        args.html.write_text(page(rows, machine()))


if __name__ == "__main__":
    main()
