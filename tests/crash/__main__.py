"""
The whole of it: ``python -m tests.crash``, which takes its time.

Every step of the commit, and moments by chance, in each order; what is killed is the
whole process, a worker, the JVM or Spark's Python worker. A start that was broken off is
followed by the next, in which the next thing is killed, until one comes to its end: then
all has to be there.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from shutil import rmtree

import tests.conftest  # noqa: F401 - has JVMs start quickly
from tests.crash.matrix import (
    ENDS,
    OF_SPARK,
    ORDERS,
    STEPS,
    WHATS,
    Case,
    Kill,
    check,
    check_rows,
    prepare,
    retry,
    start,
)
from tests.database import postgresql


def main() -> None:
    """Kill, start again, and check."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--epoch", type=int, default=20_000)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--order", choices=ORDERS, action="append")
    parser.add_argument("--ends", choices=ENDS, action="append")
    parser.add_argument("--seed", type=int, default=None)
    chosen = parser.parse_args()
    dice = random.Random(chosen.seed)  # noqa: S311
    for order, ends in product(chosen.order or ORDERS, chosen.ends or ENDS):
        with postgresql() if ends == "postgresql" else nullcontext() as server:
            case = Case(order, ends, server, chosen.messages, chosen.epoch)
            trials(case, chosen.moments, dice)


def trials(case: Case, moments: int, dice: random.Random) -> None:
    """Kill everything at every step, and at moments by chance."""
    what, began = f"{case.ends}, order {case.order}", time.monotonic()
    tell(f"{what}: {trial(case, [], dice)}, and nothing was killed")
    seconds = time.monotonic() - began
    whats = [name for name in WHATS if case.ends != "workers" or name not in OF_SPARK]
    kills = [
        Kill(name, (step, str(dice.randrange(2)))) for step in STEPS for name in whats
    ]
    for _ in range(moments):
        moment = dice.uniform(0, seconds)
        kills.append(Kill(dice.choice(whats), ("at", f"{moment:.2f}")))
    dice.shuffle(kills)
    while kills:
        tell(f"{what}: {trial(case, kills, dice)}")


def trial(case: Case, kills: list[Kill], dice: random.Random) -> str:
    """Start until a start comes to its end; check, and return what was killed."""
    folder, starts, code = Path(tempfile.mkdtemp(prefix="crash-")), 0, 1
    prepare(folder, case)
    told = folder / "kills"
    told.touch()
    while code:
        before, kill = told.read_text(), kills.pop() if kills else None
        code, said = start(folder, case, kill)
        starts += 1
        # Only who was killed may fail, and a worker is replaced.
        fails = (
            kill is not None and kill.what != "worker" and told.read_text() != before
        )
        assert fails or not code, f"{folder}, {kill}, start {starts}: {said}"
        if "Traceback" in said:
            tell(said)
    check(folder, case)
    killed = Counter(line.split()[0] for line in told.read_text().splitlines())
    # Wherever it is by then: they take longer and longer.
    seconds = dice.uniform(0.5, 2)
    while not retry(folder, seconds=seconds):
        killed["retry"] += 1
        seconds *= dice.uniform(1.5, 3)
    check_rows(folder, case, set())
    rmtree(folder)
    return f"each once after {starts} starts, killed {dict(killed)}"


def tell(text: str) -> None:
    """Say how it goes."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
