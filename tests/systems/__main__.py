"""
Draw systems, run them, kill at random, check: ``python -m tests.systems``.

At any time an ``etlstage run`` may be killed or stopped by a signal, or a worker be
killed. Runs are started again until everything is loaded. The folder of a system that
is wrong is kept; its seed draws the same system again.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from pathlib import Path

from tests.cli.forked import Forks, environment
from tests.systems.run import run


def main() -> int:
    """Run the systems; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.systems")
    parser.add_argument("--systems", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))  # noqa: S311
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))  # noqa: S108
    chosen = parser.parse_args()
    failures = kills = 0
    # A background process of a shell ignores SIGINT, and each run would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Forks(environment()) as forks:
        for seed in range(chosen.seed, chosen.seed + chosen.systems):
            ran = run(seed, chosen.folder, forks)
            kills += len(ran.kills)
            failures += bool(ran.wrong)
            sys.stdout.write(f"{ran}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{chosen.systems} systems, {kills} kills, {failures} wrong\n")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
