"""What is killed when, and what has to be there in the end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow.dataset as ds

from etlstage.pipeline.dead_letter.file import FOLDER
from etlstage.pipeline.dead_letter.record import DeadLetter
from etlstage.pipeline.dead_letter.settled import Settled
from etlstage.pipeline.delivery.record import Record
from tests.database import PostgreSQL, drivers

__all__ = (
    "ENDS",
    "OF_SPARK",
    "ORDERS",
    "STEPS",
    "WHATS",
    "Case",
    "Kill",
    "check",
    "check_rows",
    "prepare",
    "retry",
    "start",
)

STEPS: Final = ("begin", "written", "committed", "aside", "recorded")
OF_SPARK: Final = ("jvm", "python")
WHATS: Final = ("process", "worker", *OF_SPARK)
ORDERS: Final = {
    "total": "order: total",
    "none": "order: none, workers: 2",
    "key": "order: key, key: /0, workers: 2",
    "batches": "order: none, workers: 2, batch: {driver: supervisor, size: 50}",
}

KEYS: Final = 10
HERE: Final = Path(__file__).parent

PIPELINE: Final = """\
name: crash
delivery: exactly-once
state: state
{ends}
transform:
  - name: first
    worker: {{command: [{python}, {here}/stage.py{batches}]}}
    {order}
  - name: second
    worker: {{command: [{python}, {here}/stage.py{batches}]}}
    {order}
"""
SPARK: Final = """\
spark:
  config:
    spark.ui.enabled: "false"
    spark.sql.shuffle.partitions: "2"
    spark.sql.execution.arrow.maxRecordsPerBatch: "{run}"
    spark.jars: "{jars}"
extract: {{spark: {{path: in, format: text}}}}
"""
FILES: Final = """\
load:
  spark: {{path: out, format: parquet, epoch: {{messages: {epoch}}}}}
"""
TABLE: Final = """\
load:
  spark:
    {{format: jdbc, mode: append, options: {options}, epoch: {{messages: {epoch}}}}}
"""
ENDS: Final = {
    "workers": """\
extract:
  worker: {{command: [{python}, {here}/ends.py, extract, "{messages}", "{keys}"]}}
  mode: cyclic
  offsets: {{by: supervisor, step: {run}}}
load:
  worker: {{command: [{python}, {here}/ends.py, load]}}
  batch: {{driver: supervisor, size: 100}}
  commit: [{python}, {here}/ends.py, commit]
  abort: [{python}, {here}/ends.py, abort]
""",
    "local": SPARK + FILES,
    "spark": "engine: spark\n" + SPARK + FILES,
    "postgresql": SPARK + TABLE,
}
"""Between what the stages are: workers, or DataFrames on an engine."""


class Kill(NamedTuple):
    """What is killed, and when."""

    what: str
    when: tuple[str, ...]


class Case(NamedTuple):
    """How a pipeline runs."""

    order: str = "total"
    ends: str = "local"
    server: PostgreSQL | None = None
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
        lines = (f"[{n % KEYS}, {n}]\n" for n in numbers)
        (folder / "in" / f"{name}.txt").write_text("".join(lines))
    names = {"python": sys.executable, "here": HERE, "keys": KEYS}
    names |= {"run": case.epoch // 2, "jars": "", **case._asdict()}
    if case.server is not None:
        case.server.ask("drop table if exists crash, etlstage_epochs")
        options = json.dumps({**case.server.options, "dbtable": "crash"})
        names |= {"jars": drivers(), "options": options}
    text = PIPELINE.format(
        python=sys.executable,
        here=HERE,
        batches=", batches" * (case.order == "batches"),
        order=re.sub(r", (?=key|workers|batch)", "\n    ", ORDERS[case.order]),
        ends=ENDS[case.ends].format(**names),
    )
    (folder / "pipeline.yaml").write_text(text)


def start(folder: Path, case: Case, kill: Kill | None = None) -> tuple[int, str]:
    """Run the pipeline once; return the exit code, and what was said."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.crash.victim", folder / "pipeline.yaml"),
            *(str(case.epoch), *((kill.what, *kill.when) if kill else ())),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def retry(folder: Path, *, seconds: float | None = None) -> bool:
    """Retry the dead letters, which pass now; return whether it was not killed."""
    (folder / "mended").touch()
    etlstage = str(Path(sys.executable).with_name("etlstage"))
    process = subprocess.Popen(
        [etlstage, "dlq", "retry", str(folder / "pipeline.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    assert not process.returncode, said
    return True


def check(folder: Path, case: Case) -> None:
    """Assert that all is there once, and nothing else."""
    refused = {n for n in range(case.messages) if n % 100 == 7}
    loaded = check_rows(folder, case, refused)
    check_order(loaded, case)
    record = Record.latest(folder / "state")
    position = case.messages if case.ends == "workers" else None
    assert (record.ended, record.position) == (True, position), record
    extracted, first, second, last = record.accounts.values()
    assert extracted[5] == case.messages, record
    kept = case.messages - len(refused)
    assert [*first[:3]] == [case.messages, kept, len(refused)], record
    assert [*second[:3]] == [*last[:3]] == [kept, kept, 0], record


def check_rows(folder: Path, case: Case, refused: Collection[int]) -> list[int]:
    """Assert that each message is a dead letter or a row, once; return the rows."""
    settled = Settled(folder / "state" / FOLDER)
    letters = [
        letter
        for stage in settled.stages
        for letter in settled.letters(stage)
        if isinstance(letter, DeadLetter)
    ]
    found = Counter(number_of(letter.message) for letter in letters)
    assert found == Counter(refused), doubled("dead letters", found, refused)
    if case.server is not None:
        loaded = [number_of(row) for row in case.server.ask("select value from crash")]
        tables = "select tablename from pg_tables where schemaname = 'public'"
        assert sorted(case.server.ask(tables)) == ["crash", "etlstage_epochs"]
    else:
        loaded = [number_of(row) for row in rows_of(folder / "out", case)]
    rows, wanted = Counter(loaded), set(range(case.messages)).difference(refused)
    assert rows == Counter(wanted), doubled("rows", rows, wanted)
    left = {re.sub(r"\d+\.", "", path.name) for path in (folder / "state").iterdir()}
    assert left == {"lock", FOLDER, "record.json"}, left
    aside = folder / "aside"
    assert not aside.exists() or not list(aside.iterdir()), list(aside.iterdir())
    return loaded


def rows_of(out: Path, case: Case) -> Iterator[str]:
    """Yield the rows in the order in which they were loaded; other files are no data."""
    folders = [path for path in out.iterdir() if path.name != "_SUCCESS"]
    for path in folders:
        assert re.fullmatch(r"epoch=([0-9a-f]{8}|retry)-\d+", path.name), folders
    for path in sorted(folders, key=lambda path: int(path.name.rpartition("-")[2])):
        if case.ends == "workers":
            yield from path.read_text().splitlines()
            continue
        files = sorted(path.glob("part-*"), key=lambda file: file.stat().st_mtime_ns)
        for file in files:
            table = ds.dataset(file, format="parquet").to_table()
            yield from table["value"].to_pylist()


def check_order(loaded: Sequence[int], case: Case) -> None:
    """Assert that what was in one file is in order, as far as that is kept."""
    if case.order not in ("total", "key") or case.server is not None:
        return
    keys = KEYS if case.order == "key" else 1
    last: dict[tuple[bool, int], int] = {}
    for number in loaded:
        of = number < case.messages // 2, number % keys
        assert last.get(of, -1) < number, f"{number} behind {last[of]}"
        last[of] = number


def number_of(message: str | bytes) -> int:
    """Return which message it is, or was made of."""
    return int(json.loads(message)[1])


def doubled(what: str, found: Counter[int], wanted: Collection[int]) -> str:
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
