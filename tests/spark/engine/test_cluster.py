"""Engine ``spark`` on a cluster, whose executors are processes that can be killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tarfile
from pathlib import Path
from typing import Any

import pytest

from etlstage.pipeline.dead_letter.files import letter_files, read_letters
from etlstage.pipeline.dead_letter.letter import DeadLetter
from tests.spark.driver import Driver, Failed
from tests.spark.processes import TELL, are_gone, parent, wait_for_pids

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("cluster of engine"),  # they share a cluster
]

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
"""A worker that always exits on one message, and hangs on a later one, once."""
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
    """Return code that runs a pipeline over numbered rows in two partitions."""
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
        [a.received, a.done, a.dead, a.failed, a.unprocessed, a.produced]
        for a in report.ledger
    ],
}}
"""


def loaded(cluster: Driver, path: Path, format: str = "text") -> list[str]:  # noqa: A002
    """Return the values in the output, sorted."""
    frame = f"spark.read.format({format!r}).load({str(path)!r}).collect()"
    found: list[str] = cluster.run(f"result = [row.value for row in {frame}]")
    return sorted(found)


def letters(folder: Path) -> list[tuple[int, bytes]]:
    """Return place and message of each dead letter of the run in ``folder``."""
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
    """Rows and accounts are right, and the earlier letter is there once."""
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
    assert loaded(cluster, tmp_path / "out", "parquet") == expected
    assert letters(tmp_path) == [(100, b"row 100")]
    assert are_gone([pid, host, own, child])


CLEAN = """\
import os
from etlstage import worker

with open("words.txt") as file:
    words = file.read().encode()

def clean(message):
    if message == b"row 3":
        os._exit(3)
    return (b" ".join([message, words, os.getcwd().encode(), __file__.encode()]),)

worker.transform(clean)
"""
NUMBER = """\
#!/bin/sh
while IFS= read -r x; do printf '%s %s\\n\\0' "$x" "$1"; done
"""
SHIPPING = """\
name: p
engine: {engine}
state: {state}
spark: {{files: [bin/clean.py, bin/../words.txt], archives: ["tools.tar.gz#tools"]}}
extract:
  spark: {{{source}}}
transform:
  - name: clean
    worker: {{command: [python, bin/clean.py]}}
    restart: {{delay: 10ms}}
  - name: number
    worker: {{command: [tools/bin/number, -n]}}
  - name: same
    worker: {{command: [sh, -c, 'while IFS= read -r x; do printf "%s\\n\\0" "$$x"; done']}}
load:
  spark: {{format: text, path: {out}}}
"""
REMOVING = """
import shutil
from etlstage.spark.ship.artifact import Shipment

def send_and_remove(self, spark, send=Shipment.send):
    send(self, spark)
    shutil.rmtree(self._folder, ignore_errors=True)

Shipment.send = send_and_remove
"""
"""Removes the pipeline's folder once all of its files have been sent."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files that ``SHIPPING`` names, and the archive, once."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("bin", "tools/bin"):
        (folder / name).mkdir(parents=True)
    (folder / "bin/clean.py").write_text(CLEAN)
    (folder / "words.txt").write_text("some words")
    (folder / "tools/bin/number").write_text(NUMBER)
    (folder / "tools/bin/number").chmod(0o755)
    with tarfile.open(folder / "tools.tar.gz", "w:gz") as archive:
        archive.add(folder / "tools/bin", "bin")
    return folder


def test_programs_go_to_the_executors(
    cluster: Driver, programs: Path, tmp_path: Path
) -> None:
    """Engine spark ships them, and needs the folder no more; engine local does not."""
    made = {}
    for engine in ("local", "spark"):
        folder = tmp_path / engine
        shutil.copytree(programs, folder)
        out, state = tmp_path / f"out-{engine}", tmp_path / f"state-{engine}"
        text = SHIPPING.format(
            engine=engine, source="table: numbers", out=out, state=state
        )
        (folder / "p.yaml").write_text(text)
        before = REMOVING if engine == "spark" else ""
        result = cluster.run(before + running(folder / "p.yaml", 10))
        assert result["error"] is None
        assert result["counts"][1:] == [
            [10, 9, 1, 0, 0, 9],
            *[[9, 9, 0, 0, 0, 9]] * 2,
            [9, 9, 0, 0, 0, 0],
        ]
        rows = [row.split() for row in loaded(cluster, out)]
        assert [row[:4] + row[6:] for row in rows] == [
            ["row", str(n), "some", "words", "-n"] for n in range(10) if n != 3
        ]
        (path,) = letter_files(state)
        (letter,) = read_letters(path)
        assert isinstance(letter, DeadLetter)
        text = json.dumps(letter.config).replace(str(folder), "...")
        made[engine] = rows, text
    (local, wanted), (shipped, found) = made["local"], made["spark"]
    assert found == wanted
    assert {tuple(row[4:6]) for row in local} == {
        (str(tmp_path / "local"), str(tmp_path / "local/bin/clean.py"))
    }
    assert not (tmp_path / "spark").exists()
    # One per executor.
    folders = {row[4] for row in shipped}
    assert len(folders) == 2
    assert not [folder for folder in folders if folder.startswith(str(tmp_path))]


def test_programs_go_to_the_executors_of_a_stream(
    cluster: Driver, programs: Path, tmp_path: Path
) -> None:
    """The batches of a stream have a session of their own."""
    shutil.copytree(programs, tmp_path / "p")
    (tmp_path / "in").mkdir()
    for part in range(2):
        lines = "".join(f"row {n}\n" for n in range(part * 5, part * 5 + 5))
        (tmp_path / f"in/{part}.txt").write_text(lines)
    text = SHIPPING.format(
        engine="streaming",
        source=f'format: text, path: {tmp_path / "in"}, options: {{maxFilesPerTrigger: "1"}}',
        out=tmp_path / "out",
        state=tmp_path / "state",
    )
    (tmp_path / "p/p.yaml").write_text(text)
    result = cluster.run(REMOVING + running(tmp_path / "p/p.yaml"))
    assert result["error"] is None
    assert result["counts"][-1] == [9, 9, 0, 0, 0, 0]
    rows = sorted(row.split()[1] for row in loaded(cluster, tmp_path / "out"))
    assert rows == [str(n) for n in range(10) if n != 3]
    assert not (tmp_path / "p").exists()


def test_cluster_takes_a_file_again_as_it_was(cluster: Driver, tmp_path: Path) -> None:
    """It would run the old content of a file that has changed, so that is an error."""
    program = tmp_path / "again.py"
    program.write_text("one")
    source = f"from etlstage.spark import ship; ship(spark, {str(program)!r})"
    cluster.run(source)
    cluster.run(source)
    program.write_text("two")
    with pytest.raises(Failed, match="shipped with other content"):
        cluster.run(source)
