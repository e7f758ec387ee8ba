from __future__ import annotations

import pytest

from etlstage.protocol.marker import Markers
from tests.examples.conftest import Start
from tests.examples.languages import ALL, ANY_MARKERS, PYTHONS, SHELLS, Language

each_language = pytest.mark.parametrize("language", ALL, ids=str)
each_with_any_markers = pytest.mark.parametrize("language", ANY_MARKERS, ids=str)
each_that_drives = pytest.mark.parametrize("language", PYTHONS, ids=str)
odd_markers = pytest.mark.parametrize(
    "markers",
    [
        Markers(eom=b"<eom>", eop=b"<eop>", eob=b"<eob>", bnc=b"<bnc>"),
        Markers(eom=b"\\\n", eop=b"\\000", eob=b"\\\t", bnc=b"%%"),
        Markers(eom=b"\xff\0\xfe", eop=b"\xe2\x82\xac", eob=b"\xff\0\0", bnc=b"\0\0"),
    ],
    ids=["words", "backslashes", "binary"],
)

# --- The supervisor drives: it ends a batch with EOB ---------------------------------


@each_language
def test_each_batch_is_answered_before_the_next_is_sent(
    start: Start, language: Language
) -> None:
    """EOB is noticed at once, though no EOM and no further message follows it."""
    worker = start(language, "transform_batch")

    assert worker.answer_to(b"a\nb\na\n\x17", until=b"\0") == b"a\nb\n\0"
    assert worker.answer_to(b"a\n\x17", until=b"\0") == b"a\n\0"
    assert worker.answer_to(b"c\n\x17", until=b"\0") == b"c\n\0"
    assert worker.finish() == (b"", 0)


@each_language
def test_empty_batch_is_answered_with_eop_alone(
    start: Start, language: Language
) -> None:
    """One EOP per EOB, also for the first batch and for two in a row."""
    worker = start(language, "transform_batch")

    assert worker.answer_to(b"\x17", until=b"\0") == b"\0"
    assert worker.answer_to(b"\x17\x17", until=b"\0", times=2) == b"\0\0"
    assert worker.answer_to(b"a\n\x17", until=b"\0") == b"a\n\0"
    assert worker.answer_to(b"\x17", until=b"\0") == b"\0"
    assert worker.finish() == (b"", 0)


@each_language
def test_empty_message_is_a_message_of_its_batch(
    start: Start, language: Language
) -> None:
    """A batch of empty messages is not an empty batch."""
    worker = start(language, "transform_batch")

    assert worker.answer_to(b"\n\x17", until=b"\0") == b"\n\0"
    assert worker.answer_to(b"\n\n\x17", until=b"\0") == b"\n\0"
    assert worker.answer_to(b"a\n\nb\n\x17", until=b"\0") == b"a\n\nb\n\0"
    assert worker.finish() == (b"", 0)


@each_language
def test_batches_written_ahead_are_answered_in_order(
    start: Start, language: Language
) -> None:
    """Five thousand at once fill the pipes both ways, and still nothing is stuck."""
    worker = start(language, "transform_batch")
    batches = [b"first-%d\nsecond-%d\n" % (n, n) for n in range(5_000)]

    answer = worker.answer_to(
        b"".join(batch + b"\x17" for batch in batches), until=b"\0", times=len(batches)
    )

    assert answer == b"".join(batch + b"\0" for batch in batches)
    assert worker.finish() == (b"", 0)


@each_language
def test_batch_may_come_in_pieces(start: Start, language: Language) -> None:
    """A read ends where it ends: within a message, or right before EOM or EOB."""
    worker = start(language, "transform_batch")

    # The answer to the first shows that the piece after it was read, too.
    assert worker.answer_to(b"a\n\x17b\nc", until=b"\0") == b"a\n\0"
    assert worker.answer_to(b"c\n\x17d", until=b"\0") == b"b\ncc\n\0"
    assert worker.answer_to(b"\n\x17e\n", until=b"\0") == b"d\n\0"
    assert worker.answer_to(b"\x17", until=b"\0") == b"e\n\0"

    assert worker.finish() == (b"", 0)


@each_language
@pytest.mark.parametrize(
    ("tail", "answer"),
    [
        (b"b\n", b"b\n\0"),
        (b"\n", b"\n\0"),
        (b"b\nc", b"b\n\0"),
        (b"b", b""),
        (b".", b""),
    ],
)
def test_end_of_input_closes_the_last_batch(
    start: Start, language: Language, tail: bytes, answer: bytes
) -> None:
    """Its whole messages are answered; one without EOM is dropped."""
    worker = start(language, "transform_batch")
    worker.write(b"a\n\x17" + tail)

    assert worker.finish() == (b"a\n\0" + answer, 0)


@each_language
def test_batch_of_a_megabyte_that_is_no_text(start: Start, language: Language) -> None:
    """There is no limit in the worker, and each byte but the markers may occur."""
    worker = start(language, "transform_batch")
    word = bytes(sorted(set(range(256)) - set(b"\n\0\x05\x15\x17"))) * 4_000

    answer = worker.answer_to(b"a\n" + word + b"\n\xc3\n\xa9\n\x17", until=b"\0")

    assert answer == b"a\n" + word + b"\n\xc3\n\xa9\n\0"
    assert worker.stderr == ""


@each_with_any_markers
@odd_markers
def test_markers_come_from_the_environment(
    start: Start, language: Language, markers: Markers
) -> None:
    """Any bytes can be markers, and a read may end within each of them."""
    eom, eop, eob = markers.eom, markers.eop, markers.eob
    worker = start(language, "transform_batch", markers=markers)

    assert worker.answer_to(eob, until=eop) == eop
    for end in (eom + eob, eob):
        for cut in range(len(end)):
            batch = b"one" + eom + b"one" + eom + (b"two" if end != eob else b"")
            # The answer to the first shows that the piece of a marker was read, too.
            first = worker.answer_to(b"zero" + eom + eob + batch + end[:cut], until=eop)
            second = worker.answer_to(end[cut:], until=eop)
            assert first == b"zero" + eom + eop
            assert second == b"one" + eom + (b"two" + eom) * (end != eob) + eop

    assert worker.finish() == (b"", 0)


@pytest.mark.parametrize("language", SHELLS, ids=str)
def test_shell_worker_refuses_an_eob_that_it_cannot_speak(
    start: Start, language: Language
) -> None:
    """It reports it and exits with 2, rather than wait for the default one forever."""
    worker = start(language, "transform_batch", markers=Markers(eob=b"|"))

    assert worker.finish() == (b"", 2)
    assert "transform_batch.sh: only the default markers" in worker.stderr


# --- The worker drives: it asks for one more message with BNC ------------------------


@each_that_drives
def test_worker_asks_until_its_batch_is_full(start: Start, language: Language) -> None:
    """BNC follows each message but the one that fills the batch."""
    worker = start(language, "transform_batch", 3)

    for _ in range(2):
        assert worker.answer_to(b"a\n", until=b"\x05") == b"\x05"
        assert worker.answer_to(b"b\n", until=b"\x05") == b"\x05"
        assert worker.answer_to(b"a\n", until=b"\0") == b"a\nb\n\0"

    assert worker.finish() == (b"", 0)


@each_that_drives
def test_eob_closes_a_batch_that_is_not_full(start: Start, language: Language) -> None:
    """The supervisor has no more messages; what was read is worked on, even nothing."""
    worker = start(language, "transform_batch", 3)

    assert worker.answer_to(b"a\n", until=b"\x05") == b"\x05"
    assert worker.answer_to(b"\x17", until=b"\0") == b"a\n\0"
    assert worker.answer_to(b"\x17", until=b"\0") == b"\0"
    # The next batch is counted from its beginning.
    assert worker.answer_to(b"a\n", until=b"\x05") == b"\x05"
    assert worker.answer_to(b"b\n", until=b"\x05") == b"\x05"
    assert worker.answer_to(b"c\n", until=b"\0") == b"a\nb\nc\n\0"
    assert worker.finish() == (b"", 0)


@each_that_drives
def test_batch_of_one_is_never_asked_for(start: Start, language: Language) -> None:
    """With size 1 each message fills its batch, so that there is no BNC at all."""
    worker = start(language, "transform_batch", 1)

    for message in (b"a", b"", b"a"):
        assert worker.answer_to(message + b"\n", until=b"\0") == message + b"\n\0"

    assert worker.finish() == (b"", 0)


@each_that_drives
@pytest.mark.parametrize(
    ("tail", "answer"), [(b"b\n", b"\x05b\n\0"), (b"b", b""), (b"", b"")]
)
def test_end_of_input_closes_the_last_batch_of_a_worker_that_drives(
    start: Start, language: Language, tail: bytes, answer: bytes
) -> None:
    """As EOB would, but a batch that was not begun has no EOP."""
    worker = start(language, "transform_batch", 2)

    worker.answer_to(b"a\n", until=b"\x05")
    worker.answer_to(b"a\n", until=b"\0")
    worker.write(tail)

    assert worker.finish() == (answer, 0)


def test_plain_worker_that_drives_takes_messages_it_did_not_ask_for(
    start: Start,
) -> None:
    """
    Each message that does not fill a batch is answered by BNC, asked for or not.

    The stages that the protocol was written for do so, too. The SDK is stricter: it
    treats a supervisor that does not wait for BNC as broken.
    """
    worker = start(PYTHONS[0], "transform_batch", 3)
    worker.write(b"a\nb\nc\nd\ne\nf\ng\n")

    answer = b"\x05\x05a\nb\nc\n\0" + b"\x05\x05d\ne\nf\n\0" + b"\x05g\n\0"
    assert worker.finish() == (answer, 0)


@each_that_drives
@odd_markers
def test_markers_of_a_worker_that_drives_come_from_the_environment(
    start: Start, language: Language, markers: Markers
) -> None:
    """BNC may be any bytes, too, and has no EOM after it."""
    eom, eop, eob, bnc = markers.eom, markers.eop, markers.eob, markers.bnc
    worker = start(language, "transform_batch", 2, markers=markers)

    for cut in range(len(eom)):
        # The pieces may well be read together: nothing is answered between them.
        worker.write(b"a" + eom[:cut])
        assert worker.answer_to(eom[cut:], until=bnc) == bnc
        worker.write(b"b" + eom[:cut])
        assert worker.answer_to(eom[cut:], until=eop) == b"a" + eom + b"b" + eom + eop
    for cut in range(len(eob)):
        assert worker.answer_to(b"a" + eom, until=bnc) == bnc
        worker.write(eob[:cut])
        assert worker.answer_to(eob[cut:], until=eop) == b"a" + eom + eop

    assert worker.finish() == (b"", 0)
