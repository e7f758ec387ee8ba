"""``etlstage journal``: the commands that show and change a set of journals."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etlstage.cli import journal as commands
from etlstage.cli.app import app, run_command
from etlstage.errors import ConfigError, EtlstageError
from etlstage.journal import AppendInDoubt, Journals, OffsetGone, Publisher, modulo
from etlstage.journal.account import lags, verify
from etlstage.journal.log import Group, JournalLog
from etlstage.journal.messages import LogReader

pytestmark = pytest.mark.core


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a set of one journal: two committed, two pending, one rolled back."""
    path = tmp_path / "orders"
    with Journals.open(path) as journals:
        writer = Publisher(journals, mapping=modulo(lambda m: m["n"]))
        writer.publish_uncommitted({"n": 1})
        (intent,) = writer.build_ack_intents()
        journals.append(intent.journal, intent.intent)
        writer.publish_uncommitted({"n": 2})
        # As after a crash: an acknowledgement again rolls back what came since.
        journals.append(intent.journal, intent.intent)
        other = Publisher(journals, mapping=modulo(lambda m: m["n"]))
        other.publish_committed({"n": 3})
        other.publish_uncommitted({"n": 4})
        other.publish_uncommitted({"n": 5})
    return path


def run(*words: str) -> int:
    """Run a command."""
    return int(app([*words], standalone_mode=False) or 0)


def rows(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    """Return what was printed, a JSON object a line."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_journals_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is listed with its offsets and its size."""
    assert run("journal", "ls", str(folder), "--json") == 0
    (row,) = rows(capsys)
    assert row["journal"] == "orders/part-000"
    assert row["first"] == 0
    assert row["end"] == row["bytes"] > 500
    assert row["segments"] == 1
    assert run("journal", "ls", str(folder)) == 0
    assert capsys.readouterr().out.startswith("orders/part-000: first 0, end ")


def test_messages_are_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Committed ones are, or all, or those within offsets or of one producer."""
    assert run("journal", "cat", str(folder)) == 0
    committed = rows(capsys)
    assert [row["message"]["n"] for row in committed] == [1, 3]
    assert [row["flags"] for row in committed] == ["CONTINUE_TXN", "OUTSIDE_TXN"]
    assert committed[0]["time"].startswith("20")
    assert run("journal", "cat", str(folder), "--uncommitted") == 0
    every = rows(capsys)
    assert [row["message"].get("n") for row in every] == [1, None, 2, None, 3, 4, 5]
    begin, end = every[2]["begin"], every[4]["end"]
    assert (
        run(
            *("journal", "cat", str(folder), "--uncommitted"),
            *("--from", str(begin), "--to", str(end)),
        )
        == 0
    )
    assert [row["message"].get("n") for row in rows(capsys)] == [2, None, 3]
    producer = every[4]["uuid"][-12:]
    assert run("journal", "cat", str(folder), "--producer", producer) == 0
    assert [row["message"]["n"] for row in rows(capsys)] == [3]


@pytest.mark.parametrize("every", [(), ("--uncommitted",)])
def test_messages_are_printed_from_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], every: tuple[str, ...]
) -> None:
    """The time is that of the append, in each journal of the set."""
    hours = iter(range(24))
    path = tmp_path / "orders"
    with Journals.open(
        path, partitions=2, segment=300, now=lambda: next(hours) * 3600 * 10**9
    ) as journals:
        writer = Publisher(journals, mapping=modulo(lambda m: m["n"]))
        for number in range(8):
            writer.publish_committed({"n": number})
    cat = "journal", "cat", str(path), *every, "--from"
    assert run(*cat, "1970-01-01T04:59:00Z") == 0
    assert sorted(row["message"]["n"] for row in rows(capsys)) == [5, 6, 7]
    assert run(*cat, "1970-01-01T08:59:00+02:00") == 0
    assert [row["message"]["n"] for row in rows(capsys)] == [7]
    assert run(*cat, "2026-01-02") == 0
    assert rows(capsys) == []
    with pytest.raises(ConfigError, match="--from is 'soon', expected an offset, or"):
        run(*cat, "soon")


@pytest.mark.parametrize("begin", ["1\u00b2", "9" * 5000, "9999-12-31T23:00:00-12:00"])
def test_begin_that_is_no_offset(folder: Path, begin: str) -> None:
    """Digits that make no number, and times after the last one (issue 26)."""
    with pytest.raises(ConfigError, match=f"--from is '{begin}', expected an offset"):
        run("journal", "cat", str(folder), "--from", begin)


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("every", [(), ("--uncommitted",)])
def test_what_is_dropped_before_it_is_printed_is_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    every: tuple[str, ...],
    before: int,
) -> None:
    """Messages that are kept are printed, each once, whatever else is in the set."""
    asked = 0
    path = tmp_path / "orders"
    with Journals.open(path, segment=100, partitions=2) as journals:
        writer, other = (
            Publisher(journals, mapping=modulo(lambda m: m["n"])) for _ in range(2)
        )
        for number in range(12):
            other.publish_uncommitted({"n": 100 + number})
            writer.publish_committed({"n": number})
        # These transactions begin in segments that will have been dropped.
        for intent in other.build_ack_intents():
            journals.append(intent.journal, intent.intent)
        logs = [journals.log(spec.name) for spec in journals.select()]
        read, firsts = LogReader.group, [log.segments()[3] for log in logs]

        def group(self: LogReader) -> Group | None:
            nonlocal asked
            asked += 1
            if asked > before:
                for log, first in zip(logs, firsts, strict=True):
                    log.drop(first)
            return read(self)

        monkeypatch.setattr(LogReader, "group", group)
        assert run("journal", "cat", str(path), *every) == 0
        assert [log.first() for log in logs] == firsts
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    places = [(row["journal"], row["begin"]) for row in found]
    assert len(places) == len(set(places)) > 3
    kept = {place for place in places if place[1] > min(firsts)}
    assert len(kept) >= 12
    assert before or kept == set(places)
    assert printed.err.count("has been dropped") == 2


def test_lag_of_a_journal_that_is_trimmed_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting starts again, in ``verify``, too."""
    gone = [OffsetGone("orders/part-000", 0, 9) for _ in range(2)]
    read = JournalLog.groups

    def groups(self: JournalLog, *args: Any, **named: Any) -> Iterator[Group]:  # noqa: ANN401
        if gone:
            raise gone.pop()
        return read(self, *args, **named)

    with Journals.open(folder) as journals:
        journals.read_committed("late").close()
        monkeypatch.setattr(JournalLog, "groups", groups)
        (lag,) = lags(journals)
        assert lag.messages == 5
        gone.append(OffsetGone("orders/part-000", 0, 9))
        assert verify(journals, "orders/part-000").committed == 2


def test_unknown_journal_is_named(folder: Path) -> None:
    """The error names a similar one; a wrong folder is refused, too (issue 24)."""
    with pytest.raises(ConfigError, match=r"did you mean 'orders/part-000'"):
        run("journal", "cat", str(folder), "--journal", "orders/part-00")
    for none in (folder / "none", folder / "spec.json"):
        with pytest.raises(ConfigError, match="there is no set of journals"):
            run("journal", "ls", str(none))
    with pytest.raises(ConfigError, match="expected 12 lower-case hexadecimal digits"):
        run("journal", "cat", str(folder), "--producer", "birds")


def test_lines_are_appended(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines before the first that is not a JSON object are appended."""
    for text, status in ((b'{"n": 6}\n', 0), (b'{"n": 7}\n[1]\n', 1), (b"x\n", 1)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
        assert run("journal", "append", str(folder)) == status
    assert capsys.readouterr().err.splitlines() == [
        "etlstage: error: line 2 is not a JSON object",
        "etlstage: error: line 1 is not JSON: Expecting value: line 1 column 1 (char 0)",
    ]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b'{"n": 8}')))
    assert run("journal", "append", str(folder), "--journal", "orders/part-000") == 0
    assert run("journal", "cat", str(folder), "--journal", "orders/part-000") == 0
    assert [row["message"]["n"] for row in rows(capsys)] == [1, 3, 6, 7, 8]


@pytest.mark.parametrize(
    ("line", "flaw"),
    [
        (b'{"a": NaN}', "not JSON: NaN is not a JSON number"),
        (b'{"a": [-Infinity]}', "not JSON: -Infinity is not a JSON number"),
        (
            b'{"a": 1e999}',
            (
                "not a message: found a number that is no 64-bit float, expected -1.8e+308"
                " to 1.8e+308"
            ),
        ),
        (
            b'{"_meta": 5}',
            (
                "not a message: found a number at /_meta, expected an object, to which the"
                " UUID is added"
            ),
        ),
        (
            b'{"_meta": null, "a": 1}',
            (
                "not a message: found null at /_meta, expected an object, to which the UUID"
                " is added"
            ),
        ),
        (b'{"a": %s' % (b"[" * 100_000), "nested too deeply"),
        (b'{"a": %s0.5%s}' % (b"[" * 900, b"]" * 900), "nested too deeply"),
    ],
)
def test_line_that_is_no_message(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: bytes,
    flaw: str,
) -> None:
    """It is refused by its number; those before it are appended (issue 24)."""
    text = b'{"n": 6.5, "_meta": {"a": 1}}\n' + line + b'\n{"n": 7}\n'
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    assert run("journal", "append", str(folder)) == 1
    assert capsys.readouterr().err.startswith(f"etlstage: error: line 2 is {flaw}")
    assert run("journal", "cat", str(folder)) == 0
    assert [row["message"]["n"] for row in rows(capsys)] == [1, 3, 6.5]


def test_lines_wait_until_readers_have_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are appended; each reader that is waited for is named once (issue 24)."""
    found: list[object] = []
    with Journals.open(tmp_path, limit="1KiB") as journals:
        journals.read_committed("slow").close()
        lines = [b'{"n": %d}\n' % number for number in range(50)]
        stdin = SimpleNamespace(buffer=io.BytesIO(b"".join(lines)))
        monkeypatch.setattr(sys, "stdin", stdin)

        def read(_seconds: float) -> None:
            found.append([*journals.read_committed("slow")])

        monkeypatch.setattr("time.sleep", read)
        assert run("journal", "append", str(tmp_path)) == 0
        assert len(list(journals.read_committed())) == 50
    assert len(found) > 2
    assert capsys.readouterr().err == (
        f"etlstage: warning: waiting for reader 'slow' of {tmp_path} (limit)\n"
    )


def test_appended_lines_are_counted_when_the_disk_fails(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error follows (issue 24)."""
    append, left = JournalLog.append, [1, 0]

    def failing(self: JournalLog, now: int, *data: bytes) -> tuple[int, int]:
        if not left.pop(0):
            raise OSError("no space left")
        return append(self, now, *data)

    monkeypatch.setattr(JournalLog, "append", failing)
    lines = SimpleNamespace(buffer=io.BytesIO(b'{"n": 6}\n{"n": 7}\n'))
    monkeypatch.setattr(sys, "stdin", lines)
    with pytest.raises(OSError, match="no space left"):
        run("journal", "append", str(folder))
    assert capsys.readouterr().err == "etlstage: warning: 1 line appended\n"


@pytest.mark.parametrize(
    ("error", "last"),
    [(AppendInDoubt("no answer"), "no answer"), (KeyboardInterrupt(), "interrupted")],
)
def test_line_that_may_have_been_appended_is_named(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    last: str,
) -> None:
    """It is not among those that are counted (issue 24)."""
    append = JournalLog.append

    def interrupted(self: JournalLog, now: int, *data: bytes) -> tuple[int, int]:
        place = append(self, now, *data)
        if b'"n":7' in b"".join(data):
            raise error
        return place

    monkeypatch.setattr(JournalLog, "append", interrupted)
    lines = SimpleNamespace(buffer=io.BytesIO(b'{"n": 6}\n{"n": 7}\n'))
    monkeypatch.setattr(sys, "stdin", lines)
    monkeypatch.setattr(sys, "argv", ["etlstage", "journal", "append", str(folder)])
    assert run_command() != 0
    assert capsys.readouterr().err == (
        "etlstage: warning: 1 line appended, and perhaps line 2\n"
        f"etlstage: error: {last}\n"
    )


def test_set_is_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damaged messages are counted, and make it fail."""
    assert run("journal", "verify", str(folder), "--json") == 0
    (row,) = rows(capsys)
    del row["bytes"]
    assert row == {
        "journal": "orders/part-000",
        "committed": 2,
        "pending": 2,
        "rolled_back": 1,
        "duplicates": 0,
        "damaged": 0,
    }
    with Journals.open(folder) as journals:
        journals.append("orders/part-000", b"no json\n")
    (segment,) = (folder / "part-000").glob("*.log")
    data = bytearray(segment.read_bytes())
    data[40] ^= 1
    segment.write_bytes(data)
    assert run("journal", "verify", str(folder), "--json") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["damaged"] == 2
    # Each is named with its journal (issue 24).
    assert printed.err.count("etlstage: error: orders/part-000: ") == 2


def test_readers_and_their_lag(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lag is in bytes, messages and seconds; a reader can be forgotten."""
    with Journals.open(folder) as journals:
        journals.read_committed("slow").close()
        list(journals.read_committed("fast"))
        end = journals.log("orders/part-000").end()
    assert run("journal", "stat", str(folder), "--json") == 0
    fast, slow = rows(capsys)
    assert (fast["reader"], fast["bytes"], fast["messages"]) == ("fast", 0, 0)
    assert (slow["bytes"], slow["messages"]) == (end, 5)
    assert slow["seconds"] > fast["seconds"] == 0
    assert run("journal", "readers", str(folder), "--json") == 0
    fast, slow = rows(capsys)
    # It must be able to read the open transaction again.
    assert 0 < fast["needs"]["orders/part-000"] < end
    assert slow["needs"] == {"orders/part-000": 0}
    with pytest.raises(EtlstageError, match=r"no reader '\.\./spec'"):
        run("journal", "readers", str(folder), "--forget", "../spec")
    assert (folder / "spec.json").exists()
    assert run("journal", "readers", str(folder), "--forget", "slow") == 0
    assert run("journal", "readers", str(folder)) == 0
    assert capsys.readouterr().out.count("updated") == 1


def test_reader_of_no_known_time(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A time beyond those of the calendar is shown as none (issue 24)."""
    with Journals.open(folder) as journals:
        journals.read_committed("r").close()
    path = folder / "readers" / "r.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"updated": 1e300}))
    assert run("journal", "readers", str(folder), "--json") == 0
    assert rows(capsys)[0]["updated"] is None


def test_set_is_trimmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``trim`` drops what the set's ``keep`` allows."""
    path = tmp_path / "orders"
    with Journals.open(path, keep="read", segment=10) as journals:
        writer = Publisher(journals, mapping=modulo(lambda m: m["n"]))
        for number in range(3):
            writer.publish_committed({"n": number})
        list(journals.read_committed("r"))
    assert run("journal", "trim", str(path)) == 0
    assert capsys.readouterr().out == "orders/part-000: dropped 2 segments\n"


def test_runs_and_bytes_are_shown(tmp_path: Path) -> None:
    """Every kind of message is shown as printable text."""
    from etlstage.journal import RunMessage
    from etlstage.sequencing import CsvRecord, Envelope, Opaque

    shown = [
        commands._row(Envelope("j", 0, 1, message))["message"]
        for message in (
            RunMessage([b"a", b"\xff"]),
            Opaque(b"\xff"),
            CsvRecord(["", "x"]),
        )
    ]
    assert shown == [["a", "\\xff"], "\\xff", ["x"]]


def test_lines_are_appended_as_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a set for pipelines each line is a message, whatever it holds."""
    Journals.open(tmp_path, content_type="application/x-etlstage-run").close()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n{}\nlast")))
    assert run("journal", "append", str(tmp_path)) == 0
    assert run("journal", "cat", str(tmp_path)) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["message"] for one in found] == [["one"], ["{}"], ["last"]]


@pytest.mark.parametrize("kind", ["text/csv", "application/x-protobuf-fixed"])
def test_set_to_which_no_line_is_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The error names the sets that can be appended to; nothing is read (issue 24)."""
    Journals.open(tmp_path, content_type=kind).close()
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ConfigError) as caught:
        run("journal", "append", str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}: can't append lines to a set of {kind}, expected"
        " application/x-ndjson (JSON lines) or application/x-etlstage-run (runs); append"
        " to this set in Python, with etlstage.journal.Publisher"
    )
