from __future__ import annotations

from pathlib import Path

import pytest

from etlstage.protocol.marker import Markers
from tests.examples.conftest import Start
from tests.examples.languages import PYTHONS, Language

each_language = pytest.mark.parametrize("language", PYTHONS, ids=str)
ODD = Markers(eom=b"<eom>", eop=b"\\0\0")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a file of four lines, one of them empty and one no text."""
    source = tmp_path / "source"
    source.write_bytes(b"zero\none\n\nthree\xff\n")
    return source


@pytest.fixture
def offset(tmp_path: Path) -> Path:
    """Name the file where a worker stores how far it got."""
    return tmp_path / "source.offset"


# --- Plain: everything, then exit ----------------------------------------------------


@each_language
def test_plain_worker_writes_all_and_exits(
    start: Start, language: Language, source: Path
) -> None:
    """There is no EOP: the end of the output is the end, and status 0 its proof."""
    worker = start(language, "extract", source)

    assert worker.finish() == (b"zero\none\n\nthree\xff\n", 0)


@each_language
def test_plain_worker_does_not_wait_for_its_input_to_end(
    start: Start, language: Language, source: Path
) -> None:
    """Nothing is sent to it, so that an input that stays open must not keep it."""
    worker = start(language, "extract", source)

    assert worker.read_to_end() == (b"zero\none\n\nthree\xff\n", 0)


@each_language
def test_empty_source_has_no_messages(
    start: Start, language: Language, source: Path
) -> None:
    """Nothing to extract is no error."""
    source.write_bytes(b"")

    assert start(language, "extract", source).finish() == (b"", 0)


@each_language
def test_big_source_passes_through_the_pipe(
    start: Start, language: Language, source: Path
) -> None:
    """More than a pipe holds, with a message of a megabyte in the middle."""
    content = b"line\n" * 50_000 + b"x" * 1_000_000 + b"\n" + b"line\n" * 50_000
    source.write_bytes(content)

    assert start(language, "extract", source).finish() == (content, 0)


@each_language
def test_source_that_does_not_exist_is_not_taken_for_empty(
    start: Start, language: Language, source: Path
) -> None:
    """Half a source, or none, is never taken for all of it: the status shows that."""
    worker = start(language, "extract", source.with_name("missing"))

    output, status = worker.finish()

    assert output == b""
    assert status != 0
    assert "missing" in worker.stderr


@each_language
def test_eom_of_a_plain_worker_comes_from_the_environment(
    start: Start, language: Language, source: Path
) -> None:
    """The newline is the file's, EOM the protocol's."""
    worker = start(language, "extract", source, markers=ODD)

    assert worker.finish() == (b"zero<eom>one<eom><eom>three\xff<eom>", 0)


# --- Cyclic: the worker knows how far it got -----------------------------------------


@each_language
def test_each_request_gets_what_is_new(
    start: Start, language: Language, source: Path, offset: Path
) -> None:
    """A line without its end is not sent yet."""
    worker = start(language, "extract_cycle_worker_offsets", source, offset)

    assert worker.answer_to(b"\n", until=b"\0") == b"zero\none\n\nthree\xff\n\0"
    assert worker.answer_to(b"\n", until=b"\0") == b"\0"
    with source.open("ab") as log:
        log.write(b"four\nfi")
    assert worker.answer_to(b"\n", until=b"\0") == b"four\n\0"
    with source.open("ab") as log:
        log.write(b"ve\n\n")
    assert worker.answer_to(b"\n", until=b"\0") == b"five\n\n\0"
    assert worker.finish() == (b"", 0)


@each_language
def test_restarted_worker_goes_on_where_it_was(
    start: Start, language: Language, source: Path, offset: Path
) -> None:
    """What a further request has confirmed is not sent again."""
    name = "extract_cycle_worker_offsets"
    first = start(language, name, source, offset)
    first.answer_to(b"\n", until=b"\0")
    first.answer_to(b"\n", until=b"\0")
    first.finish()
    with source.open("ab") as log:
        log.write(b"four\n")

    second = start(language, name, source, offset)

    assert second.answer_to(b"\n", until=b"\0") == b"four\n\0"


@each_language
def test_reply_that_no_one_confirmed_is_sent_again(
    start: Start, language: Language, source: Path, offset: Path
) -> None:
    """The supervisor may have died before it was handled: twice rather than never."""
    name = "extract_cycle_worker_offsets"
    first = start(language, name, source, offset)
    answer = first.answer_to(b"\n", until=b"\0")
    first.finish()

    second = start(language, name, source, offset)

    assert second.answer_to(b"\n", until=b"\0") == answer


# --- Cyclic: the supervisor knows how far it got -------------------------------------


@each_language
def test_each_request_gets_its_range(
    start: Start, language: Language, source: Path
) -> None:
    """From ``start`` up to, but not including, ``end``, as often as it is asked for."""
    worker = start(language, "extract_cycle_supervisor_offsets", source)
    zero_and_one = b'{"start": 0, "end": 2}\n'
    the_rest = b'{"start": 2, "end": 1000}\n'

    assert worker.answer_to(zero_and_one, until=b"\0") == b"zero\none\n\0"
    assert worker.answer_to(the_rest, until=b"\0") == b"\nthree\xff\n\0"
    assert worker.answer_to(zero_and_one, until=b"\0") == b"zero\none\n\0"
    assert worker.finish() == (b"", 0)


@each_language
@pytest.mark.parametrize(
    "request_", [b'{"start": 4, "end": 9}', b'{"start":1,"end":1}']
)
def test_empty_range_is_answered_with_eop_alone(
    start: Start, language: Language, source: Path, request_: bytes
) -> None:
    """Beyond the end there is nothing, and that is no error."""
    worker = start(language, "extract_cycle_supervisor_offsets", source)

    assert worker.answer_to(request_ + b"\n", until=b"\0") == b"\0"
    assert worker.finish() == (b"", 0)


@each_language
def test_latest_offset_is_behind_the_last_whole_line(
    start: Start, language: Language, source: Path
) -> None:
    """What was appended is counted the next time; a line still open is not."""
    worker = start(language, "extract_cycle_supervisor_offsets", source)
    latest = b'{"offsets": "latest"}\n'

    assert worker.answer_to(latest, until=b"\0") == b"4\n\0"
    with source.open("ab") as file:
        file.write(b"four\nfi")
    assert worker.answer_to(latest, until=b"\0") == b"5\n\0"
    assert worker.finish() == (b"", 0)


# --- Both ----------------------------------------------------------------------------


@each_language
@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("extract_cycle_worker_offsets", b""),
        ("extract_cycle_supervisor_offsets", b'{"start": 0, "end": 4}'),
    ],
    ids=["worker", "supervisor"],
)
def test_markers_of_a_cyclic_worker_come_from_the_environment(
    start: Start,
    language: Language,
    source: Path,
    offset: Path,
    name: str,
    request_: bytes,
) -> None:
    """A request is a message, so that it ends with EOM, and a read may end in it."""
    worker = start(language, name, source, offset, markers=ODD)
    lines = b"zero<eom>one<eom><eom>three\xff<eom>"

    assert worker.answer_to(request_ + b"<eom>", until=ODD.eop) == lines + ODD.eop
    assert worker.answer_to(request_ + b"<eom>" + request_ + b"<e", until=ODD.eop)
    assert worker.answer_to(b"om>", until=ODD.eop)
    assert worker.finish() == (b"", 0)


@each_language
@pytest.mark.parametrize(
    "name", ["extract_cycle_worker_offsets", "extract_cycle_supervisor_offsets"]
)
def test_cyclic_worker_that_is_asked_nothing_writes_nothing(
    start: Start, language: Language, source: Path, offset: Path, name: str
) -> None:
    """Half a request is none: no reply, no EOP, and status 0."""
    worker = start(language, name, source, offset)
    worker.write(b'{"start": 0')

    assert worker.finish() == (b"", 0)
