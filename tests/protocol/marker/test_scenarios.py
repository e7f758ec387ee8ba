"""
The scenarios of the protocol page, with both sides at once, byte by byte.

Where the page and the stages written for it differ, the docstring shows which of them
is followed.
"""

from __future__ import annotations

import pytest

from etlstage.protocol.base import SEND_EOF
from etlstage.protocol.marker import Markers, MarkerState, Mode
from etlstage.testing.strategies import MARKER_SETS
from tests.protocol.pair import ConnectionPair, S, W
from tests.protocol.strategies import PR399
from tests.protocol.words import Answers, BatchEnd, Eof, Messages, More, Output


def messages(*texts: str) -> Messages:
    """Return a run of messages."""
    return Messages([text.encode() for text in texts])


def reply(*texts: str) -> Answers:
    """Return one reply."""
    return Answers([tuple(text.encode() for text in texts)])


def test_extract_plain() -> None:
    """The worker writes until it exits: its stdout is read while it is open."""
    pair = ConnectionPair(Mode.PLAIN)
    assert pair.status == (MarkerState.STREAMING, 0)
    assert pair.send(W, Output([b"a", b""])) == b"a\n\n"
    assert pair.send(W, Output([b"b"])) == b"b\n"
    assert pair.send(W, Eof()) == SEND_EOF


def test_extract_plain_with_closed_input() -> None:
    """A plain worker is given nothing, so its stdin may be closed at once."""
    pair = ConnectionPair(Mode.PLAIN)
    assert pair.send(S, Eof()) == SEND_EOF
    assert pair.send(W, Output([b"a"]), Eof()) == b"a\n"


def test_extract_cyclic_with_offsets_at_the_worker() -> None:
    """An empty message requests one round; pyDKB would not even call its handler."""
    pair = ConnectionPair(Mode.CYCLIC)
    assert pair.send(S, messages("")) == b"\n"
    assert pair.status == (MarkerState.BUSY, 1)
    assert pair.send(W, Output([b"a"])) == b"a\n"
    assert pair.send(W, reply("b")) == b"b\n\0"
    assert pair.status == (MarkerState.IDLE, 0)
    assert pair.send(S, messages("")) == b"\n"
    assert pair.send(W, reply()) == b"\0"


def test_single_message() -> None:
    """One message, one reply: of one message, of many, of none."""
    pair = ConnectionPair(Mode.SINGLE)
    assert pair.send(S, messages("one")) == b"one\n"
    assert pair.status == (MarkerState.BUSY, 1)
    assert pair.send(W, reply("1")) == b"1\n\0"
    assert pair.status == (MarkerState.IDLE, 0)
    assert pair.send(S, messages("two")) == b"two\n"
    assert pair.send(W, reply("1", "", "2")) == b"1\n\n2\n\0"
    assert pair.send(S, messages("three")) == b"three\n"
    assert pair.send(W, reply()) == b"\0"
    assert pair.send(S, Eof()) == SEND_EOF
    assert pair.send(W, Eof()) == SEND_EOF


def test_empty_message_is_a_message() -> None:
    """It is answered as any other, and an empty output is an output."""
    pair = ConnectionPair(Mode.SINGLE)
    assert pair.send(S, messages("", "")) == b"\n\n"
    assert pair.status == (MarkerState.BUSY, 2)
    assert pair.send(W, reply()) == b"\0"
    assert pair.send(W, reply("")) == b"\n\0"


def test_window_is_answered_in_order() -> None:
    """The k-th EOP answers the k-th message, however replies are grouped."""
    pair = ConnectionPair(Mode.SINGLE)
    pair.send(S, messages("a", "b", "c", "d"))
    assert pair.send(W, Answers([(b"1",), (b"2", b"2"), ()])) == (b"1\n\0002\n2\n\0\0")
    assert pair.status == (MarkerState.BUSY, 1)
    pair.send(S, messages("e"))
    assert pair.send(W, Answers([(b"4",), (b"5",)])) == b"4\n\0005\n\0"
    assert pair.status == (MarkerState.IDLE, 0)


def test_reply_in_parts_is_one_reply() -> None:
    """A worker need not hold all its outputs; the supervisor does."""
    pair = ConnectionPair(Mode.SINGLE)
    pair.send(S, messages("a", "b"))
    assert pair.send(W, Output([b"1"])) == b"1\n"
    assert pair.send(W, Output([b"2", b"3"])) == b"2\n3\n"
    assert pair.send(W, Answers([(b"4",), (b"5",)])) == b"4\n\0005\n\0"


def test_one_output_for_each_input() -> None:
    """``eop == eom``, the default of the Java processor."""
    pair = ConnectionPair(Mode.SINGLE, Markers(eop=b"\n"))
    pair.send(S, messages("a", "b"))
    assert pair.send(W, Answers([(b"1",), (b"",)])) == b"1\n\n"
    assert pair.status == (MarkerState.IDLE, 0)


def test_supervisor_driven_batch() -> None:
    """The supervisor closes it with EOB, once: the page's loop writes it forever."""
    pair = ConnectionPair(Mode.BATCH_SUPERVISOR)
    assert pair.send(S, messages("a", "b")) == b"a\nb\n"
    assert pair.status == (MarkerState.FILLING, 0)
    assert pair.send(S, messages("c"), BatchEnd()) == b"c\n\x17"
    assert pair.status == (MarkerState.BUSY, 1)
    assert pair.send(W, reply("1", "2")) == b"1\n2\n\0"
    assert pair.status == (MarkerState.IDLE, 0)


def test_last_batch_is_closed_though_no_message_follows() -> None:
    """According to the page it would not be, and the worker would wait forever."""
    pair = ConnectionPair(Mode.BATCH_SUPERVISOR)
    assert pair.send(S, messages("a"), BatchEnd(), Eof()) == b"a\n\x17"
    assert pair.send(W, reply("1"), Eof()) == b"1\n\0"


@pytest.mark.parametrize("mode", [Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER])
def test_empty_batch_is_answered(mode: Mode) -> None:
    """One EOP for each EOB: the Java sink sends one after a full batch."""
    pair = ConnectionPair(mode)
    assert pair.send(S, BatchEnd()) == b"\x17"
    assert pair.send(W, reply()) == b"\0"
    assert pair.status == (MarkerState.IDLE, 0)


def test_batches_ahead_are_answered_in_order() -> None:
    """The k-th EOP answers the k-th EOB, though the next batch has already begun."""
    pair = ConnectionPair(Mode.BATCH_SUPERVISOR)
    pair.send(S, messages("a", "b"), BatchEnd())
    assert pair.send(S, messages("c")) == b"c\n"
    assert pair.status == (MarkerState.AHEAD, 1)
    assert pair.send(W, Output([b"1"])) == b"1\n"
    assert pair.send(S, BatchEnd()) == b"\x17"
    assert pair.status == (MarkerState.BUSY, 2)
    pair.send(S, messages("d"))
    assert pair.send(W, Answers([(b"2",), ()])) == b"2\n\0\0"
    assert pair.status == (MarkerState.FILLING, 0)


def test_outputs_before_eob_belong_to_the_batch() -> None:
    """A stage in awk prints as it reads."""
    pair = ConnectionPair(Mode.BATCH_SUPERVISOR)
    pair.send(S, messages("a"))
    assert pair.send(W, Output([b"1"])) == b"1\n"
    assert pair.status[0] is MarkerState.FILLING
    pair.send(S, messages("b"), BatchEnd())
    assert pair.send(W, reply("2")) == b"2\n\0"


def test_worker_driven_batch_of_the_branch() -> None:
    """PR399: BNC after each message but the one that fills the batch."""
    pair = ConnectionPair(Mode.BATCH_WORKER, PR399)
    assert pair.send(S, messages("a")) == b"a\n"
    assert pair.send(W, More()) == b"BNC"
    assert pair.status == (MarkerState.WANTED, 1)
    assert pair.send(S, messages("b")) == b"b\n"
    assert pair.send(W, More()) == b"BNC"
    assert pair.send(S, messages("c")) == b"c\n"
    assert pair.status[0] is MarkerState.FILLING
    assert pair.send(W, reply("1", "2", "3")) == b"1\n2\n3\n\0"
    assert pair.status == (MarkerState.IDLE, 0)


def test_worker_driven_batch_of_the_literal_page() -> None:
    """BNC follows even the message that fills the batch, and then comes the reply."""
    pair = ConnectionPair(Mode.BATCH_WORKER)
    pair.send(S, messages("a"))
    assert pair.send(W, More()) == b"\x05"
    pair.send(S, messages("b"))
    assert pair.send(W, More()) == b"\x05"
    assert pair.send(W, Output([b"1"])) == b"1\n"
    assert pair.status == (MarkerState.BUSY, 1)
    assert pair.send(W, reply("2")) == b"2\n\0"
    pair.send(S, messages("c"))
    assert pair.send(W, More(), reply()) == b"\x05\0"
    assert pair.status == (MarkerState.IDLE, 0)


def test_worker_driven_batch_is_closed_before_the_end() -> None:
    """EOB and then the end: PR399 sees EOB only when the end arrives."""
    pair = ConnectionPair(Mode.BATCH_WORKER, PR399)
    pair.send(S, messages("a"))
    pair.send(W, More())
    assert pair.send(S, BatchEnd(), Eof()) == b"EOB"
    assert pair.send(W, reply("1"), Eof()) == b"1\n\0"


def test_eob_that_needs_an_eom() -> None:
    """PR399 sees EOB only with the next EOM, which it then answers with a BNC."""
    pair = ConnectionPair(Mode.BATCH_WORKER, PR399, eob_then_eom=True)
    pair.send(S, messages("a"))
    pair.send(W, More())
    assert pair.send(S, BatchEnd()) == b"EOB\n"
    assert pair.send(W, reply("1")) == b"1\n\0BNC"
    assert pair.status == (MarkerState.IDLE, 0)
    pair.send(S, messages("b"))
    assert pair.send(W, More()) == b"BNC"
    assert pair.status == (MarkerState.WANTED, 1)


def test_eom_after_eob_that_is_part_of_it() -> None:
    """A worker that reads lines has no BNC for it: the next asks for more (issue 22)."""
    pair = ConnectionPair(
        Mode.BATCH_WORKER, PR399, eob_then_eom=True, bnc_after_eob=False
    )
    for _ in range(2):
        pair.send(S, messages("a"))
        assert pair.send(W, More()) == b"BNC"
        assert pair.status == (MarkerState.WANTED, 1)
        assert pair.send(S, BatchEnd()) == b"EOB\n"
        assert pair.send(W, reply("1")) == b"1\n\0"
        assert pair.status == (MarkerState.IDLE, 0)


def test_eob_that_needs_an_eom_in_supervisor_driven_batches() -> None:
    """A shell sink fed by Kafka: ``00 0a`` ends its batches."""
    pair = ConnectionPair(
        Mode.BATCH_SUPERVISOR, Markers(eop=b"\6", eob=b"\0"), eob_then_eom=True
    )
    assert pair.send(S, messages("a", "b"), BatchEnd()) == b"a\nb\n\0\n"
    assert pair.send(W, reply()) == b"\6"
    assert pair.send(S, messages(""), BatchEnd()) == b"\n\0\n"
    assert pair.send(W, reply()) == b"\6"


def test_batch_cut_off_by_the_end_is_not_owed() -> None:
    """If the supervisor died within a batch, its worker may exit without a reply."""
    pair = ConnectionPair(Mode.BATCH_SUPERVISOR)
    pair.send(S, messages("a"))
    pair.worker.receive_eof(0.0)
    assert pair.send(W, Eof()) == SEND_EOF


def test_worker_driven_batch_cut_off_by_the_end_may_be_answered() -> None:
    """PR399 processes what it has when its input ends."""
    pair = ConnectionPair(Mode.BATCH_WORKER)
    pair.send(S, messages("a"))
    pair.send(W, More())
    pair.worker.receive_eof(0.0)
    pair.worker.events_received()
    assert pair.send(W, reply("1"), Eof()) == b"1\n\0"


@pytest.mark.parametrize("markers", MARKER_SETS)
def test_every_scenario_goes_with_every_marker(markers: Markers) -> None:
    """Single bytes, words, markers that overlap themselves, one for both."""
    for mode in (Mode.SINGLE, Mode.CYCLIC):
        pair = ConnectionPair(mode, markers)
        assert pair.send(S, messages("x", "")) == b"x" + markers.eom * 2
        pair.send(W, Answers([(b"",), (b"y",)]))
        assert pair.status == (MarkerState.IDLE, 0)
    pair = ConnectionPair(Mode.BATCH_WORKER, markers)
    pair.send(S, messages(""))
    assert pair.send(W, More()) == markers.bnc
    assert pair.send(S, BatchEnd()) == markers.eob
    pair.send(W, reply(""))
    pair = ConnectionPair(Mode.BATCH_SUPERVISOR, markers)
    assert pair.send(S, messages("x"), BatchEnd()) == b"x" + markers.eom + markers.eob
    pair.send(W, reply("y"))
    pair = ConnectionPair(Mode.PLAIN, markers)
    assert pair.send(W, Output([b"y"])) == b"y" + markers.eom
