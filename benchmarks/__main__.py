"""Run the benchmarks that are named, or all."""

from __future__ import annotations

import argparse
import importlib
import logging
from pathlib import Path

import structlog

from benchmarks.harness import show

QUESTIONS = (
    "framing",
    "stream",
    "lockstep",
    "sdk_worker",
    "refusals",
    "pairing",
    "supervision",
    "import_time",
    "local_engine",
    "executor",
    "executor_chain",
    "executor_growth",
    "executor_memory",
    "driver_memory",
)


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
    args = parser.parse_args()
    unknown = set(args.questions) - set(QUESTIONS)
    if unknown:
        parser.error(f"no such question: {', '.join(sorted(unknown))}")
    quiet = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=quiet)
    rows = []
    for name in args.questions or QUESTIONS:
        rows += importlib.import_module(f"benchmarks.{name}").measure()
    show(rows, args.json)


if __name__ == "__main__":
    main()
