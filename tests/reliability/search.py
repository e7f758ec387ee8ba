"""``python -m tests.reliability.search N WHAT``: run seeds until one fails."""

from __future__ import annotations

import json
import sys
import time

from tests.simulate import SimulationFailed
from tests.simulate.__main__ import RUNS

__all__ = ("main",)


def main() -> None:
    """Print each seed before it is run, and then the outcome, as lines of JSON."""
    seed, why, run = None, "", RUNS[sys.argv[2]]
    for at in range(int(sys.argv[1])):
        _print(at=at)
        try:
            run([at])
        except SimulationFailed as error:
            seed, why = at, str(error).strip().splitlines()[0]
            break
        except Exception as error:
            seed, why = at, f"{type(error).__name__}: {error}".splitlines()[0]
            break
    _print(seed=seed, why=why, seconds=time.process_time())


def _print(**line: object) -> None:
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
