from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from pyspark.sql import DataFrame, SparkSession

from etlstage.block import block_of
from etlstage.columns import Column
from etlstage.errors import InputDamaged, SourceFailed
from etlstage.messages import AnnotatedRun, Position
from etlstage.pipeline.interfaces import Epochs, Source
from etlstage.spark import DataFrameSource, read_frame
from etlstage.spark.dataframe import source as source_module
from etlstage.spark.dataframe.spool import KeptSpool, Spooled

pytestmark = pytest.mark.spark


def content(directory: Path) -> list[Path]:
    """Return the entries of ``directory``."""
    return list(directory.iterdir())


def mode(path: Path) -> int:
    """Return the permissions of ``path``."""
    return path.stat().st_mode & 0o777


def wait_for_spooling(directory: Path) -> None:
    """Block until a task has begun a file below ``directory``."""
    while not list(directory.glob("*/*.part")):
        threading.Event().wait(0.05)


async def messages(source: Source) -> list[bytes]:
    """Return all messages of ``source``."""
    found: list[bytes] = []
    async for run in source.runs():
        assert not isinstance(run, Position | InputDamaged)
        assert run
        found += run
    await source.aclose()
    return found


@pytest.fixture(params=["spooled", "packed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use both ways from the executors: a shared spool, and none."""
    if request.param == "packed":
        monkeypatch.setattr(source_module, "NONCE", "another")
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("count", [0, 1, 3, 25_000])
async def test_every_row_is_a_message_in_order(spark: SparkSession, count: int) -> None:
    """With none, one, fewer rows than partitions, or many: all arrive unchanged."""
    frame = spark.range(0, count, 1, 5).selectExpr("concat('row ', id) as text")
    expected = [b"row %d" % number for number in range(count)]
    assert await messages(DataFrameSource(frame)) == expected


@pytest.mark.usefixtures("way")
async def test_sorted_frame_stays_sorted(spark: SparkSession) -> None:
    """Messages come in the order of the sort."""
    frame = spark.range(0, 1000, 1, 7).selectExpr("999 - id as n").orderBy("n")
    found = await messages(DataFrameSource(frame, message="cast(n as string)"))
    assert found == [b"%d" % number for number in range(1000)]


@pytest.mark.usefixtures("way")
@pytest.mark.any_client
async def test_payload_is_opaque(spark: SparkSession) -> None:
    """NUL, newlines, markers, empty messages and invalid UTF-8 pass unchanged."""
    payloads = [b"", b"\0", b"a\nb\r\n", b"\xff\xfe", b"\n\0\x17\x05", b"x" * 70_000]
    frame = spark.createDataFrame([(bytearray(p),) for p in payloads], "m binary")
    assert await messages(DataFrameSource(frame)) == payloads


@pytest.mark.usefixtures("way")
@pytest.mark.any_client
async def test_run_is_bounded(spark: SparkSession) -> None:
    """A run exceeds neither messages nor bytes, except for a single big message."""
    frame = spark.range(0, 1000, 1, 1).selectExpr(
        "repeat('x', if(id = 500, 5000, 10)) as m"
    )
    source = DataFrameSource(frame, run_messages=64, run_bytes=500)
    runs = [run async for run in source.runs() if not isinstance(run, Position)]
    assert max(map(len, runs)) <= 64
    assert all(sum(map(len, run)) <= 500 for run in runs if len(run) > 1)
    assert sum(map(len, runs)) == 1000


@pytest.mark.any_client
async def test_string_of_the_only_column_is_the_message(spark: SparkSession) -> None:
    """Text becomes UTF-8, whatever the column is called."""
    frame = spark.createDataFrame([("é€𝄞",)], "`a.b ``c` string")
    assert await messages(DataFrameSource(frame)) == ["é€𝄞".encode()]


@pytest.mark.any_client
async def test_row_of_several_columns_is_json(spark: SparkSession) -> None:
    """Without an expression a row becomes a JSON object."""
    frame = spark.createDataFrame([(1, "é")], "id long, title string")
    assert await messages(DataFrameSource(frame)) == ['{"id":1,"title":"é"}'.encode()]


@pytest.mark.any_client
async def test_times_keep_their_microseconds(spark: SparkSession) -> None:
    """``to_json`` drops them by default; time and offset are unchanged (issue 23)."""
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        frame = spark.sql(
            "SELECT timestamp'2020-07-01 00:00:00.123456Z' t,"
            " array(timestamp'1880-01-01 00:00:00.5') old,"
            " timestamp_ntz'2020-01-01 00:00:00.000001' n"
        )
        assert await messages(DataFrameSource(frame)) == [
            (
                b'{"t":"2020-07-01T02:00:00.123456+02:00",'
                b'"old":["1880-01-01T00:00:00.500000+00:53:28"],'
                b'"n":"2020-01-01T00:00:00.000001"}'
            )
        ]
    finally:
        spark.conf.unset("spark.sql.session.timeZone")


async def test_only_column_that_is_a_number_is_json(spark: SparkSession) -> None:
    """A number alone is not a message."""
    assert await messages(DataFrameSource(spark.range(1))) == [b'{"id":0}']


@pytest.mark.any_client
async def test_expression_makes_the_message(spark: SparkSession) -> None:
    """It may be any Spark SQL expression over the columns."""
    source = DataFrameSource(spark.range(2), message="concat_ws(';', id, id + 1)")
    assert await messages(source) == [b"0;1", b"1;2"]


@pytest.mark.any_client
async def test_file_is_read_by_its_format(spark: SparkSession, tmp_path: Path) -> None:
    """Format, path, schema and options are Spark's own."""
    path = tmp_path / "in.csv"
    path.write_text("1|one\n2|two\n")
    source = DataFrameSource(
        lambda: read_frame(
            spark,
            format="csv",
            path=str(path),
            schema="id int, name string",
            options={"sep": "|"},
        ),
        message="name",
    )
    assert await messages(source) == [b"one", b"two"]


@pytest.mark.any_client
async def test_malformed_input_line_stays_with_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark's own column for corrupt records is passed on."""
    path = tmp_path / "in.json"
    path.write_text('{"id":1}\n{"id":\n')
    frame = read_frame(spark, format="json", path=str(path)).cache()
    found = await messages(DataFrameSource(frame))
    whole, broken = map(json.loads, found)
    assert whole == {"_corrupt_record": None, "id": 1}
    assert broken == {"_corrupt_record": '{"id":', "id": None}


def broken(spark: SparkSession, text: str) -> Callable[[], DataFrame]:
    """Return a function that reads a path whose content is not Parquet."""
    path = Path(text)
    path.write_text("no parquet")
    return lambda: read_frame(spark, format="parquet", path=str(path))


async def refusal(source: Source) -> str:
    """Return the one-line error with which ``source`` fails."""
    with pytest.raises(SourceFailed) as failure:
        await messages(source)
    text = str(failure.value)
    assert "\n" not in text
    assert text.startswith("extract: ")
    return text


async def test_path_that_does_not_exist_is_reported(spark: SparkSession) -> None:
    """The error names the path, without a stack trace."""
    source = DataFrameSource(lambda: read_frame(spark, format="json", path="/no/such"))
    assert await refusal(source) == (
        "extract: path does not exist: file:/no/such (PATH_NOT_FOUND)"
    )


async def test_column_that_does_not_exist_is_reported(spark: SparkSession) -> None:
    """The error names the column and has Spark's suggestion."""
    text = await refusal(DataFrameSource(spark.range(1), message="upper(idd)"))
    assert "`idd` cannot be resolved. Did you mean one of the following? [`id`]" in text


async def test_format_that_does_not_exist_is_reported(spark: SparkSession) -> None:
    """The error names the format."""
    source = DataFrameSource(lambda: read_frame(spark, format="nofmt", path="/"))
    assert "failed to find the data source: nofmt" in await refusal(source)


async def test_unreadable_file_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    """The error names the file."""
    path = str(tmp_path / "x.parquet")
    text = await refusal(DataFrameSource(broken(spark, path)))
    assert path in text
    assert "CANNOT_READ_FILE_FOOTER" in text


async def test_syntax_error_is_reported(spark: SparkSession) -> None:
    """So is an expression that can't be resolved."""
    text = await refusal(DataFrameSource(spark.range(1), message="to_json(struct(*)"))
    assert text == (
        "extract: message 'to_json(struct(*)': syntax error at or near end of input"
        " (PARSE_SYNTAX_ERROR)"
    )
    source = DataFrameSource(spark.range(1), message="'x'", key="idd")
    assert (await refusal(source)).startswith("extract: key 'idd': a column, variable")


async def test_error_at_run_time_is_reported(spark: SparkSession) -> None:
    """An error in a task is reported in one line, too."""
    source = DataFrameSource(spark.range(9), message="upper(raise_error('no ' || id))")
    text = await refusal(source)
    assert re.search(r"no \d \(USER_RAISED_EXCEPTION\)$", text), text


@pytest.mark.any_client
async def test_number_is_no_message(spark: SparkSession) -> None:
    """An expression of another type is refused, with the remedy."""
    text = await refusal(DataFrameSource(spark.range(1), message="id + 1"))
    assert text == (
        "extract: message 'id + 1' is bigint, expected string or binary: "
        "write 'cast(id + 1 as string)' or 'to_json(...)'"
    )


@pytest.mark.any_client
async def test_columns_of_one_name_are_no_message(spark: SparkSession) -> None:
    """A JSON object could have only one of them, at any depth (issue 23)."""
    twice = spark.range(1).selectExpr("id as a", "id + 1 as a")
    inner = spark.range(1).selectExpr("named_struct('a', id, 'a', id + 1) as s")
    for frame in (twice, inner):
        assert await refusal(DataFrameSource(frame)) == (
            "extract: column 'a' appears 2 times, but JSON can have it only once:"
            " rename one"
        )


@pytest.mark.any_client
@pytest.mark.parametrize(
    ("made", "kind"),
    [
        ("map(X'6162', 1)", "binary"),
        ("array(map(date'2020-01-01', 1))", "date"),
        ("map('a', map(timestamp'2020-01-01', 1))", "timestamp"),
    ],
)
async def test_keys_that_json_would_garble_are_no_message(
    spark: SparkSession, made: str, kind: str
) -> None:
    """Spark writes a number of days, or where the JVM has the bytes (issue 23)."""
    frame = spark.range(1).selectExpr("id", f"{made} as m")
    assert (await refusal(DataFrameSource(frame))).startswith(
        f"extract: column 'm' has a map with keys of type {kind}, of which to_json makes"
    )


@pytest.mark.any_client
async def test_keys_that_are_text_numbers_or_booleans_are_kept(
    spark: SparkSession,
) -> None:
    """JSON has them as text."""
    frame = spark.range(1).selectExpr(
        "map('a', 1) as a", "map(1.10, 1) as b", "map(true, 1) as c"
    )
    assert await messages(DataFrameSource(frame)) == [
        b'{"a":{"a":1},"b":{"1.10":1},"c":{"true":1}}'
    ]


@pytest.mark.usefixtures("way")
@pytest.mark.any_client
async def test_null_message_is_refused(spark: SparkSession) -> None:
    """The error counts the nulls and has the remedy."""
    frame = spark.range(0, 100, 1, 4).selectExpr(
        "if(id between 60 and 62, null, 'x') m"
    )
    text = await refusal(DataFrameSource(frame))
    assert re.match(r"extract: message is null in 3 (of 100 )?rows", text)
    assert "coalesce" in text


@pytest.mark.any_client
async def test_null_message_names_the_partition(spark: SparkSession) -> None:
    """With a spool the whole frame is known when nulls are refused."""
    frame = spark.range(0, 100, 1, 4).selectExpr(
        "if(id between 60 and 62, null, 'x') m"
    )
    text = await refusal(DataFrameSource(frame, message="m"))
    assert text == (
        "extract: message is null in 3 of 100 rows, first in partition 2: filter "
        "these rows, or give them a message with coalesce(m, '')"
    )


def test_frame_may_be_cancelled_anywhere(spark: SparkSession) -> None:
    """A DataFrame has no points that are better to resume from than others."""
    assert not DataFrameSource(spark.range(1)).drain()


async def test_spool_is_removed(spark: SparkSession, tmp_path: Path) -> None:
    """While it is read, the spool is private; then it is gone."""
    source = DataFrameSource(spark.range(10), spool_dir=tmp_path)
    async for _ in source.runs():
        (spool,) = content(tmp_path)
        assert mode(spool) == 0o700
    assert content(tmp_path) == []


async def test_spool_is_removed_when_reading_stops_early(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Closing the generator, and then the source, leaves nothing."""
    source = DataFrameSource(spark.range(10), spool_dir=tmp_path, run_messages=2)
    runs = source.runs()
    await anext(runs)
    assert content(tmp_path)
    await runs.aclose()
    await source.aclose()
    await source.aclose()
    assert content(tmp_path) == []


async def test_spool_that_can_not_be_made_is_reported(spark: SparkSession) -> None:
    """The error names the directory."""
    source = DataFrameSource(spark.range(1), spool_dir=Path("/no/such"))
    assert "no such file or directory: '/no/such" in (await refusal(source)).lower()


async def test_cancelled_extraction_stops_its_job(
    spark: SparkSession, wait_for_jobs: Callable[[bool], None], tmp_path: Path
) -> None:
    """Cancelling the reader interrupts the Spark job and removes the spool."""
    endless = spark.range(0, 10**12, 1, 2).selectExpr("sha2(repeat(id, 500), 512) as m")
    source = DataFrameSource(endless, spool_dir=tmp_path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(messages, source)
        await anyio.to_thread.run_sync(wait_for_spooling, tmp_path)
        tasks.cancel_scope.cancel()
    wait_for_jobs(False)
    assert content(tmp_path) == []
    assert await messages(DataFrameSource(spark.range(1), message="'on'")) == [b"on"]


@pytest.mark.usefixtures("way")
@pytest.mark.any_client
async def test_messages_may_have_keys(spark: SparkSession) -> None:
    """Keys are Spark's hash of an expression, whatever the size of runs."""
    frame = spark.range(0, 1000, 1, 3).selectExpr("id", "id % 7 as k")
    source = DataFrameSource(
        frame, message="cast(id as string)", key="concat('k', k)", run_messages=64
    )
    runs = [run async for run in source.runs()]
    hashes = {
        row.k: row.h
        for row in frame.selectExpr("k", "xxhash64(concat('k', k)) as h").collect()
    }
    found = []
    for run in runs:
        assert isinstance(run, AnnotatedRun)
        assert len(run.columns["key"]) == len(run) <= 64
        found += list(zip(run, run.columns["key"], strict=True))
    assert found == [(b"%d" % n, hashes[n % 7]) for n in range(1000)]
    await source.aclose()


@pytest.mark.any_client
async def test_messages_have_no_keys_unless_wanted(spark: SparkSession) -> None:
    """They stay in Arrow, without a Python object for each message."""
    source = DataFrameSource(spark.range(3), message="cast(id as string)")
    runs: list[object] = [run async for run in source.runs()]
    assert all(isinstance(run, Column) for run in runs)


@pytest.mark.any_client
async def test_null_is_a_key(spark: SparkSession) -> None:
    """It is hashed like any other key."""
    frame = spark.range(2).selectExpr("cast(null as string) as k", "'m' as m")
    source = DataFrameSource(frame, message="m", key="k")
    keys = [
        k
        async for run in source.runs()
        if isinstance(run, AnnotatedRun)
        for k in run.columns["key"]
    ]
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert isinstance(keys[0], int)


async def test_key_that_is_no_expression(spark: SparkSession) -> None:
    """It is reported as for the message expression."""
    source = DataFrameSource(spark.range(2), message="'m'", key="nope")
    with pytest.raises(SourceFailed, match="nope"):
        await messages(source)


async def test_spool_without_room(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the folder and the settings to change."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(source_module, "spooled", full)
    source = DataFrameSource(spark.range(1), message="'m'", spool_dir=tmp_path)
    with pytest.raises(SourceFailed) as raised:
        await messages(source)
    assert str(raised.value) == (
        f"extract: no space left for the spool of all messages in {tmp_path}: set"
        " TMPDIR, or spool, to a folder with room for them"
    )
    assert not content(tmp_path)


# --- a spool that is kept -------------------------------------------------------------


EPOCHS = Epochs("ab12", 0, once=True, check=lambda: None, start=1)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Keep a spool of two parts; return the file of the last, which has three runs."""
    spool = KeptSpool(tmp_path, tmp_path, EPOCHS)
    aside, parts = spool.make(), []
    for part, runs in enumerate((0, 3)):
        file = aside / f"{part}-0.arrow"
        blocks = (block_of([b"a", b"b"], 2 * run) for run in range(runs))
        file.write_bytes(b"".join(b for block in blocks for b in block))
        parts.append(Spooled(part, file.name, 2 * runs, 0))
    spool.keep(parts, "ids")
    return spool.path / file.name


async def read_on(state: Path, *at: int) -> int:
    """Return the number of messages in a kept spool after a position."""
    source = DataFrameSource(unread, state=state, of="ids")
    source.begin(EPOCHS)
    if at:
        source.resume([*at])
    return sum([len(i) async for i in source.runs() if not isinstance(i, Position)])


def unread() -> DataFrame:
    """Stand in for a frame that must not be read."""
    raise AssertionError("unreachable: it is in the spool")


async def test_kept_spool_that_is_too_short(tmp_path: Path, kept: Path) -> None:
    """Wherever it was cut off, it is not taken for complete (issue 14)."""
    assert await read_on(tmp_path) == 6
    size = kept.stat().st_size  # noqa: ASYNC240
    for left, messages in (size - 1, 4), (2 * size // 3, 4), (size // 3, 2), (0, 0):
        os.truncate(kept, left)
        expected = (
            f"^extract: {kept} has complete blocks with {messages} messages, up to"
            rf" byte \d+, expected 6 messages; start from the beginning, after"
            " etlstage state reset$"
        )
        with pytest.raises(SourceFailed, match=expected):
            await read_on(tmp_path)


@pytest.mark.parametrize(
    ("at", "found"),
    [([1, 4], "3 runs in that part"), ([0, 1], "0 runs in"), ([7, 0], "2 parts")],
)
async def test_position_outside_of_the_spool(
    tmp_path: Path, kept: Path, at: list[int], found: str
) -> None:
    """Messages that it would skip were never loaded (issue 14)."""
    assert await read_on(tmp_path, 1, 3) == 0
    where = f"can't resume after run {at[1]} of part {at[0]} .* in {kept.parent} has"
    with pytest.raises(SourceFailed, match=f"{where} {found}.* etlstage state reset"):
        await read_on(tmp_path, *at)


async def test_spool_is_read_again_and_spark_reads_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It is resumed from a position, and removed when all is loaded (issue 14)."""
    frame = spark.range(4).selectExpr("cast(id as string) as id").coalesce(1)

    def source(
        read: DataFrame | Callable[[], DataFrame], of: str = "ids"
    ) -> DataFrameSource:
        made = DataFrameSource(read, run_messages=2, state=tmp_path, of=of)
        made.begin(EPOCHS)
        return made

    first = [item async for item in source(frame).runs()]
    assert [item for item in first if isinstance(item, Position)][-1].value == [0, 2]
    with pytest.raises(SourceFailed, match="was made with different settings"):
        [item async for item in source(unread, "others").runs()]
    again = source(unread)
    again.resume([0, 1])
    found = [item async for item in again.runs()]
    assert [[*item] for item in found[::2] if not isinstance(item, Position)] == [
        [b"2", b"3"]
    ]
    await again.finished()
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240
    with pytest.raises(SourceFailed, match="can't resume: there is no complete spool"):
        [item async for item in again.runs()]


@pytest.mark.any_client
async def test_rows_are_numbered_any_number_of_times(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Always in the order of the expression; the spool is removed in the end."""
    frame = spark.range(0, 100, numPartitions=3).selectExpr("cast(99 - id as int) n")
    source = DataFrameSource(
        lambda: frame, sort="n % 50", message="cast(n as string)", run_messages=7
    )
    for after in (-1, 0, 40, 98, 99):
        rows: list[bytes] = []
        numbers: list[int] = []
        async for run in source.numbered(after):
            rows += run
            numbers += run.columns["sequence"]
        assert numbers == [*range(after + 1, 100)]
        assert [int(row) % 50 for row in rows] == [n // 2 for n in numbers]
    await source.aclose()


async def test_frame_is_not_numbered_without_a_spool(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read again, its order might differ; and an unknown sort column is refused."""
    monkeypatch.setattr(source_module, "NONCE", "another")
    with pytest.raises(
        SourceFailed, match="spool is read more than once; set spool to"
    ):
        async for _ in DataFrameSource(spark.range(3)).numbered():
            pass
    with pytest.raises(SourceFailed, match="sort 'nix'"):
        await messages(DataFrameSource(spark.range(3), sort="nix"))
