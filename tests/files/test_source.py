from __future__ import annotations

import gzip
import io
import json
import os
import tracemalloc
from contextlib import aclosing
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.errors import SourceFailed
from etlstage.files import json_format, lines, parquet_format
from etlstage.files.csv_format import CsvFormat
from etlstage.files.find import find, partition_columns
from etlstage.files.sink import FileSink
from etlstage.files.source import FileSource
from etlstage.messages import AnnotatedRun, Position, Run
from etlstage.pipeline.invalid import loaded


@pytest.mark.parametrize("packed", [False, True])
async def test_file_is_read_a_megabyte_at_a_time(
    tmp_path: Path, *, packed: bool
) -> None:
    """However large it is (issue 27)."""
    lines = b"".join(b"%1023d\n" % n for n in range(8192))
    path = tmp_path / ("in.gz" if packed else "in")
    path.write_bytes(gzip.compress(lines, 1) if packed else lines)
    count = 0
    tracemalloc.start()
    try:
        async for item in FileSource(str(path), "text").runs():
            count += 0 if isinstance(item, Position) else len(item)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 8192
    assert most < 5 * 1024 * 1024


async def items_of(source: FileSource) -> list[Run | Position]:
    """Return what a source yields."""
    return [item async for item in source.runs()]


async def messages_of(source: FileSource) -> list[bytes]:
    """Return its messages alone."""
    items = await items_of(source)
    return [m for item in items if not isinstance(item, Position) for m in item]


async def error_of(path: Path, kind: str, **settings: Any) -> str:  # noqa: ANN401
    """Return why files can't be read."""
    with pytest.raises(SourceFailed) as caught:
        await messages_of(FileSource(str(path), kind, **settings))
    return str(caught.value).replace(f"{path}", "in")


async def test_files_come_by_name_and_hidden_ones_do_not(tmp_path: Path) -> None:
    """Packed or not; folders without a column are not looked into."""
    (tmp_path / "b.txt").write_text("b1\nb2")
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(b"a1\r\na2\r\n")
    with pa.output_stream(str(tmp_path / "c.txt.zst"), compression="zstd") as out:
        out.write(b"c\n")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".b.txt.crc").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "d.txt").write_text("d")
    wanted = [b"a1", b"a2", b"b1", b"b2", b"c"]
    assert await messages_of(FileSource(str(tmp_path), "text")) == wanted
    pattern = str(tmp_path / "[bc].*")
    assert await messages_of(FileSource(pattern, "text")) == wanted[2:]


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("[^a].txt", "bc{"),
        ("[!a].txt", "bc{"),
        ("{c,a,c,?}.txt", "abc{"),
        ("{b.t{x,y},{c,d}.tx}t", "bc"),
        ("{a.txt,o/d.txt}", "ad"),
        ("{o,o/*.txt}", "d"),
        ("{o,./o,o/.}/d.txt", "d"),
        ("{.txt", "{"),
        ("[{].txt", "{"),
        ("x[{]1[}]/*.txt", "e"),
        ("{[{].txt,x[{]1[}]/{e,f}.txt,a.txt}", "ae{"),
        ("m[,]n.txt", "n"),
        ("{m[,]n,a}.txt", "a"),
        ("[{a,b}].txt", "ab"),
    ],
)
async def test_pattern_of_files(tmp_path: Path, pattern: str, wanted: str) -> None:
    """It may have alternatives and excluded characters, as with Spark (issue 23)."""
    for folder in ("o", "x{1}"):
        (tmp_path / folder).mkdir()
    for name in ("a", "b", "c", "{", "o/d", "x{1}/e", "m,n"):
        (tmp_path / f"{name}.txt").write_text(name[-1])
    found = await messages_of(FileSource(str(tmp_path / pattern), "text"))
    assert b"".join(found).decode() == wanted


def test_file_matched_by_two_paths(tmp_path: Path) -> None:
    """It is read once; a link to it, or to a partition, is another (issue 23)."""
    (tmp_path / "in" / "m=1").mkdir(parents=True)
    (tmp_path / "in" / "m=1" / "a").write_text("a")
    (tmp_path / "in" / "m=1" / "b").symlink_to("a")
    (tmp_path / "in" / "m=2").symlink_to("m=1")
    (tmp_path / "e").mkdir()
    (tmp_path / "l").symlink_to("in")
    whole = find(str(tmp_path / "in"))
    assert [(file.path.name, file.partition) for file in whole] == [
        (name, (("m", m),)) for m in "12" for name in "ab"
    ]
    assert find(str(tmp_path / "{in,l,e/../in}")) == [
        file._replace(path=tmp_path / "e" / ".." / file.path.relative_to(tmp_path))
        for file in whole
    ]


@pytest.mark.parametrize("kind", ["json", "parquet"])
async def test_row_without_a_column(tmp_path: Path, kind: str) -> None:
    """It is a message, with or without a partition (issue 23)."""
    for folder in (tmp_path, tmp_path / "out" / "n=1"):
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "json":
            (folder / "a").write_text('{}\n{"a":{}}\n')
        else:
            pq.write_table(pa.table({}), folder / "a")
            pq.write_table(pa.table({"v": [1, 2]}), folder / "b")
    assert await messages_of(FileSource(str(tmp_path), kind)) == [b"{}", b"{}"]
    path = str(tmp_path / "out")
    assert await messages_of(FileSource(path, kind)) == [b'{"n":1}', b'{"n":1}']


@pytest.mark.parametrize("kind", ["text", "csv", "json", "parquet"])
async def test_reading_goes_on_behind_any_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Wherever a run was cut, in a packed file, too (issue 23)."""
    monkeypatch.setattr(lines, "_CHUNK", 60)
    monkeypatch.setattr(parquet_format, "_ROWS", 7)
    for name in ("a", "b", "c"):
        numbers = [f"{name}{n}" for n in range(25)]
        if kind == "parquet":
            pq.write_table(pa.table({"v": numbers}), tmp_path / name, row_group_size=10)
            continue
        texts = {
            "text": [f"line {n}" for n in numbers],
            "csv": [f'{n},"x,{n}"' for n in numbers],
            "json": [f'{{"v": "{n}", "w": {len(n)}}}' for n in numbers],
        }
        data = "\n".join(texts[kind]).encode()
        packed = gzip.compress(data) if name == "b" else data
        (tmp_path / f"{name}{'.gz' * (name == 'b')}").write_bytes(packed)

    def source() -> FileSource:
        return FileSource(str(tmp_path), kind, run_messages=3, keeps=True)

    items = await items_of(source())
    whole = [m for item in items if not isinstance(item, Position) for m in item]
    assert len(whole) == 75
    seen = 0
    for item in items:
        if not isinstance(item, Position):
            assert len(item) <= 3
            seen += len(item)
            continue
        again = source()
        again.resume(item.value)
        assert await messages_of(again) == whole[seen:]
    numbered = await numbered_of(source())
    assert [message for message, _ in numbered] == whole
    places = [number for _, number in numbered]
    assert places == sorted(set(places))
    for at, number in enumerate(places):
        assert await numbered_of(source(), number) == numbered[at + 1 :]


async def numbered_of(source: FileSource, after: int = -1) -> list[tuple[bytes, int]]:
    """Return its messages behind a number, each with its own."""
    runs = [run async for run in source.numbered(after)]
    return [
        (message, number)
        for run in runs
        for message, number in zip(run, run.columns["sequence"], strict=True)
    ]


async def test_source_that_was_identified_reads_no_other(tmp_path: Path) -> None:
    """Its numbers would be those of other messages."""
    (tmp_path / "a.txt").write_text("a\nb\n")
    source = FileSource(str(tmp_path), "text")
    assert source.identity() == FileSource(str(tmp_path), "text").identity()
    (tmp_path / "0.txt").write_text("new\n")
    with pytest.raises(SourceFailed, match="not those that were read"):
        await numbered_of(source)
    assert FileSource(str(tmp_path), "text").identity() not in source._of


async def test_pipe_is_refused(tmp_path: Path) -> None:
    """It can be read once only (issue 23)."""
    os.mkfifo(tmp_path / "in")
    assert await error_of(tmp_path / "in", "text") == (
        "extract: can't read in: it is not a regular file, which can be read from any"
        " place: copy it to one, or have 'etlstage pipe' read stdin"
    )


@pytest.mark.parametrize("name", [b"n=\xff/f", b"\xff=1/f", b"\xff.txt"])
async def test_path_that_is_not_utf8_is_refused(tmp_path: Path, name: bytes) -> None:
    """It is named, so that it can be renamed: Arrow can't open it (issue 23)."""
    path = tmp_path / "in" / os.fsdecode(name)
    path.parent.mkdir(parents=True)
    path.write_text("a\n")
    shown = name.decode(errors="backslashreplace")
    assert await error_of(tmp_path / "in", "text") == (
        f"extract: can't read in/{shown}: its path is not utf-8: rename the file or folder"
    )


async def test_path_may_lead_to_one_that_is_not_utf8(tmp_path: Path) -> None:
    """Arrow opens it by the path that was given (issue 23)."""
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    (folder / "f").write_text("a\n")
    (tmp_path / "in").symlink_to(folder)
    source = FileSource(str(tmp_path / "in"), "text")
    assert await messages_of(source) == [b"a"]


async def test_pipe_in_a_folder_is_refused(tmp_path: Path) -> None:
    """It is not left out either (issue 23)."""
    os.mkfifo(tmp_path / "a.txt")
    found = await error_of(tmp_path, "text")
    assert found.startswith("extract: can't read in/a.txt: it is not a regular file,")


@pytest.mark.parametrize("folder", ["", "a=1/"])
async def test_link_to_nothing_is_an_error(tmp_path: Path, folder: str) -> None:
    """In a folder, too: what it has linked to would be missing (issue 23)."""
    (tmp_path / "a=1").mkdir()
    (tmp_path / folder / "a.txt").write_text("a\n")
    (tmp_path / folder / "other").symlink_to(tmp_path / "a=1")
    (tmp_path / folder / "_b.txt").symlink_to("gone")
    (tmp_path / folder / ".b.txt").symlink_to("gone")
    assert len(await messages_of(FileSource(str(tmp_path), "text"))) == 1
    link = tmp_path / folder / "b.txt"
    link.symlink_to("gone")
    wanted = "extract: can't read in: no such file or directory"
    assert await error_of(link, "text") == wanted
    for path in (tmp_path, tmp_path / folder / "*.txt"):
        with pytest.raises(SourceFailed) as caught:
            await messages_of(FileSource(str(path), "text"))
        assert str(caught.value).replace(str(link), "in") == wanted


@pytest.mark.parametrize("text", ["", "c\n", "c\nd\ne\n", "x\ny\n"])
@pytest.mark.parametrize("when", ["before it is read", "while it is read"])
async def test_input_that_changes_during_the_run(
    tmp_path: Path, when: str, text: str
) -> None:
    """Lines that were cut off would be missing without a sign (issue 23)."""
    (tmp_path / "a.txt").write_text("a\nb\n")
    (tmp_path / "b.txt").write_text("c\nd\n")
    changed = tmp_path / ("b.txt" if when == "before it is read" else "a.txt")
    os.utime(changed, ns=(1, 1))
    source = FileSource(str(tmp_path), "text", run_messages=1)
    async with aclosing(source.runs()) as runs:
        await anext(runs)
        changed.write_text(text)
        with pytest.raises(SourceFailed) as caught:
            async for _ in runs:
                pass
    assert str(caught.value) == (
        f"extract: {changed} was changed during the run: give a file its place once it"
        " is complete (write it elsewhere, then rename it), and start again"
    )


@pytest.mark.parametrize("path", ["in", "link", "e/../*", "link/a.txt"])
@pytest.mark.parametrize("when", ["as it was", "moved", "before this form"])
async def test_reading_goes_on_by_another_path(
    tmp_path: Path, path: str, when: str
) -> None:
    """It leads to the same files, or is the same for files that moved (issue 23)."""
    for folder in ("in", "e"):
        (tmp_path / folder).mkdir()
    file = tmp_path / "in" / "a.txt"
    file.write_text("a\nb\n")
    (tmp_path / "link").symlink_to("in")
    began = tmp_path / ("in" if when == "as it was" else path)
    source = FileSource(str(began), "text", run_messages=1, keeps=True)
    position = next(i for i in await items_of(source) if isinstance(i, Position))
    value = position.value
    assert isinstance(value, list)
    if when == "moved":
        (tmp_path / "in").rename(tmp_path / "other")
        (tmp_path / "link").unlink()
        (tmp_path / "in").symlink_to("other")
        (tmp_path / "link").symlink_to("other")
    elif when == "before this form":
        [found] = find(str(began))
        line = f"{found.path}\0{found.size}\0{found.modified}"
        value[-1] = sha256(line.encode()).hexdigest()[:16]
    source = FileSource(str(tmp_path / path), "text", keeps=True)
    source.resume(value)
    assert await messages_of(source) == [b"b"]
    os.utime(file, ns=(1, 1))
    with pytest.raises(SourceFailed, match="not those that were read before"):
        await items_of(source)


async def test_input_that_has_changed_is_not_read_on(tmp_path: Path) -> None:
    """No one knows where that would be (issue 23)."""
    (tmp_path / "a.txt").write_text("a\nb\n")
    source = FileSource(str(tmp_path), "text", run_messages=1, keeps=True)
    position = next(i for i in await items_of(source) if isinstance(i, Position))
    (tmp_path / "0.txt").write_text("new\n")
    source.resume(position.value)
    with pytest.raises(SourceFailed, match="not those that were read before"):
        await items_of(source)
    with pytest.raises(SourceFailed, match="can't resume from one"):
        source.resume([1, "x"])


async def test_drained_source_ends_at_a_position(tmp_path: Path) -> None:
    """And without positions it is cancelled."""
    (tmp_path / "a.txt").write_text("a\nb\n")
    source = FileSource(str(tmp_path), "text", run_messages=1, keeps=True)
    assert source.drain()
    assert len(await items_of(source)) == 2
    assert not FileSource(str(tmp_path), "text").drain()


async def test_message_and_key_are_columns(tmp_path: Path) -> None:
    """Equal keys are equal numbers."""
    (tmp_path / "a.csv").write_text("k,v\n1,a\n2,b\n1,c\n")
    header = {"header": "true"}
    source = FileSource(str(tmp_path), "csv", message="v", key="k", options=header)
    (run,) = await items_of(source)
    assert isinstance(run, AnnotatedRun)
    assert list(run) == [b"a", b"b", b"c"]
    first, second, third = run.columns["key"]
    assert first == third != second
    said = await error_of(tmp_path, "csv", message="w", options=header)
    assert said == "extract: message: there is no column 'w', expected one of k, v"


@pytest.mark.parametrize(
    ("kind", "text", "settings", "error"),
    [
        (
            "csv",
            'a\n"b"c\n',
            {},
            "in/f:2: the closing quote of a cell is missing",
        ),
        ("csv", "a\n\xe9\n", {}, "in/f:2: the line is not UTF-8 at offset 0: convert"),
        ("csv", "\xe9\n", {}, "in/f:1: the line is not UTF-8 at offset 0: convert"),
        ("csv", "\n\n\xe9\n", {}, "in/f:3: the line is not UTF-8 at offset 0: convert"),
        ("csv", "a,b\nc,d,e\n", {}, "in/f:2: the line has 3 cells, expected 2: quote"),
        ("csv", 'a,b\n"c\nd",e\n', {}, "a cell with a line break needs Spark"),
        (
            "csv",
            "a,a\n",
            {"options": {"header": "true"}},
            "in/f:1: column 'a' appears",
        ),
        (
            "csv",
            "a,A\n",
            {"options": {"header": "true"}},
            "in/f:1: column 'A' appears twice, ignoring case: give the columns",
        ),
        (
            "csv",
            "\n\na,a\n",
            {"options": {"header": "true"}},
            "in/f:3: column 'a' appears",
        ),
        ("csv", '\n"a"b\n', {}, "in/f:2: the closing quote of a cell is"),
        (
            "csv",
            "1\n\n \n2\nx\ny\n",
            {"schema": "a long"},
            "in/f:5: the value of column 'a' is not of type bigint",
        ),
        (
            "csv",
            "a\n1\n2\nx\n",
            {"schema": "a long", "options": {"header": "true"}},
            "in/f:4: the value of column 'a' is not of type bigint",
        ),
        (
            "csv",
            "a,\n,b\n",
            {"message": "_c0"},
            "message '_c0' is null in at least 1 rows of in/f",
        ),
        (
            "csv",
            "1\n",
            {"schema": "a int", "message": "a"},
            "message 'a' is int32, expec",
        ),
        ("json", '{"a":1}\n{"a"\n', {}, "in/f:2: the line is not one JSON document"),
        ("json", "\n[1]\n", {}, "in/f:2: the line is an array, expected an object"),
        (
            "json",
            '{"a":1e999}\n{"a":9223372036854775808}',
            {},
            "in/f:2: a number does no",
        ),
        (
            "json",
            '{"a":"x"}',
            {"schema": "a long"},
            "in/f:1: field 'a' is a string that",
        ),
        ("json", '{"a":1}\n{"\\uD800":1}', {}, "in/f:2: the line has an unpaired"),
        *(
            (
                "csv",
                text,
                {"schema": "a decimal(9,2)"},
                "in/f:1: the value of column 'a'",
            )
            for text in ("1_000\n", " 12 \n", "NaN\n")
        ),
        ("parquet", "x", {}, "in/f is not Parquet: if it is another format, set"),
    ],
)
async def test_file_that_cant_be_read(
    tmp_path: Path, kind: str, text: str, settings: dict[str, Any], error: str
) -> None:
    """Its place is reported, and what would do."""
    (tmp_path / "f").write_text(text, "latin-1")
    assert error in await error_of(tmp_path, kind, **settings)


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
@pytest.mark.parametrize("message", [None, "v"])
async def test_only_column_that_is_null(
    tmp_path: Path, kind: str, message: str | None
) -> None:
    """What the error recommends gives all rows (issue 23)."""
    if kind == "parquet":
        pq.write_table(pa.table({"v": ["x", None]}), tmp_path / "f")
    else:
        texts = {"csv": 'x\n""\n', "json": '{"v":"x"}\n{"v":null}\n'}
        (tmp_path / "f").write_text(texts[kind])
    error = await error_of(tmp_path, kind, schema="v string", message=message)
    assert error == (
        "extract: message 'v' is null in at least 1 rows of in/f: set a schema with a"
        " second column and no message, which gives all columns as JSON, and have a"
        " worker check these"
    )
    source = FileSource(str(tmp_path), kind, schema="v string, w string")
    assert await messages_of(source) == [
        b'{"v":"x","w":null}',
        b'{"v":null,"w":null}',
    ]


async def test_first_line_is_in_the_file_that_has_it(tmp_path: Path) -> None:
    """Files without a line come before it (issue 23)."""
    (tmp_path / "f").touch()
    (tmp_path / "g").write_text('"a"b\n')
    error = await error_of(tmp_path, "csv")
    assert "in/g:1: the closing quote of a cell is" in error


@pytest.mark.parametrize(
    ("kind", "line", "wrong"),
    [("csv", "1", "x"), ("csv", "1", "1,2"), ("json", '{"a":1}', "x")],
)
@pytest.mark.parametrize("packed", [False, True])
async def test_line_is_counted_from_the_beginning_of_its_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    line: str,
    wrong: str,
    packed: bool,
) -> None:
    """Also where reading resumes in the middle (issue 23)."""
    monkeypatch.setattr(lines, "_CHUNK", 10)
    data = "\r\n".join([*[line] * 12, wrong, ""]).encode()
    name = "f.gz" if packed else "f"
    (tmp_path / name).write_bytes(gzip.compress(data) if packed else data)

    def source() -> FileSource:
        return FileSource(
            str(tmp_path), kind, schema="a long", run_messages=2, keeps=True
        )

    found = list[Position]()

    async def read() -> None:
        async for item in source().runs():
            found.extend([item] if isinstance(item, Position) else [])

    with pytest.raises(SourceFailed, match=f"{name}:13: "):
        await read()
    assert len(found) > 2
    for position in found:
        again = source()
        again.resume(position.value)
        with pytest.raises(SourceFailed, match=f"{name}:13: "):
            await items_of(again)


async def test_cells_behind_the_last_column_are_lost_if_they_are_empty(
    tmp_path: Path,
) -> None:
    """Some programs end each line with a separator."""
    (tmp_path / "f").write_text("a,b\n1,2,\n3\n")
    source = FileSource(str(tmp_path), "csv", options={"header": "true"})
    assert await messages_of(source) == [b'{"a":"1","b":"2"}', b'{"a":"3","b":null}']


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        (
            {"t": pa.array([1], pa.duration("us"))},
            "column 't' is duration[us], which can't be written as JSON",
        ),
        (
            {"t": pa.array([1 << 60], pa.timestamp("us"))},
            "column 't' has a date or time outside of the years 1 to 9999, which can't",
        ),
        (
            {"t": pa.array([1]), "u": pa.array([1])},
            "in/f: column 't' appears twice, but JSON can have it only once: give",
        ),
    ],
)
async def test_parquet_that_is_no_json(
    tmp_path: Path, columns: dict[str, pa.Array], error: str
) -> None:
    """The column is named, and what would do."""
    table = pa.Table.from_arrays([*columns.values()], ["t"] * len(columns))
    pq.write_table(table, tmp_path / "f")
    assert error in await error_of(tmp_path, "parquet")


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (pa.array([1e300]), "float"),
        (pa.array([0.1]), "float"),
        (pa.array([0.126]), "decimal(10,2)"),
        (pa.array([datetime(2020, 1, 1, 5)]), "date"),
        (pa.array([{"b": 0.1}]), "struct<b: float>"),
    ],
)
async def test_parquet_whose_values_a_type_does_not_have(
    tmp_path: Path, values: pa.Array, wanted: str
) -> None:
    """They would be loaded as other values (issue 23)."""
    pq.write_table(pa.table({"a": values}), tmp_path / "f")
    error = await error_of(tmp_path, "parquet", schema=f"a {wanted}")
    assert error.startswith(f"extract: in/f: column 'a' is {values.type}, expected")
    assert error.endswith(": a value would be changed")


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (pa.array([1700000000]), "timestamp"),
        (pa.array([1700000000]), "timestamp_ntz"),
        (pa.array([19000], pa.int32()), "date"),
        (pa.array([0], pa.timestamp("us")), "bigint"),
        (pa.array([0], pa.date32()), "int"),
        (pa.array([1], pa.time64("us")), "bigint"),
        (pa.array([1], pa.duration("s")), "bigint"),
        (pa.array([[1700000000]]), "array<timestamp>"),
        (pa.array([{"b": [{"c": 0}]}]), "struct<b: array<struct<c: timestamp>>>"),
        (pa.array([[("k", 1)]], pa.map_("string", "int64")), "map<string,timestamp>"),
    ],
    ids=lambda value: str(getattr(value, "type", value)),
)
async def test_parquet_numbers_are_no_times(
    tmp_path: Path, values: pa.Array, wanted: str
) -> None:
    """Their unit is not known, and neither is that of a column (issue 23)."""
    pq.write_table(pa.table({"a": values}), tmp_path / "f")
    error = await error_of(tmp_path, "parquet", schema=f"a {wanted}")
    assert error.startswith("extract: in/f: column 'a' is ")
    assert ": numbers and times are not converted into each other: declare" in error


INSTANT = pa.timestamp("us", "UTC")


def writes_views() -> bool:
    """Whether this PyArrow writes them to Parquet, which the oldest can't."""
    try:
        pq.write_table(pa.table({"a": pa.array([], pa.string_view())}), io.BytesIO())
    except pa.ArrowNotImplementedError:
        return False
    return True


VIEWS = pytest.mark.skipif(not writes_views(), reason="this PyArrow writes no views")


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [
        (INSTANT, 0, "timestamp"),
        (pa.list_(INSTANT), [0], "array<timestamp>"),
        (pa.large_list(INSTANT), [0], "array<timestamp>"),
        (pa.list_(INSTANT, 1), [0], "array<timestamp>"),
        (pa.map_(pa.string(), INSTANT), [("k", 0)], "map<string, timestamp>"),
        (
            pa.struct([("n", pa.list_(pa.struct([("b", INSTANT)])))]),
            {"n": [{"b": 0}]},
            "struct<n: array<struct<b: timestamp>>>",
        ),
    ],
    ids=str,
)
async def test_parquet_instant_within_a_value(
    tmp_path: Path, kind: pa.DataType, value: object, wanted: str, *, declared: bool
) -> None:
    """As Spark writes it, without a zone in Arrow's type (issue 23)."""
    columns = {"b": [1], "a": pa.array([value], kind), "d.e": pa.array([0], INSTANT)}
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "f", use_deprecated_int96_timestamps=True)
    schema = f"b bigint, a {wanted}, `d.e` timestamp" if declared else None
    source = FileSource(str(tmp_path), "parquet", schema=schema)
    (message,) = await messages_of(source)
    found = json.loads(message)
    assert found["b"] == 1
    for one in (found["a"], found["d.e"]):
        inner = one
        while not isinstance(inner, str):
            (inner,) = inner.values() if isinstance(inner, dict) else inner
        assert datetime.fromisoformat(inner) == datetime.fromtimestamp(0, UTC)


@pytest.mark.parametrize(
    ("values", "wanted", "found"),
    [
        (pa.nulls(1), "bigint", "null"),
        (pa.nulls(1), "date", "null"),
        (pa.array([[None]]), "array<double>", "[null]"),
        (pa.array([{"b": None}]), "struct<b: int>", '{"b":null}'),
        (
            pa.array([[("k", None)]], pa.map_(pa.string(), pa.null())),
            "map<string, date>",
            '{"k":null}',
        ),
    ],
    ids=lambda value: str(getattr(value, "type", value)),
)
async def test_parquet_column_of_nulls_has_any_type(
    tmp_path: Path, values: pa.Array, wanted: str, found: str
) -> None:
    """A writer that saw no other value could not know the type (issue 23)."""
    pq.write_table(pa.table({"a": values}), tmp_path / "f")
    source = FileSource(str(tmp_path), "parquet", schema=f"a {wanted}, b int")
    assert await messages_of(source) == [f'{{"a":{found},"b":null}}'.encode()]


@pytest.mark.parametrize(
    ("values", "typed", "found"),
    [
        (pa.nulls(1), pa.array([7]), ["null", "7"]),
        pytest.param(
            pa.nulls(1),
            pa.array(["x"], pa.string_view()),
            ["null", '"x"'],
            marks=VIEWS,
        ),
        (pa.nulls(1), pa.array([[None]]), ["null", "[null]"]),
        (
            pa.nulls(1),
            pa.array([datetime(2026, 11, 30)], pa.timestamp("ns")),
            ["null", '"2026-11-30T00:00:00.000000Z"'],
        ),
        (pa.array([[None]]), pa.array([[7]]), ["[null]", "[7]"]),
        (
            pa.array([{"b": None, "c": 1}]),
            pa.array([{"b": [7], "c": 2}]),
            ['{"b":null,"c":1}', '{"b":[7],"c":2}'],
        ),
        (
            pa.array([[("k", None)]], pa.map_(pa.string(), pa.null())),
            pa.array([[("k", 7)]], pa.map_(pa.string(), pa.int8())),
            ['{"k":null}', '{"k":7}'],
        ),
        (pa.nulls(1), pa.nulls(1), ["null", "null"]),
    ],
    ids=lambda value: str(getattr(value, "type", value)),
)
async def test_parquet_nulls_have_the_type_of_a_later_file(
    tmp_path: Path, values: pa.Array, typed: pa.Array, found: list[str]
) -> None:
    """The first one that has any, whatever the order of the files is (issue 23)."""
    for name, array in ("1", values), ("2", pa.nulls(1)), ("3", typed):
        table = pa.table({"a" if name < "3" else "A": array, "b": [1]})
        path = tmp_path / name
        pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    pq.write_table(pa.table({"b": [1]}), tmp_path / "2a")
    first, last = found
    wanted = [f'{{"a":{text},"b":1}}' for text in (first, "null", "null", last)]
    messages = await messages_of(FileSource(str(tmp_path), "parquet"))
    assert [message.decode() for message in messages] == wanted


@pytest.mark.parametrize(
    ("kind", "wanted", "found"),
    [
        (pa.dictionary(pa.int32(), pa.string()), "date", '"2026-11-30"'),
        pytest.param(pa.string_view(), "date", '"2026-11-30"', marks=VIEWS),
        pytest.param(pa.binary_view(), "binary", '"MjAyNi0xMS0zMA=="', marks=VIEWS),
        (pa.binary(10), "binary", '"MjAyNi0xMS0zMA=="'),
    ],
    ids=str,
)
async def test_parquet_text_in_any_encoding(
    tmp_path: Path, kind: pa.DataType, wanted: str, found: str
) -> None:
    """Such as a categorical column of pandas, also within another (issue 23)."""
    values = pa.array(["2026-11-30"], kind)
    items = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), values)
    pq.write_table(pa.table({"a": values, "b": items}), tmp_path / "f")
    schema = f"a {wanted}, b array<{wanted}>"
    source = FileSource(str(tmp_path), "parquet", schema=schema)
    assert await messages_of(source) == [f'{{"a":{found},"b":[{found}]}}'.encode()]
    source = FileSource(str(tmp_path), "parquet", message="a")
    assert await messages_of(source) == [b"2026-11-30"]
    pq.write_table(pa.table({"a": values}), tmp_path / "f")
    assert await messages_of(FileSource(str(tmp_path), "parquet")) == [b"2026-11-30"]


async def test_parquet_is_read_as_another_type(tmp_path: Path) -> None:
    """If that has all of the values."""
    columns = {"a": pa.array([0.5, float("nan")]), "b": pa.array([1, None], pa.int8())}
    pq.write_table(pa.table(columns), tmp_path / "f")
    source = FileSource(str(tmp_path), "parquet", schema="a float, b double")
    assert await messages_of(source) == [
        b'{"a":0.5,"b":1.0}',
        b'{"a":"NaN","b":null}',
    ]


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        ("9007199254740993", "double"),
        ("-9007199254740993", "double"),
        ("16777217", "float"),
        ("1" * 400, "double"),
    ],
)
async def test_integer_that_a_float_does_not_have(
    tmp_path: Path, kind: str, number: str, wanted: str
) -> None:
    """It would be loaded as its neighbour (issue 23)."""
    line = number if kind == "csv" else f'{{"a":{number}}}'
    (tmp_path / "f").write_text(f"{line}\n")
    error = await error_of(tmp_path, kind, schema=f"a {wanted}")
    assert error.startswith("extract: in/f:1: ")
    assert f"not of type {wanted}: " in error


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize(
    ("number", "wanted", "found"),
    [
        ("9007199254740992", "double", "9.007199254740992E15"),
        ("9007199254740993.0", "double", "9.007199254740992E15"),
        ("12345678901234567000", "double", "1.2345678901234567E19"),
        ("12345678901234567168", "double", "1.2345678901234567E19"),
        ("16777216", "float", "1.6777216E7"),
        ("123456790", "float", "1.2345679E8"),
        ("-123456792", "float", "-1.2345679E8"),
        ("0.1", "float", "0.1"),
        ("16777217.0000000001", "float", "1.6777218E7"),
    ],
)
async def test_number_that_a_float_has(
    tmp_path: Path, kind: str, number: str, wanted: str, found: str
) -> None:
    """As an integer its exact value, or the shortest text that is read as it."""
    line = number if kind == "csv" else f'{{"a":{number}}}'
    (tmp_path / "f").write_text(f"{line}\n")
    source = FileSource(str(tmp_path), kind, schema=f"a {wanted}, b int")
    (message,) = await messages_of(source)
    assert json.loads(message)["a"] == float(found)
    assert f'"a":{found},' in message.decode()


@pytest.mark.parametrize("number", [-(1 << 63), (1 << 63) - 1])
async def test_integer_that_only_just_fits(tmp_path: Path, number: int) -> None:
    """The least and the greatest one of a bigint, with and without a schema (issue 23)."""
    line = b'{"a":%d}' % number
    (tmp_path / "f").write_bytes(line)
    for schema in (None, "a bigint"):
        source = FileSource(str(tmp_path), "json", schema=schema)
        assert await messages_of(source) == [line]
    (tmp_path / "f").write_text(f'{{"a":{number + (1 if number > 0 else -1)}}}')
    error = await error_of(tmp_path, "json")
    assert error == "extract: in/f:1: a number does not fit into bigint: set a schema"


async def test_parquet_column_matches_in_any_case(tmp_path: Path) -> None:
    """As with Spark, whether the schema is declared or the first file's (issue 23)."""
    pq.write_table(pa.table({"id": [1], "Name": ["x"]}), tmp_path / "f")
    pq.write_table(pa.table({"NAME": ["y"], "id": [2]}), tmp_path / "g")
    source = FileSource(str(tmp_path), "parquet")
    assert await messages_of(source) == [
        b'{"id":1,"Name":"x"}',
        b'{"id":2,"Name":"y"}',
    ]
    source = FileSource(str(tmp_path), "parquet", schema="name string, ID long")
    assert await messages_of(source) == [
        b'{"name":"x","ID":1}',
        b'{"name":"y","ID":2}',
    ]


async def test_parquet_column_of_the_same_case_comes_first(tmp_path: Path) -> None:
    """Its twin is not read in its place, nor twice (issue 23)."""
    pq.write_table(pa.table({"a": [1], "A": [2]}), tmp_path / "f")
    pq.write_table(pa.table({"a": [3]}), tmp_path / "g")
    source = FileSource(str(tmp_path), "parquet")
    assert await messages_of(source) == [b'{"a":1,"A":2}', b'{"a":3,"A":null}']
    source = FileSource(str(tmp_path / "f"), "parquet", schema="A long")
    assert await messages_of(source) == [b'{"A":2}']


@pytest.mark.parametrize(
    ("names", "schema", "error"),
    [
        (["aB", "AB"], "ab long", "'AB' or 'aB' of the file with 'ab' of the schema"),
        (["ab"], None, "'ab' of the file with 'aB' or 'Ab' of the schema"),
    ],
)
async def test_parquet_columns_that_differ_in_case_only(
    tmp_path: Path, names: list[str], schema: str | None, error: str
) -> None:
    """Which one is meant is not guessed (issue 23)."""
    if schema is None:
        pq.write_table(pa.table({"aB": [1], "Ab": [2]}), tmp_path / "f")
    pq.write_table(pa.table({name: [1] for name in names}), tmp_path / "g")
    assert await error_of(tmp_path, "parquet", schema=schema) == (
        f"extract: in/g: can't match column {error}, which differ in case only: rename"
        " one, or set a schema with the exact name"
    )


async def test_number_of_json_is_taken_as_it_is_written(tmp_path: Path) -> None:
    """Where a column has all of its digits, or is text (issue 23)."""
    numbers = ["12345678901234567.89", "0.12", "1.10", "1e2"]
    (tmp_path / "f").write_text("".join(f'{{"a":{n}}}\n' for n in numbers))
    source = FileSource(str(tmp_path), "json", schema="a decimal(38,2)")
    found = [json.loads(m, parse_float=str)["a"] for m in await messages_of(source)]
    assert found == ["12345678901234567.89", "0.12", "1.10", "100.00"]
    source = FileSource(str(tmp_path), "json", schema="a string, b int")
    assert [json.loads(m)["a"] for m in await messages_of(source)] == numbers
    (tmp_path / "f").write_text('{"a":{"b":1.10,"c":["\u00e9",1e2,null,true]}}\n')
    source = FileSource(str(tmp_path), "json", schema="a string")
    assert await messages_of(source) == ['{"b":1.10,"c":["é",1e2,null,true]}'.encode()]


AS_WRITTEN = [
    '{"b": "\\u00e9/\\/", "b" :2}',
    '[ 1,\t{"c" : []} ]',
    "[]",
    "{ }",
    "-0",
    "0",
    "false",
    "true",
    "17",
    "1.50",
]


@pytest.mark.parametrize(
    ("schema", "outer", "inner"),
    [
        ("a string", '{"a": %s }', "a"),
        (
            "s struct<a: string, b: int, c: string>",
            '{"s":{"a":%s ,"d":0,"c":"x"}}',
            "sa",
        ),
        ("m map<string, string>", '{"m" : {"a" : %s, "b":null, "c": "x"} }', "ma"),
        ("l array<string>", '{"k":[{}],"l":[ %s\t,null,"x"],"l2":0}', "l0"),
        ("l array<struct<a: string>>", ' {"l":[{"a":%s}]}\t', "l0a"),
    ],
)
async def test_text_column_has_json_as_it_is_written(
    tmp_path: Path, schema: str, outer: str, inner: str
) -> None:
    """With blanks, escapes and repeated keys, at any depth, as with Spark (issue 23)."""
    (tmp_path / "f").write_text("".join(f"{outer % one}\n" for one in AS_WRITTEN))
    found = list[object]()
    for message in await messages_of(
        FileSource(str(tmp_path), "json", schema=f"{schema}, o int")
    ):
        value = json.loads(message)
        for place in inner:
            value = value[int(place) if place.isdigit() else place]
        found.append(value)
    assert found == AS_WRITTEN


@pytest.mark.parametrize("value", ["0", "false", "[]", '{"-0": 1}', "-0"])
async def test_text_columns_are_taken_from_a_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """No more is parsed of a line than itself twice, and each value (issue 23)."""
    names = [f"c{n}" for n in range(20)]
    row = ", ".join(f'"{name}": {value}' for name in names)
    (tmp_path / "f").write_text(f"{{{row}}}\n")
    parsed = list[str]()

    def counted(text: str, *, literal: bool) -> object:
        parsed.append(text)
        return loaded(text, literal=literal)

    schema = ", ".join(f"{name} string" for name in names)
    source = FileSource(str(tmp_path), "json", schema=schema)
    monkeypatch.setattr(json_format, "loaded", counted)
    (message,) = await messages_of(source)
    assert json.loads(message) == dict.fromkeys(names, value)
    twice = value not in ("0", "false")
    assert len(parsed) == (2 + len(names) if twice else 1)


async def test_value_beside_json_that_is_text(tmp_path: Path) -> None:
    """It is still checked (issue 23)."""
    (tmp_path / "f").write_text('{"a":{"b":[{}],"c":"x"}}\n')
    schema = "a struct<b: string, c: int>"
    error = await error_of(tmp_path, "json", schema=schema)
    assert error.startswith(
        "extract: in/f:1: field 'a' is an object that is not of type"
    )


async def test_byte_order_mark_within_a_file_is_kept(tmp_path: Path) -> None:
    """Only that at its beginning is none of the data (issue 23)."""
    (tmp_path / "f").write_text("\ufeffa,b\n\ufeff1,x\n\ufeff2,y\n")
    source = FileSource(str(tmp_path), "csv", options={"header": "true"})
    found = [json.loads(message) for message in await messages_of(source)]
    assert found == [{"a": "\ufeff1", "b": "x"}, {"a": "\ufeff2", "b": "y"}]


async def test_line_of_a_partition_that_is_not_utf8(tmp_path: Path) -> None:
    """It can't be a string of JSON; as the message it is passed on (issue 23)."""
    (tmp_path / "p=1").mkdir()
    (tmp_path / "p=1" / "f").write_bytes(b"good\nbad\xff\n")
    error = await error_of(tmp_path, "text")
    assert error.startswith("extract: in/p=1/f:2: the line is not UTF-8 at offset 3:")
    source = FileSource(str(tmp_path), "text", message="value")
    assert await messages_of(source) == [b"good", b"bad\xff"]


@pytest.mark.parametrize("kind", ["text", "csv"])
async def test_compressed_file_that_ends_early_is_named(
    tmp_path: Path, kind: str
) -> None:
    """Among other files of the folder (issue 23)."""
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one\n"))
    whole = gzip.compress(" ".join(map(str, range(9999))).encode())
    (tmp_path / "b.gz").write_bytes(whole[:2000])
    error = await error_of(tmp_path, kind)
    assert error == "extract: can't read in/b.gz: truncated compressed stream"


@pytest.mark.parametrize(
    ("first", "second", "schema", "error"),
    [
        ("a,b\n1,x\n", "b,a\ny,2\n", None, "in/g:1: the header has columns b, a, exp"),
        ("a,b\n1,x\n", "\na\n2\n", None, "in/g:2: the header has columns a, expected"),
        ("b,a\nx,1\n", "", "a int, b string", "in/f:1: column 'b' is number 1 in the"),
        ("a,c\n1,x\n", "c,A\nx,1\n", "a int, b string", "in/g:1: column 'A' is number"),
    ],
)
async def test_header_of_other_columns_or_in_another_order(
    tmp_path: Path, first: str, second: str, schema: str | None, error: str
) -> None:
    """Values would get into other columns (issue 23)."""
    (tmp_path / "f").write_text(first)
    (tmp_path / "g").write_text(second)
    header = {"header": "true"}
    assert error in await error_of(tmp_path, "csv", schema=schema, options=header)


@pytest.mark.parametrize(
    ("header", "names"),
    [("\ta\tb", ["_c0", "a", "b"]), ("a\t b\t", ["a", " b", "_c2"])],
)
async def test_header_keeps_blanks_at_its_ends(
    tmp_path: Path, header: str, names: list[str]
) -> None:
    """A separator or part of a name, they are no end of the line (issue 23)."""
    (tmp_path / "e").write_text("\ufeff")
    (tmp_path / "f").write_text(f"\n \n{header}\n1\t2\t3\n")
    options = {"header": "true", "sep": "\t"}
    (message,) = await messages_of(FileSource(str(tmp_path), "csv", options=options))
    assert json.loads(message) == dict(zip(names, "123", strict=True))


async def test_header_that_begins_with_a_separator(tmp_path: Path) -> None:
    """With a schema, cells are not read as those of the columns before (issue 23)."""
    (tmp_path / "f").write_text("\ta\tb\n1\t2\t\n")
    options = {"header": "true", "sep": "\t"}
    error = await error_of(tmp_path, "csv", schema="a int, b int", options=options)
    assert "in/f:1: column 'a' is number 2 in the header, and 1 in the" in error


@pytest.mark.parametrize("schema", [None, "a string, b string"])
async def test_header_after_many_blank_lines_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: str | None
) -> None:
    """Wherever the file is cut, and reading resumes (issue 23)."""
    monkeypatch.setattr(lines, "_CHUNK", 10)
    rows = "".join(f"{n},x\n" for n in range(5))
    (tmp_path / "f").write_text("\n \n" * 9 + f"a,b\n{rows}")

    def source() -> FileSource:
        return FileSource(
            str(tmp_path),
            "csv",
            schema=schema,
            options={"header": "true"},
            run_messages=1,
            keeps=True,
        )

    wanted = [b'{"a":"%d","b":"x"}' % n for n in range(5)]
    items = await items_of(source())
    assert [m for i in items if not isinstance(i, Position) for m in i] == wanted
    for n, position in enumerate(i for i in items if isinstance(i, Position)):
        again = source()
        again.resume(position.value)
        assert await messages_of(again) == wanted[n + 1 :]


async def test_schema_gives_columns_other_names_than_the_header(tmp_path: Path) -> None:
    """They are read by their place; a header may also be shorter."""
    (tmp_path / "f").write_text("x,y\n1,2\n")
    (tmp_path / "g").write_text("A\n3\n")
    source = FileSource(
        str(tmp_path), "csv", schema="a int, b int", options={"header": "true"}
    )
    assert await messages_of(source) == [b'{"a":1,"b":2}', b'{"a":3,"b":null}']


@pytest.mark.parametrize(("sep", "cut"), [("||", "||"), ("\\t", "\t"), ("|", "|")])
async def test_separator_of_cells(tmp_path: Path, sep: str, cut: str) -> None:
    """It may have several characters, also beside quotes (issue 23)."""
    rows = [["a:", 'b"c'], ["d", "e"], ["f;", ""]]
    lines = ["a:|'b\\\"c'", "d|'e'", "f;|"]
    text = "".join(f"{line}\n" for line in lines)
    (tmp_path / "f").write_text(text.replace("'", '"').replace("|", cut))
    source = FileSource(str(tmp_path), "csv", options={"sep": sep})
    found = [json.loads(message) for message in await messages_of(source)]
    assert [[*row.values()] for row in found] == [[a, b or None] for a, b in rows]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("zone", "wanted"), [(None, "timestamp"), ("UTC", "timestamp_ntz")]
)
async def test_time_of_parquet_with_a_zone_or_without(
    tmp_path: Path, zone: str | None, wanted: str, *, nested: bool
) -> None:
    """One is no value of the other's type, at any depth (issue 23)."""
    kind, value = pa.timestamp("us", zone), datetime(2020, 1, 1, 5)
    values = pa.array([[value]], pa.list_(kind)) if nested else pa.array([value], kind)
    pq.write_table(pa.table({"a": values}), tmp_path / "f")
    schema = f"a array<{wanted}>" if nested else f"a {wanted}"
    error = await error_of(tmp_path, "parquet", schema=schema)
    assert "only one of the two has a zone: declare timestamp_ntz for times" in error


@pytest.mark.parametrize(
    ("kind", "text", "schema", "name"),
    [
        ("csv", "1,x\n,y\n", "a int not null, b string", "a"),
        ("json", '{"a":1}\n{}\n', "a int not null", "a"),
        ("json", '{"a":null}\n{"a":{"b":[]}}', "a struct<b: array<int>, c: int>", None),
        ("json", '{"a":{"b":null}}', "a struct<b: int not null>", "a.b"),
        (
            "json",
            '{"a":[{"b":null}]}',
            "a array<struct<b: int not null>>",
            "a.element.b",
        ),
        (
            "json",
            '{"a":{"k":{}}}',
            "a map<string, struct<b: int not null>>",
            "a.value.b",
        ),
    ],
)
async def test_null_in_what_is_not_null(
    tmp_path: Path, kind: str, text: str, schema: str, name: str | None
) -> None:
    """At any depth; null where it is allowed is not looked into (issue 23)."""
    (tmp_path / "f").write_text(text)
    if name is None:
        found = await messages_of(FileSource(str(tmp_path), kind, schema=schema))
        assert len(found) == 2
        return
    error = await error_of(tmp_path, kind, schema=schema)
    assert error.startswith(
        f"extract: column {name} is NOT NULL in the schema, and null in a row of in/f:"
    )


@pytest.mark.parametrize("schema", ["line string", "line string not null", "b binary"])
async def test_line_of_text_has_the_declared_name(tmp_path: Path, schema: str) -> None:
    """As with Spark (issue 23)."""
    name = schema.split()[0]
    (tmp_path / "f").write_text("a\nb\n")
    for message in (None, name):
        source = FileSource(str(tmp_path), "text", schema=schema, message=message)
        assert await messages_of(source) == [b"a", b"b"]
    error = await error_of(tmp_path, "text", schema=schema, message="value")
    assert error.startswith("extract: message: there is no column 'value'")


async def test_line_of_a_partition_has_the_declared_name(tmp_path: Path) -> None:
    """It is the column that no folder has, wherever the schema has it (issue 23)."""
    partitioned(tmp_path, "n=1", "n=2", text="a\n")
    source = FileSource(str(tmp_path), "text", schema="N string, line string not null")
    wanted = [b'{"line":"a","N":"1"}', b'{"line":"a","N":"2"}']
    assert await messages_of(source) == wanted


@pytest.mark.parametrize("schema", ["a int", "a string, b string", "n string"])
async def test_text_has_one_column(tmp_path: Path, schema: str) -> None:
    """Besides those of folders (issue 23)."""
    partitioned(tmp_path, "n=1", text="1\n")
    assert await error_of(tmp_path, "text", schema=schema) == (
        "extract: schema: format text needs a single column, string or binary, besides"
        " those of partition folders: declare one, or omit the schema, which names it"
        " value"
    )


def partitioned(path: Path, *folders: str, text: str = '{"id":1}\n') -> None:
    """Write a file into each folder."""
    for folder in folders:
        (path / folder).mkdir(parents=True)
        (path / folder / "f").write_text(text)


async def test_partition_has_the_declared_type(tmp_path: Path) -> None:
    """Its type is inferred only if the schema lacks it (issue 23)."""
    partitioned(tmp_path, "Zip=10115/q=1.50/d=2020-01-01/n=1")
    schema = "q double, id long, zip string, d string"
    source = FileSource(str(tmp_path), "json", schema=schema)
    (message,) = await messages_of(source)
    assert message == b'{"id":1,"zip":"10115","q":1.5,"d":"2020-01-01","n":1}'
    (message,) = await messages_of(FileSource(str(tmp_path), "json"))
    assert message == b'{"id":1,"Zip":10115,"q":"1.50","d":"2020-01-01","n":1}'


async def test_partitions_of_a_load_come_back_as_they_were(tmp_path: Path) -> None:
    """With the schema of the load (issue 23)."""
    schema = (
        "id int, z string, l long, d double, e decimal(5,2), b boolean, n binary,"
        " dt date, ts timestamp, tn timestamp_ntz"
    )
    row = (
        b'{"id":1,"z":"007","l":-7,"d":1.0E-9,"e":1.50,"b":true,"n":"YWI=",'
        b'"dt":"2020-01-01","ts":"2020-01-01T12:30:00.123456Z",'
        b'"tn":"1999-12-31T23:59:59.000000"}'
    )
    nulls = b'{"id":2,%s}' % b",".join(
        b'"%s":null' % name for name in b"z l d e b n dt ts tn".split()
    )
    by = ["z", "l", "d", "e", "b", "n", "dt", "ts", "tn"]
    sink = FileSink(tmp_path / "o", "parquet", schema=schema, partition_by=by)
    async with sink:
        await sink.write([row, nulls])
        await sink.finish()
    source = FileSource(str(tmp_path / "o"), "parquet", schema=schema)
    found = sorted(map(json.loads, await messages_of(source)), key=lambda m: m["id"])
    again = [json.loads(row), json.loads(nulls)]
    moment = found[0].pop("ts")
    assert datetime.fromisoformat(moment) == datetime.fromisoformat(again[0].pop("ts"))
    assert found == again


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("q=x", "double"),
        ("q=1.5", "int"),
        ("q=2147483648", "int"),
        ("q=1.505", "decimal(5,2)"),
        ("q=2020-02-30", "date"),
        ("q=a", "binary"),
        ("q=1", "array<int>"),
        ("q=", "int"),
    ],
)
async def test_partition_that_its_type_does_not_have(
    tmp_path: Path, folder: str, kind: str
) -> None:
    """It would be loaded as another value, or as null (issue 23)."""
    partitioned(tmp_path, f"p=1/{folder}")
    error = await error_of(tmp_path, "json", schema=f"id long, q {kind}")
    assert error == (
        f"extract: in/p=1/{folder}: the value of column 'q' is not of type {kind}:"
        " declare it as string, and have a worker parse the text"
    )


@pytest.mark.parametrize(("kind", "text"), [("json", '{"id":1}\n'), ("csv", "1\n")])
async def test_only_a_null_partition_is_null(
    tmp_path: Path, kind: str, text: str
) -> None:
    """A column of folders may be NOT NULL (issue 23)."""
    schema = "id int, p int not null"
    partitioned(tmp_path, "p=7", text=text)
    source = FileSource(str(tmp_path), kind, schema=schema)
    assert await messages_of(source) == [b'{"id":1,"p":7}']
    partitioned(tmp_path, "p=__HIVE_DEFAULT_PARTITION__", text=text)
    assert await error_of(tmp_path, kind, schema=schema) == (
        "extract: column p is NOT NULL in the schema, and null in a row of"
        " in/p=__HIVE_DEFAULT_PARTITION__/f: omit NOT NULL, and have a worker check all"
        " rows"
    )


async def test_date_of_a_partition_that_does_not_exist(tmp_path: Path) -> None:
    """Its folder is named where a date is declared; else it is text (issue 23)."""
    partitioned(tmp_path, "d=2020-02-30")
    error = await error_of(tmp_path, "json", schema="id long, d date")
    assert error.startswith("extract: in/d=2020-02-30: the value of column 'd' is not")
    for schema in ("id long, d string", None):
        (message,) = await messages_of(FileSource(str(tmp_path), "json", schema=schema))
        assert message == b'{"id":1,"d":"2020-02-30"}'


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["-2147483648", "2147483647"], "int"),
        (["-2147483649"], "bigint"),
        (["2147483648", "0"], "bigint"),
        (["-9223372036854775808", "9223372036854775807"], "bigint"),
        (["-9223372036854775809"], "string"),
        (["9223372036854775808", "1"], "string"),
        (["1" * 20], "string"),
        (["2024-02-29", "0001-01-01"], "date"),
        (["2024-02-30", "2024-01-01"], "string"),
        (["0000-01-01"], "string"),
        (["2024-01-0٢"], "string"),
        (["٢"], "string"),
    ],
)
def test_type_of_a_partition_fits_all_its_values(
    tmp_path: Path, values: list[str], kind: str
) -> None:
    """And is the first of int, bigint, date and string that does (issue 23)."""
    partitioned(tmp_path, *(f"p={value}" for value in values))
    (column,) = partition_columns(find(str(tmp_path)), [])
    assert str(column.type) == kind


async def test_cells_are_not_those_of_partitions(tmp_path: Path) -> None:
    """Wherever the schema has the columns of folders (issue 23)."""
    partitioned(tmp_path, "q=1.50/p=007", text="5,x\n")
    schema = "q double, P string, id long, s string"
    source = FileSource(str(tmp_path), "csv", schema=schema)
    (message,) = await messages_of(source)
    assert message == b'{"id":5,"s":"x","q":1.5,"P":"007"}'


@pytest.mark.parametrize(
    ("kind", "text", "options"),
    [
        ("csv", 'x,"a""b"\n \n2\n', {}),
        ("csv", "\na,b\nx,y\n1\n", {"header": "true"}),
        ("json", '{"a":1}\n\n{}\n', {}),
    ],
)
async def test_schema_of_partitions_only(
    tmp_path: Path, kind: str, text: str, options: dict[str, str]
) -> None:
    """Each line that is not blank is a row, as with Spark (issue 23)."""
    partitioned(tmp_path, "p=7", text=text)
    source = FileSource(str(tmp_path), kind, schema="p int", options=options)
    assert await messages_of(source) == [b'{"p":7}'] * 2


@pytest.mark.parametrize(
    ("folder", "columns"),
    [
        ("a=1/a=2", "'a' repeats 'a'"),
        ("x=1/b=1/X=2", "'X' repeats 'x'"),
    ],
)
async def test_partition_column_that_repeats(
    tmp_path: Path, folder: str, columns: str
) -> None:
    """Only one of its values could be read (issue 23)."""
    partitioned(tmp_path, folder)
    error = (
        f"extract: in/{folder}: partition column {columns}, expected each name once in"
        " any case: rename one of the folders"
    )
    assert await error_of(tmp_path, "json") == error
    with pytest.raises(SourceFailed) as caught:
        FileSource(str(tmp_path), "json").identity()
    assert str(caught.value).replace(str(tmp_path), "in") == error


@pytest.mark.parametrize("schema", [None, "b int, A int"])
@pytest.mark.parametrize("name", ["a", "A"])
async def test_partition_replaces_a_column_in_any_case(
    tmp_path: Path, name: str, schema: str | None
) -> None:
    """No message has names that differ in case only (issue 23)."""
    partitioned(tmp_path, "A=7", text=f'{{"{name}":1,"b":2}}\n')
    source = FileSource(str(tmp_path), "json", schema=schema)
    assert await messages_of(source) == [b'{"b":2,"A":7}']


async def test_explicit_path_of_a_hidden_file(tmp_path: Path) -> None:
    """Its name is why it is not read (issue 23)."""
    (tmp_path / "_x").touch()
    for path in (tmp_path, tmp_path / "_x"):
        with pytest.raises(SourceFailed) as caught:
            await messages_of(FileSource(str(path), "text"))
        assert str(caught.value) == (
            f"extract: there is no file to read at {path}: names that begin with a dot"
            " or an underscore are not data"
        )
    with pytest.raises(SourceFailed, match=r"there is no file to read at \S+$"):
        await messages_of(FileSource(str(tmp_path / "y"), "text"))


async def test_nothing_there(tmp_path: Path) -> None:
    """No files at all, and partitions that differ."""
    assert "there is no file to read at in" in await error_of(tmp_path, "text")
    for name in ("a=1", "b=1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    said = await error_of(tmp_path, "text")
    assert said == "extract: partition columns differ: in/a=1/x by a; in/b=1/x by b"


CELLS = st.text(st.sampled_from('ab,"\\ ;é1\ufeff'), max_size=5)


@settings(deadline=None)
@given(
    st.lists(st.lists(CELLS, min_size=2, max_size=2), min_size=1, max_size=6),
    st.sampled_from(["\\", '"']),
    st.integers(1, 40),
)
async def test_cells_are_read_alike_at_once_and_by_line(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[list[str]],
    escape: str,
    chunk: int,
) -> None:
    """Whatever is in them, however the file is cut (issue 23)."""

    def cell(text: str) -> str:
        if escape != '"':
            text = text.replace("\\", "\\\\")
        escaped = text.replace('"', f'{escape}"')
        bare = not set(text) & set('",\\') and len(text) % 2
        return text if bare else f'"{escaped}"'

    path = tmp_path_factory.mktemp("in") / "a.csv"
    path.write_text("".join(f"{','.join(map(cell, row))},z\n" for row in rows))
    source = FileSource(str(path), "csv", options={"escape": escape})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_CHUNK", chunk)
        cut = await messages_of(source)
    assert cut == await messages_of(source)
    wanted = FileSource(str(path), "csv", options={"escape": escape}, message="_c2")
    assert await messages_of(wanted) == [b"z"] * len(rows)
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(CsvFormat, "_at_once", lambda *_: None)
        assert await messages_of(source) == cut


@pytest.mark.parametrize("inside", ["in", "in/*", "{i[n],x}/a.txt"])
async def test_folder_is_no_pattern(tmp_path: Path, inside: str) -> None:
    """What a path is relative to may have any name; the path is one (issue 23)."""
    for name in ("v1x", "v[12]{x,y}*?]"):
        (tmp_path / name / "in").mkdir(parents=True)
        (tmp_path / name / "in" / "a.txt").write_text(name)
    folder = tmp_path / "v[12]{x,y}*?]"
    source = FileSource(inside, "text", folder=str(folder))
    assert await messages_of(source) == [folder.name.encode()]
    assert str(folder) in source.input
