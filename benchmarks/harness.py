"""Measure in turn, compare pair by pair, print a table and JSON."""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from etlstage import Stage

__all__ = (
    "HEADINGS",
    "Job",
    "Row",
    "cells",
    "compile_c",
    "echo_stage",
    "echo_worker",
    "in_turn",
    "machine",
    "memory",
    "messages",
    "paired",
    "processor_time",
    "sdk_stage",
    "shell_stage",
    "show",
)

T = TypeVar("T")

MESSAGE_BYTES = 108
"""With its EOM; the size with which the targets were set."""


HEADINGS = "what", "ours", "against", "theirs", "unit", "ratio", "target"


class Job(NamedTuple):
    """A job that is timed, to be compared with itself at another commit."""

    passing: int
    """Messages that pass."""
    make: Callable[[], Iterator[Callable[[], object]]]
    """Yields, once, the function to time; what is before and after it is not timed."""
    everywhere: bool = False
    """Most of the work is done by Spark's processes: their time counts, too."""


class Row(NamedTuple):
    """One comparison, of numbers that were measured in the same rounds."""

    what: str
    ours: Sequence[float]
    against: str
    theirs: Sequence[float]
    unit: str
    target: float
    """The ratio ours / theirs to reach; 0 where there is none."""
    at_most: bool = False
    """The target is an upper bound."""

    @property
    def ratios(self) -> list[float]:
        """Ours as a multiple of theirs, in each round."""
        return [one / other for one, other in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """The ratio of the median round."""
        return statistics.median_low(self.ratios)

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        if self.at_most:
            return self.ratio <= self.target
        return self.ratio >= self.target


def messages(count: int) -> list[bytes]:
    """Return ``count`` messages, all different, of ``MESSAGE_BYTES`` with EOM."""
    width = MESSAGE_BYTES - 1
    return [b"%0*d" % (width, number) for number in range(count)]


@functools.cache
def echo_worker() -> str:
    """Compile the C worker and return its path."""
    target = Path(tempfile.mkdtemp(prefix="etlstage-benchmark-"), "echo")
    compile_c(Path(__file__).with_name("echo.c"), target, "-O2")
    return str(target)


def compile_c(source: Path, target: Path, *options: str) -> None:
    """
    Compile one file.

    Raises:
        SystemExit: If there is no C compiler.

    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        sys.exit("the benchmarks need a C compiler, for their reference worker first")
    subprocess.run([compiler, *options, "-o", target, source], check=True)


def echo_stage(**options: object) -> Stage:
    """Return a stage with the C worker."""
    return Stage(name="echo", worker=(echo_worker(),), **options)  # type: ignore[arg-type]


def sdk_stage(**options: object) -> Stage:
    """Return a stage with an identity worker made with the SDK."""
    identity = "from etlstage import worker; worker.transform(lambda m: (m,))"
    return Stage(name="sdk", worker=(sys.executable, "-c", identity), **options)  # type: ignore[arg-type]


def shell_stage(**options: object) -> Stage:
    """Return a stage with an identity worker in shell and awk."""
    script = str(Path(__file__).with_name("echo.sh"))
    return Stage(name="shell", worker=("sh", script), **options)  # type: ignore[arg-type]


def paired(
    ours: Callable[[], float], theirs: Callable[[], float], *, rounds: int = 5
) -> tuple[list[float], list[float]]:
    """
    Measure both in turn and return what each gave, a number a round.

    In turn, because the speed of a shared machine drifts; the first round is a
    warm-up and does not count.
    """
    rates = in_turn({"ours": ours, "theirs": theirs}, rounds=rounds)
    return rates["ours"], rates["theirs"]


def in_turn(jobs: Mapping[str, Callable[[], T]], *, rounds: int) -> dict[str, list[T]]:
    """Measure all in turn, as :func:`paired` does two, and return what each gave."""
    found: dict[str, list[T]] = {name: [] for name in jobs}
    for _ in range(rounds + 1):
        for name, job in jobs.items():
            found[name].append(job())
    return {name: numbers[1:] for name, numbers in found.items()}


def processor_time() -> float:
    """Return processor seconds so far, of this process and all below it."""
    us = psutil.Process()
    # The time of a process that has ended counts for the one that waited for it.
    return sum(sum(one.cpu_times()[:4]) for one in (us, *us.children(recursive=True)))


def memory(what: str, module: str, many: int, few: int) -> Row:
    """
    Return the peak memory for many messages beside that for few.

    Args:
        what: Whose memory it is.
        module: Module of the benchmarks that, as a program in a fresh process, is given
            a number of messages and prints megabytes.
        many: Millions of messages.
        few: Likewise.

    """

    def peak(millions: int) -> float:
        done = subprocess.run(
            [sys.executable, "-m", module, str(millions * 1_000_000)],
            check=True,
            capture_output=True,
            text=True,
        )
        return float(done.stdout)

    return Row(
        f"{what}, {many} million messages",
        [peak(many)],
        f"{few} million",
        [peak(few)],
        "MB",
        1.2,
        at_most=True,
    )


def machine() -> str:
    """Return a description of this machine."""
    kind = platform.processor() or platform.machine()
    return f"{kind}, {os.cpu_count()} cores, Python {platform.python_version()}"


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row, as ``HEADINGS`` name them."""
    bound = "at most" if row.at_most else "at least"
    target = f"{bound} {row.target:g}: {'yes' if row.met else 'NO'}"
    return (
        row.what,
        _spread(row.ours),
        row.against,
        _spread(row.theirs),
        row.unit,
        _spread(row.ratios),
        target if row.target else "",
    )


def show(rows: Sequence[Row], target: Path | None) -> None:
    """Print the rows as a table and as JSON, and write the JSON to ``target``."""
    table = Table(title=machine())
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*cells(row))
    table.caption = "median (minimum to maximum) of the rounds"
    Console(width=140).print(table)
    text = json.dumps(
        [
            row._asdict() | {"ratio": round(row.ratio, 3), "met": row.met}
            for row in rows
        ],
        indent=2,
    )
    print(text)
    if target is not None:
        target.write_text(text + "\n")


def _spread(numbers: Sequence[float]) -> str:
    middle, least, most = statistics.median_low(numbers), min(numbers), max(numbers)
    if len(numbers) == 1:
        return _short(middle)
    return f"{_short(middle)} ({_short(least)} to {_short(most)})"


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
