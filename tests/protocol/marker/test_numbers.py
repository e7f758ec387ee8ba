"""The numbers of exchanges, and the room for more; with the dialect's own events."""

from __future__ import annotations

import pytest

from etlstage.errors import InvalidMessage, LocalProtocolError
from etlstage.messages import StageKind
from etlstage.protocol.base import Limits, Paired, Side
from etlstage.protocol.events import (
    Added,
    Ended,
    Event,
    Farewell,
    Mispaired,
    Noise,
    Opened,
    Refusal,
    Wanted,
)
from etlstage.protocol.marker import MarkerProtocol, Mode
from etlstage.protocol.marker.settings import MarkerDialect

S, W = Side
BATCH: Event = Opened(1, [b"a"], each=False, ended=False)


def meaning(protocol: MarkerProtocol, data: bytes) -> list[Event]:
    """Return the events that bytes lead to."""
    protocol.receive_data(data)
    return protocol.events_received()


def sent(protocol: MarkerProtocol, *events: Event) -> bytes:
    """Send events; return the bytes to write."""
    for event in events:
        protocol.send(event)
    return b"".join(protocol.data_to_send())


def test_exchanges_are_counted_from_1_at_both_sides() -> None:
    """Each message is an exchange; consecutive ones end in one event."""
    ours, theirs = (MarkerProtocol(side, Mode.SINGLE) for side in Side)
    assert sent(ours, Opened(1, [b"a", b"b"]), Opened(3, [b"c"])) == b"a\nb\nc\n"
    assert meaning(theirs, b"a\nb\n") == [Opened(1, [b"a", b"b"])]
    assert meaning(theirs, b"c\n") == [Opened(3, [b"c"])]
    no = [Refusal(1, 0, 0, "no")]
    wire = sent(theirs, Ended(1, [(b"A",)]), Ended(2, [(b"B",), ()], no))
    assert wire == b"A\n\0B\n\0no\x15"
    (first,) = meaning(ours, wire[:3])
    (rest,) = meaning(ours, wire[3:])
    assert isinstance(first, Ended)
    assert isinstance(rest, Ended)
    assert (first.first, rest.first, rest.refusals) == (1, 2, no)


def test_parts_of_a_reply_have_its_number() -> None:
    """As in the rounds of an extraction, where parts are passed on."""
    ours, theirs = (MarkerProtocol(side, Mode.CYCLIC) for side in Side)
    sent(ours, Opened(1, [b"0"]), Opened(2, [b"1"]))
    meaning(theirs, b"0\n1\n")
    wire = sent(theirs, Ended(1, [()]), Added(2, [b"a"]), Ended(2, [(b"b",)]))
    events = meaning(ours, wire)
    assert [event[:2] for event in events] == [
        (1, [()]),
        (2, [b"a", b"b"]),
        (2, [()]),
    ]


@pytest.mark.parametrize(
    ("mode", "side", "before", "event", "text"),
    [
        (Mode.SINGLE, S, (), Opened(2, [b"a"]), "open exchange 2: expected number 1"),
        (
            Mode.SINGLE,
            S,
            (Opened(1, [b"a", b"b"]),),
            Opened(2, [b"c"]),
            "open exchange 2: expected number 3",
        ),
        (Mode.SINGLE, W, (), Ended(2, [()]), "end exchange 2: expected number 1"),
        (Mode.SINGLE, W, (), Added(2, [b"a"]), "add to exchange 2: expected number 1"),
        (Mode.SINGLE, S, (), Added(1, [b"a"]), "exchange 1: no batch is open"),
        (Mode.SINGLE, W, (), Added(1, [b"a"], ended=True), "send Ended"),
        (Mode.SINGLE, S, (), Opened(1, [b"a"], each=False), "there are no batches"),
        (Mode.PLAIN, S, (), Opened(2, (), each=False), "expected number 1"),
        (
            Mode.PLAIN,
            S,
            (Opened(1, (), each=False),),
            Opened(2, (), each=False),
            "round 1 is open until the worker exits",
        ),
        (Mode.BATCH_SUPERVISOR, S, (), Opened(1, [b"a"]), "a batch"),
        (
            Mode.BATCH_SUPERVISOR,
            S,
            (BATCH,),
            Opened(2, [b"a"], each=False),
            "can't open batch 2: the previous one has not ended",
        ),
        (
            Mode.BATCH_SUPERVISOR,
            S,
            (BATCH,),
            Added(2, [b"a"]),
            "add to exchange 2: expected number 1",
        ),
        (
            Mode.BATCH_SUPERVISOR,
            S,
            (),
            Opened(1, (), each=False, ended=False),
            "can't open batch 1: it has neither a message nor an end",
        ),
        (
            Mode.BATCH_WORKER,
            S,
            (),
            Opened(1, [b"a"], each=False),
            "BNC comes first",
        ),
        (Mode.BATCH_WORKER, W, (), Wanted(2), "can't ask for 2 messages"),
    ],
)
def test_other_numbers_are_not_sent(
    mode: Mode, side: Side, before: tuple[Event, ...], event: Event, text: str
) -> None:
    """The error shows the expected number; nothing of the event is queued."""
    protocol = MarkerProtocol(side, mode)
    sent(protocol, *before)
    with pytest.raises(LocalProtocolError, match=text):
        protocol.send(event)
    assert protocol.data_to_send() == []


@pytest.mark.parametrize("mode", [Mode.SINGLE, Mode.BATCH_SUPERVISOR])
def test_what_can_t_be_sent_uses_no_number(mode: Mode) -> None:
    """Nor does it begin a batch, or join one."""
    protocol = MarkerProtocol(S, mode)
    each = not mode.batches
    with pytest.raises(InvalidMessage):
        protocol.send(Opened(1, [b"a", b"\0"], each=each))
    assert sent(protocol, Opened(1, [b"a"], each=each)).startswith(b"a\n")


def test_batch_is_opened_filled_and_ended() -> None:
    """In one event or in several; the next may be opened before it is answered."""
    ours, theirs = (MarkerProtocol(side, Mode.BATCH_SUPERVISOR) for side in Side)
    wire = sent(
        ours,
        Opened(1, [b"a", b"b"], each=False),
        Opened(2, [b"c"], each=False, ended=False),
        Added(2, [b"d"]),
        Added(2, (), ended=True),
        Opened(3, (), each=False),
        Opened(4, [b"e"], each=False, ended=False),
    )
    assert wire == b"a\nb\n\x17c\nd\n\x17\x17e\n"
    assert ours.owed == 3
    assert meaning(theirs, wire[:7]) == [
        Opened(1, [b"a", b"b"], each=False),
        Opened(2, [b"c"], each=False, ended=False),
    ]


def test_worker_has_a_batch_as_it_comes() -> None:
    """A complete batch is one event."""
    theirs = MarkerProtocol(W, Mode.BATCH_SUPERVISOR)
    assert meaning(theirs, b"a\nb\n\x17\x17c\n") == [
        Opened(1, [b"a", b"b"], each=False),
        Opened(2, (), each=False),
        Opened(3, [b"c"], each=False, ended=False),
    ]
    assert meaning(theirs, b"d\n") == [Added(3, [b"d"])]
    assert meaning(theirs, b"\x17e\n\x17") == [
        Added(3, (), ended=True),
        Opened(4, [b"e"], each=False),
    ]


def test_room_is_what_a_worker_asks_for() -> None:
    """One message at the start and after each BNC; a BNC has no event of its own."""
    ours = MarkerProtocol(S, Mode.BATCH_WORKER, batch=3)
    theirs = MarkerProtocol(W, Mode.BATCH_WORKER, batch=3)
    assert ours.room == 1
    assert meaning(theirs, sent(ours, BATCH)) == [BATCH]
    assert ours.room == 0
    assert meaning(ours, sent(theirs, Wanted())) == []
    assert ours.room == 1
    assert meaning(theirs, sent(ours, Added(1, [b"b"]))) == [Added(1, [b"b"])]
    meaning(ours, sent(theirs, Wanted()))
    assert meaning(theirs, sent(ours, Added(1, (), ended=True))) == [
        Added(1, (), ended=True)
    ]
    assert ours.room == 0
    meaning(ours, sent(theirs, Ended(1, [()])))
    assert ours.room == 1


@pytest.mark.parametrize("vain", [False, True])
def test_who_asks_in_vain_has_no_room(vain: bool) -> None:
    """It asked after a full batch; without ``bnc_after_last`` that BNC asks for EOB."""
    dialect = MarkerDialect(mode=Mode.BATCH_WORKER, bnc_after_last=vain)
    ours = dialect.open(S, Limits(), batch=2)
    sent(ours, BATCH)
    meaning(ours, b"\x05")
    assert ours.room == 1
    sent(ours, Added(1, [b"b"]))
    meaning(ours, b"\x05")
    assert ours.room == (0 if vain else 1)
    meaning(ours, b"r\n\0")
    assert ours.room == 1


def test_round_of_a_plain_extraction_ends_with_a_clean_exit() -> None:
    """The last message needs no EOM; output before the round opened belongs to none."""
    ours = MarkerProtocol(S, Mode.PLAIN)
    assert ours.room == 1
    assert meaning(ours, b"early\n\n") == [Noise(b"early\n\n")]
    assert sent(ours, Opened(1, (), each=False)) == b""
    assert (ours.room, ours.owed) == (0, 0)
    assert meaning(ours, b"a\nb\nc") == [Added(1, [b"a", b"b"])]
    ours.receive_eof()
    assert ours.events_received() == []
    ours.peer_exited(True, 0.0)
    assert ours.events_received() == [Ended(1, [(b"c",)])]
    assert ours.room == 1


def test_round_without_a_tail_ends_with_nothing() -> None:
    """And it ends only once."""
    ours = MarkerProtocol(S, Mode.PLAIN)
    sent(ours, Opened(1, (), each=False))
    ours.receive_eof()
    ours.peer_exited(True, 0.0)
    ours.peer_exited(True, 0.0)
    assert ours.events_received() == [Ended(1, [()])]


@pytest.mark.parametrize("data", [b"a", b"a\n\0"])
def test_round_of_a_worker_that_failed_does_not_end(data: bytes) -> None:
    """Its output is incomplete; nor does that of one that broke the protocol."""
    ours = MarkerProtocol(S, Mode.PLAIN)
    sent(ours, Opened(1, (), each=False))
    ours.receive_data(data)
    ours.receive_eof()
    ours.events_received()
    ours.peer_exited(data[-1:] == b"\0", 0.0)
    assert ours.events_received() == []


def test_worker_is_notified_of_the_end() -> None:
    """And input after the last EOM is noise."""
    theirs = MarkerProtocol(W, Mode.SINGLE)
    theirs.receive_data(b"a\nb")
    theirs.receive_eof()
    assert theirs.events_received() == [Opened(1, [b"a"]), Noise(b"b"), Farewell()]


def test_supervisor_has_no_event_of_the_end() -> None:
    """The exit decides; the unfinished rest of a reply is kept."""
    ours = MarkerProtocol(S, Mode.SINGLE)
    sent(ours, Opened(1, [b"a"]))
    ours.receive_data(b"r\n")
    ours.receive_eof()
    assert ours.events_received() == []
    assert ours.tail == b"r\n"
    ours.peer_exited(True, 0.0)
    assert ours.events_received() == []


# --- pairing ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", StageKind)
@pytest.mark.parametrize("mode", Mode)
def test_replies_are_proven_where_a_stage_is_supervised(
    kind: StageKind, mode: Mode
) -> None:
    """Not on the worker's side, not in a kit, and not where nothing is owed."""
    dialect = MarkerDialect(mode=mode)
    ours = dialect.open(S, Limits(), kind=kind, window=4, life=100.0)
    assert isinstance(ours, Paired)
    assert (ours.proof is None) == (mode is Mode.PLAIN)
    assert ours.unprompted == (mode is not Mode.PLAIN)
    assert dialect.open(W, Limits(), kind=kind, life=1.0).proof is None
    assert dialect.open(S, Limits(), kind=kind).proof is None
    if mode is Mode.SINGLE:
        assert ours.room == (4 if kind is StageKind.TRANSFORM else 1)
        ours.go_in_step(True)
        assert ours.room == 1


def test_step_and_bound_mean_nothing_without_a_proof() -> None:
    """So that callers need not check for one."""
    ours = MarkerProtocol(S, Mode.SINGLE)
    ours.go_in_step(True)
    ours.bound_replies(1.0)
    assert ours.room == float("inf")
    assert not ours.ahead


def test_replies_that_were_held_back_come_as_one() -> None:
    """With each refusal's place among all of them."""
    ours = MarkerDialect().open(S, Limits(), window=4, life=100.0)
    sent(ours, Opened(1, [b"a", b"b", b"c", b"d"]))
    ours.input_unread(0, 0.0)
    ours.input_unread(0, 1.0)
    ours.output_dry(1.0)
    ours.data_to_send()
    for data in (b"A\n\0", b"B\nb\n\0no\x15", b"D\n\0"):
        assert meaning(ours, data) == []
    ours.receive_eof()
    ours.peer_exited(True, 1.0)
    (event,) = ours.events_received()
    assert isinstance(event, Ended)
    assert event[:3] == (
        1,
        [(b"A",), (b"B", b"b"), (), (b"D",)],
        [Refusal(2, 0, 0, "no")],
    )


def test_fault_counts_messages_of_batches() -> None:
    """Doubt is counted in messages, while exchanges go back."""
    dialect = MarkerDialect(mode=Mode.BATCH_SUPERVISOR)
    ours = dialect.open(S, Limits(), batch=3, kind=StageKind.LOAD, life=100.0)
    sent(ours, Opened(1, [b"a", b"b"], each=False, ended=False))
    ours.input_unread(0, 0.0)
    ours.input_unread(0, 1.0)
    ours.output_dry(1.0)
    sent(ours, Added(1, [b"c"], ended=True))
    assert meaning(ours, b"\0") == []
    (fault,) = meaning(ours, b"\0")
    assert isinstance(fault, Mispaired)
    assert (fault.exchanges, fault.doubtful) == (1, 3)
    assert fault.what == (
        "wrote 1 reply too many: <EOP>; for a worker that closes full batches by"
        " itself set dialect.eob_after_full: false"
    )
