"""The cases of the crash matrix, and the checks of what must be there in the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow.dataset as ds

from etlstage.journal import Journals, RunMessage
from etlstage.pipeline.dead_letter.files import FOLDER
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.retry import Settled
from etlstage.pipeline.delivery.record import CommitRecord
from tests.crash.victim import HANGS, PATIENCE
from tests.database import PostgreSQL, drivers

__all__ = (
    "ENDS",
    "EXECUTORS",
    "OFFSETS",
    "ORDERS",
    "SHOWN",
    "SPARKLESS",
    "STEPS",
    "Case",
    "Kill",
    "Start",
    "check",
    "check_gone",
    "check_rows",
    "prepare",
    "retry",
    "start",
)

STEPS: Final = ("begin", "written", "committed", "aside", "recorded", "performed")
ORDERS: Final = {
    "total": "order: total",
    "none": "order: none, workers: 2",
    "key": "order: key, key: /0, workers: 2",
    "batches": "order: none, workers: 2, batch: {size: 50}",
}

KEYS: Final = 10
HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parent.parent

_LOAD: Final = r"(?:[0-9a-f]{8}|retry-[0-9a-f]{16})"
_FOLDER: Final = re.compile(rf"epoch={_LOAD}-(\d+)")
_FILE: Final = re.compile(rf"part-{_LOAD}-(\d+)-.*\.parquet")
PIPELINE: Final = """\
name: crash
delivery: exactly-once
state: state
{ends}
transform:
  - name: first
    worker: {{command: [{python}, {here}/stage.py{batches}]}}
    on_error: {{budget: 50%}}
    {order}
  - name: second
    worker: {{command: [{python}, {here}/stage.py{batches}]}}
    on_error: {{budget: 50%}}
    {order}
"""
SPARK: Final = """\
spark:
  master: local[2]
  config:
    spark.sql.shuffle.partitions: "2"
    spark.sql.adaptive.enabled: "false"
    spark.sql.codegen.wholeStage: "false"
    spark.sql.execution.arrow.maxRecordsPerBatch: "{run}"
    spark.jars: "{jars}"
extract:
  spark: {{path: in, format: text, options: {{maxFilesPerTrigger: "1"}}}}
"""
# As on a cluster, Spark retries a task that fails.
EXECUTED: Final = SPARK.replace("local[2]", "local[2,2]")
INTO_FILES: Final = "load: {{spark: {{path: out, format: parquet}}}}\n"
TABLE: Final = """\
load: {{spark: {{format: jdbc, mode: append, options: {options}}}}}
"""
EXTRACTED: Final = """\
extract:
  worker: {{command: [{python}, {here}/ends.py, extract, "{messages}", "{keys}"]}}
  dialect: {{mode: cyclic}}
  offsets: {{by: supervisor, step: {run}}}
"""
ENDS: Final = {
    "local": SPARK + INTO_FILES,
    "files": """\
extract: {{files: {{path: in, format: text}}}}
load: {{files: {{path: out, format: parquet, epoch: {{messages: {epoch}}}}}}}
""",
    "postgresql": SPARK + TABLE,
    "spark": "engine: spark\n" + EXECUTED + INTO_FILES,
    "spark-postgresql": "engine: spark\n" + EXECUTED + TABLE,
    "streaming": "engine: streaming\n" + EXECUTED + INTO_FILES,
    "streaming-postgresql": "engine: streaming\n" + EXECUTED + TABLE,
    "journals": EXTRACTED + "load: {{journal: {{path: out}}}}\n",
    "workers": EXTRACTED
    + """\
load:
  worker: {{command: [{python}, {here}/ends.py, load]}}
  batch: {{size: 100}}
  commit: [{python}, {here}/ends.py, commit]
  abort: [{python}, {here}/ends.py, abort]
""",
}
"""The ends around the stages: workers, files, journals, or Spark on an engine."""
OFFSETS: Final = ("workers", "journals")
"""Ends whose source is a worker with recorded offsets."""
SHOWN: Final = ("files", "local", "spark", "streaming", "journals")
"""Ends that publish an epoch after its record, such as by moving its files."""
SPARKLESS: Final = ("files", *OFFSETS)
"""Ends that need no Spark."""
EXECUTORS: Final = ("spark", "streaming")
"""Prefixes of the names of ends with the stages inside Spark's executors."""


class Kill(NamedTuple):
    """What is killed, and when."""

    what: str
    """``process``, ``worker``, ``jvm``, or ``python``, which is Spark's."""
    when: str
    """A step of the commit, or ``at``."""
    number: float
    """Number of times the step comes before; or seconds after the process appears."""

    @classmethod
    def of(cls, text: str) -> Kill:
        """Parse the text of :meth:`__str__`."""
        what, when, number = text.split(":")
        return cls(what, when, float(number))

    def __str__(self) -> str:
        return f"{self.what}:{self.when}:{self.number:g}"


class Start(NamedTuple):
    """The outcome of one start."""

    code: int
    said: str
    done: list[Kill]
    """Kills that were done."""
    vain: list[Kill]
    """Kills for which there was no such process."""


class Case(NamedTuple):
    """The variant of the pipeline to run."""

    order: str = "total"
    ends: str = "local"
    server: PostgreSQL | None = None
    messages: int = 100_000
    epoch: int = 10_000

    @property
    def files(self) -> int:
        """Number of input files; none has more messages than an epoch."""
        return -(-self.messages // self.epoch)


def prepare(folder: Path, case: Case) -> None:
    """Write the input and the pipeline."""
    (folder / "in").mkdir()
    (folder / "tmp").mkdir()
    (folder / "kills").touch()
    for number in range(case.files):
        start = number * case.epoch
        numbers = range(start, min(start + case.epoch, case.messages))
        lines = (f"[{n % KEYS}, {n}]\n" for n in numbers)
        (folder / "in" / f"{number:03}.txt").write_text("".join(lines))
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


def start(folder: Path, case: Case, kills: Sequence[Kill] = ()) -> Start:
    """Run the pipeline once, with these kills."""
    told = (folder / "kills").read_text()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.crash.victim", "pipeline.yaml"),
            *(str(case.epoch), *map(str, kills)),
        ],
        **_place(folder),
        timeout=PATIENCE + 60,
        check=False,
    )
    found = (folder / "kills").read_text().removeprefix(told).splitlines()
    results: list[list[Kill]] = [[], []]
    for line in found:
        name, count = line.split()
        results[count == "0"].append(Kill.of(name))
    assert HANGS not in done.stdout, done.stdout
    return Start(done.returncode, done.stdout, *results)


def retry(folder: Path, *, seconds: float | None = None) -> bool:
    """Retry the dead letters, which pass now; return False if time ran out first."""
    (folder / "mended").touch()
    etlstage = str(Path(sys.executable).with_name("etlstage"))
    command = [etlstage, "dlq", "retry", "pipeline.yaml"]
    try:
        done = subprocess.run(command, **_place(folder), timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return False
    assert not done.returncode, done.stdout
    return True


def _place(folder: Path) -> dict[str, Any]:
    """Return options for subprocesses: all files they leave are inside the folder."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
    return {
        "cwd": folder,
        "env": environ,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }


def check(folder: Path, case: Case, *, ended: bool = True) -> None:
    """
    Assert that every message is there once, and nothing else.

    Args:
        folder: The folder that the case ran in.
        case: The case that ran.
        ended: Whether the last start ended successfully, rather than being killed.

    """
    refused = {n for n in range(case.messages) if n % 100 == 7}
    loaded = check_rows(folder, case, refused, ended=ended)
    check_order(loaded, case)
    record = CommitRecord.latest(folder / "state")
    position: int | None = None
    if case.ends in OFFSETS:
        position = case.messages
    elif case.ends.startswith("streaming"):
        # The number of Spark's batches. If Spark is killed while it plans a batch, it
        # has noted the file already, and puts it into the next batch with that one's.
        position = record.epoch
        assert position <= case.files, record
    assert (record.ended, record.position) == (True, position), record
    extracted, first, second, last = record.accounts.values()
    assert extracted[5] == case.messages, record
    kept = case.messages - len(refused)
    assert [*first[:3]] == [case.messages, kept, len(refused)], record
    assert [*second[:3]] == [*last[:3]] == [kept, kept, 0], record
    for account in (first, second, last):
        assert account[3:5] == [0, 0], record


def check_gone(folder: Path) -> None:
    """Assert that all processes that were started in a folder have ended."""
    left: dict[str, bytes] = {}
    for _ in range(60):
        left = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (process / "cwd").readlink().is_relative_to(folder):
                    left[process.name] = (process / "cmdline").read_bytes()[:200]
        if not left:
            return
        time.sleep(0.5)
    raise AssertionError(f"processes are left: {left}")


def check_rows(
    folder: Path, case: Case, refused: Collection[int], *, ended: bool = True
) -> list[int]:
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
    elif case.ends == "journals":
        loaded = [number_of(row) for row in committed(folder)]
    else:
        loaded = [number_of(row) for row in rows_of(folder / "out", case)]
    rows, wanted = Counter(loaded), set(range(case.messages)).difference(refused)
    assert rows == Counter(wanted), doubled("rows", rows, wanted)
    left = {re.sub(r"\d+\.", "", path.name) for path in (folder / "state").iterdir()}
    kept = {"lock", FOLDER, "record.json"} | {"checkpoint"} & left
    # A run that is killed after the record leaves files for the next run to remove.
    spool = re.compile("(spool|staging)-.*")
    assert {name for name in left if ended or not spool.match(name)} == kept, left
    aside = folder / "aside"
    assert not aside.exists() or not list(aside.iterdir()), list(aside.iterdir())
    return loaded


def rows_of(out: Path, case: Case) -> Iterator[str]:
    """Yield the rows in the order in which they were loaded; allow no other files."""
    paths = [path for path in out.iterdir() if path.name != "_SUCCESS"]
    form = _FOLDER if case.ends == "workers" else _FILE
    for path in paths:
        assert form.fullmatch(path.name), paths
    numbers = {path: int(form.fullmatch(path.name)[1]) for path in paths}  # type: ignore[index]
    for path in sorted(paths, key=lambda p: (numbers[p], p.stat().st_mtime_ns, p)):
        if case.ends == "workers":
            yield from path.read_text().splitlines()
            continue
        table = ds.dataset(path, format="parquet").to_table()
        yield from table["value"].to_pylist()


def committed(folder: Path) -> Iterator[bytes]:
    """Yield what readers of the journals see after the next start."""
    with Journals.open(folder / "out", create=False) as journals:
        for journal, intent in CommitRecord.latest(folder / "state").intents:  # type: ignore[attr-defined]
            journals.append(journal, bytes.fromhex(intent))
        for envelope in journals.read_committed():
            assert isinstance(envelope.message, RunMessage)
            yield from envelope.message.run


def check_order(loaded: Sequence[int], case: Case) -> None:
    """Assert that the messages of each input file are in order, if order is kept."""
    if case.order not in ("total", "key") or case.server is not None:
        return
    keys = KEYS if case.order == "key" else 1
    last: dict[tuple[int, int], int] = {}
    for number in loaded:
        of = number // case.epoch, number % keys
        assert last.get(of, -1) < number, f"{number} behind {last[of]}"
        last[of] = number


def number_of(message: str | bytes) -> int:
    """Return the number of the input message that a message was made from."""
    return int(json.loads(message)[1])


def doubled(what: str, found: Counter[int], wanted: Collection[int]) -> str:
    """Return JSON about the numbers that were found too often, or not at all."""
    often = [n for n, count in found.items() if count > 1 or n not in wanted]
    missing = [n for n in wanted if n not in found]
    return json.dumps(
        {
            what: len(found),
            "too often": [len(often), *sorted(often)[:5]],
            "missing": [len(missing), *sorted(missing)[:5]],
        }
    )
