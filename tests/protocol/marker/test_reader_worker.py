"""What a supervisor's stream means."""

from __future__ import annotations

import pytest

from etlstage.protocol.base import SEND_EOF
from etlstage.protocol.marker import MarkerProtocol, MarkerState, Mode
from tests.protocol.marker.reading import (
    Chop,
    failure,
    worker,
)
from tests.protocol.pair import W, receive, typed
from tests.protocol.strategies import PR399, WORDS
from tests.protocol.words import Answers, BatchEnd, Eof, Messages, tell, words_of


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR])
def test_messages_are_received_in_runs(chop: Chop, mode: Mode) -> None:
    """Empty messages included."""
    protocol = worker(mode)
    assert receive(protocol, *chop(b"a\n\nb\nc")) == typed(
        [Messages([b"a", b"", b"b"])]
    )
    assert protocol.owed == (0 if mode.batches else 3)


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR])
def test_run_of_messages_is_one_event(mode: Mode) -> None:
    """An event per message would cost more than the message."""
    protocol = worker(mode)
    protocol.receive_data(b"a\n" * 1000)
    (event,) = protocol.events_received()
    assert typed(words_of(protocol, [event])) == [("Messages", [b"a"] * 1000)]


@pytest.mark.parametrize("mode", list(Mode))
def test_input_without_eom_comes_with_the_end(chop: Chop, mode: Mode) -> None:
    """An unfinished message is not processed, and no EOP is owed for it."""
    protocol = worker(mode)
    assert receive(protocol, *chop(b"ab"), SEND_EOF) == typed([Eof(b"ab")])
    assert protocol.owed == 0


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (Mode.SINGLE, "state IDLE: there are no batches in single mode"),
        (Mode.CYCLIC, "state IDLE: there are no batches in an extract stage"),
        (Mode.PLAIN, "state STREAMING"),
    ],
)
@pytest.mark.parametrize("data", [b"", b"ab"])
def test_eob_is_refused_where_there_are_no_batches(
    chop: Chop, mode: Mode, text: str, data: bytes
) -> None:
    """PR399 takes it for part of the message; here it is the supervisor's fault."""
    failed = failure(worker(mode, WORDS), chop(data + b"EOBEOM"))
    assert failed == f"can't handle EOB in {text} (offset {len(data)}"


def test_messages_before_a_stray_eob_are_received(chop: Chop) -> None:
    """Events before a fault are delivered before the fault."""
    text = failure(worker(Mode.SINGLE), chop(b"a\n\x17b\n"), Messages([b"a"]))
    assert text.startswith("can't handle EOB in state BUSY")


def test_message_to_a_plain_worker_is_refused(chop: Chop) -> None:
    """It writes until it exits, and reads nothing."""
    text = failure(worker(Mode.PLAIN), chop(b"a\nb\n"))
    assert text == "can't handle a message in state STREAMING (offset 0"


def test_batches_end_with_eob(chop: Chop) -> None:
    """Without EOM between EOB and the next message; an empty batch is a batch."""
    protocol = worker(Mode.BATCH_SUPERVISOR, PR399)
    assert receive(protocol, *chop(b"a\nb\nEOBEOBxyz\n")) == typed(
        [
            Messages([b"a", b"b"]),
            BatchEnd(),
            BatchEnd(),
            Messages([b"xyz"]),
        ]
    )
    assert (protocol.state, protocol.owed) == (MarkerState.AHEAD, 2)


@pytest.mark.parametrize("mode", [Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER])
def test_message_without_eom_before_eob_is_refused(chop: Chop, mode: Mode) -> None:
    """A batch must not end in the middle of a message."""
    text = failure(worker(mode, PR399), chop(b"a\nbcEOB"), Messages([b"a"]))
    assert text == "message without EOM before EOB (offset 2"


def test_message_written_ahead_to_a_worker_that_fills_is_refused(chop: Chop) -> None:
    """Lock-step: the worker did not ask."""
    text = failure(worker(Mode.BATCH_WORKER), chop(b"ab\ncd\nef\n"), Messages([b"ab"]))
    assert text == (
        "can't handle a message in state FILLING: the worker did not ask for one with"
        " BNC (offset 3"
    )


def test_message_that_may_not_come_is_shown() -> None:
    """With its first sixteen bytes, as in any fault."""
    _, failed = receive(worker(Mode.BATCH_WORKER), b"ab\n" + b"c" * 15 + b"\n")
    assert str(failed[2]).endswith(f"(offset 3, found {' '.join(['63'] * 15)} 0a)")


@pytest.mark.parametrize("mode", [Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER])
def test_one_eom_behind_eob_is_left_out(chop: Chop, mode: Mode) -> None:
    """``eob_then_eom``: it is not an empty message."""
    protocol = MarkerProtocol(W, mode, PR399, eob_then_eom=True)
    assert receive(protocol, *chop(b"EOB\n")) == typed([BatchEnd()])
    tell(protocol, Answers([()]))
    assert receive(protocol, *chop(b"\n")) == typed([Messages([b""])])


def test_eom_that_does_not_come_behind_eob_is_not_missed(chop: Chop) -> None:
    """A supervisor that writes none is understood, too."""
    protocol = MarkerProtocol(W, Mode.BATCH_SUPERVISOR, PR399, eob_then_eom=True)
    assert receive(protocol, *chop(b"EOBEOBa\n\n")) == typed(
        [BatchEnd(), BatchEnd(), Messages([b"a", b""])]
    )


def test_eom_behind_eob_counts_in_the_offset(chop: Chop) -> None:
    """Although it has no event."""
    protocol = MarkerProtocol(W, Mode.BATCH_WORKER, PR399, eob_then_eom=True)
    receive(protocol, *chop(b"EOB\n"))
    tell(protocol, Answers([()]))
    text = failure(protocol, chop(b"a\nb\n"), Messages([b"a"]))
    assert text.endswith("(offset 6")
    protocol = MarkerProtocol(W, Mode.BATCH_WORKER, PR399, eob_then_eom=True)
    receive(protocol, *chop(b"EOB"))
    tell(protocol, Answers([()]))
    text = failure(protocol, chop(b"\na\nb\n"), Messages([b"a"]))
    assert text.endswith("(offset 6")
