"""Engine ``spark`` on a cluster: executors that are processes, and can be killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from etlstage.pipeline.dead_letter import DeadLetter, letter_files, read_letters
from tests.spark.driver import Driver
from tests.spark.processes import TELL, are_gone, parent, wait_for_pids

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]

ONCE = f"""{TELL}
from etlstage import worker

def answer(message):
    if message == b"row 100":
        os._exit(3)
    if message == b"row 1500" and not any(os.scandir("pids")):
        tell_and_hang("pids")
    return (message.upper(),)

worker.transform(answer)
"""
"""Dies of one message, always, and hangs at a later one, once."""
FILE = """\
name: p
engine: spark
extract:
  spark: {table: numbers}
transform:
  - name: once
    worker: {command: [python, once.py]}
    timeout: {message: null}
    restart: {delay: 10ms}
  - name: count
    worker: {command: [sh, -c, 'while IFS= read -r x; do printf "%s\\n\\0" "$$x"; done']}
load:
  spark: {format: parquet, path: out}
"""


def running(path: Path, rows: int = 4000) -> str:
    """Return source that runs a pipeline over numbered rows in two partitions."""
    return f"""
import anyio
from etlstage.pipeline import Pipeline

numbers = spark.range(0, {rows}, 1, 2).selectExpr("concat('row ', id) as text")
numbers.createOrReplaceTempView("numbers")
report = anyio.run(Pipeline.from_yaml({str(path)!r}, spark=spark).run)
report.ledger.check(whole=report.status == "done")
result = {{
    "status": report.status,
    "error": report.error and str(report.error),
    "counts": [
        [a.received, a.done, a.dead, a.failed, a.lost, a.produced]
        for a in report.ledger
    ],
}}
"""


def loaded(cluster: Driver, path: Path) -> list[str]:
    """Return the values in the output, sorted."""
    frame = f"spark.read.parquet({str(path)!r}).collect()"
    found: list[str] = cluster.run(f"result = [row.value for row in {frame}]")
    return sorted(found)


def letters(folder: Path) -> list[tuple[int, bytes]]:
    """Return place and message of what the run in ``folder`` has put aside."""
    found = []
    for path in letter_files(folder / ".etlstage" / "p"):
        for letter in read_letters(path):
            assert isinstance(letter, DeadLetter)
            found.append((letter.place, letter.message))
    return found


@pytest.mark.parametrize("victim", ["python worker", "executor"])
def test_killed_process_costs_and_doubles_nothing(
    cluster: Driver, tmp_path: Path, victim: str
) -> None:
    """Rows, accounts and the letter that was written before are there once."""
    (tmp_path / "once.py").write_text(ONCE)
    (tmp_path / "p.yaml").write_text(FILE)
    (pids := tmp_path / "pids").mkdir()
    job = cluster.start(running(tmp_path / "p.yaml"))
    host, own, child = wait_for_pids(pids)
    executor = parent(parent(host))
    pid = {"python worker": host, "executor": executor}[victim]
    os.kill(pid, signal.SIGKILL)
    result: dict[str, Any] = job.result(150)
    assert result == {
        "status": "done",
        "error": None,
        "counts": [
            [0, 0, 0, 0, 0, 4000],
            [4000, 3999, 1, 0, 0, 3999],
            [3999, 3999, 0, 0, 0, 3999],
            [3999, 3999, 0, 0, 0, 0],
        ],
    }
    expected = sorted(f"ROW {n}" for n in range(4000) if n != 100)
    assert loaded(cluster, tmp_path / "out") == expected
    assert letters(tmp_path) == [(100, b"row 100")]
    assert are_gone([pid, host, own, child])
