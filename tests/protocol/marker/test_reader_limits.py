"""How much either side may be made to hold; limits are inclusive."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etlstage.columns import OVERHEAD as COLUMN_OVERHEAD
from etlstage.columns import Column
from etlstage.errors import PayloadTooBig
from etlstage.messages import OVERHEAD
from etlstage.protocol.base import SEND_EOF, Limits, Side
from etlstage.protocol.events import Failed
from etlstage.protocol.marker import MarkerProtocol, Markers, MarkerState, Mode
from etlstage.protocol.marker.columnar import framing_of
from etlstage.protocol.marker.reader import ReceiveBounds
from etlstage.testing.strategies import MARKER_SETS
from tests.protocol.marker.reading import ONE_TO_ONE, Chop
from tests.protocol.pair import S, W, receive, typed
from tests.protocol.strategies import REPEATED, WORDS
from tests.protocol.words import Answers, BatchEnd, Eof, Messages, Output, Word, tell

REPLY = 22 + 2 * OVERHEAD  # two messages of maximum length, with EOM
LIMITS = Limits(max_message_bytes=10, max_reply_bytes=REPLY)
TEN, ELEVEN = b"x" * 10, b"y" * 11
TOO_LONG = "message is 11 bytes long, expected no more than 10 bytes; see max_message"


def waiting(
    mode: Mode, markers: Markers | None = None, *, limits: Limits = LIMITS
) -> MarkerProtocol:
    """Return a supervisor that waits for three replies, or for one to a batch."""
    protocol = MarkerProtocol(S, mode, markers, limits=limits)
    if mode in (Mode.SINGLE, Mode.CYCLIC):
        tell(protocol, Messages([b"m"] * 3))
    if mode.batches:
        tell(protocol, BatchEnd())
    return protocol


def worker(mode: Mode, markers: Markers | None = None) -> MarkerProtocol:
    """Return a worker with small limits."""
    return MarkerProtocol(W, mode, markers, limits=LIMITS)


def failure(protocol: MarkerProtocol, chunks: list[bytes], *before: Word) -> str:
    """Return which limit was exceeded; check the events ``before``."""
    *events, last = receive(protocol, *chunks)
    assert events == typed(before)
    assert last[:2] == (Failed.__name__, PayloadTooBig.__name__)
    assert protocol.state is MarkerState.ERROR
    return str(last[2])


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.BATCH_SUPERVISOR])
@pytest.mark.parametrize("markers", MARKER_SETS)
def test_message_of_the_limit_is_received_by_a_supervisor(
    chop: Chop, mode: Mode, markers: Markers
) -> None:
    """The limit is inclusive, and half an EOM after the message does not count."""
    wire = TEN + markers.eom
    wire += markers.eop if markers.eop != markers.eom else b""
    assert receive(waiting(mode, markers), *chop(wire)) == typed([Answers([(TEN,)])])


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CYCLIC])
@pytest.mark.parametrize("markers", [Markers(), WORDS, REPEATED])
def test_message_of_the_limit_is_extracted(
    chop: Chop, mode: Mode, markers: Markers
) -> None:
    """In any number: an extract stage holds one at a time."""
    wire = (TEN + markers.eom) * 5
    assert receive(waiting(mode, markers), *chop(wire)) == typed([Output([TEN] * 5)])


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR])
@pytest.mark.parametrize("markers", MARKER_SETS)
def test_message_of_the_limit_is_received_by_a_worker(
    chop: Chop, mode: Mode, markers: Markers
) -> None:
    """In any number: the limit of a reply does not apply to a worker."""
    wire = (TEN + markers.eom) * 5
    assert receive(worker(mode, markers), *chop(wire)) == typed([Messages([TEN] * 5)])


@pytest.mark.parametrize(
    "mode", [Mode.SINGLE, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER]
)
def test_message_over_the_limit_in_a_reply_is_refused(mode: Mode) -> None:
    """The error has both numbers, and names the setting."""
    assert failure(waiting(mode), [b"a\n" + ELEVEN + b"\n\0"]) == TOO_LONG


@pytest.mark.parametrize("markers", [Markers(), ONE_TO_ONE])
def test_replies_before_a_message_over_the_limit_are_sound(markers: Markers) -> None:
    """They answer their messages; the reply that failed is still owed."""
    end = markers.eom if markers.eop == markers.eom else markers.eom + markers.eop
    for mode in (Mode.SINGLE, Mode.CYCLIC):
        protocol = waiting(mode, markers)
        *before, _ = receive(protocol, b"a" + end + ELEVEN + end)
        assert before[-1][0] == Answers.__name__
        assert protocol.owed == 2


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CYCLIC])
def test_message_over_the_limit_is_not_extracted(mode: Mode) -> None:
    """The messages before it are."""
    data = b"a\nb\n" + ELEVEN + b"\nc\n"
    assert failure(waiting(mode), [data], Output([b"a", b"b"])) == TOO_LONG


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CYCLIC])
def test_nothing_is_extracted_before_a_first_message_over_the_limit(mode: Mode) -> None:
    """No event carries an empty run."""
    assert failure(waiting(mode), [ELEVEN + b"\n"]) == TOO_LONG


def test_one_to_one_cycle_over_the_limit_is_refused() -> None:
    """The reply is the message."""
    protocol = waiting(Mode.CYCLIC, ONE_TO_ONE)
    assert failure(protocol, [ELEVEN + b"\n"]) == TOO_LONG


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR])
def test_worker_refuses_a_message_over_the_limit(mode: Mode) -> None:
    """The messages before it are received."""
    data = b"a\nb\n" + ELEVEN + b"\nc\n"
    assert failure(worker(mode), [data], Messages([b"a", b"b"])) == TOO_LONG
    assert failure(worker(mode), [ELEVEN + b"\n"]) == TOO_LONG


def test_worker_in_lock_step_refuses_a_message_over_the_limit() -> None:
    """The length is checked before whether a message may come at all."""
    protocol = worker(Mode.BATCH_WORKER)
    assert failure(protocol, [ELEVEN + b"\n"]) == TOO_LONG
    protocol = worker(Mode.BATCH_WORKER)
    data = b"a\n" + ELEVEN + b"\n"
    assert failure(protocol, [data], Messages([b"a"])) == TOO_LONG


@pytest.mark.parametrize("side", [S, W])
@pytest.mark.parametrize(
    "mode", [Mode.SINGLE, Mode.CYCLIC, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER]
)
def test_endless_message_is_refused_before_its_eom(side: Side, mode: Mode) -> None:
    """Sizes are bounded before memory is used; the offset counts the bytes read."""
    protocol = waiting(mode) if side is S else worker(mode)
    assert receive(protocol, TEN) == []
    assert failure(protocol, [b"x"]) == (
        "message is more than 10 bytes long, with no EOM yet at offset 11;"
        " see max_message"
    )


def test_endless_message_behind_others_is_refused() -> None:
    """The offset counts from the beginning of the stream, the size does not."""
    protocol = waiting(Mode.PLAIN)
    assert failure(protocol, [b"ab\n" + ELEVEN], Output([b"ab"])) == (
        "message is more than 10 bytes long, with no EOM yet at offset 14;"
        " see max_message"
    )
    protocol = waiting(Mode.SINGLE)
    assert failure(protocol, [b"ab\n\0c\n" + ELEVEN], Answers([(b"ab",)])) == (
        "message is more than 10 bytes long, with no EOM yet at offset 17;"
        " see max_message"
    )


@pytest.mark.parametrize("markers", [Markers(), WORDS, REPEATED])
def test_reply_of_the_limit_is_received(chop: Chop, markers: Markers) -> None:
    """Each EOM counts; EOP does not, and half an EOP does not either."""
    limits = Limits(10, 2 * (10 + len(markers.eom) + OVERHEAD))
    protocol = waiting(Mode.SINGLE, markers, limits=limits)
    wire = (TEN + markers.eom) * 2 + markers.eop
    assert receive(protocol, *chop(wire)) == typed([Answers([(TEN, TEN)])])


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.BATCH_WORKER])
def test_reply_over_the_limit_is_refused(mode: Mode) -> None:
    """A message costs what it takes in memory, even if empty (issue 10)."""
    assert failure(waiting(mode), [(TEN + b"\n") * 2 + b"\n\0"]) == (
        f"reply of 3 messages takes {23 + 3 * OVERHEAD} bytes of memory,"
        f" expected no more than {REPLY} bytes; see max_reply"
    )
    assert failure(waiting(mode), [b"\n" * 23 + b"\0"]) == (
        f"reply of 23 messages takes {23 + 23 * OVERHEAD} bytes of memory,"
        f" expected no more than {REPLY} bytes; see max_reply"
    )


def test_replies_before_one_over_the_limit_are_sound() -> None:
    """Each reply is measured by itself."""
    protocol = waiting(Mode.SINGLE)
    data = b"a\n\0" + b"b\n" * 12 + b"\0" + b"c\n\0"
    assert failure(protocol, [data], Answers([(b"a",)])) == (
        f"reply of 12 messages takes {24 + 12 * OVERHEAD} bytes of memory,"
        f" expected no more than {REPLY} bytes; see max_reply"
    )
    assert protocol.owed == 2


def test_endless_reply_is_refused_before_its_eop() -> None:
    """The worker may have forgotten its EOP for good."""
    protocol = waiting(Mode.SINGLE)
    assert receive(protocol, (TEN + b"\n") * 2) == []
    assert failure(protocol, [b"\n"]) == (
        f"reply takes more than {REPLY} bytes of memory, with no EOP yet at offset 23;"
        " see max_reply"
    )
    protocol = waiting(Mode.SINGLE)
    assert receive(protocol, b"\n" * 2) == []
    assert "at offset 3;" in failure(protocol, [b"\n"])


def test_one_to_one_reply_is_measured_with_its_eom() -> None:
    """It counts as a reply of one message."""
    protocol = waiting(Mode.SINGLE, ONE_TO_ONE, limits=Limits(10, 5 + OVERHEAD))
    assert receive(protocol, b"abcd\n") == typed([Answers([(b"abcd",)])])
    assert failure(protocol, [b"abcde\n"]) == (
        f"reply of 1 message takes {6 + OVERHEAD} bytes of memory,"
        f" expected no more than {5 + OVERHEAD} bytes; see max_reply"
    )


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.CYCLIC])
def test_extracted_messages_have_no_limit_together(chop: Chop, mode: Mode) -> None:
    """Each is handed over by itself, even if it is longer than a reply may be."""
    protocol = waiting(mode, limits=Limits(10, 5))
    assert receive(protocol, *chop((TEN + b"\n") * 3)) == typed([Output([TEN] * 3)])


def test_markers_may_be_longer_than_messages(chop: Chop) -> None:
    """Limits apply to the content between markers."""
    markers = Markers(b"--end of message--", b"==done==", b"<end of batch>", b"[more]")
    limits = Limits(1, 19 + OVERHEAD)
    protocol = waiting(Mode.SINGLE, markers, limits=limits)
    wire = b"x" + markers.eom + markers.eop
    assert receive(protocol, *chop(wire + markers.eop)) == typed(
        [Answers([(b"x",), ()])]
    )
    protocol = MarkerProtocol(W, Mode.BATCH_SUPERVISOR, markers, limits=limits)
    assert receive(protocol, *chop(b"x" + markers.eom + markers.eob)) == typed(
        [Messages([b"x"]), BatchEnd()]
    )


def test_message_over_the_limit_in_an_unfinished_reply_is_found_at_the_end(
    chop: Chop,
) -> None:
    """It fails however it was cut: in small reads earlier, in one read at the end."""
    chunks = [*chop(ELEVEN + b"\n"), SEND_EOF]
    assert failure(waiting(Mode.SINGLE), chunks).startswith("message is ")


def test_unfinished_reply_of_the_limit_is_a_tail(chop: Chop) -> None:
    """It was within the limit when the worker died."""
    wire = (TEN + b"\n") * 2
    assert receive(waiting(Mode.SINGLE), *chop(wire), SEND_EOF) == typed([Eof(wire)])


def test_messages_in_arrow_cost_less(chop: Chop) -> None:
    """There is no object for each of them (issue 10)."""
    limits = Limits(10, 22 + 2 * COLUMN_OVERHEAD)
    for extra, fits in (b"", True), (b"\n", False):
        protocol = MarkerProtocol(S, Mode.SINGLE, limits=limits, framing_of=framing_of)
        tell(protocol, Messages(Column(pa.array([b"m"], pa.binary()))))
        *_, last = receive(protocol, *chop((TEN + b"\n") * 2 + extra + b"\0"))
        assert (last[0] == Answers.__name__) == fits


@given(
    data=st.lists(st.sampled_from([b"EOM", b"x", b"E"]), max_size=6).map(b"".join),
    message=st.integers(0, 9),
    reply=st.integers(0, 9 * OVERHEAD),
)
def test_nothing_that_fits_is_too_big(data: bytes, message: int, reply: int) -> None:
    """Data of at most ``small`` bytes needs no further check (issue 10)."""
    found = ReceiveBounds(Limits(message, reply), WORDS, replies=True)
    if len(data) <= found.small:
        assert not found.too_big(data.split(b"EOM"))
    assert found.small <= message
    assert ReceiveBounds(Limits(), WORDS, replies=True).small >= 1024 * 1024


@pytest.mark.parametrize(
    ("tail", "fits"),
    [
        (TEN + b"\n" + ELEVEN, True),  # not ended yet
        (b"\n" * 30, True),
        (b"a\nb\n" + ELEVEN + b"\n", False),
        (ELEVEN + b"\nc", False),
    ],
)
def test_tail_is_searched_for_what_is_too_long(tail: bytes, fits: bool) -> None:
    """Without a look at each message, as there may be millions (issue 10)."""
    bounds = ReceiveBounds(LIMITS, Markers(), replies=True)
    if fits:
        bounds.check_tail(tail)
    else:
        with pytest.raises(PayloadTooBig, match="message is 11 bytes long"):
            bounds.check_tail(tail)
