"""A worker rejects with ERR in place of EOP, seen from both sides."""

from __future__ import annotations

import pytest

from etlstage.errors import PayloadTooBig
from etlstage.protocol.base import Limits
from etlstage.protocol.events import Failed
from etlstage.protocol.marker import MarkerProtocol, Markers, MarkerState, Mode
from tests.protocol.marker.reading import (
    ONE_TO_ONE,
    Chop,
    asked,
    failure,
    supervisor,
)
from tests.protocol.pair import ConnectionPair, S, W, receive, typed
from tests.protocol.strategies import REPEATED, WORDS
from tests.protocol.words import Answers, BatchEnd, Messages, Output, Word, tell


def refusal(reason: str) -> Answers:
    """Return the event of one refused exchange."""
    return Answers([()], 0, [(0, reason)])


NO = refusal("no date")
MESSAGE = Messages([b"m"])


def test_refusal_stands_between_replies(chop: Chop) -> None:
    """It ends the exchange whose turn it is; those around it have their replies."""
    protocol = asked(4)
    assert receive(protocol, *chop(b"a\n\0no date\x15\0b\n\0")) == typed(
        [Answers([(b"a",)]), NO, Answers([(), (b"b",)])]
    )
    assert (protocol.state, protocol.owed) == (MarkerState.IDLE, 0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x15", ""),
        (b"no date\x15", "no date"),
        (b"no date\n\x15", "no date"),
        (b"made before\nno date\x15", "no date"),
        (b"made before\n\n\x15", ""),
        (b"\xff\xc3\xa9\x15", "\ufffd\xe9"),
        (b"x" * 1000 + b"\x15", "x" * 1000),
        (b"x" * 1001 + b"\x15", "x" * 1000 + "..."),
    ],
)
def test_reason_is_what_the_worker_wrote_last(
    chop: Chop, data: bytes, reason: str
) -> None:
    """Earlier outputs of the exchange are dropped; an EOM after it is harmless."""
    protocol = asked(1)
    assert receive(protocol, *chop(data)) == typed([refusal(reason)])


@pytest.mark.parametrize("markers", [WORDS, REPEATED])
def test_err_may_be_any_bytes(chop: Chop, markers: Markers) -> None:
    """As the other markers may."""
    protocol = asked(2, markers=markers)
    eom, eop, _, _, err = markers
    assert err is not None
    assert receive(protocol, *chop(b"no date" + err + b"a" + eom + eop)) == typed(
        [NO, Answers([(b"a",)])]
    )


def test_one_to_one_worker_may_refuse(chop: Chop) -> None:
    """ERR takes the place of EOM."""
    protocol = asked(3, markers=ONE_TO_ONE)
    assert receive(protocol, *chop(b"a\nno date\x15b\n")) == typed(
        [Answers([(b"a",)]), NO, Answers([(b"b",)])]
    )


def test_batch_is_refused_as_a_whole(chop: Chop) -> None:
    """Whoever fills it; a worker that does may refuse before it is full."""
    before: list[Word] = [MESSAGE, BatchEnd()]
    ours = supervisor(Mode.BATCH_SUPERVISOR, *before, MESSAGE)
    assert receive(ours, *chop(b"no date\x15")) == typed([NO])
    assert (ours.state, ours.owed) == (MarkerState.FILLING, 0)
    theirs = asked(1, Mode.BATCH_WORKER)
    assert receive(theirs, *chop(b"\x05no date\x15")) == typed([NO])
    assert (theirs.state, theirs.owed) == (MarkerState.IDLE, 0)


def test_refused_request_keeps_what_was_passed_on(chop: Chop) -> None:
    """Extraction passes each message on as it comes, so the reason has no EOM."""
    protocol = asked(1, Mode.CYCLIC)
    assert receive(protocol, *chop(b"a\nb\nno date\x15")) == typed(
        [Output([b"a", b"b"]), NO]
    )
    protocol = asked(2, Mode.CYCLIC, ONE_TO_ONE)
    assert receive(protocol, *chop(b"no date\x15a\n")) == typed(
        [NO, Answers([(b"a",)])]
    )


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_WORKER])
def test_unsolicited_err_is_refused(chop: Chop, mode: Mode) -> None:
    """There is nothing to reject."""
    text = failure(supervisor(mode), chop(b"\x15"))
    assert text == "can't handle ERR in state IDLE: no reply is due (offset 0"


def test_err_before_the_end_of_the_batch_is_refused(chop: Chop) -> None:
    """As an EOP would be."""
    protocol = supervisor(Mode.BATCH_SUPERVISOR, MESSAGE)
    text = failure(protocol, chop(b"no date\x15"))
    assert text.startswith("can't handle ERR in state FILLING: the batch is not closed")


@pytest.mark.parametrize("limits", [Limits(4, 100), Limits(100, 4)])
def test_reason_that_is_too_long_is_refused(chop: Chop, limits: Limits) -> None:
    """Sizes are bounded before memory is used, whatever it is used for."""
    protocol = MarkerProtocol(S, Mode.SINGLE, limits=limits)
    tell(protocol, MESSAGE)
    (event,) = (deliver(protocol, chop(b"no date\x15")),)
    assert isinstance(event, Failed)
    assert isinstance(event.error, PayloadTooBig)


def deliver(protocol: MarkerProtocol, chunks: list[bytes]) -> Word:
    """Return the only event of these chunks."""
    for chunk in chunks:
        protocol.receive_data(chunk)
    (event,) = protocol.events_received()
    return event


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR])
def test_without_err_its_byte_is_like_any_other(chop: Chop, mode: Mode) -> None:
    """Then no worker can reject."""
    before: list[Word] = [MESSAGE]
    if mode.batches:
        before.append(BatchEnd())
    protocol = supervisor(mode, *before, markers=Markers(err=None))
    data = typed([Output([b"\x15"])])
    events = receive(protocol, *chop(b"\x15\n\0"))
    whole = typed([Answers([(b"\x15",)])])
    assert events == (data + typed([Answers([()])]) if mode is Mode.CYCLIC else whole)


def test_plain_extraction_has_nothing_to_refuse(chop: Chop) -> None:
    """Nothing was asked: ERR is a byte like any other, on both sides."""
    assert receive(supervisor(Mode.PLAIN), *chop(b"a\x15\n")) == typed(
        [Output([b"a\x15"])]
    )
    pair = ConnectionPair(Mode.PLAIN)
    assert pair.send(W, Output([b"a\x15"])) == b"a\x15\n"


# --- what is sent -----------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR])
def test_messages_for_a_worker_may_contain_err(mode: Mode) -> None:
    """Only replies are searched for it."""
    pair = ConnectionPair(mode)
    assert pair.send(S, Messages([b"a\x15"])) == b"a\x15\n"


def test_worker_refuses() -> None:
    """The reason has no EOM: in an extraction it would be a message."""
    pair = ConnectionPair(Mode.SINGLE)
    pair.send(S, MESSAGE, MESSAGE)
    assert pair.send(W, NO) == b"no date\x15"
    assert pair.status == (MarkerState.BUSY, 1)
    assert pair.send(W, refusal("")) == b"\x15"
    assert pair.status == (MarkerState.IDLE, 0)


def test_worker_without_err_can_t_refuse() -> None:
    """Its supervisor would take the reason for output."""
    pair = ConnectionPair(Mode.SINGLE, Markers(err=None))
    pair.send(S, MESSAGE)
    assert "there is no marker err" in pair.refusal(W, NO)


@pytest.mark.parametrize("marker", Markers())
def test_reason_with_a_marker_is_not_sent(marker: bytes) -> None:
    """It would end early, or be cut off at an EOM."""
    pair = ConnectionPair(Mode.SINGLE)
    pair.send(S, MESSAGE)
    text = pair.refusal(W, refusal(f"a{marker.decode()}b"))
    assert text.startswith("InvalidMessage: message contains marker ")


def test_reason_that_ends_as_err_begins_is_not_sent() -> None:
    """The first two of three equal bytes would be ERR, not the last two."""
    pair = ConnectionPair(Mode.SINGLE, REPEATED)
    pair.send(S, MESSAGE)
    text = pair.refusal(W, refusal("no!"))
    assert text == "InvalidMessage: reason ends as marker err begins"
