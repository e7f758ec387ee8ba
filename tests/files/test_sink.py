from __future__ import annotations

import gzip
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import anyio
import pyarrow.dataset as ds
import pytest
from structlog.testing import capture_logs

from etlstage.errors import SinkFailed
from etlstage.files.sink import FileSink
from etlstage.files.source import FileSource
from etlstage.messages import Position, Run
from etlstage.pipeline import landing
from etlstage.pipeline.dead_letter.letter import DeadLetter
from etlstage.pipeline.dead_letter.retry import Settled, settle
from etlstage.pipeline.dead_letter.store import DeadLetters, replacement
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.record import CommitRecord
from etlstage.pipeline.interfaces import Epochs
from etlstage.pipeline.journal_sink import JournalSink
from etlstage.pipeline.journal_source import JournalSource
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.report import Report
from etlstage.stage import ErrorBudget, ErrorPolicy
from tests.pipeline.dead_letter.test_retry import letter as letter_of


async def load(path: Path, *runs: Run, **settings: Any) -> FileSink:  # noqa: ANN401
    """Load runs."""
    async with FileSink(path, **settings) as sink:
        for run in runs:
            await sink.write(run)
        await sink.finish()
    return sink


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that sets this machine's time zone for the test."""

    def setter(zone: str) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield setter
    monkeypatch.undo()
    time.tzset()


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Return the rows of Parquet."""
    table = ds.dataset(path, format="parquet", partitioning="hive").to_table()
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def names_in(path: Path) -> list[str]:
    """Return what readers see, without the name of the load, and what is hidden."""
    return sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()
    )


async def test_messages_are_text_without_a_schema(tmp_path: Path) -> None:
    """In epochs, all of them marked as whole at the end."""
    sink = await load(tmp_path / "o", [b"a", b"b"], [b"c"], epoch_messages=2)
    assert [row["value"] for row in rows_in(tmp_path / "o")] == ["a", "b", "c"]
    assert (sink.epochs, sink.account.done) == (2, 3)
    assert (
        sink.landed()
        == f"wrote 3 messages in 2 epochs to {tmp_path}/o; output complete"
    )
    assert "_SUCCESS" in names_in(tmp_path / "o")
    assert len(names_in(tmp_path / "o")) == 3


@pytest.mark.parametrize(
    ("kind", "options", "suffix", "content"),
    [
        ("csv", {}, ".csv", b'1,"a,b",\n2,,"\\\\"\n'),
        ("csv", {"header": "true", "escape": '"'}, ".csv", b'n,t,u\n1,"a,b",\n2,,\\\n'),
        ("json", {}, ".json", b'{"n":1,"t":"a,b"}\n{"n":2,"u":"\\\\"}\n'),
        (
            "ndjson",
            {"compression": "gzip"},
            ".json.gz",
            b'{"n":1,"t":"a,b"}\n{"n":2,"u":"\\\\"}\n',
        ),
    ],
)
async def test_formats(
    tmp_path: Path, kind: str, options: dict[str, str], suffix: str, content: bytes
) -> None:
    """As Spark writes them."""
    rows = [b'{"n":1,"t":"a,b"}', b'{"n":2,"u":"\\\\"}']
    settings: Any = {"schema": "n int, t string, u string", "missing": "null"}
    await load(tmp_path / "o", rows, format=kind, options=options, **settings)
    (part,) = (tmp_path / "o").glob("part-*")
    assert part.name.endswith(f"-00000{suffix}")
    data = part.read_bytes()
    if suffix == ".csv" and "escape" not in options:
        content = content.replace(b'"\\\\"', b"\\")
    assert (gzip.decompress(data) if suffix.endswith("gz") else data) == content


@pytest.mark.parametrize("kind", ["csv", "json", "ndjson", "parquet", "text"])
@pytest.mark.parametrize("packed", ["GZIP", "Zstd", "NONE"])
async def test_compression_in_any_case(tmp_path: Path, kind: str, packed: str) -> None:
    """As with Spark (issue 23)."""
    settings: dict[str, Any] = {
        "options": {"compression": packed},
        "schema": "v string",
    }
    await load(tmp_path / "o", [b'{"v":"a"}'], format=kind, **settings)
    source = FileSource(str(tmp_path / "o"), kind, message="v", schema="v string")
    if kind == "text":
        source = FileSource(str(tmp_path / "o"), kind)
    assert [m async for run in source.runs() for m in run] == [b"a"]


async def test_null_of_a_single_column_is_a_row(tmp_path: Path) -> None:
    """An empty line of CSV would be none (issue 23)."""
    rows: list[bytes] = [b'{"k":"x","v":null}', b'{"k":"x","v":"1"}']
    settings: dict[str, Any] = {"schema": "k string, v string", "partition_by": ["k"]}
    await load(tmp_path / "o", rows, format="csv", **settings)
    (file,) = (tmp_path / "o" / "k=x").iterdir()
    assert file.read_bytes() == b'""\n1\n'
    source = FileSource(str(tmp_path / "o"), "csv", schema="v string")
    found = [m async for run in source.runs() for m in run]
    assert found == [b'{"v":null,"k":"x"}', b'{"v":"1","k":"x"}']


@pytest.mark.parametrize(("kind", "value"), [("string", '"a"'), ("binary", '"YQ=="')])
async def test_null_of_text_is_an_empty_line(
    tmp_path: Path, kind: str, value: str
) -> None:
    """Of bytes as of strings (issue 23)."""
    rows: list[bytes] = [b'{"k":1,"v":%s}' % v for v in (b"null", value.encode())]
    settings: dict[str, Any] = {"schema": f"k int, v {kind}", "partition_by": ["k"]}
    await load(tmp_path / "o", rows, format="text", **settings)
    (file,) = (tmp_path / "o" / "k=1").iterdir()
    assert file.read_bytes() == b"\na\n"


@pytest.mark.parametrize(("sep", "cut"), [("\\t", "\t"), (" ", " ")])
async def test_row_of_nulls_between_blanks_is_a_row(
    tmp_path: Path, sep: str, cut: str
) -> None:
    """A blank line of CSV would be none (issue 23)."""
    rows = [b'{"a":null,"b":%s,"k":1}' % value for value in (b"null", b'"x"')]
    settings: dict[str, Any] = {
        "schema": "a string, b string, k int",
        "options": {"sep": sep},
    }
    await load(tmp_path / "o", rows, format="csv", partition_by=["k"], **settings)
    (file,) = (tmp_path / "o" / "k=1").iterdir()
    assert file.read_text() == f'""{cut}\n{cut}x\n'
    source = FileSource(str(tmp_path / "o"), "csv", **settings)
    assert [m async for run in source.runs() for m in run] == rows


@pytest.mark.parametrize(
    ("kind", "schema", "header", "written"),
    [
        ("csv", "v string", "false", '"\ufeffa"\n"\ufeffb"\n'),
        ("csv", "`\ufeffv` string", "true", '"\ufeffv"\n"\ufeffa"\n"\ufeffb"\n'),
        ("json", "v string", "false", '{"v":"\ufeffa"}\n{"v":"\ufeffb"}\n'),
        ("text", None, "false", "\ufeff\ufeffa\n\ufeffb\n"),
        ("text", "value binary", "false", "\ufeff\ufeffa\n\ufeffb\n"),
    ],
)
async def test_byte_order_mark_of_a_value_is_kept(
    tmp_path: Path, kind: str, schema: str | None, header: str, written: str
) -> None:
    """Readers drop one at the beginning of a file (issue 23)."""
    wanted: list[bytes] = ["\ufeffa".encode(), "\ufeffb".encode()]
    rows = wanted
    if schema and kind != "text":
        name = schema.split()[0].strip("`").encode()
        rows = [b'{"%s":"%s"}' % (name, value) for value in wanted]
    settings: dict[str, Any] = {"schema": schema, "options": {"header": header}}
    await load(tmp_path / "o", rows, format=kind, **settings)
    (file,) = (tmp_path / "o").glob("part-*")
    assert file.read_text() == written
    source = FileSource(str(tmp_path / "o"), kind, **settings)
    assert [m async for run in source.runs() for m in run] == wanted


@pytest.mark.parametrize("kind", ["csv", "json"])
async def test_time_that_has_no_year_in_this_zone(
    tmp_path: Path, local: Callable[[str], None], kind: str
) -> None:
    """It is written in UTC, and the rest of the epoch as ever (issue 23)."""
    local("Asia/Kathmandu")
    rows = [b'{"t":"9999-12-31T23:59:59Z"}', b'{"t":"2020-01-01T00:00:00Z"}']
    sink = await load(tmp_path / "o", rows, format=kind, schema="t timestamp")
    assert sink.account.done == 2
    (file,) = (tmp_path / "o").glob("part-*")
    first, second = file.read_text().splitlines()
    assert "9999-12-31T23:59:59.000000Z" in first
    assert "2020-01-01T05:45:00.000000+05:45" in second


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2018-11-04", "2018-11-04T03:00:00Z"),
        ("2018-11-04T00:30:00.000001", "2018-11-04T03:30:00.000001Z"),
        ("2018-11-04T01:00:00", "2018-11-04T03:00:00Z"),
        ("2018-11-03T23:59:59.999999", "2018-11-04T02:59:59.999999Z"),
        ("2018-02-17T23:30:00", "2018-02-18T01:30:00Z"),
        ("1900-01-01T00:00:00", "1900-01-01T03:06:28Z"),
    ],
)
async def test_time_that_clocks_skip_or_repeat(
    tmp_path: Path, local: Callable[[str], None], text: str, wanted: str
) -> None:
    """It is moved forward, or is the earlier one, as with Spark (issue 23)."""
    local("America/Sao_Paulo")
    row = f'{{"t":"{text}"}}'.encode()
    await load(tmp_path / "o", [row], format="parquet", schema="t timestamp")
    (found,) = rows_in(tmp_path / "o")
    assert found["t"] == datetime.fromisoformat(wanted)


async def test_text_has_one_column(tmp_path: Path) -> None:
    """Which may be any bytes."""
    await load(tmp_path / "o", [b"\xff", b"b"], format="text", schema="v binary")
    (part,) = (tmp_path / "o").glob("part-*")
    assert part.read_bytes() == b"\xff\nb\n"
    options = {"compression": "zstd"}
    await load(tmp_path / "z", [b"a", b"b"], format="text", options=options)
    source = FileSource(str(tmp_path / "z"), "text")
    runs = [run async for run in source.runs() if not isinstance(run, Position)]
    assert [m for run in runs for m in run] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("schema", "run", "why"),
    [
        (None, [b"a\r", b"b\nc", b"d\re"], "it has a line break at offset 1"),
        ("v binary", [b"a\r", b"\xff\n", b"d\re"], "it has a line break at offset 1"),
        (
            "day string null, v string null",
            [
                b'{"v":"a\\r","day":"m\\nn"}',
                b'{"v":"b\\nc","day":"m\\nn"}',
                b'{"v":"d\\r\\r","day":"m\\nn"}',
            ],
            "field 'v' has a line break at offset 1",
        ),
    ],
)
async def test_line_break_does_not_make_two_rows_of_text(
    tmp_path: Path, schema: str | None, run: list[bytes], why: str
) -> None:
    """Such a message is dead-lettered, or nothing is loaded."""
    settings: Any = {"schema": schema, "format": "text"}
    if schema is not None and "day" in schema:
        settings["partition_by"] = ["day"]
    with pytest.raises(SinkFailed) as caught:
        await load(tmp_path / "o", run, **settings)
    assert str(caught.value).endswith(
        f": message 2 is the first, {why}, and would become two rows in format text;"
        " json, csv and parquet keep it as one row; nothing of epoch 1 is loaded"
    )
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    policy = ErrorPolicy(then="dead_letter", budget=ErrorBudget())
    settings |= {"dead_letters": letters, "mode": "append", "on_error": policy}
    await load(tmp_path / "o", run, **settings)
    (part,) = (tmp_path / "o").rglob("part-*")
    assert part.read_bytes() == b"a\r\n"
    assert [letter.message for letter in letters.letters()] == run[1:]


async def test_what_does_not_fit_is_dead_lettered(tmp_path: Path) -> None:
    """Or it fails the run; what else is there is loaded, or not (issue 23)."""
    run = [b'{"n":1}', b"x", b'{"n":"y"}']
    with pytest.raises(SinkFailed) as caught:
        await load(tmp_path / "o", run, schema="n long")
    assert str(caught.value) == (
        "load: 2 of 3 messages do not fit the schema 'n long': message 2 is the first,"
        " it is not one JSON document (Expecting value: line 1 column 1 (char 0));"
        " nothing of epoch 1 is loaded"
    )
    assert not list((tmp_path / "o").glob("part-*"))
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    settings: Any = {"schema": "n long", "dead_letters": letters, "mode": "append"}
    policy = ErrorPolicy(then="dead_letter", budget=ErrorBudget())
    sink = FileSink(tmp_path / "o", on_error=policy, **settings)
    async with sink:
        await sink.write(run)
        await sink.finish()
    assert rows_in(tmp_path / "o") == [{"n": 1}]
    assert [letter.message for letter in letters.letters()] == run[1:]


async def test_value_too_long_for_a_folder_is_dead_lettered(tmp_path: Path) -> None:
    """Such a message does not fit; others are loaded (issue 23)."""
    long = "\u00e9" * 100 + "/" * 17  # 251 bytes, as a slash becomes three
    run = [
        f'{{"k":"{k}","n":1}}'.encode()
        for k in ("a", long + "bbb", "", long + "bb", "a", "cc")
    ]
    run[1:1] = [b"x"]
    settings: Any = {"schema": "k string, n int", "partition_by": ["k"]}
    with pytest.raises(SinkFailed) as caught:
        await load(tmp_path / "o", run[2:], **settings)
    assert str(caught.value) == (
        "load: 1 of 5 messages does not fit the schema 'k string, n int': message 1 is"
        " the first, field 'k' makes a folder name of 256 bytes, expected no more than"
        " 255: shorten it, or take k out of partition_by; nothing of epoch 1 is loaded"
    )
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    policy = ErrorPolicy(then="dead_letter", budget=ErrorBudget())
    settings |= {"dead_letters": letters, "mode": "append", "on_error": policy}
    sink = await load(tmp_path / "o", run, **settings)
    assert [letter.message for letter in letters.letters()] == [run[1], run[2]]
    assert sink.account.done == 5
    assert len(rows_in(tmp_path / "o")) == 5


async def test_value_that_is_null_in_a_folder_is_dead_lettered(tmp_path: Path) -> None:
    """It would come back as null (issue 23)."""
    run = [
        b'{"k":"__HIVE_DEFAULT_PARTITION__","n":1}',
        b'{"k":null,"n":2}',
        b'{"k":"__HIVE_DEFAULT_PARTITION__s","n":3}',
    ]
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    settings: Any = {"schema": "k string, n int", "partition_by": ["k"]}
    settings |= {"dead_letters": letters, "on_error": ErrorPolicy(then="dead_letter")}
    await load(tmp_path / "o", run, **settings)
    (letter,) = letters.letters()
    assert letter.message == run[0]
    assert letter.error == (
        "load: message 1 does not fit the schema 'k string, n int': field 'k' has the"
        " text that is null in a folder's name: replace it, or take k out of"
        " partition_by"
    )
    assert rows_in(tmp_path / "o") == [
        {"k": None, "n": 2},
        {"k": "__HIVE_DEFAULT_PARTITION__s", "n": 3},
    ]


async def test_value_with_nul_is_dead_lettered(tmp_path: Path) -> None:
    """No folder has it in its name, with Spark neither (issue 23)."""
    run: list[bytes] = [b'{"k":"a\\u0000b","n":1}', b'{"k":"c","n":2}']
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    settings: Any = {"schema": "k string, n int", "partition_by": ["k"]}
    settings |= {"dead_letters": letters, "on_error": ErrorPolicy(then="dead_letter")}
    await load(tmp_path / "o", run, **settings)
    (letter,) = letters.letters()
    assert letter.message == run[0]
    assert letter.error.endswith(
        "field 'k' has a NUL at offset 1, which no folder can have in its name: replace"
        " it, or take k out of partition_by"
    )
    assert rows_in(tmp_path / "o") == [{"k": "c", "n": 2}]


async def test_empty_value_that_must_not_be_null_is_dead_lettered(
    tmp_path: Path,
) -> None:
    """It would come back as null, which only a nullable column has (issue 23)."""
    run: list[bytes] = [
        b'{"k":"","b":"","n":1}',
        b'{"k":"a","b":"","n":2}',
        b'{"k":"a","b":"YQ==","n":3}',
    ]
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    schema = "k string, b binary not null, n int"
    settings: Any = {"schema": schema, "partition_by": ["k", "b"]}
    settings |= {"dead_letters": letters, "on_error": ErrorPolicy(then="dead_letter")}
    settings["on_error"] = ErrorPolicy(then="dead_letter", budget=ErrorBudget(count=9))
    await load(tmp_path / "o", run, **settings)
    found = [*letters.letters()]
    assert [letter.message for letter in found] == run[:2]
    assert found[0].error.endswith(
        "field 'b' is NOT NULL, and empty, which is null in a folder's name: replace it,"
        " or take b out of partition_by"
    )
    assert [row["n"] for row in rows_in(tmp_path / "o")] == [3]


async def test_modes(tmp_path: Path) -> None:
    """What is there is kept, replaced, or in the way."""
    out = tmp_path / "o"
    await load(out, [b"a"])
    with pytest.raises(
        SinkFailed, match="exists already: remove it, or set mode to app"
    ):
        await load(out, [b"b"])
    await load(out, [b"b"], mode="append")
    assert sorted(row["value"] for row in rows_in(out)) == ["a", "b"]
    await load(out, [b"c"], [b"d"], mode="overwrite", epoch_messages=1)
    assert sorted(row["value"] for row in rows_in(out)) == ["c", "d"]
    await load(out, mode="overwrite")
    assert rows_in(out) == []
    assert len(names_in(out)) == 2


@pytest.mark.parametrize("mode", ["append", "overwrite"])
async def test_output_of_a_run_that_failed_is_incomplete(
    tmp_path: Path, mode: str
) -> None:
    """The marker of the run before is gone (issue 23)."""
    out = tmp_path / "o"
    settings: dict[str, Any] = {"schema": "id int", "mode": mode, "epoch_messages": 1}
    await load(out, [b'{"id":1}'], **settings)
    assert (out / "_SUCCESS").exists()
    with pytest.raises(SinkFailed, match="not fit the schema"):
        await load(out, [b'{"id":2}', b'{"id":"x"}'], **settings)
    assert not (out / "_SUCCESS").exists()
    await load(out, [b'{"id":3}'], **settings)
    assert (out / "_SUCCESS").exists()


async def test_run_that_loaded_nothing_is_in_no_other_runs_way(tmp_path: Path) -> None:
    """One that was stopped before its first epoch."""
    out = tmp_path / "o"
    async with FileSink(out) as sink:
        await sink.write([b"a"])
    assert not out.exists()
    await load(out, [b"b"])
    assert [row["value"] for row in rows_in(out)] == ["b"]


async def test_two_runs_at_a_time_are_refused(tmp_path: Path) -> None:
    """And what one left that was killed is removed by the next."""
    out = tmp_path / "o"
    (out / ".epoch=run-0-1.0").mkdir(parents=True)
    async with FileSink(out, mode="append") as sink:
        await sink.write([b"a"])
        assert names_in(out) == []
        with pytest.raises(SinkFailed, match="another run writes to"):
            await load(out, [b"b"], mode="append")
        await sink.finish()
    assert not (out / ".epoch=run-0-1.0").exists()


async def test_epoch_is_there_behind_its_record(tmp_path: Path) -> None:
    """Once, whatever start moves it (issue 23)."""
    out = tmp_path / "o"
    epochs = Epochs("ab12", 0, once=True, check=lambda: None)
    sink = FileSink(out, partition_by=["p"], schema="p int null, v string")
    sink.begin(epochs)
    async with sink:
        await sink.write([b'{"p":1,"v":"x"}', b'{"v":"y"}'])
        await sink.flush()
        assert not [name for name in names_in(out) if not name.startswith(".")]
        assert sink.performs
    again = FileSink(out, partition_by=["p"], schema="p int null, v string")
    again.begin(epochs._replace(done=1))
    async with again:
        await again.write([b'{"p":1,"v":"z"}'])
        await again.finish()
        await again.perform()
    # The first epoch is an earlier run's.
    assert again.landed() == f"wrote 1 message to {out}; output complete"
    assert sorted(names_in(out)) == [
        "_SUCCESS",
        "p=1/part-ab12-1-00000.parquet",
        "p=1/part-ab12-2-00000.parquet",
        "p=__HIVE_DEFAULT_PARTITION__/part-ab12-1-00001.parquet",
    ]
    with pytest.raises(SinkFailed, match="exists already"):
        await load(out)


async def test_column_that_is_always_null_is_reported(tmp_path: Path) -> None:
    """At the end, once (issue 23)."""
    run, schema = [b'{"a":1,"b":null}', b'{"a":2,"b":null}'], "a int, b int"
    sink = await load(tmp_path / "o", run, schema=schema)
    assert sink.landed().endswith("; column b is null in all rows loaded (2)")
    assert sink.output() == ("parquet", str(tmp_path / "o"))


async def test_output_that_cant_be_made(tmp_path: Path) -> None:
    """It is reported before the first message."""
    (tmp_path / "o").touch()
    with pytest.raises(SinkFailed, match=r"can't write to .*/o: file exists"):
        await load(tmp_path / "o", mode="append")


async def test_epoch_that_cant_be_moved_is_removed(tmp_path: Path) -> None:
    """As a whole, and none before it; the file in the way is named (issue 23)."""
    rows: list[bytes] = [b'{"id":%d,"p":%d}' % (n, n) for n in range(8)]
    for way in range(1, 8):
        out = tmp_path / f"{way}"
        out.mkdir()
        (out / f"p={way}").touch()
        settings: dict[str, Any] = {"schema": "id int, p int", "partition_by": ["p"]}
        match = rf"can't write epoch 2 to {out}: {out}/p={way}: file exists"
        async with FileSink(out, mode="append", **settings) as sink:
            await sink.write(rows[:1])
            await sink.flush()
            before = names_in(out)
            await sink.write(rows[1:])
            with pytest.raises(SinkFailed, match=match):
                await sink.flush()
            assert names_in(out) == before
            assert not [*out.glob(".epoch*")]


async def test_letters_behind_the_first_epoch_are_current(tmp_path: Path) -> None:
    """The output is replaced by then, though no letter was there to record it beside."""
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    await load(
        tmp_path / "o",
        [b'{"n":1}'],
        [b"no JSON"],
        mode="overwrite",
        schema="n long",
        epoch_messages=1,
        on_error=ErrorPolicy(budget=ErrorBudget(count=9, share=None)),
        dead_letters=letters,
    )
    letters.close()
    settled = Settled(letters.folder)
    (letter,) = [x for x in settled.letters("load") if isinstance(x, DeadLetter)]
    assert not settled.superseded(letter)


async def test_letters_are_current_though_a_start_was_killed_behind_the_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start records it: else no retry would load them (issue 23)."""
    before, mine = (
        DeadLetters(tmp_path / "state", pipeline="p", run=run) for run in "ab"
    )
    made = partial(
        FileSink,
        tmp_path / "o",
        mode="overwrite",
        schema="n long",
        on_error=ErrorPolicy(budget=ErrorBudget(count=9, share=None)),
    )
    async with made(dead_letters=before) as first:
        await first.write([b'{"n":1}', b"no JSON"])
        await first.finish()
    killed, again, last = (made(dead_letters=mine) for _ in range(3))
    epochs = Epochs("ab", 0, once=True, check=lambda: None)
    killed.begin(epochs)
    async with killed:
        await killed.write([b'{"n":1}', b"no JSON"])
        await killed.flush()
        with monkeypatch.context() as patch:
            patch.setattr(mine, "supersede", Mock(side_effect=OSError("killed")))
            with pytest.raises(SinkFailed, match="killed"):
                await killed.perform()
    again.begin(epochs._replace(done=1))
    async with again:
        await again.finish()
    settled = Settled(mine.folder)
    left = [x for x in settled.letters("load") if isinstance(x, DeadLetter)]
    assert {x.run: settled.superseded(x) for x in left} == {"a": True, "b": False}
    known = replacement(mine.folder)
    last.begin(epochs._replace(done=2))
    async with last:
        await last.finish()
    assert replacement(mine.folder) == known


@pytest.mark.parametrize("killed", [False, True])
async def test_letters_of_a_load_that_a_later_run_goes_on_with_are_current(
    tmp_path: Path, *, killed: bool
) -> None:
    """It replaces nothing but what was there before the load (issue 23)."""
    stores = [DeadLetters(tmp_path / "state", pipeline="p", run=run) for run in "ab"]
    for done, letters in enumerate(stores):
        sink = FileSink(
            tmp_path / "o",
            mode="overwrite",
            schema="n long",
            on_error=ErrorPolicy(budget=ErrorBudget(count=9, share=None)),
            dead_letters=letters,
        )
        sink.begin(Epochs("ab", done, once=True, check=lambda: None))
        async with sink:
            await sink.write([b'{"n":1}', b"no JSON"])
            await sink.flush()
            if killed and not done:
                continue
            await sink.perform()
    settled = Settled(letters.folder)
    assert settled.replaced
    assert settled.replaced.run == ("b" if killed else "a")
    left = [x for x in settled.letters("load") if isinstance(x, DeadLetter)]
    assert [(x.run, settled.superseded(x)) for x in left] == [
        ("a", False),
        ("b", False),
    ]
    assert len(rows_in(tmp_path / "o")) == 2


async def test_letters_of_a_retry_are_current_while_the_load_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output was replaced before, though there was no letter yet (issue 23)."""
    times = iter(["2026-01", "2026-03"])
    monkeypatch.setattr(landing, "letter_time", lambda: next(times))
    state = tmp_path / "state"
    with Delivery(state, exactly_once=True):
        stores = [DeadLetters(state, pipeline="p", run=run) for run in "ab"]
    for done, letters in enumerate(stores):
        sink = FileSink(
            tmp_path / "o", mode="overwrite", schema="n long", dead_letters=letters
        )
        sink.begin(Epochs("ab", done, once=True, check=lambda: None))
        async with sink:
            await sink.write([b'{"n":1}'])
            await sink.flush()
            await sink.perform()
        if not done:
            retried = replace(letter_of(1), load="retry-1", time="2026-02")
            settle(state, [], "passed", letters=[retried], number=1)
    assert not Settled(letters.folder).superseded(retried)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("marked", [False, True])
async def test_mark_is_kept_as_it_is(
    tmp_path: Path, *, marked: bool, once: bool
) -> None:
    """A retry adds rows to output that is complete or is not (issue 23)."""
    await load(tmp_path / "o", [b'{"n":1}'], schema="n long")
    if not marked:
        (tmp_path / "o" / "_SUCCESS").unlink()
    sink = FileSink(tmp_path / "o", mode="append", schema="n long")
    sink.keeps_mark = True
    if once:
        sink.begin(Epochs("ab", 0, once=True, check=lambda: None))
    async with sink:
        assert (tmp_path / "o" / "_SUCCESS").exists() is marked
        await sink.write([b'{"n":2}'])
        await sink.finish()
        await sink.perform()
    assert (tmp_path / "o" / "_SUCCESS").exists() is marked
    assert len(rows_in(tmp_path / "o")) == 2


async def go_on(
    folder: Path,
    out: str,
    mode: str,
    *messages: bytes,
    once: bool = True,
    kill: str = "",
) -> Report:
    """Append messages to journals, and load what is new; at step ``kill``, be killed."""
    if messages:
        async with JournalSink(folder / "in") as journals:
            await journals.write([*messages])
            await journals.finish()
    delivery = Delivery(folder / "state", exactly_once=once)

    def at(step: str) -> None:
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    delivery.at = at
    made = Pipeline(
        name="p",
        source=JournalSource(folder / "in", reader="r"),
        sink=FileSink(folder / out, mode=mode),
        delivery=delivery,
    )
    return await made.run()


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("mode", ["error", "overwrite"])
async def test_load_that_continues_elsewhere_finds_no_other_output_there(
    tmp_path: Path, mode: str, *, once: bool
) -> None:
    """Not even at a second start; only mode append adds to it (issue 23)."""
    run = partial(go_on, tmp_path, once=once)
    for message, other in ((b"1", "b"), (b"2", "c")):
        assert (await run("a", mode, message)).error is None
        await load(tmp_path / other, [b"stale"])
        for _ in range(2):
            report = await run(other, mode)
            assert str(report.error) == (
                f"load: {tmp_path / other} exists already, and nothing is replaced"
                f" there, as the load continues from parquet {tmp_path / 'a'}: set mode"
                " to append, or another output"
            )
            assert rows_in(tmp_path / other) == [{"value": "stale"}]
    for out, as_it_is, message in (("c", "append", b"3"), ("d", mode, b"4")):
        assert (await run(out, as_it_is, message)).error is None
    assert (await run("d", mode, b"5")).error is None
    assert [len(rows_in(tmp_path / out)) for out in "acd"] == [2, 2, 2]


KILLED: Final = """\
import sys
from functools import partial
from pathlib import Path
import anyio
from tests.files.test_sink import go_on
folder, out = map(Path, sys.argv[1:])
anyio.run(partial(go_on, folder, out, "error", b"3", kill="recorded"))
"""


@pytest.mark.process
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("mode", ["error", "overwrite"])
async def test_load_that_continues_where_another_was_killed_before_its_move(
    tmp_path: Path, mode: str, *, once: bool
) -> None:
    """Rows that the other load is still to move are output, too (issue 23)."""
    run, other, out = partial(go_on, tmp_path, once=once), tmp_path / "other", "out"
    assert (await run("a", mode, b"1")).error is None
    command = sys.executable, "-c", KILLED, str(other), str(tmp_path / out)
    killed = await anyio.run_process(command, check=False, stderr=None)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name[:7] for path in (tmp_path / out).iterdir()] == [".epoch="]
    report = await run(out, mode, b"2")
    assert f"{out} exists already, and nothing is replaced there" in str(report.error)
    assert (await go_on(other, f"../{out}", "error")).error is None
    assert rows_in(tmp_path / out) == [{"value": "3"}]


async def test_output_that_is_moved_with_its_load_is_kept(tmp_path: Path) -> None:
    """Its files have the name of the load, so mode overwrite keeps them (issue 23)."""
    assert (await go_on(tmp_path, "a", "overwrite", b"1")).error is None
    (tmp_path / "a").rename(tmp_path / "b")
    assert (await go_on(tmp_path, "b", "overwrite", b"2")).error is None
    assert sorted(row["value"] for row in rows_in(tmp_path / "b")) == ["1", "2"]


@pytest.mark.parametrize("once", [False, True])
async def test_load_that_continues_elsewhere_reports_where_the_rest_is(
    tmp_path: Path, *, once: bool
) -> None:
    """A warning names both outputs; the one that is complete lacks it (issue 23)."""
    first, second = tmp_path / "a", tmp_path / "b"
    report = await go_on(tmp_path, "a", "append", b"1", once=once)
    assert report.landed.endswith("; output complete")
    epoch = CommitRecord.latest(tmp_path / "state").epoch
    with capture_logs() as logs:
        report = await go_on(tmp_path, "b", "append", b"2", once=once)
    assert [log for log in logs if log["log_level"] == "warning"] == [
        {
            "event": "the load continues in another output: what is loaded stays where it"
            " is",
            "log_level": "warning",
            "before": f"parquet {first}",
            "output": f"parquet {second}",
            "epoch": epoch,
        }
    ]
    assert report.landed == (
        f"wrote 1 message to {second}; output complete; earlier runs have loaded epochs up"
        f" to {epoch}, the last into parquet {first}"
    )
    with capture_logs() as logs:
        report = await go_on(tmp_path, "b", "append", b"3", once=once)
    assert report.landed.endswith("; output complete")
    assert not [log for log in logs if log["log_level"] == "warning"]


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("mode", ["error", "overwrite"])
async def test_load_continues_where_a_path_leads_to_the_same_output(
    tmp_path: Path, mode: str, *, once: bool
) -> None:
    """A project is linked, named by way of another folder, or moved (issue 23).

    At least once, files have no name of their load: they may be another one's.
    """
    project, link = tmp_path / "project", tmp_path / "link"
    project.mkdir()
    link.symlink_to(project)
    for folder in (project, project / ".." / "project", link):
        report = await go_on(folder, "out", mode, b"1", once=once)
        assert report.error is None
    moved = project.rename(tmp_path / "moved")
    assert ((await go_on(moved, "out", mode, b"1", once=once)).error is None) is once
    assert len(rows_in(moved / "out")) == 3 + once


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("mode", ["error", "overwrite"])
async def test_load_that_continues_elsewhere_begins_in_an_empty_folder(
    tmp_path: Path, mode: str, *, once: bool
) -> None:
    """A start that was killed before its first record has left it (issue 23)."""
    assert (await go_on(tmp_path, "a", mode, b"1", once=once)).error is None
    load = CommitRecord.latest(tmp_path / "state").load
    (tmp_path / "b" / f".epoch={load if once else 'run-1a'}-2.7").mkdir(parents=True)
    assert (await go_on(tmp_path, "b", mode, b"2", once=once)).error is None
    assert rows_in(tmp_path / "b") == [{"value": "2"}]


@pytest.mark.parametrize("done", [0, 1])
async def test_letters_of_a_load_that_goes_on_are_current(
    tmp_path: Path, done: int
) -> None:
    """What is behind its first epoch replaces nothing any more."""
    letters = DeadLetters(tmp_path / "state", pipeline="p")
    sink = FileSink(
        tmp_path / "o",
        mode="overwrite",
        schema="n long",
        on_error=ErrorPolicy(budget=ErrorBudget(count=9, share=None)),
        dead_letters=letters,
    )
    sink.begin(Epochs("ab", done, once=False, check=lambda: None))
    async with sink:
        await sink.write([b"no JSON"])
        (tmp_path / "o").rmdir()
        (tmp_path / "o").touch()
        with pytest.raises(SinkFailed):
            await sink.flush()
    letters.close()
    settled = Settled(letters.folder)
    (letter,) = [x for x in settled.letters("load") if isinstance(x, DeadLetter)]
    assert settled.superseded(letter) is (done == 0)
