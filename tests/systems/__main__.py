"""
Draw systems, run them, kill at random, check: ``python -m tests.systems``.

Each ``etlstage run`` may be killed, or stopped by a signal, and any worker killed, at any
time. Who was is started again, until all is loaded. A system that is wrong is left in its
folder, and drawn again by its seed.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tests.systems.run import run


def main() -> int:
    """Run so many systems; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.systems")
    parser.add_argument("--systems", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))  # noqa: S311
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))  # noqa: S108
    chosen = parser.parse_args()
    failures = kills = 0
    for seed in range(chosen.seed, chosen.seed + chosen.systems):
        ran = run(seed, chosen.folder)
        kills += len(ran.kills)
        failures += bool(ran.wrong)
        sys.stdout.write(f"{ran}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{chosen.systems} systems, {kills} kills, {failures} wrong\n")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
