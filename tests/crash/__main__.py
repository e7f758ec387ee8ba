"""
The whole of it: ``python -m tests.crash``, which takes its time.

Every step of the commit, and moments by chance, in each order; what is killed is the
whole process, a worker or the JVM. After it nothing is killed, and all has to be there.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.crash.matrix import ORDERS, STEPS, Case, Kill, check, prepare, start


def main() -> None:
    """Kill, start again, and check."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--epoch", type=int, default=20_000)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--order", choices=ORDERS, action="append")
    chosen = parser.parse_args()
    whats = ("process", "worker", "jvm")
    moments = [str(random.uniform(1, 60)) for _ in range(chosen.moments)]  # noqa: S311
    for order in chosen.order or ORDERS:
        kills = [Kill(what, (step, "1")) for step in STEPS for what in whats]
        kills += [
            Kill(whats[n % len(whats)], ("at", moment))
            for n, moment in enumerate(moments)
        ]
        case = Case(order=order, messages=chosen.messages, epoch=chosen.epoch)
        while kills:
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                prepare(folder, case)
                killed = 0
                # As many as it takes until a start comes to its end.
                while kills and start(folder, kills.pop(0))[0]:
                    killed += 1
                code, said = start(folder) if not kills else (0, "")
                assert not code, said
                check(folder, case)
                sys.stdout.write(f"{order}: each once after {killed} kills\n")


if __name__ == "__main__":
    main()
