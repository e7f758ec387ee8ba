"""Lease tables in memory, SQLite and PostgreSQL behave the same."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TypeAlias
from urllib.parse import urlsplit

import pytest

from etlstage.errors import ConfigError
from etlstage.shard.keeper import LeaseKeeper
from etlstage.shard.lease import (
    Answer,
    CheckpointAsked,
    Event,
    Instruction,
    Lease,
    Read,
    Stop,
    TableRead,
    TimerRang,
    WorkerEnded,
    Write,
    WriteFailed,
    WriteRefused,
    Written,
)
from etlstage.shard.table import (
    LAYOUT,
    LeaseTable,
    MemoryLeases,
    PostgresLeases,
    SQLiteLeases,
    TableGone,
    open_leases,
    without_password,
)
from tests.database import PostgreSQL, postgresql, url_of

pytestmark = pytest.mark.process

Open: TypeAlias = Callable[..., LeaseTable]
FULL = Lease("s 1", ("a", "b'\u00e4"), '["5", 0]', False, "r/1", 7, 2, "r/2")


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    """Return a PostgreSQL server for this module."""
    with postgresql() as found:
        yield found


@pytest.fixture(params=["sqlite", "postgresql"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens a table in a new database."""
    found: list[LeaseTable] = []
    if request.param == "sqlite":

        def open_(application: str = "app", **settings: str) -> LeaseTable:
            table = SQLiteLeases(tmp_path / "leases", application, **settings)  # type: ignore[arg-type]
            found.append(table)
            return table
    else:
        server: PostgreSQL = request.getfixturevalue("server")
        name = "".join(c if c.isalnum() else "_" for c in request.node.name)
        url = url_of(server.another(name.lower()))

        def open_(application: str = "app", **settings: str) -> LeaseTable:
            table = PostgresLeases(url, application, **settings)  # type: ignore[arg-type]
            found.append(table)
            return table

    yield open_
    for table in found:
        table.close()
        table.close()


def tables(open_: Open) -> list[LeaseTable]:
    """Return a table in memory, and one in a database."""
    return [MemoryLeases(), open_()]


def test_leases_are_as_they_were_put(opened: Open) -> None:
    """Reading returns all fields of all leases, ordered by name."""
    for table in tables(opened):
        assert table.read() == []
        assert table.add([FULL, Lease("a")]) == 2
        assert table.read() == [Lease("a"), FULL]
        table.close()


def test_leases_that_are_there_stay(opened: Open) -> None:
    """Adding an existing lease again changes nothing."""
    for table in tables(opened):
        table.add([FULL])
        assert table.add([Lease("s 1"), Lease("t")]) == 1
        assert table.read() == [FULL, Lease("t")]


def test_leases_are_added_only_if_all_are_new(opened: Open) -> None:
    """A single one that exists refuses the others (issue 25)."""
    for table in tables(opened):
        table.add([FULL])
        assert table.add([Lease("a"), FULL, Lease("t")], all_new=True) == 0
        assert table.read() == [FULL]
        assert table.add([Lease("a"), Lease("t")], all_new=True) == 2
        assert table.read() == [Lease("a"), FULL, Lease("t")]


def test_leases_are_added_by_one_of_several(opened: Open) -> None:
    """Those of two that add them at once are never mixed (issue 25)."""
    both = [opened(), opened()]
    names = [f"s{n:02}" for n in range(64)]
    gate = Barrier(2)

    def add(of: int) -> int:
        mine = [Lease(name, position=f"[{of}]") for name in names]
        gate.wait(timeout=10)
        return both[of].add(mine[:: 1 - 2 * of], all_new=True)

    with ThreadPoolExecutor(2) as pool:
        added = [*pool.map(add, range(2))]
    assert sorted(added) == [0, 64]
    assert {row.position for row in both[0].read()} == {f"[{added.index(64)}]"}


def test_error_between_two_leases_leaves_none(opened: Open) -> None:
    """Neither does it keep others from adding theirs (issue 25)."""
    table, other = opened(), opened()
    wrong = Lease("b", counter=None)  # type: ignore[arg-type]
    for error, second in (TableGone, wrong), (UnicodeEncodeError, Lease("\ud800")):
        with pytest.raises(error):
            table.add([Lease("a"), second])
        assert table.read() == []
    assert other.add([Lease("c")]) == 1
    assert table.read() == [Lease("c")]


@pytest.mark.parametrize(
    "change",
    [{"counter": 6}, {"owner": "r/9"}, {"owner": None}, {"shard": "gone"}],
)
def test_a_row_takes_the_place_of_that_row_alone(
    opened: Open, change: dict[str, object]
) -> None:
    """A swap succeeds only if shard, owner and counter match."""
    for table in tables(opened):
        table.add([FULL])
        after = FULL._replace(counter=8, position='["6", 0]', ended=True)
        assert not table.swap(FULL._replace(**change), after)  # type: ignore[arg-type]
        assert table.read() == [FULL]
        assert table.swap(FULL, after)
        assert table.read() == [after]
        assert not table.swap(FULL, after)


def test_a_row_without_an_owner(opened: Open) -> None:
    """A missing owner matches a missing owner, although null equals nothing in SQL."""
    for table in tables(opened):
        table.add([Lease("s")])
        assert table.swap(Lease("s"), Lease("s", owner="r/1", counter=1))
        assert not table.swap(Lease("s"), Lease("s", owner="r/2", counter=1))


def test_of_many_one_succeeds(opened: Open) -> None:
    """Concurrent swaps of a row, on several connections, succeed only once."""
    first = opened()
    first.add([Lease("s")])
    others = [opened() for _ in range(4)]

    def take(number: int) -> bool:
        after = Lease("s", owner=f"r/{number}", counter=1)
        return others[number % 4].swap(Lease("s"), after)

    with ThreadPoolExecutor(8) as pool:
        taken = [*pool.map(take, range(40))]
    assert taken.count(True) == 1
    (row,) = first.read()
    assert row.owner == f"r/{taken.index(True)}"


def perform(
    keeper: LeaseKeeper, table: LeaseTable, event: Event, now: float, *, untold: bool
) -> list[Instruction]:
    """Perform a keeper's reads and writes on a table; return its other instructions."""
    rest: list[Instruction] = []
    wanted = keeper.handle(event, now)
    while wanted:
        match wanted.pop(0):
            case Read():
                wanted += keeper.handle(TableRead(table.read()), now)
            case Write(number, before, after):
                done = table.swap(before, after)
                heard: Event = Written(number) if done else WriteRefused(number)
                wanted += keeper.handle(WriteFailed(number) if untold else heard, now)
            case other:
                rest.append(other)
    return rest


@pytest.mark.parametrize("untold", [False, True])
def test_runners_share_a_database(opened: Open, untold: bool) -> None:
    """A keeper recognizes its own writes, since rows are read as they were written."""
    keepers = {name: LeaseKeeper(name, "1") for name in ("blue", "red")}
    tables = {name: opened() for name in keepers}
    tables["red"].add(Lease(f"s{number}", ("p",)) for number in range(8))
    tables["red"].add([Lease("p", ended=True, position='["SHARD_END", 0]')])
    for now in range(60):
        for name, keeper in keepers.items():
            at = (keeper, tables[name])
            for told in perform(*at, TimerRang(), float(now), untold=False):
                if isinstance(told, Stop):
                    end = WorkerEnded(told.shard)
                    perform(*at, end, float(now), untold=False)
    assert [len(keeper.phases) for keeper in keepers.values()] == [4, 4]

    shard = min(keepers["blue"].phases)
    ask = CheckpointAsked(shard, '["5", 0]')
    answers = perform(keepers["blue"], tables["blue"], ask, 60.0, untold=untold)
    for now in range(61, 70):
        event = TimerRang()
        answers += perform(
            keepers["blue"], tables["blue"], event, float(now), untold=False
        )
    assert Answer(shard, stored=True) in answers
    (row,) = (lease for lease in tables["red"].read() if lease.shard == shard)
    assert (row.owner, row.position) == ("blue/1", '["5", 0]')


def test_table_of_another_application_is_refused(opened: Open) -> None:
    """The error names it, and nothing is written (issue 25)."""
    table = opened("blue")
    table.add([FULL])
    with pytest.raises(
        ConfigError, match="belongs to application 'blue' in layout 1, expected 'red'"
    ):
        opened("red")
    assert opened("red", table="other").read() == []
    assert opened("blue").read() == [FULL]


def test_table_of_another_layout_is_refused(tmp_path: Path) -> None:
    """Such a table belongs to another version of etlstage."""
    path = tmp_path / "leases"
    SQLiteLeases(path, "app").close()
    with sqlite3.connect(path) as base:
        base.execute("update etlstage_leases_layout set layout = 9")
    base.close()
    with pytest.raises(ConfigError, match=f"in layout 9, .* in layout {LAYOUT}"):
        SQLiteLeases(path, "app")


def test_table_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """A foreign table is not written to; an invalid name is refused."""
    path = tmp_path / "leases"
    with sqlite3.connect(path) as base:
        base.execute("create table mine (a)")
    base.close()
    with pytest.raises(ConfigError, match="table mine holds no leases of etlstage"):
        SQLiteLeases(path, "app", table="mine")
    with pytest.raises(ConfigError, match="is not a table name"):
        SQLiteLeases(path, "app", table="x; drop table mine")


@pytest.mark.parametrize(
    ("application", "table"), [(None, "etlstage_leases"), ("red", "a"), ("red", "mine")]
)
def test_refused_database_is_not_changed(
    tmp_path: Path, application: str | None, table: str
) -> None:
    """Not a byte is written until its tables are known to be ours (issue 25)."""
    path = tmp_path / "a? b#%41.db"
    with sqlite3.connect(path) as base:
        base.execute("create table a (a)")
        base.execute("create table mine_layout (application, layout, made)")
        base.execute("insert into mine_layout values ('blue', 1, '{}')")
    base.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="lease"):
        SQLiteLeases(path, application, table=table)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_empty_file_has_no_leases(tmp_path: Path) -> None:
    """To look for leases in it writes nothing to it (issue 25)."""
    path = tmp_path / "leases"
    path.touch()
    with pytest.raises(ConfigError, match="there is no lease table etlstage_leases"):
        open_leases(str(path), None)
    assert path.stat().st_size == 0


def test_look_creates_no_file(tmp_path: Path) -> None:
    """Not even if the file has just been removed (issue 25)."""
    with pytest.raises(TableGone, match="unable to open database file"):
        SQLiteLeases(tmp_path / "leases", None)
    assert not any(tmp_path.iterdir())


def test_name_that_can_not_be_kept(tmp_path: Path) -> None:
    """A name with a line end can't be stored, as it would be read as two."""
    table = SQLiteLeases(tmp_path / "leases", "app")
    with pytest.raises(ConfigError, match="can't contain a line end"):
        table.add([Lease("a\nb")])
    table.close()


def test_database_that_can_not_be_opened(tmp_path: Path) -> None:
    """The error names the table, and the reason."""
    with pytest.raises(TableGone, match="lease table etlstage_leases: unable to open"):
        SQLiteLeases(tmp_path / "none" / "leases", "app")


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    """The error is immediate, as another attempt is of no use."""
    (tmp_path / "leases").write_bytes(b"name,text\n" * 99)
    with pytest.raises(ConfigError, match="etlstage_leases: file is not a database"):
        SQLiteLeases(tmp_path / "leases", "app")


@pytest.mark.parametrize(
    ("user", "password", "database", "why"),
    [
        ("etlstage_nobody", "wrong", "postgres", "authentication failed"),
        (None, "wrong", "postgres", "authentication failed"),
        (None, None, "etlstage_none", "does not exist"),
    ],
)
def test_server_that_refuses_us(
    server: PostgreSQL,
    user: str | None,
    password: str | None,
    database: str,
    why: str,
) -> None:
    """The error is immediate, rather than after the time allowed for an outage."""
    parts = urlsplit(url_of(server))
    name, secret = user or parts.username, password or parts.password
    place = f"{name}:{secret}@{parts.hostname}:{parts.port}"
    with pytest.raises(ConfigError, match=f"lease table etlstage_leases: .*{why}"):
        PostgresLeases(f"postgresql://{place}/{database}", "app")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection that locks a file, which has no write-ahead log yet."""
    connection = sqlite3.connect(tmp_path / "leases", isolation_level=None)
    connection.execute("begin immediate")
    yield connection
    connection.close()


def test_runners_that_start_together_on_a_new_file(
    writer: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One waits until the other is done; SQLite itself doesn't wait there."""
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            writer.execute("commit")

    monkeypatch.setattr(sys.modules[SQLiteLeases.__module__], "sleep", wait)
    SQLiteLeases(tmp_path / "leases", "app").close()
    assert len(waits) == 3


def test_file_that_others_never_let_go(
    writer: sqlite3.Connection, tmp_path: Path
) -> None:
    """The attempt fails after the timeout."""
    with pytest.raises(TableGone, match="etlstage_leases: database is locked"):
        SQLiteLeases(tmp_path / "leases", "app", timeout=0.02)
    writer.execute("commit")
    SQLiteLeases(tmp_path / "leases", "app", timeout=0.02).close()


def test_server_that_is_gone_and_comes_back(server: PostgreSQL) -> None:
    """Requests fail meanwhile; what was written before is still there."""
    table = PostgresLeases(url_of(server), "app")
    table.add([Lease("s")])
    server.stop()
    try:
        with pytest.raises(TableGone):
            table.swap(Lease("s"), Lease("s", counter=1))
        with pytest.raises(TableGone):
            table.read()
    finally:
        server.start()
    assert table.read() == [Lease("s")]
    table.close()


def test_postgresql_needs_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error shows how the driver is installed."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"install 'etlstage\[postgresql\]'"):
        PostgresLeases("postgresql://127.0.0.1/x", "app")


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("a/leases.db", "a/leases.db"),
        ("postgresql://me:secret@db:5433/x?password=y", "postgresql://db:5433/x"),
        ("postgres:///x", "postgres:///x"),
    ],
)
def test_no_password_is_shown(where: str, shown: str) -> None:
    """Neither is the user name."""
    assert without_password(where) == shown
