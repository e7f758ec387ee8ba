"""What a worker's stream means; for batches, worker side and limits see other files."""

from __future__ import annotations

import pytest

from etlstage.protocol.base import SEND_EOF
from etlstage.protocol.marker import MarkerProtocol, Markers, MarkerState, Mode
from tests.protocol.marker.reading import (
    DIAGNOSTICS,
    ONE_TO_ONE,
    Chop,
    asked,
    failure,
    supervisor,
)
from tests.protocol.pair import S, receive, typed
from tests.protocol.strategies import PR399, REPEATED, WORDS
from tests.protocol.words import (
    Answers,
    BatchEnd,
    Eof,
    Messages,
    Output,
    Word,
    words_of,
)

# --- replies to single messages ---------------------------------------------


@pytest.mark.parametrize(
    ("data", "groups"),
    [
        (b"\0\0", [(), ()]),
        (b"a\n\0b\n\0", [(b"a",), (b"b",)]),
        (b"a\nb\n\0\0", [(b"a", b"b"), ()]),
        (b"\0a\n\nb\n\0", [(), (b"a", b"", b"b")]),
        (b"\n\0\n\0", [(b"",), (b"",)]),
    ],
)
def test_replies_are_completed_by_eop(
    chop: Chop, data: bytes, groups: list[tuple[bytes, ...]]
) -> None:
    """With no message, one, or many; the k-th EOP answers the k-th message."""
    protocol = asked(2)
    assert receive(protocol, *chop(data)) == typed([Answers(groups)])
    assert (protocol.state, protocol.owed) == (MarkerState.IDLE, 0)


def test_run_of_replies_is_one_event() -> None:
    """An event per reply would cost more than the reply."""
    protocol = asked(1000)
    protocol.receive_data(b"a\n\0" * 1000)
    (event,) = protocol.events_received()
    assert typed(words_of(protocol, [event])) == [("Answers", [(b"a",)] * 1000)]


def test_reply_without_eop_is_held_back(chop: Chop) -> None:
    """The worker may still die in it; then the message is tried again."""
    protocol = asked(2)
    assert receive(protocol, *chop(b"a\n\0b\nc")) == typed([Answers([(b"a",)])])
    assert (protocol.state, protocol.owed) == (MarkerState.BUSY, 1)
    assert receive(protocol, b"\n\0") == typed([Answers([(b"b", b"c")])])


def test_message_may_begin_as_the_eop_before_it_ends(chop: Chop) -> None:
    """Even if a read ends there: three dashes are EOP and one dash of content."""
    protocol = asked(2, markers=REPEATED)
    assert receive(protocol, *chop(b"x\n\n---")) == typed([Answers([(b"x",)])])
    assert receive(protocol, *chop(b"y\n\n--")) == typed([Answers([(b"-y",)])])


def test_missing_eop_leaves_a_remainder(chop: Chop) -> None:
    """Stage 019 writes nothing for a bad message: only a deadline can detect that."""
    protocol = asked(2)
    receive(protocol, *chop(b"a\n\0"), SEND_EOF)
    assert protocol.owed == 1


def test_message_without_eom_before_eop_is_refused(chop: Chop) -> None:
    """The end of the reply may be missing; replies before it are sound."""
    text = failure(asked(3), chop(b"a\n\0b\nc\0d\n\0"), Answers([(b"a",)]))
    assert text == "message without EOM before EOP (offset 3"


def test_one_to_one_reply_is_its_message(chop: Chop) -> None:
    """When eop is eom, each message answers one."""
    protocol = asked(3, markers=ONE_TO_ONE)
    assert receive(protocol, *chop(b"a\n\nb")) == typed([Answers([(b"a",), (b"",)])])
    assert (protocol.state, protocol.owed) == (MarkerState.BUSY, 1)


def test_unterminated_tail_of_a_reply_comes_with_the_end(chop: Chop) -> None:
    """It was written, but is not a message; the reader of the event decides."""
    protocol = asked(1)
    assert receive(protocol, *chop(b"a\nb"), SEND_EOF) == typed([Eof(b"a\nb")])
    assert (protocol.state, protocol.owed) == (MarkerState.BUSY, 1)


def test_half_a_marker_at_the_end_is_a_tail(chop: Chop) -> None:
    """The other half will never come."""
    protocol = asked(1, markers=WORDS)
    assert receive(protocol, *chop(b"aEOMEO"), SEND_EOF) == typed([Eof(b"aEOMEO")])


# --- unsolicited output ------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.BATCH_SUPERVISOR, Mode.CYCLIC])
@pytest.mark.parametrize("markers", [Markers(), WORDS, REPEATED])
def test_unsolicited_eop_is_refused(chop: Chop, mode: Mode, markers: Markers) -> None:
    """PyDKB writes one after an unterminated tail; it answers no message."""
    text = failure(MarkerProtocol(S, mode, markers), chop(markers.eop))
    assert text.startswith("can't handle EOP in state IDLE: no reply is due")
    assert text.endswith("(offset 0")


def test_second_eop_for_a_message_is_refused(chop: Chop) -> None:
    """The first was sound, and is delivered."""
    text = failure(asked(1), chop(b"a\n\0\0"), Answers([(b"a",)]))
    assert text == "can't handle EOP in state IDLE: no reply is due (offset 3"


@pytest.mark.parametrize(
    "mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER]
)
@pytest.mark.parametrize("markers", [Markers(), ONE_TO_ONE, WORDS, REPEATED])
def test_output_while_idle_is_refused(chop: Chop, mode: Mode, markers: Markers) -> None:
    """Most often it's a ``print()`` at the start of a worker."""
    data = b"Loading model...EN" + markers.eom + markers.eop
    text = failure(MarkerProtocol(S, mode, markers), chop(data))
    assert text == f"can't handle output in state IDLE{DIAGNOSTICS} (offset 0"


@pytest.mark.parametrize(
    "mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER]
)
def test_output_while_idle_is_noticed_before_its_eom(mode: Mode) -> None:
    """A prompt has no line end."""
    text = failure(MarkerProtocol(S, mode), [b">"])
    assert text.startswith("can't handle output in state IDLE")


def test_half_a_marker_that_another_cuts_off_is_output(chop: Chop) -> None:
    """``E`` could have become EOP, but BNC followed."""
    text = failure(MarkerProtocol(S, Mode.SINGLE, WORDS), chop(b"EBNC"))
    assert text == f"can't handle output in state IDLE{DIAGNOSTICS} (offset 0"


def test_output_behind_the_last_reply_is_refused(chop: Chop) -> None:
    """The offset counts from the beginning of the stream."""
    text = failure(asked(1), chop(b"a\n\0oops\n"), Answers([(b"a",)]))
    assert text == f"can't handle output in state IDLE{DIAGNOSTICS} (offset 3"


@pytest.mark.parametrize("markers", [WORDS, REPEATED])
def test_half_an_eop_while_idle_is_waited_for(markers: Markers) -> None:
    """The rest shows whether it is output or an unsolicited EOP."""
    protocol = MarkerProtocol(S, Mode.SINGLE, markers)
    assert receive(protocol, markers.eop[:1]) == []
    assert failure(protocol, [b"x"]).startswith("can't handle output in state IDLE")


def test_fault_shows_the_first_sixteen_bytes() -> None:
    """Enough to recognize a traceback or a prompt."""
    (failed,) = receive(asked(0), b"Traceback (most recent call last):\n")
    assert str(failed[2]).endswith(
        "(offset 0, found 54 72 61 63 65 62 61 63 6b 20 28 6d 6f 73 74 20)"
    )


def test_fault_shows_the_marker_that_has_no_place() -> None:
    """And nothing that happens to follow it."""
    (failed,) = receive(asked(1), b"abc\x05def")
    assert str(failed[2]).endswith("set dialect.driver: worker (offset 3, found 05)")


def test_unterminated_message_is_shown() -> None:
    """From the beginning of its reply."""
    _, failed = receive(asked(2), b"a\n\0b\nc\0")
    assert failed[2] == "message without EOM before EOP (offset 3, found 62 0a 63 00)"


@pytest.mark.parametrize(
    ("mode", "hint"),
    [
        (Mode.SINGLE, "the worker fills batches; set dialect.driver: worker"),
        (Mode.CYCLIC, "an extract stage has no batches"),
        (
            Mode.BATCH_SUPERVISOR,
            "the worker asks for messages itself; set dialect.driver: worker",
        ),
    ],
)
@pytest.mark.parametrize("markers", [Markers(), WORDS, PR399])
def test_bnc_is_refused_where_the_worker_fills_no_batches(
    chop: Chop, mode: Mode, hint: str, markers: Markers
) -> None:
    """At the first byte and after a reply; the hint names the setting."""
    text = failure(MarkerProtocol(S, mode, markers), chop(markers.bnc))
    assert text == f"can't handle BNC in state IDLE: {hint} (offset 0"
    protocol = asked(2, mode, markers)
    state = protocol.state.value
    before: list[Word] = []
    if mode is Mode.SINGLE:
        before = [Answers([(b"a",)])]
    if mode is Mode.CYCLIC:
        before = [Output([b"a"]), Answers([()])]
    data = b"a" + markers.eom + markers.eop
    data = data if before else b""
    text = failure(protocol, chop(data + b"b" + markers.bnc), *before)
    assert text == f"can't handle BNC in state {state}: {hint} (offset {len(data) + 1}"


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.BATCH_SUPERVISOR])
def test_bnc_in_a_whole_reply_is_refused(chop: Chop, mode: Mode) -> None:
    """Even if the same read ends with the EOP of a reply."""
    events: list[Word] = [BatchEnd()] if mode.batches else []
    protocol = supervisor(mode, *events, Messages([b"m"]), *events)
    text = failure(protocol, chop(b"a\n\x05b\n\0"))
    assert text.startswith("can't handle BNC in state BUSY: the worker ")
    assert text.endswith(" (offset 2")


# --- extraction -------------------------------------------------------------


def test_plain_messages_come_as_they_are_written(chop: Chop) -> None:
    """While stdout is open; nothing was asked, and nothing is owed."""
    protocol = MarkerProtocol(S, Mode.PLAIN)
    assert receive(protocol, *chop(b"a\n\nb\n")) == typed([Output([b"a", b"", b"b"])])
    assert (protocol.state, protocol.owed) == (MarkerState.STREAMING, 0)


def test_plain_tail_without_eom_comes_with_the_end(chop: Chop) -> None:
    """The last line of a file often lacks its LF; Java would deliver it."""
    protocol = MarkerProtocol(S, Mode.PLAIN)
    assert receive(protocol, *chop(b"a\nb"), SEND_EOF) == typed(
        [Output([b"a"]), Eof(b"b")]
    )


def test_plain_end_without_output_is_an_end() -> None:
    """There was nothing to extract."""
    assert receive(MarkerProtocol(S, Mode.PLAIN), SEND_EOF) == typed([Eof()])


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        (b"EOP", "can't handle EOP in state STREAMING: the worker works in cycles"),
        (b"BNC", "can't handle BNC in state STREAMING: an extract stage has no b"),
    ],
)
def test_plain_worker_writes_no_other_marker(
    chop: Chop, marker: bytes, text: str
) -> None:
    """The messages before it are delivered."""
    data = b"aEOMbEOMc" + marker + b"dEOM"
    failed = failure(
        MarkerProtocol(S, Mode.PLAIN, WORDS), chop(data), Output([b"a", b"b"])
    )
    assert failed.startswith(text)
    assert failed.endswith("(offset 9")


@pytest.mark.parametrize(
    ("data", "name"), [(b"aEOMEOPBNC", "EOP"), (b"aEOMBNCEOP", "BNC")]
)
def test_first_of_two_misplaced_markers_is_to_blame(
    chop: Chop, data: bytes, name: str
) -> None:
    """Anything after the first fault is ignored."""
    protocol = MarkerProtocol(S, Mode.PLAIN, WORDS)
    text = failure(protocol, chop(data), Output([b"a"]))
    assert text.startswith(f"can't handle {name} in state STREAMING")
    assert text.endswith("(offset 4")


def test_plain_worker_may_have_one_marker_for_eom_and_eop(chop: Chop) -> None:
    """Then the marker is EOM: there is no reply to complete."""
    protocol = MarkerProtocol(S, Mode.PLAIN, ONE_TO_ONE)
    assert receive(protocol, *chop(b"a\nb\n")) == typed([Output([b"a", b"b"])])


def test_cycle_hands_messages_over_before_its_eop(chop: Chop) -> None:
    """A round of extraction may be longer than memory."""
    protocol = asked(2, Mode.CYCLIC)
    assert receive(protocol, *chop(b"a\nb\nc")) == typed([Output([b"a", b"b"])])
    assert receive(protocol, b"\n\0\0") == typed([Output([b"c"]), Answers([(), ()])])
    assert (protocol.state, protocol.owed) == (MarkerState.IDLE, 0)


def test_cycle_may_be_answered_one_to_one(chop: Chop) -> None:
    """Each round then yields exactly one message."""
    protocol = asked(3, Mode.CYCLIC, ONE_TO_ONE)
    assert receive(protocol, *chop(b"a\n\nb")) == typed([Answers([(b"a",), (b"",)])])
    assert protocol.owed == 1


def test_cycle_with_an_unfinished_message_is_refused(chop: Chop) -> None:
    """Complete messages have been handed over before."""
    protocol = asked(1, Mode.CYCLIC)
    text = failure(protocol, chop(b"a\nb\0"), Output([b"a"]))
    assert text == "message without EOM before EOP (offset 2"


def test_cycle_without_eop_leaves_a_remainder(chop: Chop) -> None:
    """The offset that it was to reach must not be stored."""
    protocol = asked(1, Mode.CYCLIC)
    assert receive(protocol, *chop(b"a\nb"), SEND_EOF) == typed(
        [Output([b"a"]), Eof(b"b")]
    )
    assert protocol.owed == 1
