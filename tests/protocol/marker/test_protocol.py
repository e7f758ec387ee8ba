"""What either side may send, and the session's interface; not what it receives."""

from __future__ import annotations

import pytest

from etlstage.errors import InvalidMessage, LocalProtocolError, RemoteProtocolError
from etlstage.protocol.base import SEND_EOF, Limits, Side
from etlstage.protocol.events import Ended, Failed, Opened, Wanted
from etlstage.protocol.marker import MarkerProtocol, Markers, Mode
from tests.protocol.marker.reading import ONE_TO_ONE, worker
from tests.protocol.pair import ConnectionPair, S, W, heard, receive, typed
from tests.protocol.strategies import PR399
from tests.protocol.words import (
    Answers,
    BatchEnd,
    Eof,
    Messages,
    More,
    Output,
    Word,
    tell,
)


def sent(protocol: MarkerProtocol, *events: Word) -> list[bytes]:
    """Send events; return what is to be written."""
    for event in events:
        tell(protocol, event)
    return protocol.data_to_send()


def refusal(side: Side, mode: Mode, event: Word, *before: tuple[Side, Word]) -> str:
    """Return why an event may not be sent after what was sent ``before``."""
    pair = ConnectionPair(mode)
    for sender, earlier in before:
        pair.send(sender, earlier)
    return pair.refusal(side, event)


MESSAGE = Messages([b"a"])
OUTPUT = Output([b"r"])
REPLY = Answers([(b"r",)])


# --- the interface ----------------------------------------------------------


@pytest.mark.parametrize("side", [S, W])
@pytest.mark.parametrize("mode", list(Mode))
def test_repr_shows_the_fate(side: Side, mode: Mode) -> None:
    """Side, mode, state and replies owed: what an operator asks for first."""
    protocol = MarkerProtocol(side, mode)
    state = "STREAMING" if mode is Mode.PLAIN else "IDLE"
    assert repr(protocol) == (
        f"<MarkerProtocol {side.value} {mode.value} {state} owed=0>"
    )
    assert protocol.mode is mode
    assert protocol.side is side


def test_repr_counts_what_is_owed() -> None:
    """Three messages were sent and none was answered."""
    protocol = MarkerProtocol(S, Mode.SINGLE)
    tell(protocol, Messages([b"a"] * 3))
    assert repr(protocol) == "<MarkerProtocol supervisor single BUSY owed=3>"


def test_defaults_are_the_markers_defaults() -> None:
    """So are those of the limits."""
    protocol = MarkerProtocol(S, Mode.SINGLE)
    assert protocol.markers == Markers()
    text = f"expected no more than {64 * 1024 * 1024} bytes"
    with pytest.raises(InvalidMessage, match=text):
        tell(protocol, Messages([b"x" * (64 * 1024 * 1024 + 1)]))


def test_events_and_data_are_fetched_once() -> None:
    """Both lists are emptied."""
    protocol = worker(Mode.SINGLE)
    protocol.receive_data(b"a\n")
    assert heard(protocol) == typed([MESSAGE])
    assert protocol.events_received() == []
    assert sent(protocol, REPLY) == [b"r\n\0"]
    assert protocol.data_to_send() == []


def test_each_send_is_one_piece_to_write() -> None:
    """A run becomes one piece of bytes, however many messages are in it."""
    protocol = MarkerProtocol(S, Mode.BATCH_SUPERVISOR)
    assert sent(protocol, Messages([b"a", b"b"]), BatchEnd(), MESSAGE) == [
        b"a\nb\n",
        b"\x17",
        b"a\n",
    ]


@pytest.mark.parametrize("side", [S, W])
def test_reading_nothing_means_nothing(side: Side) -> None:
    """An empty read is not the end of the stream, which has its own method."""
    protocol = MarkerProtocol(side, Mode.SINGLE)
    protocol.receive_data(b"")
    protocol.reading_paused(0.0)
    assert protocol.events_received() == []


@pytest.mark.parametrize(
    ("side", "event"),
    [
        (S, Messages([])),
        (W, Output([])),
        (W, Answers([])),
    ],
)
@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.CYCLIC])
def test_empty_run_is_nothing(side: Side, event: Word, mode: Mode) -> None:
    """It is always allowed, and has no effect."""
    protocol = MarkerProtocol(side, mode)
    before = repr(protocol)
    assert sent(protocol, event) == []
    assert repr(protocol) == before


@pytest.mark.parametrize(
    ("side", "event"),
    [
        (S, Ended(1, [()])),
        (S, Wanted()),
        (S, Failed(RemoteProtocolError("x"))),
        (W, Opened(1, [b"a"])),
        (W, Failed(RemoteProtocolError("x"))),
    ],
)
@pytest.mark.parametrize("mode", list(Mode))
def test_each_side_sends_its_own_events(side: Side, event: Word, mode: Mode) -> None:
    """A worker has no messages to hand over, a supervisor has no replies."""
    assert refusal(side, mode, event) == (
        f"LocalProtocolError: a {side.value} can't send {type(event).__name__}"
    )


# --- what the state allows --------------------------------------------------


@pytest.mark.parametrize(
    ("side", "mode", "event", "text"),
    [
        (S, Mode.PLAIN, MESSAGE, "a message in state STREAMING"),
        (W, Mode.SINGLE, REPLY, "EOP in state IDLE: no reply is due"),
    ],
)
def test_what_the_peer_would_refuse_is_not_sent(
    side: Side, mode: Mode, event: Word, text: str
) -> None:
    """Both sides share one state table; here the sender is at fault."""
    assert refusal(side, mode, event) == f"LocalProtocolError: can't handle {text}"


def test_write_ahead_in_a_worker_driven_batch_is_refused() -> None:
    """Lock-step: one message for each BNC, one at the beginning."""
    text = (
        "LocalProtocolError: can't handle a message in state FILLING:"
        " the worker did not ask for one with BNC"
    )
    pair = ConnectionPair(Mode.BATCH_WORKER)
    assert pair.refusal(S, Messages([b"a", b"b"])) == text
    pair.send(S, MESSAGE)
    assert pair.refusal(S, MESSAGE) == text
    pair.send(W, More())
    assert pair.refusal(S, Messages([b"a", b"b"])) == text
    pair.send(S, MESSAGE)


# --- messages that can't be sent --------------------------------------------


@pytest.mark.parametrize(
    "mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER]
)
@pytest.mark.parametrize("marker", Markers()[:4])
def test_message_with_a_marker_is_not_sent_by_a_supervisor(
    mode: Mode, marker: bytes
) -> None:
    """Any of the first four, in any mode; nothing of its run is queued."""
    pair = ConnectionPair(mode)
    text = pair.refusal(S, Messages([b"a", b"b" + marker]))
    assert text.startswith("InvalidMessage: message contains marker ")
    assert " at offset 1; choose other markers, or encode the message" in text


@pytest.mark.parametrize("marker", Markers())
def test_message_with_a_marker_is_not_sent_by_a_worker(marker: bytes) -> None:
    """Neither in a part of a reply, nor in a complete one."""
    pair = ConnectionPair(Mode.SINGLE)
    pair.send(S, MESSAGE)
    for event in (
        Output([b"a", b"b" + marker]),
        Answers([(b"a", b"b" + marker)]),
    ):
        text = pair.refusal(W, event)
        assert text.startswith("InvalidMessage: message contains marker ")
        assert " at offset 1;" in text


def test_message_of_the_limit_is_sent_and_a_longer_one_is_not() -> None:
    """On both sides."""
    pair = ConnectionPair(Mode.SINGLE, limits=Limits(10, 100))
    text = (
        "InvalidMessage: message is 11 bytes long, expected no more than 10 bytes;"
        " see max_message"
    )
    assert pair.refusal(S, Messages([b"x" * 11])) == text
    pair.send(S, Messages([b"x" * 10]))
    assert pair.refusal(W, Output([b"x" * 11])) == text
    assert pair.refusal(W, Answers([(b"x" * 11,)])) == text
    pair.send(W, Answers([(b"x" * 10,)]))


# --- exactly one output per input -------------------------------------------


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR])
@pytest.mark.parametrize("groups", [[()], [(b"a", b"b")], [(b"a",), ()]])
def test_one_to_one_reply_has_one_message(
    mode: Mode, groups: list[tuple[bytes, ...]]
) -> None:
    """Without a message nothing would end it, and two messages would be two replies."""
    pair = ConnectionPair(mode, ONE_TO_ONE)
    assert pair.refusal(W, Answers(groups)) == (
        "LocalProtocolError: a reply must be one message when eop is eom"
    )


def test_one_to_one_reply_has_no_parts() -> None:
    """The first part would end it."""
    pair = ConnectionPair(Mode.SINGLE, ONE_TO_ONE)
    pair.send(S, MESSAGE)
    assert pair.refusal(W, OUTPUT) == (
        "LocalProtocolError: can't send part of a reply when eop is eom:"
        " a reply is one message"
    )


# --- EOB and the EOM after it -----------------------------------------------


def test_worker_that_fills_echoes_the_eom_behind_eob() -> None:
    """As PR399 does: once, after EOP, and only for a batch that EOB closed."""
    protocol = MarkerProtocol(W, Mode.BATCH_WORKER, PR399, eob_then_eom=True)
    receive(protocol, b"EOB\n")
    assert sent(protocol, OUTPUT) == [b"r\n"]
    assert sent(protocol, Answers([()])) == [b"\0BNC"]
    receive(protocol, b"a\n")
    assert sent(protocol, Answers([()])) == [b"\0"]


def test_worker_that_is_given_batches_does_not_echo() -> None:
    """Only a worker that fills its batches has a BNC."""
    protocol = MarkerProtocol(W, Mode.BATCH_SUPERVISOR, PR399, eob_then_eom=True)
    receive(protocol, b"EOB\nEOB\n")
    assert sent(protocol, Answers([(), ()])) == [b"\0\0"]


# --- the end ----------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
def test_supervisor_ends_its_input(mode: Mode) -> None:
    """A half-close: replies can still arrive."""
    protocol = MarkerProtocol(S, mode)
    assert sent(protocol, Eof()) == [SEND_EOF]


@pytest.mark.parametrize(
    ("event", "name"),
    [(MESSAGE, "a message"), (BatchEnd(), "EOB"), (Eof(), "the end of inp")],
)
def test_supervisor_sends_nothing_after_the_end(event: Word, name: str) -> None:
    """The pipe is closed."""
    protocol = MarkerProtocol(S, Mode.BATCH_SUPERVISOR)
    tell(protocol, Eof())
    with pytest.raises(
        LocalProtocolError, match=rf"can't handle {name}.* after the end of input"
    ):
        tell(protocol, event)
    assert protocol.data_to_send() == [SEND_EOF]


@pytest.mark.parametrize(
    ("event", "name"), [(OUTPUT, "output"), (REPLY, "EOP"), (More(), "BNC")]
)
def test_worker_sends_nothing_after_the_end(event: Word, name: str) -> None:
    """Even if a message arrives that the supervisor sent before it knew."""
    pair = ConnectionPair(Mode.BATCH_WORKER)
    pair.send(W, Eof())
    pair.send(S, MESSAGE)
    assert pair.refusal(W, event) == (
        f"LocalProtocolError: can't handle {name} after the end of output"
    )


def test_worker_does_not_end_while_it_has_replies_outstanding() -> None:
    """One that gives up just exits."""
    pair = ConnectionPair(Mode.SINGLE)
    pair.send(S, Messages([b"a", b"b", b"c"]))
    pair.send(W, REPLY)
    assert pair.refusal(W, Eof()) == (
        "LocalProtocolError: can't end: 2 EOP are still owed"
    )


@pytest.mark.parametrize("mode", list(Mode))
def test_worker_ends_when_it_has_nothing_outstanding(mode: Mode) -> None:
    """A plain worker does so at any time."""
    pair = ConnectionPair(mode)
    assert pair.send(W, Eof()) == SEND_EOF


def test_nothing_is_sent_after_the_peer_failed() -> None:
    """A supervisor must not feed a worker that it no longer understands."""
    protocol = MarkerProtocol(S, Mode.SINGLE)
    receive(protocol, b"\0")
    for event, name in ((MESSAGE, "a message"), (Eof(), "the end of input")):
        with pytest.raises(
            LocalProtocolError, match=f"can't handle {name} in state ERROR"
        ):
            tell(protocol, event)
