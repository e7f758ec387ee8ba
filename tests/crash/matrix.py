"""What is killed when, and what has to be there in the end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow.dataset as ds

from etlstage.pipeline.dead_letter.file import letter_files, read_letters
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.delivery.record import Record

__all__ = ("STEPS", "Case", "Kill", "check", "prepare", "start")

STEPS: Final = ("begin", "written", "aside", "recorded")
ORDERS: Final = {
    "total": "order: total",
    "none": "order: none, workers: 2",
    "key": "order: key, key: /0, workers: 2",
}

PIPELINE: Final = """\
name: crash
delivery: exactly-once
state: state
spark: {{config: {{spark.ui.enabled: "false", spark.sql.shuffle.partitions: "2"}}}}
extract: {{spark: {{path: in, format: text}}}}
transform:
  - name: first
    worker: {{command: [{python}, {stage}]}}
    {order}
  - name: second
    worker: {{command: [{python}, {stage}]}}
    {order}
load:
  spark: {{path: out, format: {format}, epoch: {{messages: {epoch}}}}}
"""


class Kill(NamedTuple):
    """What is killed, and when."""

    what: str
    when: tuple[str, ...]


class Case(NamedTuple):
    """How a pipeline runs."""

    order: str = "total"
    format: str = "parquet"
    messages: int = 100_000
    epoch: int = 20_000


def prepare(folder: Path, case: Case) -> None:
    """Write the input and the pipeline."""
    (folder / "in").mkdir()
    half = case.messages // 2
    for name, numbers in (
        ("a", range(half)),
        ("b", range(half, case.messages)),
    ):
        (folder / "in" / f"{name}.txt").write_text("".join(f"{n}\n" for n in numbers))
    text = PIPELINE.format(
        python=sys.executable,
        stage=Path(__file__).with_name("stage.py"),
        order=ORDERS[case.order].replace(", ", "\n    "),
        format=case.format,
        epoch=case.epoch,
    )
    (folder / "pipeline.yaml").write_text(text)


def start(folder: Path, kill: Kill | None = None) -> tuple[int, str]:
    """Run the pipeline once; return the exit code, and what was said."""
    arguments = [] if kill is None else [*kill.when]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.crash.victim", folder / "pipeline.yaml"),
            *("none" if kill is None else kill.what, *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def check(folder: Path, case: Case) -> None:
    """Assert that all is there once, and nothing else."""
    refused = {n for n in range(case.messages) if n % 100 == 7}
    letters = [
        letter
        for path in letter_files(folder / "state")
        for letter in read_letters(path)
        if isinstance(letter, DeadLetter)
    ]
    found = Counter(int(letter.message) for letter in letters)
    assert found == Counter(refused), doubled("dead letters", found, refused)
    rows = Counter[int]()
    for path in (folder / "out").iterdir():
        assert path.name == "_SUCCESS" or path.name.startswith("epoch="), path
        if path.is_dir():
            table = ds.dataset(path, format=case.format).to_table()
            rows.update(int(row.split()[0]) for row in table["value"].to_pylist())
    wanted = set(range(case.messages)) - refused
    assert rows == Counter(wanted), doubled("rows", rows, wanted)
    record = Record.latest(folder / "state")
    assert (record.ended, record.position) == (True, None), record
    extracted, first, second, loaded = record.accounts.values()
    assert extracted[5] == case.messages, record
    kept = case.messages - len(refused)
    assert [*first[:3]] == [case.messages, kept, len(refused)], record
    assert [*second[:3]] == [*loaded[:3]] == [kept, kept, 0], record
    left = {path.name for path in (folder / "state").iterdir()}
    assert {name for name in left if name.startswith("spool")} == set(), left


def doubled(what: str, found: Counter[int], wanted: set[int]) -> str:
    """Say what is there too often, or not at all."""
    often = [n for n, count in found.items() if count > 1 or n not in wanted]
    missing = [n for n in wanted if n not in found]
    return json.dumps(
        {
            what: len(found),
            "too often": [len(often), *sorted(often)[:5]],
            "missing": [len(missing), *sorted(missing)[:5]],
        }
    )
