"""``etlstage shards``: the commands that show and change leases."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from etlstage.cli import shards as commands
from etlstage.cli.app import app
from etlstage.errors import ConfigError
from etlstage.shard.lease import Lease
from etlstage.shard.table import NEWS, LeaseTable, News, SQLiteLeases

pytestmark = pytest.mark.core

ONE = Lease("shardId-000000000001", (), '["446", 0]', False, "host-1/ab", 7, 2)


@pytest.fixture
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SQLiteLeases]:
    """Return a table with four shards; one is owned, one has ended, one has failed."""
    table = SQLiteLeases(tmp_path / "leases.db", "clicks", made={"count": 4})
    names = [f"shardId-{n:012}" for n in range(4)]
    table.add(map(Lease, names))
    now = time.time()
    clock = SimpleNamespace(time=lambda: now)
    monkeypatch.setattr("etlstage.cli.shards.time", clock)
    moved = News(lag=12, moved=now - 60)
    table.swap(Lease(ONE.shard), ONE, moved)
    ended = Lease(names[2], (), '["SHARD_END", 0]', True, "host-1/ab", 3)
    table.swap(Lease(names[2]), ended, News(lag=0))
    table.swap(Lease(names[3]), Lease(names[3], counter=4), News(error="it died\n"))
    yield table
    table.close()


def run(*words: str | Path) -> int:
    """Run a command."""
    return int(app(["shards", *map(str, words)], standalone_mode=False) or 0)


def test_shards_are_listed(
    leases: SQLiteLeases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a line; control characters in a worker's error are escaped."""
    assert run("ls", tmp_path / "leases.db") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "shard"
    assert [" ".join(line.split()) for line in lines] == [
        "shardId-000000000000 - - - -",
        "shardId-000000000001 host-1/ab 446 12 records, 60 s -",
        "shardId-000000000002 - ended - -",
        "shardId-000000000003 - - - it died\\n",
    ]
    assert run("ls", tmp_path / "leases.db", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown[1]["checkpoint"] == ["446", 0]
    assert shown[1]["uncommitted"] == 12


def test_shard_is_shown(
    leases: SQLiteLeases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named in full, or by its end."""
    assert run("show", tmp_path / "leases.db", "01") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "shard shardId-000000000001 parents - owner host-1/ab" in out
    assert "checkpoint ['446', 0]" in out
    assert run("show", tmp_path / "leases.db", "01", "--json") == 0
    assert json.loads(capsys.readouterr().out)["counter"] == 7
    with pytest.raises(ConfigError, match="no shard '9', expected one of shardId-0"):
        run("show", tmp_path / "leases.db", "9")


@pytest.mark.parametrize("words", [["ls"], ["show", "01"]], ids=" ".join)
def test_shards_that_are_reset_meanwhile(
    leases: SQLiteLeases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    """They are shown as they were, without what was published of them (issue 25)."""
    published = SQLiteLeases.news

    def reset_before(table: SQLiteLeases) -> dict[str, News]:
        leases.forget()
        return published(table)

    monkeypatch.setattr(SQLiteLeases, "news", reset_before)
    command, *rest = words
    assert run(command, tmp_path / "leases.db", *rest, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    one = shown[1] if command == "ls" else shown
    assert (one["owner"], one["uncommitted"]) == ("host-1/ab", None)


def test_shard_is_released(leases: SQLiteLeases, tmp_path: Path) -> None:
    """Its owner is asked to give it up, and keeps it until then."""
    assert run("release", tmp_path / "leases.db", "01") == 0
    assert leases.read()[1] == ONE._replace(counter=8, claimant="")


def test_shard_is_taken(leases: SQLiteLeases, tmp_path: Path) -> None:
    """Its owner's next write is refused; its checkpoint stays."""
    assert run("take", tmp_path / "leases.db", "01") == 0
    assert leases.read()[1] == ONE._replace(counter=8, owner=None)
    assert not leases.swap(ONE, ONE._replace(counter=8, position='["500", 0]'))


@pytest.mark.parametrize(("shard", "why"), [("00", "no owner"), ("02", "has ended")])
def test_shard_without_an_owner(
    leases: SQLiteLeases, tmp_path: Path, shard: str, why: str
) -> None:
    """There is no owner to be asked."""
    for command in ("release", "take"):
        with pytest.raises(ConfigError, match=why):
            run(command, tmp_path / "leases.db", shard)


def test_one_shard_is_reset(
    leases: SQLiteLeases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It loses its owner and its checkpoint; other shards keep theirs (issue 25)."""
    assert run("reset", tmp_path / "leases.db", "01", "--yes") == 0
    assert capsys.readouterr().out == (
        "shard shardId-000000000001 starts from the beginning: at once in a live run,"
        " otherwise in the next one\n"
    )
    assert leases.read()[1] == Lease(ONE.shard, counter=8)
    assert leases.read()[2].ended


def test_all_shards_are_reset(
    leases: SQLiteLeases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The user is asked first; then the table may be used for other shards."""
    asked: list[str] = []
    monkeypatch.setattr(commands, "confirm", asked.append)
    assert run("reset", tmp_path / "leases.db") == 0
    (question,) = asked
    assert "of 4 shards (1 with an owner), so that all records" in question
    assert capsys.readouterr().out == "the next run starts from the beginning\n"
    assert leases.read() == []
    assert run("ls", tmp_path / "leases.db") == 0
    assert "no shards" in capsys.readouterr().out
    table: LeaseTable = SQLiteLeases(tmp_path / "leases.db", "other", made={"count": 9})
    table.close()


def test_places_without_leases(tmp_path: Path) -> None:
    """The error names the place, and nothing is made there."""
    with pytest.raises(ConfigError, match=r"there is no file .*nix\.db"):
        run("ls", tmp_path / "nix.db")
    assert not (tmp_path / "nix.db").exists()
    (tmp_path / "leases.db").touch()
    with pytest.raises(ConfigError, match="there is no lease table x"):
        run("ls", tmp_path / "leases.db", "--table", "x")
    (tmp_path / "p.yaml").write_text(
        "name: p\nextract: {worker: {command: [seq, '3']}}\n"
        "load: {worker: {command: [cat]}}\n"
    )
    with pytest.raises(ConfigError, match="has neither the key load"):
        run("ls", tmp_path / "p.yaml")


def test_leases_of_a_pipeline(
    leases: SQLiteLeases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pipeline file names the lease table."""
    (tmp_path / "p.yaml").write_text(
        "name: clicks\n"
        "extract: {files: {path: in, format: text}}\n"
        "load:\n"
        "  worker: {command: [cat]}\n"
        "  dialect: kcl\n"
        "  shards: {count: 4, leases: leases.db}\n"
    )
    assert run("ls", tmp_path / "p.yaml") == 0
    assert "host-1/ab" in capsys.readouterr().out
    assert leases.news()["shardId-000000000000"] == NEWS


def test_leases_of_a_stream_with_state(
    leases: SQLiteLeases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pipeline file, or its state directory, leads to them (issue 25)."""
    (tmp_path / "p.yaml").write_text(
        "name: clicks\n"
        "state: state\n"
        "extract: {kinesis: {stream: s}}\n"
        "load: {worker: {command: [cat]}, dialect: kcl}\n"
    )
    (tmp_path / "state").mkdir()
    leases.close()
    (tmp_path / "leases.db").rename(tmp_path / "state" / "leases.db")
    for where in ("p.yaml", "state"):
        assert run("ls", tmp_path / where) == 0
        assert "host-1/ab" in capsys.readouterr().out
