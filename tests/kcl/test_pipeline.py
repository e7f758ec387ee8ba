"""A pipeline file whose load worker is a processor of the published client."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from etlstage.journal import Journals, Publisher, modulo
from tests.cli.forked import Forks, environment
from tests.kcl.client import CURRENT, downloaded
from tests.kcl.processors import BUFFERING

pytestmark = pytest.mark.process

FILE = """\
name: clicks
extract: {worker: {command: [seq, "0", "9"]}}
load:
  worker:
    command: [python, processor.py, effects, %r]
    env: {PYTHONPATH: %s}
  dialect: {name: kcl, version: v2}
  batch: {size: 5}
"""


@pytest.mark.parametrize("die_at", ["", "14"])
def test_file_with_an_unmodified_processor(
    tmp_path: Path, forks: Forks, die_at: str
) -> None:
    """It loads everything, even if the processor is killed in between."""
    (tmp_path / "processor.py").write_text(BUFFERING)
    path = os.fspath(downloaded(CURRENT))
    (tmp_path / "clicks.yaml").write_text(FILE % (die_at, path))
    for command in ["run"] if die_at else ["validate", "plan", "run"]:
        ended = forks.run([command, "clicks.yaml"], tmp_path, environment(), "")
        assert ended.returncode == 0, ended.stderr

    assert "10 messages loaded; output complete" in ended.stdout
    lines = (tmp_path / "effects").read_text().splitlines()
    assert [*dict.fromkeys(lines)] == [f"{n + 1} {n}" for n in range(10)]


SHARDED = """\
name: clicks
state: state
extract: {worker: {command: [cat, clicks.jsonl]}}
load:
  worker:
    command: [python, processor.py, effects, "14"]
    env: {PYTHONPATH: %s}
  dialect: kcl
  batch: {size: 5}
  shards: {count: 3, key: /user}
"""


def test_shards_of_an_unmodified_processor(tmp_path: Path, forks: Forks) -> None:
    """One of three is killed; a message without a key is a dead letter."""
    clicks = [f'{{"user": {n % 13}, "n": {n}}}' for n in range(100)]
    clicks[40] = '{"n": 40}'
    (tmp_path / "clicks.jsonl").write_text("\n".join([*clicks, ""]))
    (tmp_path / "processor.py").write_text(BUFFERING)
    (tmp_path / "clicks.yaml").write_text(SHARDED % os.fspath(downloaded(CURRENT)))
    planned, ended = (
        forks.run([command, "clicks.yaml"], tmp_path, environment(), "")
        for command in ("plan", "run")
    )
    assert "3, by /user, a worker for each; at the end of the input each shard" in (
        planned.stdout
    )
    assert ended.returncode == 0, ended.stderr
    assert "99 messages loaded in 3 shards; output complete" in ended.stdout
    assert "row 41: there is no partition key at /user" in ended.stderr
    lines = [line.split(" ", 1) for line in _lines(tmp_path / "effects")]
    assert {text for _, text in lines} == {*clicks} - {clicks[40]}
    # A record that comes again keeps its number.
    assert len({number for number, _ in lines}) == 99
    assert (tmp_path / "effects.died").exists()


PICKY = """\
import json, os, sys
from pathlib import Path
from etlstage.worker import kcl

class Picky(kcl.Processor):
    def initialize(self, given):
        self.shard = given.name

    def process_records(self, records, checkpointer):
        for record in records:
            if json.loads(record.data)["n"] in json.loads(Path("bad").read_text()):
                os._exit(1)
            with open("effects", "a") as file:
                print(self.shard, record.sequence_number, file=file)
            checkpointer.checkpoint(record)

kcl.run(Picky())
"""
RETRIED = """\
name: clicks
{state}
extract: {{files: {{path: clicks.jsonl, format: json}}}}
load:
  worker: {{command: [python, processor.py]}}
  dialect: kcl
  restart: {{delay: 10ms}}
  on_error: {{retries: 0, budget: 50%}}
  {shards}
"""


@pytest.mark.parametrize(
    ("state", "shards"),
    [
        ("state: state", ""),
        ("state: state", "shards: {count: 2, key: /user}"),
        ("state: state", "shards: {count: 2, key: /user, sequence: /id}"),
        ("", "shards: {count: 2, key: /user, sequence: /id, leases: leases.db}"),
        ("", "shards: {count: 2, key: /user, leases: leases.db}"),
    ],
)
def test_dead_letters_of_shards_are_retried(
    tmp_path: Path, forks: Forks, state: str, shards: str
) -> None:
    """
    They are given to a processor, although checkpoints are past them (issue 25).

    None has the number of another record, in the run or in another retry.
    """

    def etlstage(*words: str, status: int = 0) -> str:
        ended = forks.run(words, tmp_path, environment(), "")
        assert ended.returncode == status, ended.stderr
        return ended.stdout

    rows = [{"user": n % 3, "n": n, "id": 10 * n + 10} for n in range(12)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "clicks.jsonl").write_text("".join(lines))
    (tmp_path / "processor.py").write_text(PICKY)
    (tmp_path / "clicks.yaml").write_text(RETRIED.format(state=state, shards=shards))
    (tmp_path / "bad").write_text("[4, 7]")
    etlstage("run", "clicks.yaml")
    assert len(_lines(tmp_path / "effects")) == 10
    (tmp_path / "bad").write_text("[7]")
    assert "1 dead letter passed" in etlstage("dlq", "retry", "clicks.yaml", status=1)
    (tmp_path / "bad").write_text("[]")
    assert "1 dead letter passed" in etlstage("dlq", "retry", "clicks.yaml")

    effects = [line.split() for line in _lines(tmp_path / "effects")]
    numbers = [int(number) for _, number in effects]
    assert len(set(numbers)) == len(numbers) == 12
    first, second = effects[10:]
    if "sequence" in shards:
        assert numbers[10:] == [50, 80]
        assert [first[0], "20"] in effects  # of the same user
        assert [second[0], "20"] in effects
    assert "no dead letters" in etlstage("dlq", "ls", "clicks.yaml")


LIMITED = """\
name: clicks
state: state
extract: {{journal: {{path: clicks, reader: r}}}}
load:
  worker: {{command: [python, processor.py]}}
  dialect: kcl
  {shards}
"""


@pytest.mark.parametrize("shards", ["", "shards: {count: 2, key: /user}"])
def test_limited_load_of_journals_is_continued(
    tmp_path: Path, forks: Forks, shards: str
) -> None:
    """Each run loads as many messages as it may, and the next reads on (issue 25)."""
    with Journals.open(tmp_path / "clicks") as journals:
        publisher = Publisher(journals, mapping=modulo(lambda m: m["n"]))
        for n in range(12):
            publisher.publish_committed({"user": n % 3, "n": n})
    (tmp_path / "processor.py").write_text(PICKY)
    (tmp_path / "bad").write_text("[]")
    (tmp_path / "clicks.yaml").write_text(LIMITED.format(shards=shards))
    for count in (5, 10):
        words = "run", "clicks.yaml", "--limit", "5"
        ended = forks.run(words, tmp_path, environment(), "")
        assert ended.returncode == 0, ended.stderr
        assert "5 messages loaded" in ended.stdout
        assert len(_lines(tmp_path / "effects")) == count


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
