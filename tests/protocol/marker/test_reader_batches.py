"""What a worker's stream means when the worker is given batches."""

from __future__ import annotations

import pytest

from etlstage.protocol.marker import MarkerProtocol, Markers, MarkerState, Mode
from tests.protocol.marker.reading import (
    DIAGNOSTICS,
    Chop,
    failure,
    supervisor,
)
from tests.protocol.pair import receive, typed
from tests.protocol.strategies import PR399
from tests.protocol.words import Answers, BatchEnd, Messages, Word, tell


def test_worker_asks_for_more_with_bnc(chop: Chop) -> None:
    """With one BNC for each message, until the batch is full."""
    protocol = supervisor(Mode.BATCH_WORKER, Messages([b"a"]), markers=PR399)
    assert receive(protocol, *chop(b"BNC")) == []
    assert (protocol.state, protocol.room) == (MarkerState.WANTED, 1)


def test_full_batch_is_answered_without_bnc(chop: Chop) -> None:
    """PR399: no BNC for the message that fills the batch."""
    protocol = supervisor(Mode.BATCH_WORKER, Messages([b"a"]), markers=PR399)
    assert receive(protocol, *chop(b"r\ns\n\0")) == typed([Answers([(b"r", b"s")])])
    assert (protocol.state, protocol.owed) == (MarkerState.IDLE, 0)


def test_full_batch_may_be_answered_after_bnc(chop: Chop) -> None:
    """As the protocol page has it: a BNC for each message, including the last."""
    protocol = supervisor(Mode.BATCH_WORKER, Messages([b"a"]), markers=PR399)
    assert receive(protocol, *chop(b"BNCr\n\0")) == typed([Answers([(b"r",)])])


@pytest.mark.parametrize("echo", [False, True])
def test_bnc_directly_before_data_is_read(chop: Chop, echo: bool) -> None:
    """``BNC{"df"``: no EOM follows a marker."""
    protocol = supervisor(Mode.BATCH_WORKER, Messages([b"a"]), markers=PR399, echo=echo)
    assert receive(protocol, *chop(b'BNC{"df": 1}\nBN\n\0')) == typed(
        [Answers([(b'{"df": 1}', b"BN")])]
    )


@pytest.mark.parametrize(
    ("mode", "before"),
    [
        (Mode.BATCH_SUPERVISOR, 0),
        (Mode.BATCH_SUPERVISOR, 1),
        (Mode.BATCH_WORKER, 0),
    ],
)
@pytest.mark.parametrize("eob", [b"\x17", b"<eob>"])
def test_end_of_a_batch_in_a_reply_is_refused(
    chop: Chop, mode: Mode, eob: bytes, before: int
) -> None:
    """A worker that does not know batches echoes EOB, which is not part of a row."""
    protocol = supervisor(mode, markers=Markers(eob=eob))
    for _ in range(before + 1):
        tell(protocol, Messages([b"1"]))
        if mode is Mode.BATCH_WORKER:
            assert receive(protocol, b"\x05") == []
        tell(protocol, BatchEnd())
    text = failure(
        protocol,
        chop(b"0\n\0" * before + b"1\n" + eob + b"2\n\0"),
        *[Answers([(b"0",)])] * before,
    )
    at = 3 * before + (mode is Mode.BATCH_WORKER) + 2
    assert text == (
        "sent EOB in a reply, expected no marker in a message; a worker that does not"
        f" handle batches passes EOB on: remove batch from its stage (offset {at}"
    )


@pytest.mark.parametrize("eob", [b"\n", b"\n\n", b"x\0"])
def test_what_may_be_other_markers_is_no_end_of_a_batch(chop: Chop, eob: bytes) -> None:
    """Where EOB may be confused with markers that a worker writes."""
    markers = Markers(eom=b"\r", eob=eob, bnc=b"\n!")
    protocol = supervisor(
        Mode.BATCH_SUPERVISOR, Messages([b"1"]), BatchEnd(), markers=markers
    )
    reply = Answers([(b"\n", b"x")])
    assert receive(protocol, *chop(b"\n\rx\r\0")) == typed([reply])


def test_two_requests_for_one_message_are_refused(chop: Chop) -> None:
    """The second would be taken for a request after the next message."""
    protocol = supervisor(Mode.BATCH_WORKER, Messages([b"a"]))
    text = failure(protocol, chop(b"\x05\x05"))
    assert text == "can't handle BNC in state WANTED (offset 1"


@pytest.mark.parametrize("output", [b"r", b"r\n", b"r\ns"])
def test_request_behind_output_is_refused(chop: Chop, output: bytes) -> None:
    """The batch was closed when its reply began."""
    protocol = supervisor(Mode.BATCH_WORKER, Messages([b"a"]), markers=PR399)
    text = failure(protocol, chop(output + b"BNC\n\0"))
    assert text == (
        "can't handle BNC in state BUSY: the batch is closed already"
        f" (offset {len(output)}"
    )


@pytest.mark.parametrize("markers", [Markers(), PR399])
def test_request_behind_eop_is_refused(chop: Chop, markers: Markers) -> None:
    """The protocol page has it there, but it follows no message."""
    protocol = supervisor(Mode.BATCH_WORKER, Messages([b"a"]), markers=markers)
    data = b"r\n\0" + markers.bnc
    text = failure(protocol, chop(data), Answers([(b"r",)]))
    assert text == (
        "can't handle BNC in state IDLE: BNC follows a message, and none was sent"
        " (offset 3"
    )


def test_reply_behind_the_reply_to_a_batch_is_refused(chop: Chop) -> None:
    """One EOP for each batch."""
    protocol = supervisor(Mode.BATCH_WORKER, Messages([b"a"]))
    text = failure(protocol, chop(b"r\n\0\0"), Answers([(b"r",)]))
    assert text.startswith("can't handle EOP in state IDLE")
    protocol = supervisor(Mode.BATCH_WORKER, Messages([b"a"]))
    text = failure(protocol, chop(b"r\n\0s\n\0"), Answers([(b"r",)]))
    assert text == f"can't handle output in state IDLE{DIAGNOSTICS} (offset 3"


def test_outputs_before_eob_are_tolerated(chop: Chop) -> None:
    """An awk stage writes while it reads; the reply still ends after EOB."""
    protocol = supervisor(Mode.BATCH_SUPERVISOR, Messages([b"a"]))
    assert receive(protocol, *chop(b"r\ns")) == []
    assert protocol.state is MarkerState.FILLING
    tell(protocol, BatchEnd())
    assert receive(protocol, *chop(b"\n\0")) == typed([Answers([(b"r", b"s")])])


@pytest.mark.parametrize("output", [b"", b"r\n"])
def test_eop_before_eob_is_refused(chop: Chop, output: bytes) -> None:
    """The worker answered a batch that is still open."""
    protocol = supervisor(Mode.BATCH_SUPERVISOR, Messages([b"a"]))
    text = failure(protocol, chop(output + b"\0"))
    assert text == (
        "can't handle EOP in state FILLING: the batch is not closed yet;"
        f" EOP follows EOB (offset {len(output)}"
    )


def test_each_eob_is_answered_by_one_eop(chop: Chop) -> None:
    """Even if the batch was empty."""
    protocol = supervisor(
        Mode.BATCH_SUPERVISOR, BatchEnd(), Messages([b"a"] * 3), BatchEnd()
    )
    assert protocol.owed == 2
    assert receive(protocol, *chop(b"\0r\n\0")) == typed([Answers([(), (b"r",)])])


# --- the echo of an EOM after EOB -------------------------------------------


def closed(*after: Word) -> MarkerProtocol:
    """Return a supervisor that closed a worker-driven batch with EOB and EOM."""
    return supervisor(Mode.BATCH_WORKER, BatchEnd(), *after, markers=PR399, echo=True)


def test_one_bnc_behind_eop_is_left_out(chop: Chop) -> None:
    """PR399 reads the EOM as an empty message, and asks for one more."""
    protocol = closed()
    assert receive(protocol, *chop(b"r\n\0BNC")) == typed([Answers([(b"r",)])])
    assert protocol.state is MarkerState.IDLE
    text = failure(protocol, chop(b"BNC"))
    assert text.startswith("can't handle BNC in state IDLE")


def test_echo_is_left_out_when_the_next_batch_has_begun(chop: Chop) -> None:
    """It is the first BNC after EOP, whatever was sent in the meantime."""
    protocol = closed()
    receive(protocol, *chop(b"\0"))
    tell(protocol, Messages([b"d"]))
    assert receive(protocol, *chop(b"BNC")) == []
    assert protocol.state is MarkerState.FILLING
    assert receive(protocol, *chop(b"BNC")) == []


def test_echo_is_left_out_when_the_next_batch_is_closed_too(chop: Chop) -> None:
    """An empty batch and then another: each has its echo."""
    protocol = closed()
    receive(protocol, b"\0")
    tell(protocol, BatchEnd())
    assert receive(protocol, *chop(b"BNC\0BNC")) == typed([Answers([()])])
    assert protocol.state is MarkerState.IDLE


def test_echo_does_not_come_before_eop(chop: Chop) -> None:
    """PR399 answers EOB first, and only then what it takes for a message."""
    text = failure(closed(), chop(b"BNC\0"))
    assert text == (
        "can't handle BNC in state BUSY: the batch is closed already (offset 0"
    )


def test_without_eom_behind_eob_there_is_no_echo(chop: Chop) -> None:
    """A BNC after EOP is then a request without a batch."""
    protocol = supervisor(Mode.BATCH_WORKER, BatchEnd(), markers=PR399)
    text = failure(protocol, chop(b"\0BNC"), Answers([()]))
    assert text.startswith("can't handle BNC in state IDLE")


def test_without_eob_there_is_no_echo(chop: Chop) -> None:
    """After a batch that the worker closed itself, no extra EOM was sent."""
    protocol = supervisor(Mode.BATCH_WORKER, Messages([b"a"]), markers=PR399, echo=True)
    assert failure(protocol, chop(b"\0BNC"), Answers([()])).startswith(
        "can't handle BNC in state IDLE"
    )
