from __future__ import annotations

from dataclasses import replace

import pytest

from etlstage.protocol.marker import Markers
from tests.examples.conftest import Start
from tests.examples.languages import ALL, ANY_MARKERS, SHELLS, Language

each_language = pytest.mark.parametrize("language", ALL, ids=str)
each_with_any_markers = pytest.mark.parametrize("language", ANY_MARKERS, ids=str)
odd_markers = pytest.mark.parametrize(
    "markers",
    [
        Markers(eom=b"<eom>", eop=b"<eop>"),
        Markers(eom=b"\\\n", eop=b"\\000"),
        Markers(eom=b"\xff\xfe\0", eop=b"\xe2\x82\xac"),
        Markers(eom=b"\0", eop=b"\n"),
    ],
    ids=["words", "backslashes", "binary", "swapped"],
)


@each_language
def test_each_message_is_answered_before_the_next_is_sent(
    start: Start, language: Language
) -> None:
    """In lock-step nothing is held back, for the next message would never come."""
    worker = start(language, "transform")

    for number in range(5):
        word = b"word%d" % number
        assert worker.answer_to(word + b"\n", until=b"\0") == word + b"\n\0"

    assert worker.finish() == (b"", 0)


ANSWERS = {
    b"": b"\0",
    b"  ": b"\0",
    b"one": b"one\n\0",
    b" one  two three ": b"one\ntwo\nthree\n\0",
    b"\\x41 %s ${x} $(x) `x` * & ' \"": (
        b"\\x41\n%s\n${x}\n$(x)\n`x`\n*\n&\n'\n\"\n\0"
    ),
    b".": b".\n\0",
}


@each_language
def test_a_message_has_as_many_replies_as_words(
    start: Start, language: Language
) -> None:
    """Replies end with EOM each, and EOP follows the last, or stands alone."""
    worker = start(language, "transform")

    for message, answer in ANSWERS.items():
        assert worker.answer_to(message + b"\n", until=b"\0") == answer
    assert worker.finish() == (b"", 0)


@each_language
def test_messages_written_ahead_are_answered_in_order(
    start: Start, language: Language
) -> None:
    """Twenty thousand at once fill the pipes both ways, and still nothing is stuck."""
    worker = start(language, "transform")
    words = [b"word-%d" % number for number in range(20_000)]

    answer = worker.answer_to(
        b"".join(word + b"\n" for word in words), until=b"\0", times=len(words)
    )

    assert answer == b"".join(word + b"\n\0" for word in words)
    assert worker.finish() == (b"", 0)


@each_language
def test_message_may_come_in_pieces(start: Start, language: Language) -> None:
    """A read ends where it ends: within a message, or right before its EOM."""
    worker = start(language, "transform")

    # The answer to the first shows that the piece after it was read, too.
    assert worker.answer_to(b"one\ntw", until=b"\0") == b"one\n\0"
    assert worker.answer_to(b"o\nthree", until=b"\0") == b"two\n\0"
    assert worker.answer_to(b"\n", until=b"\0") == b"three\n\0"

    assert worker.finish() == (b"", 0)


@each_language
@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"", b""), (b"one\n", b"one\n\0"), (b"one\n\n", b"one\n\0\0")],
)
def test_worker_exits_with_zero_when_its_input_ends(
    start: Start, language: Language, sent: bytes, answer: bytes
) -> None:
    """The end of the input is no error, and what was sent before is answered."""
    worker = start(language, "transform")
    worker.write(sent)

    assert worker.finish() == (answer, 0)


@each_language
@pytest.mark.parametrize(
    ("sent", "answer"), [(b"one\ntwo", b"one\n\0"), (b"one", b""), (b".", b"")]
)
def test_message_without_its_eom_is_dropped(
    start: Start, language: Language, sent: bytes, answer: bytes
) -> None:
    """A tail that is not terminated is no message: no reply and no EOP."""
    worker = start(language, "transform")
    worker.write(sent)

    assert worker.finish() == (answer, 0)


@each_language
def test_message_of_a_megabyte(start: Start, language: Language) -> None:
    """There is no limit in the worker, and no line length either."""
    worker = start(language, "transform")
    word = b"x" * 1_000_000

    assert worker.answer_to(word + b"\n", until=b"\0") == word + b"\n\0"
    assert worker.answer_to(b"next\n", until=b"\0") == b"next\n\0"


@each_language
def test_bytes_that_are_no_text_pass_unchanged(
    start: Start, language: Language
) -> None:
    """Messages are bytes: all that is neither a blank nor a marker comes back."""
    worker = start(language, "transform")
    word = bytes(sorted(set(range(256)) - set(b" \t\n\v\f\r\0\x05\x15\x17")))

    assert worker.answer_to(word + b"\n", until=b"\0") == word + b"\n\0"
    # Half a UTF-8 character at the end of a message is not glued to the next.
    assert (
        worker.answer_to(b"\xc3\n\xa9\n", until=b"\0", times=2) == b"\xc3\n\0\xa9\n\0"
    )
    assert worker.stderr == ""


@each_language
def test_default_markers_need_no_environment(start: Start, language: Language) -> None:
    """A worker can be tried at a terminal, where no supervisor sets variables."""
    worker = start(language, "transform", markers=None)

    assert worker.answer_to(b"one two\n", until=b"\0") == b"one\ntwo\n\0"
    assert worker.finish() == (b"", 0)


@each_with_any_markers
@odd_markers
def test_markers_come_from_the_environment(
    start: Start, language: Language, markers: Markers
) -> None:
    """Any bytes can be markers, several of them and none of them ASCII."""
    eom, eop = markers.eom, markers.eop
    worker = start(language, "transform", markers=markers)

    assert (
        worker.answer_to(b"one two" + eom, until=eop)
        == b"one" + eom + b"two" + eom + eop
    )
    assert worker.answer_to(eom, until=eop) == eop
    assert worker.finish() == (b"", 0)


@each_with_any_markers
@odd_markers
def test_marker_may_be_cut_anywhere(
    start: Start, language: Language, markers: Markers
) -> None:
    """A read may end within EOM; the two pieces are found together."""
    eom, eop = markers.eom, markers.eop
    worker = start(language, "transform", markers=markers)

    for cut in range(len(eom)):
        # The answer to the first shows that the piece of a marker was read, too.
        first = worker.answer_to(b"one" + eom + b"two" + eom[:cut], until=eop)
        second = worker.answer_to(eom[cut:], until=eop)
        assert first == b"one" + eom + eop
        assert second == b"two" + eom + eop

    assert worker.finish() == (b"", 0)


@pytest.mark.parametrize("name", ["transform", "transform_batch"])
@pytest.mark.parametrize("language", SHELLS[:-1], ids=str)
def test_input_that_cannot_be_read_is_not_taken_for_its_end(
    start: Start, language: Language, name: str
) -> None:
    """A read that fails ends the worker with status 1."""
    broken = replace(language, tools={**language.tools, "dd": "false"})
    worker = start(broken, name)

    assert worker.finish() == (b"", 1)


@pytest.mark.parametrize("language", SHELLS, ids=str)
@pytest.mark.parametrize("name", ["transform", "transform_batch", "load"])
@pytest.mark.parametrize(
    "markers", [Markers(eom=b"\x1e"), Markers(eop=b"\x06"), Markers(eom=b"\r\n")]
)
def test_shell_worker_refuses_markers_that_it_cannot_speak(
    start: Start, language: Language, name: str, markers: Markers
) -> None:
    """It reports it and exits with 2, rather than wait for a newline forever."""
    worker = start(language, name, "/dev/null", markers=markers)

    assert worker.finish() == (b"", 2)
    assert f"{name}.sh: only the default markers" in worker.stderr
