"""Measure in turn, compare by the median, print a table and JSON."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from etlstage import Stage

__all__ = (
    "Row",
    "echo_stage",
    "in_turn",
    "median_pair",
    "memory",
    "messages",
    "paired",
    "sdk_stage",
    "shell_stage",
    "show",
)

MESSAGE_BYTES = 108
"""With its EOM; the size with which the targets were set."""


class Row(NamedTuple):
    """One comparison."""

    what: str
    ours: float
    against: str
    theirs: float
    unit: str
    target: float
    """The ratio ours / theirs to reach; 0 where there is none."""
    at_most: bool = False
    """The target is an upper bound."""

    @property
    def ratio(self) -> float:
        """Ours as a multiple of theirs."""
        return self.ours / self.theirs

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
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        sys.exit("the benchmarks need a C compiler for their reference worker")
    folder = tempfile.mkdtemp(prefix="etlstage-benchmark-")
    target = os.path.join(folder, "echo")
    source = Path(__file__).with_name("echo.c")
    subprocess.run([compiler, "-O2", "-o", target, str(source)], check=True)
    return target


def echo_stage(**options: object) -> Stage:
    """Return a stage with the C worker."""
    return Stage(name="echo", command=(echo_worker(),), **options)  # type: ignore[arg-type]


def sdk_stage(**options: object) -> Stage:
    """Return a stage with an identity worker made with the SDK."""
    identity = "from etlstage import worker; worker.transform(lambda m: (m,))"
    return Stage(name="sdk", command=(sys.executable, "-c", identity), **options)  # type: ignore[arg-type]


def shell_stage(**options: object) -> Stage:
    """Return a stage with an identity worker in shell and awk."""
    script = str(Path(__file__).with_name("echo.sh"))
    return Stage(name="shell", command=("sh", script), **options)  # type: ignore[arg-type]


def paired(
    ours: Callable[[], float], theirs: Callable[[], float], *, rounds: int = 5
) -> tuple[float, float]:
    """
    Measure both in turn and return the pair with the median ratio.

    In turn, because the speed of a shared machine drifts; the first round is a
    warm-up and does not count.
    """
    rates = in_turn({"ours": ours, "theirs": theirs}, rounds=rounds)
    return median_pair(rates["ours"], rates["theirs"])


def in_turn(
    jobs: Mapping[str, Callable[[], float]], *, rounds: int
) -> dict[str, list[float]]:
    """Measure all in turn, as :func:`paired` does two, and return what each gave."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds + 1):
        for name, job in jobs.items():
            found[name].append(job())
    return {name: numbers[1:] for name, numbers in found.items()}


def memory(what: str, module: str, many: int, few: int) -> Row:
    """
    Return the peak memory for many messages beside that for few.

    Args:
        what: Whose memory it is.
        module: Name of one here that, as a program, is given a number of messages and
            prints megabytes; each run has a fresh process.
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
        peak(many),
        f"{few} million",
        peak(few),
        "MB",
        1.2,
        at_most=True,
    )


def median_pair(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return, of what was measured in the same rounds, that with the median ratio."""
    pairs = sorted(zip(ours, theirs, strict=True), key=lambda pair: pair[0] / pair[1])
    return pairs[statistics.median_low(range(len(pairs)))]


def show(rows: Sequence[Row], target: Path | None) -> None:
    """Print the rows as a table and as JSON, and write the JSON to ``target``."""
    table = Table(
        title=f"{platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}"
    )
    for heading in ("what", "ours", "against", "theirs", "unit", "ratio", "target"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        bound = "at most" if row.at_most else "at least"
        table.add_row(
            row.what,
            f"{row.ours:,.4g}",
            row.against,
            f"{row.theirs:,.4g}",
            row.unit,
            f"{row.ratio:.2f}",
            f"{bound} {row.target:g}: {'yes' if row.met else 'NO'}"
            if row.target
            else "",
        )
    Console(width=120).print(table)
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
