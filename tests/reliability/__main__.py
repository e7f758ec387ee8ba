"""
Write ``tests/RELIABILITY.md``: ``python -m tests.reliability``; this takes long.

Runs seeds of the simulation, and searches for each planted bug. With ``--ran FILE`` what
was interrupted goes on behind the last seed of the file. The section about the crash
matrix is written separately, with ``--kills``, from the files that ``python -m
tests.crash --write FILE`` has written.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from etlstage import __version__
from tests.reliability.planted import Found, bugs, find
from tests.simulate.__main__ import PIECE, run_seeds
from tests.simulate.pipelines import STEPS, any_pipeline

__all__ = ("main", "run")

PAGE: Final = Path(__file__).parents[1] / "RELIABILITY.md"
_KILLS: Final = "\n## Crash matrix\n"
_KILLED: Final = ("at a step", "at a moment", "process", "worker", "jvm", "python")
_SAMPLE: Final = 20_000  # seeds that are drawn for the table of faults, and not run
_HEAD: Final = f"""\
# Reliability by figures

Written by `python -m tests.reliability`, at version {__version__}. A seed is a whole
pipeline in virtual time, with every choice drawn from that number: stages, batches,
orders, windows, faults of workers, ends that fail, a disk that fails, where a run is
killed. What comes out is compared with what the stages' functions make of the messages.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; return 1 if a seed has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability")
    parser.add_argument("--first", type=int, default=0, help="first seed to run")
    parser.add_argument("--seeds", type=int, default=100_000, help="how many to run")
    parser.add_argument("--search", type=int, default=5000, help="seeds for a bug")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument(
        "--ran",
        metavar="FILE",
        type=Path,
        help="add the seeds that were run to FILE, and go on behind those in it",
    )
    parser.add_argument(
        "--kills",
        metavar="FILE",
        nargs="+",
        type=Path,
        help="write the section of the crash matrix alone, from these files",
    )
    chosen = parser.parse_args(arguments)
    others, _, kills = PAGE.read_text().partition(_KILLS)
    if chosen.kills:
        PAGE.write_text("\n".join((f"{others}{_KILLS}", *_killed(chosen.kills))))
        return 0
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    failed, seconds = run(seeds, chosen.jobs, chosen.ran)
    found: list[Found] = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for one in pool.map(partial(find, seeds=chosen.search), bugs()):
            found.append(one)
            _tell(f"{one.bug.subject}: {one.bug.name}: {_after(one)}")
    ran = (
        f"Seeds {seeds.start:,} to {seeds.stop - 1:,} were run, in {seconds / 60:,.0f}"
        f" minutes of processor time: {failed:,} failed."
    )
    parts = (_HEAD, f"{ran}\n", *_matrix(), *_planted(found, chosen.search))
    PAGE.write_text("\n".join(parts) + (f"{_KILLS}{kills}" if kills else ""))
    return 1 if failed else 0


def run(seeds: range, jobs: int, file: Path | None) -> tuple[int, float]:
    """Run what ``file`` lacks of seeds; return how many of all failed, and the seconds."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    ran = [json.loads(line) for line in lines]
    at = seeds.start
    for first, end, _, _ in ran:
        if first != at or end > seeds.stop:
            message = f"{file}: seeds {first} to {end - 1}: expected {at} next"
            raise SystemExit(message)
        at = end
    for stories, spent in run_seeds(range(at, seeds.stop), jobs):
        end = min(at + PIECE, seeds.stop)
        ran.append((at, end, len(stories), spent))
        for story in stories:
            _tell(story)
        if file:
            with file.open("a") as log:
                log.write(f"{json.dumps(ran[-1])}\n")
        at = end
    return sum(failed for *_, failed, _ in ran), sum(spent for *_, spent in ran)


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _matrix() -> Iterator[str]:
    """Yield the section about the faults that are drawn, and where runs are killed."""
    faults, kinds, broken = Counter[tuple[str, str]](), Counter[str](), Counter[str]()
    for seed in range(_SAMPLE):
        drawn = any_pipeline(random.Random(f"{seed}"))  # noqa: S311
        mine = {f.kind.value for plan in drawn.faults.values() for f in plan.faults}
        steps = {
            at[0] if isinstance(at, tuple) else "at any time" for at in drawn.breaks
        }
        kinds.update(mine)
        broken.update([drawn.broken] if drawn.broken else [])
        faults.update((kind, step) for kind in mine for step in steps)
    columns = (*STEPS, "at any time")
    rows = (
        (f"`{kind}`", count, *(faults[kind, step] for step in columns))
        for kind, count in sorted(kinds.items())
    )
    yield f"## What goes wrong\n\nOf {_SAMPLE:,} seeds so many have a worker with a fault"
    yield "of a kind, and so many of them a run that is killed at a step of a commit:\n"
    yield _table(("fault", "seeds", *columns), rows)
    yield "So many have an end that fails, or a disk that holds the state directory:\n"
    yield _table(("end", "seeds"), sorted(broken.items()))


def _planted(found: Sequence[Found], searched: int) -> Iterator[str]:
    """Yield the section about the planted bugs."""
    seen = [one.seed + 1 for one in found if one.seed is not None]
    yield f"## Planted bugs\n\n{len(seen)} of {len(found)} bugs were found within"
    yield f"{searched:,} seeds, half of them within {statistics.median(seen):,.0f}. Each"
    yield "replaces some lines of the package, see `reliability/planted.toml`.\n"
    rows = ((one.bug.subject, one.bug.name, _after(one)) for one in found)
    yield _table(("subject", "bug", "found after"), rows)


def _killed(files: Sequence[Path]) -> Iterator[str]:
    """Yield the section about the crash matrix."""
    cells = [cell for file in files for cell in json.loads(file.read_text())]
    cells = [cell for cell in cells if cell["kills"]]
    rows, total = list[tuple[object, ...]](), 0
    for cell in cells:
        killed = Counter[str]()
        for what, when, count in cell["kills"]:
            killed["at a moment" if when == "moment" else "at a step"] += count
            killed[what] += count
        total += killed["at a step"] + killed["at a moment"]
        counts = (killed[column] for column in _KILLED)
        rows.append((cell["cell"], cell["trials"], *counts, cell["failures"]))
    failed = sum(cell["failures"] for cell in cells)
    yield f"{total:,} kills in {len(cells)} cells; in {failed:,} trials something was lost,"
    yield "doubled or out of order. A trial is started again until all is loaded; one that"
    yield "was not is left out, but for what was killed in it. Written by `--kills`.\n"
    yield _table(("cell", "trials", *_KILLED, "failed"), rows)


def _after(one: Found) -> str:
    """Return the number of seeds after which a bug was found."""
    return "not found" if one.seed is None else f"{one.seed + 1:,}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main())
