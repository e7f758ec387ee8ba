"""Epochs in a table: of SQLite, and of a PostgreSQL that is started here."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import anyio
import pytest
from pyspark.sql import SparkSession

from etlstage.config.build import pipeline_from_yaml
from etlstage.config.build_retry import Retries
from etlstage.errors import SinkFailed
from etlstage.messages import Position, Run
from etlstage.pipeline import DeadLetters, Pipeline
from etlstage.pipeline.dead_letter.files import FOLDER
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.retry import Retry, Settled
from etlstage.pipeline.delivery.delivery import Bounds, Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import Epochs, Source
from etlstage.pipeline.report import Report
from etlstage.spark import DataFrameSink, Destination, Session
from etlstage.spark.dataframe.table import EpochTable
from tests.database import PostgreSQL, SQLite, drivers, postgresql

pytestmark = [pytest.mark.spark, pytest.mark.classic]

STEPS: Final = ("begin", "written", "committed", "aside", "recorded")


Database: TypeAlias = SQLite | PostgreSQL


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    """Give all tests of the file one server."""
    drivers()
    with postgresql() as server:
        yield server


@pytest.fixture
def postgres(server: PostgreSQL) -> PostgreSQL:
    """Give the server with an empty schema."""
    server.ask("drop schema public cascade; create schema public")
    return server


@pytest.fixture(params=["sqlite", "postgresql"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """Give an empty database of each kind."""
    if request.param == "sqlite":
        return SQLite(tmp_path / "base.db")
    found: PostgreSQL = request.getfixturevalue("postgres")
    return found


def known(done: int = 0, *, start: int = 1) -> Epochs:
    """Return the epochs that a sink is given for a load."""
    return Epochs("ab12", done, once=True, check=lambda: None, start=start)


def sink_into(
    spark: SparkSession,
    base: Database,
    *,
    mode: str = "append",
    schema: str | None = None,
    table: str = "rows",
    **options: str,
) -> DataFrameSink:
    """Return a sink into a table."""
    place = Destination(
        format="jdbc", mode=mode, options={**base.options, "dbTable": table, **options}
    )
    return DataFrameSink(spark, place, schema=schema)


class Numbers(Source):
    """Yields numbers with a position after each; a second read has other texts."""

    def __init__(self, count: int) -> None:
        super().__init__("extract")
        self._count = count
        self._from = 0

    def resume(self, position: object) -> None:
        """Begin after a position."""
        assert isinstance(position, int)
        self._from = position

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield runs of one message."""
        for n in range(self._from, self._count):
            yield [b"%d %s" % (n, secrets.token_hex(2).encode())]
            yield Position(n + 1)


class Died(Exception):
    """Raised where a step was reached."""


async def run(
    spark: SparkSession,
    base: Database,
    state: Path,
    when: tuple[str, int] | None,
    **options: str,
) -> Report:
    """Load numbers; if ``when`` is given, fail at that step of that epoch."""
    delivery = Delivery(state, exactly_once=True, bounds=Bounds(messages=2))
    if when is not None:

        def at(step: str) -> None:
            if (step, delivery.record.epoch + (step != "recorded")) == when:
                raise Died(step)

        delivery.at = at
    pipeline = Pipeline(
        name="numbers",
        source=Numbers(5),
        sink=sink_into(spark, base, **options),
        delivery=delivery,
    )
    return await pipeline.run()


def numbers(base: Database, table: str = "rows") -> list[int]:
    """Return the numbers that are loaded."""
    rows = base.ask(f"select value from {table}")  # noqa: S608 - its name is ours
    return sorted(int(row.split()[0]) for row in rows)


async def test_run_that_breaks_off_loads_each_row_once(
    spark: SparkSession, base: Database, tmp_path: Path
) -> None:
    """At whatever step of a commit, including that of the last epoch (issue 14)."""
    state = tmp_path / "state"
    # The first four concern one epoch; committed rows are never loaded again.
    for step, epoch in (*zip(STEPS[:4], (1, 1, 1, 2), strict=True), ("recorded", 2)):
        report = await run(spark, base, state, (step, epoch))
        assert isinstance(report.error, Died), (step, report.error)
    report = await run(spark, base, state, ("committed", 3))
    assert isinstance(report.error, Died), report.error
    report = await run(spark, base, state, None)
    assert (report.status, report.error) == ("done", None)
    assert report.ledger[-1].done == 5
    assert "wrote 5 messages" in report.landed
    assert numbers(base) == [0, 1, 2, 3, 4]
    assert base.tables() == ["etlstage_epochs", "rows"]
    record = CommitRecord.latest(state)
    assert (record.ended, record.position) == (True, None)


async def commit(sink: DataFrameSink, *messages: bytes) -> None:
    """Load an epoch."""
    await sink.write(list(messages))
    await sink.flush()
    await sink.commit("{}")


async def test_run_that_was_taken_over_commits_nothing(
    spark: SparkSession, base: Database
) -> None:
    """The database records it, whatever is in the state directory (issue 14)."""
    old, new = sink_into(spark, base), sink_into(spark, base)
    old.begin(known())
    async with old:
        await old.write([b"1 old"])
        await old.flush()
        new.begin(known(start=2))
        assert await new.noted() == ""
        async with new:
            with pytest.raises(SinkFailed, match="another run has taken over the load"):
                await old.commit("{}")
            assert old.account.done == 0
            await commit(new, b"1 new")
    assert base.ask("select value from rows") == ["1 new"]
    assert base.tables() == ["etlstage_epochs", "rows"]


async def test_first_epoch_replaces_and_the_others_add(
    spark: SparkSession, base: Database
) -> None:
    """In an existing table that has more columns, in another order (issue 14)."""
    base.ask('create table rows (more integer default 7, "we ird" text, id integer)')
    base.ask("insert into rows (id) values (1)")
    schema = "ID long, `we ird` string"
    for done in 0, 1:
        sink = sink_into(spark, base, mode="overwrite", schema=schema)
        sink.begin(known(done, start=done + 1))
        async with sink:
            await commit(sink, b'{"ID": %d, "we ird": "x"}' % done)
    rows = base.ask('select more, "we ird", id from rows order by id')
    assert rows == ["7|x|0", "7|x|1"]


@pytest.mark.parametrize("base", ["sqlite"], indirect=True)
async def test_table_is_made_at_least_once_too(
    spark: SparkSession, base: Database
) -> None:
    """Even where Spark does not notice that it is missing (issue 14)."""
    async with sink_into(spark, base, mode="error") as sink:
        for message in b"1", b"2":
            await sink.write([message])
            await sink.flush()
        await sink.finish()
    assert base.ask("select value from rows") == ["1", "2"]
    assert base.tables() == ["rows"]
    with pytest.raises(SinkFailed, match="already exists"):
        async with sink_into(spark, base, mode="error") as sink:
            await sink.finish()


def test_options_of_the_driver_stay_as_they_are() -> None:
    """A driver may distinguish upper and lower case, unlike Spark (issue 14)."""
    options = {"url": "u", "ApplicationName": "etl", "dbTable": "mine.rows"}
    assert EpochTable(options, known()).staging == {
        "url": "u",
        "ApplicationName": "etl",
        "dbtable": "mine.etlstage_ab12_1",
    }


async def test_rows_of_a_task_that_ran_twice_are_refused(
    spark: SparkSession, base: Database
) -> None:
    """The staged rows are counted, and the transaction is rolled back (issue 14)."""
    sink = sink_into(spark, base)
    sink.begin(known())
    async with sink:
        await sink.write([b"1"])
        await sink.flush()
        base.ask("insert into etlstage_ab12_1 values ('1')")
        with pytest.raises(SinkFailed, match="2 rows were staged, expected 1"):
            await sink.commit("{}")
    assert base.ask("select count(*) from rows") == ["0"]
    assert base.ask("select epoch from etlstage_epochs") == ["0"]


@pytest.mark.parametrize("base", ["sqlite"], indirect=True)
async def test_what_stands_against_a_table_is_reported_first(
    spark: SparkSession, base: Database
) -> None:
    """Before a row is written; with the problem solved, the load works (issue 14)."""

    async def told(mode: str = "append", moved_from: str = "", **settings: str) -> str:
        sink = sink_into(spark, base, mode=mode, **settings)
        sink.begin(known()._replace(moved_from=moved_from))
        with pytest.raises(SinkFailed) as caught:
            await sink.__aenter__()
        return str(caught.value)

    base.ask("create table rows (id integer)")
    assert await told("error", schema="id long") == (
        "load: table rows exists already: drop it, or set mode to append or overwrite"
    )
    base.ask("insert into rows values (1)")
    assert await told("overwrite", moved_from="table a", schema="id long") == (
        "load: table rows exists already, and nothing is replaced there, as the load"
        " continues from table a: set mode to append, or another output"
    )
    assert await told(schema="id long, title string") == (
        "load: table rows has no column title: it has id; add what is missing, or drop"
        " the table"
    )
    assert await told(driver="org.nobody.Driver") == (
        "load: there is no driver org.nobody.Driver: put its jar into spark.config, as"
        " in {spark.jars: driver.jar}"
    )
    assert base.tables() == ["etlstage_epochs", "rows"]
    base.ask("alter table rows add title text")
    sink = sink_into(spark, base, schema="id long, title string")
    sink.begin(known())
    async with sink:
        await commit(sink, b'{"id": 1, "title": "x"}')
        base.ask("update etlstage_epochs set epoch = 7")
    assert await told() == (
        "load: etlstage_epochs has epoch 7 of load ab12, but the recorded epoch is 0: was"
        " the database restored to an earlier state? After 'etlstage state reset'"
        " everything is loaded again"
    )


async def test_database_that_is_not_reached_is_reported_first(
    spark: SparkSession, base: Database
) -> None:
    """Also at least once, when epochs are not in a table (issue 23)."""
    with pytest.raises(
        SinkFailed, match=r"load: there is no driver org\.nobody\.Driver"
    ):
        await sink_into(spark, base, driver="org.nobody.Driver").__aenter__()


async def test_it_shows_what_a_start_waits_for(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First for Spark, with nothing written yet (issue 27)."""
    sink = sink_into(spark, SQLite(tmp_path / "base.db"))
    sink.begin(known())
    shown = list[str]()

    def start(_: Session) -> SparkSession:
        shown.append(sink.activity)
        return spark

    def noted(_: EpochTable, __: SparkSession) -> None:
        shown.append(sink.activity)

    monkeypatch.setattr(Session, "start", start)
    monkeypatch.setattr(EpochTable, "noted", noted)
    assert await sink.noted() is None
    assert [*shown, sink.activity] == ["starting Spark", "reading the epochs", ""]


async def test_server_that_goes_away_costs_nothing(
    spark: SparkSession, postgres: PostgreSQL, tmp_path: Path
) -> None:
    """Nor does a missing permission; the run continues once it is back (issue 14)."""
    state = tmp_path / "state"
    report = await run(spark, postgres, state, ("written", 2))
    assert isinstance(report.error, Died)
    postgres.stop()
    try:
        report = await run(spark, postgres, state, None)
    finally:
        postgres.start()
    where = postgres.options["url"].split("/")[2]
    assert str(report.error).startswith(
        "load: can't read the epochs from table rows of a database: connection to"
        f" {where} refused"
    )
    postgres.ask(
        "create role loader login password 'of the loader'; grant all on schema public"
        " to loader; grant all on etlstage_epochs to loader; grant select on rows to loader"
    )
    loader = {"user": "loader", "password": "of the loader"}
    report = await run(spark, postgres, state, None, **loader)
    assert str(report.error) == (
        "load: can't write epoch 2 to table rows of a database: ERROR: permission denied"
        " for table rows"
    )
    assert report.ledger[-1].done == 2
    postgres.ask("grant insert on rows to loader")
    report = await run(spark, postgres, state, None, **loader)
    assert report.error is None
    assert numbers(postgres) == [0, 1, 2, 3, 4]
    postgres.ask("drop owned by loader; drop role loader")


@pytest.mark.parametrize("base", ["postgresql"], indirect=True)
def test_run_on_executors_is_one_transaction(
    spark: SparkSession, base: Database, tmp_path: Path
) -> None:
    """Whatever step an earlier start was interrupted at (issue 14)."""
    (tmp_path / "in.txt").write_text("".join(f"{n} row\n" for n in range(50)))
    options = ", ".join(f"{name}: '{said}'" for name, said in base.options.items())
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "{name: p, engine: spark, delivery: exactly-once, state: state,"
        " extract: {spark: {path: in.txt, format: text}},"
        ' transform: [{name: t, worker: {command: [cat]}, dialect: {eom: "\\n",'
        ' eop: "\\n"}}],'
        " load: {spark: {format: jdbc, mode: append, options:"
        f" {{dbtable: rows, {options}}}}}}}}}"
    )

    def at(reached: str) -> None:
        if reached == step:
            raise Died(step)

    for step in (*STEPS[:4], ""):  # after the last, another run would begin
        runner = pipeline_from_yaml(file, spark=spark)
        assert runner._delivery is not None
        runner._delivery.at = at
        report = anyio.run(runner.run)
        if step:
            assert step in str(report.error)
            continue
        assert (report.status, report.error) == ("done", None)
    assert numbers(base) == [*range(50)]
    assert base.tables() == ["etlstage_epochs", "rows"]


REFUSING = """\
from etlstage import worker

def answer(message):
    if message == b"7":
        raise worker.Refuse("seven")
    yield message

worker.transform(answer)
"""


@pytest.mark.parametrize("base", ["postgresql"], indirect=True)
def test_batch_of_a_stream_is_one_transaction(
    spark: SparkSession, base: Database, tmp_path: Path
) -> None:
    """Wherever starts are interrupted; the first batch replaces old rows (issue 14)."""
    (tmp_path / "in").mkdir()
    for name, first in ("a", 0), ("b", 5):
        text = "".join(f"{n}\n" for n in range(first, first + 5))
        (tmp_path / "in" / f"{name}.txt").write_text(text)
    (tmp_path / "stage.py").write_text(REFUSING)
    base.ask("create table rows (value text); insert into rows values ('99 others')")
    options = ", ".join(f"{name}: '{said}'" for name, said in base.options.items())
    file, state = tmp_path / "pipeline.yaml", tmp_path / "state"
    file.write_text(
        "{name: p, engine: streaming, delivery: exactly-once, state: state,"
        " extract: {spark: {path: in, format: text,"
        ' options: {maxFilesPerTrigger: "1"}}},'
        " transform: [{name: t, worker: {command: [python, stage.py]}}],"
        " load: {spark: {format: jdbc, mode: overwrite, options:"
        f" {{dbtable: rows, {options}}}}}}}}}"
    )

    def loaded(step: str = "", recorded: int = 0, *, taken: bool = False) -> Report:
        def at(reached: str) -> None:
            if (reached, CommitRecord.latest(state).epoch) != (step, recorded):
                return
            if not taken:
                raise Died(step)
            base.ask("update etlstage_epochs set fence = fence + 1")

        runner = pipeline_from_yaml(file, spark=spark)
        assert runner._delivery is not None
        runner._delivery.at = at
        return anyio.run(runner.run)

    report = loaded("written", taken=True)
    assert "another run has taken over the load" in str(report.error)
    assert numbers(base) == [99]
    for step, recorded, noted in ("committed", 0, "1"), ("aside", 1, "2"):
        assert step in str(loaded(step, recorded).error)
        assert base.ask("select epoch from etlstage_epochs") == [noted]
    report = loaded()
    assert (report.status, report.error) == ("done", None)
    assert numbers(base) == [n for n in range(10) if n != 7]
    assert base.tables() == ["etlstage_epochs", "rows"]
    account = report.ledger[1]
    assert (account.received, account.done, account.dead) == (10, 9, 1)
    letters = list(Settled(state / FOLDER).letters("t"))
    assert [x.message for x in letters if isinstance(x, DeadLetter)] == [b"7"]


STAGE = """\
from pathlib import Path
from etlstage import worker

def answer(message):
    if message == b"b" and not Path("mended").exists():
        raise worker.Refuse("not b")
    yield message

worker.transform(answer)
"""


def test_retry_that_was_killed_is_known_to_the_database(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its letters are loaded once, and count as passed (issue 14)."""
    base = SQLite(tmp_path / "base.db")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a\nb\nc\n")
    (tmp_path / "stage.py").write_text(STAGE)
    file, state = tmp_path / "pipeline.yaml", tmp_path / "state"
    file.write_text(
        "{name: p, delivery: exactly-once, state: state,"
        " extract: {spark: {path: in, format: text}},"
        " transform: [{name: t, worker: {command: [python, stage.py]}}],"
        " load: {spark: {format: jdbc, mode: append, options:"
        f" {{dbtable: rows, url: '{base.options['url']}', driver: org.sqlite.JDBC}}}}}}}}"
    )
    report = anyio.run(pipeline_from_yaml(file, spark=spark).run)
    assert report.error is None
    (tmp_path / "mended").touch()
    found = Settled(state / FOLDER).letters("t")
    letters = [letter for letter in found if isinstance(letter, DeadLetter)]
    with Delivery(state) as delivery:
        retries = Retries.of_file(file)[0]
        assert not retries.recover(1, delivery)
        again = retries.pipeline(Retry(letters, 1), delivery)
        assert anyio.run(again.run).error is None
        # It is killed here.
    with Delivery(state) as delivery:
        retries = Retries.of_file(file)[0]
        assert retries.recover(1, delivery)
        assert not retries.recover(2, delivery)
    settled = Settled(state / FOLDER)
    assert (settled.next, list(settled.letters("t"))) == (2, [])
    assert base.ask("select value from rows") == ["a", "c", "b"]


@pytest.mark.parametrize("there", [False, True])
async def test_letters_of_a_replaced_table_are_current(
    spark: SparkSession, base: Database, tmp_path: Path, *, there: bool
) -> None:
    """They are of the run that made the table, and can be retried (issue 23)."""
    if there:
        base.ask("create table rows (id bigint)")
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    place = Destination(
        format="jdbc", mode="overwrite", options={**base.options, "dbtable": "rows"}
    )
    sink = DataFrameSink(spark, place, schema="id long", dead_letters=letters)
    async with sink:
        await sink.write([b'{"id":1}', b'{"id":"x"}'])
        await sink.finish()
    letters.close()
    assert base.ask("select id from rows") == ["1"]
    settled = Settled(letters.folder)
    (letter,) = settled.letters("load")
    assert isinstance(letter, DeadLetter)
    assert not settled.superseded(letter)


def test_stream_is_refused_for_a_table_that_exists(
    spark: SparkSession, base: Database
) -> None:
    """With mode error, also if it is loaded at least once (issue 23)."""
    sink = sink_into(spark, base, mode="error")
    assert sink.objection() is None
    base.ask("create table rows (value text)")
    assert sink.objection() == (
        "table rows of a database exists already: drop it, or set mode to append or"
        " overwrite"
    )
    assert sink_into(spark, base).objection() is None


@pytest.mark.parametrize("once", [True, False])
async def test_load_that_continues_in_another_table_replaces_nothing(
    spark: SparkSession, base: Database, *, once: bool
) -> None:
    """A table without rows is taken as one that is missing (issue 23)."""
    sink = sink_into(spark, base, table="first")
    sink.begin(known()._replace(once=once))
    async with sink:
        await sink.write([b"1"])
        await sink.flush()
        if once:
            await sink.commit("{}")
    base.ask("create table rows (value text)")
    moved = known(1, start=2)._replace(once=once, moved_from="jdbc first")
    for mode in ("overwrite", "error"):
        base.ask("insert into rows values ('other')")
        sink = sink_into(spark, base, mode=mode)
        sink.begin(moved)
        with pytest.raises(SinkFailed) as caught:
            await sink.__aenter__()
        assert "exists already, and nothing is replaced there" in str(caught.value)
        assert str(caught.value).startswith("load: table rows")
        base.ask("delete from rows")
        sink = sink_into(spark, base, mode=mode)
        sink.begin(moved)
        async with sink:
            pass
    sink = sink_into(spark, base, mode="error")
    sink.begin(moved)
    async with sink:
        await sink.write([b"2"])
        await sink.flush()
        if once:
            await sink.commit("{}")
    assert base.ask("select value from rows") == ["2"]


async def moved_and_killed(
    spark: SparkSession, base: Database, state: Path, *, position: int = 2
) -> None:
    """Load an epoch into table a; be killed once the next is committed in table b."""
    report = await run(spark, base, state, ("recorded", 1), table="a")
    assert isinstance(report.error, Died), report.error
    drained = CommitRecord.latest(state)
    replace(drained, ended=True, position=position).store(state)
    report = await run(spark, base, state, ("committed", 2), table="b", mode="error")
    assert isinstance(report.error, Died), report.error
    assert CommitRecord.latest(state).epoch == 1


@pytest.mark.parametrize("base", ["sqlite"], indirect=True)
@pytest.mark.parametrize("mode", ["overwrite", "error"])
async def test_load_goes_on_in_another_table_after_a_kill(
    spark: SparkSession, base: Database, tmp_path: Path, mode: str
) -> None:
    """The rows of the epoch that was not recorded are its own (issue 23)."""
    state = tmp_path / "state"
    await moved_and_killed(spark, base, state)
    report = await run(spark, base, state, None, table="b", mode=mode)
    assert (report.status, report.error) == ("done", None)
    assert numbers(base, "a") == [0, 1]
    assert numbers(base, "b") == [2, 3, 4]


@pytest.mark.parametrize("base", ["sqlite"], indirect=True)
async def test_table_that_a_load_turns_to_after_a_kill_is_not_its_own(
    spark: SparkSession, base: Database, tmp_path: Path
) -> None:
    """The epoch that was not recorded is in the table before (issue 23)."""
    state = tmp_path / "state"
    await moved_and_killed(spark, base, state)
    base.ask("create table c (value text)")
    base.ask("insert into c values ('9 other')")
    for mode in ("overwrite", "error"):
        report = await run(spark, base, state, None, table="c", mode=mode)
        assert "as the load continues from jdbc b: set mode" in str(report.error)
        assert numbers(base, "c") == [9]
    base.ask("delete from c")
    report = await run(spark, base, state, None, table="c", mode="error")
    assert (report.status, report.error) == ("done", None)
    assert [numbers(base, table) for table in "abc"] == [[0, 1], [2, 3], [4]]
    assert CommitRecord.latest(state).output == "jdbc c"


@pytest.mark.parametrize("base", ["sqlite"], indirect=True)
async def test_load_that_is_over_is_not_recorded_elsewhere(
    spark: SparkSession, base: Database, tmp_path: Path
) -> None:
    """If it was killed before it was recorded where it loaded (issue 23)."""
    state = tmp_path / "state"
    await moved_and_killed(spark, base, state, position=4)
    report = await run(spark, base, state, None, table="c")
    assert "it has loaded into jdbc b, not into jdbc c" in str(report.error)
    report = await run(spark, base, state, None, table="b")
    assert (report.status, report.error) == ("done", None)
    assert [numbers(base, table) for table in "ab"] == [[0, 1], [4]]


@pytest.mark.parametrize("base", ["sqlite"], indirect=True)
async def test_load_does_not_go_on_in_another_database(
    spark: SparkSession, base: Database
) -> None:
    """The other database lacks its epochs so far (issue 14)."""
    sink = sink_into(spark, base)
    sink.begin(known(done=0))
    assert await sink.noted() is None
    sink.begin(known(done=3))
    with pytest.raises(
        SinkFailed, match=r"epoch 3 .* has no record of the load: set the url that"
    ):
        await sink.noted()
