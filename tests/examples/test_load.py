from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from etlstage.protocol.marker import Markers
from tests.examples.conftest import Start
from tests.examples.languages import ALL, ANY_MARKERS, PYTHONS, Language

each_language = pytest.mark.parametrize("language", ALL, ids=str)
each_with_any_markers = pytest.mark.parametrize("language", ANY_MARKERS, ids=str)
each_with_batches = pytest.mark.parametrize("language", PYTHONS, ids=str)
ODD = Markers(eom=b"<eom>", eop=b"\\0\0", eob=b"\xff\xfe", bnc=b"<bnc>")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Name what the workers load into."""
    return tmp_path / "target"


def rows(database: Path) -> list[bytes]:
    """Return what a reader of the database sees."""
    with closing(sqlite3.connect(database)) as connection:
        found: Iterator[tuple[bytes]] = connection.execute(
            "SELECT message FROM messages ORDER BY rowid"
        )
        return [message for (message,) in found]


# --- Single messages -----------------------------------------------------------------


@each_language
def test_message_is_loaded_before_its_eop_comes(
    start: Start, language: Language, target: Path
) -> None:
    """EOP is the receipt, and there is nothing else in the answer."""
    worker = start(language, "load", target)
    loaded = b""

    for message in (b"one", b"", b"  two  \\n ", b"\xc3", b"%s $x"):
        assert worker.answer_to(message + b"\n", until=b"\0") == b"\0"
        loaded += message + b"\n"
        assert target.read_bytes() == loaded

    assert worker.finish() == (b"", 0)


@each_language
def test_messages_written_ahead_are_loaded_in_order(
    start: Start, language: Language, target: Path
) -> None:
    """One EOP for each message, and what has no EOM is not loaded."""
    worker = start(language, "load", target)
    messages = b"".join(b"message %d\n" % number for number in range(200))

    assert worker.answer_to(messages + b"tail", until=b"\0", times=200) == b"\0" * 200
    assert worker.finish() == (b"", 0)
    assert target.read_bytes() == messages


@each_language
def test_message_of_a_megabyte_that_is_no_text_is_loaded(
    start: Start, language: Language, target: Path
) -> None:
    """There is no limit in the worker, and each byte but the markers may occur."""
    worker = start(language, "load", target)
    message = bytes(sorted(set(range(256)) - set(b"\n\0\x05\x17"))) * 4_000

    assert worker.answer_to(message + b"\n", until=b"\0") == b"\0"
    assert target.read_bytes() == message + b"\n"


@each_language
def test_load_worker_appends(start: Start, language: Language, target: Path) -> None:
    """A restart keeps what was loaded before."""
    target.write_bytes(b"zero\n")
    worker = start(language, "load", target)

    assert worker.answer_to(b"one\n", until=b"\0") == b"\0"
    assert target.read_bytes() == b"zero\none\n"


@each_language
def test_worker_that_cannot_load_exits_without_eop(
    start: Start, language: Language, tmp_path: Path
) -> None:
    """What was not loaded has no receipt: the status shows that it failed."""
    worker = start(language, "load", tmp_path / "no such folder" / "target")
    worker.write(b"one\n")

    output, status = worker.finish()

    assert output == b""
    assert status != 0
    assert "no such folder" in worker.stderr


@each_with_any_markers
def test_markers_of_a_load_worker_come_from_the_environment(
    start: Start, language: Language, target: Path
) -> None:
    """EOM ends the message and is no part of it; a read may end within it."""
    worker = start(language, "load", target, markers=ODD)

    assert worker.answer_to(b"one<eom>two<e", until=ODD.eop) == ODD.eop
    assert worker.answer_to(b"om>", until=ODD.eop) == ODD.eop
    assert worker.finish() == (b"", 0)
    assert target.read_bytes() == b"one\ntwo\n"


# --- Batches -------------------------------------------------------------------------


@each_with_batches
def test_batch_is_loaded_before_its_eop_comes(
    start: Start, language: Language, target: Path
) -> None:
    """One EOP per batch, also for an empty one, and the rows can be seen by then."""
    worker = start(language, "load_batch", target)

    assert worker.answer_to(b"one\n\n\xc3\n\x17", until=b"\0") == b"\0"
    assert rows(target) == [b"one", b"", b"\xc3"]
    assert worker.answer_to(b"\x17", until=b"\0") == b"\0"
    assert worker.answer_to(b"four\n\x17", until=b"\0") == b"\0"
    assert rows(target) == [b"one", b"", b"\xc3", b"four"]
    assert worker.finish() == (b"", 0)


@each_with_batches
def test_batches_written_ahead_are_loaded_in_order(
    start: Start, language: Language, target: Path
) -> None:
    """The end of the input closes the last one, without what has no EOM."""
    worker = start(language, "load_batch", target)
    batches = b"".join(b"a%d\nb%d\n\x17" % (n, n) for n in range(100))

    answer = worker.answer_to(batches + b"last\ntail", until=b"\0", times=100)

    assert answer == b"\0" * 100
    assert worker.finish() == (b"\0", 0)
    loaded = [b"%c%d" % (letter, n) for n in range(100) for letter in b"ab"]
    assert rows(target) == [*loaded, b"last"]


@each_with_batches
def test_load_worker_asks_until_its_batch_is_full(
    start: Start, language: Language, target: Path
) -> None:
    """Nothing is loaded before the batch is full or the supervisor closes it."""
    worker = start(language, "load_batch", target, 2)

    assert worker.answer_to(b"one\n", until=b"\x05") == b"\x05"
    assert rows(target) == []
    assert worker.answer_to(b"two\n", until=b"\0") == b"\0"
    assert rows(target) == [b"one", b"two"]
    assert worker.answer_to(b"three\n", until=b"\x05") == b"\x05"
    assert worker.answer_to(b"\x17", until=b"\0") == b"\0"
    assert worker.answer_to(b"\x17", until=b"\0") == b"\0"
    assert rows(target) == [b"one", b"two", b"three"]
    assert worker.finish() == (b"", 0)


@each_with_batches
def test_markers_of_a_batch_loader_come_from_the_environment(
    start: Start, language: Language, target: Path
) -> None:
    """EOM and EOB are not part of what they end."""
    worker = start(language, "load_batch", target, markers=ODD)

    assert worker.answer_to(b"one<eom>" + ODD.eob, until=ODD.eop) == ODD.eop
    assert rows(target) == [b"one"]
    assert worker.finish() == (b"", 0)


@each_with_batches
def test_markers_of_a_batch_loader_that_drives_come_from_the_environment(
    start: Start, language: Language, target: Path
) -> None:
    """BNC is read from there, too."""
    worker = start(language, "load_batch", target, 2, markers=ODD)

    assert worker.answer_to(b"one<eom>", until=ODD.bnc) == ODD.bnc
    assert worker.answer_to(ODD.eob, until=ODD.eop) == ODD.eop
    assert rows(target) == [b"one"]
    assert worker.finish() == (b"", 0)
