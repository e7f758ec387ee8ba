"""Which frames may follow which, and when."""

from __future__ import annotations

import math
from itertools import chain

import msgpack
import pytest

from etlstage.errors import InvalidMessage, LocalProtocolError, PayloadTooBig
from etlstage.protocol.base import DialectSession, Limits, Side
from etlstage.protocol.cocaine import CocaineSession, CocaineVersion, Deadlines
from etlstage.protocol.cocaine.session import ConnectionState
from etlstage.protocol.events import (
    Added,
    Alive,
    Cancelled,
    CommitAnswered,
    Ended,
    Event,
    Failed,
    Farewell,
    Noise,
    Opened,
    Ready,
)
from tests.protocol.cocaine.pair import received, sent, supervisor, worker

BYE = Farewell(1, "enough")
BEAT = b"\x93\x01\x00\x90"
TERMINATE = b"\x93\x01\x01\x92\x01\xa6enough"

versions = pytest.mark.parametrize("version", [CocaineVersion.ZERO, CocaineVersion.ONE])


def opened(id_: int, *messages: bytes, ended: bool = True) -> Opened:
    """Return an exchange to open."""
    return Opened(id_, messages, each=False, ended=ended, event="x")


def frames(*frames: object) -> bytes:
    """Return frames as bytes."""
    return b"".join(map(msgpack.Packer(use_bin_type=False).pack, frames))


def failure(events: list[Event]) -> str:
    """Return the text of the failure, which must be the last event."""
    assert isinstance(events[-1], Failed)
    return str(events[-1].error)


def test_seam_is_kept_on_both_sides() -> None:
    """The type checker compares every method; this gives it a value to check."""
    for side in Side:
        session: DialectSession = CocaineSession(side)
        assert not session.in_order
        assert (session.owed, session.room) == (0, 0)
        assert repr(session) == f"<CocaineSession {side.value} CONNECTED owed=0>"


def test_version_is_known_once_the_worker_has_sent_something() -> None:
    """A supervisor without a version takes the worker's (issue 15)."""
    session = CocaineSession(Side.SUPERVISOR)
    versions = [session.version]
    session.receive_data(b"\x93\x00\x00\x91\xa1u", 0.0)
    versions += [session.version, worker().version]
    assert versions == [CocaineVersion.AUTO, CocaineVersion.ZERO, CocaineVersion.ONE]


# --- sessions ---------------------------------------------------------------------


def test_worker_has_as_many_sessions_as_it_may() -> None:
    """A session that ends makes room for another, however it ends."""
    session = supervisor(concurrency=2)
    session.send(opened(1))
    session.send(opened(2))

    assert (session.room, session.owed) == (0, 2)
    with pytest.raises(LocalProtocolError, match="can't send Opened in state A"):
        session.send(opened(3))
    received(session, frames([3, 2, []]))
    assert (session.room, session.owed) == (1, 1)
    session.send(Cancelled(1, 0, "too late"))
    assert (session.room, session.owed) == (2, 0)


@versions
def test_sessions_that_are_opened_at_once_are_sessions(version: CocaineVersion) -> None:
    """Each has its own number and message, and our half of it has ended (issue 15)."""
    session, other = supervisor(version), supervisor(version)
    said = sent(session, Opened(3, [b"a", b"b", b"c"], event="x"))

    assert said == sent(other, opened(3, b"a"), opened(4, b"b"), opened(5, b"c"))
    assert (session.owed, session.room) == (3, 7)
    with pytest.raises(LocalProtocolError, match="our half of exchange 4 is not open"):
        session.send(Added(4, [b"d"]))
    theirs = worker(version)
    received(theirs, said)
    reply = sent(theirs, Ended(5, [(b"C",)]), Ended(3, [()]))
    assert received(session, reply) == [Ended(3, [()]), Ended(5, [(b"C",)])]
    assert session.owed == 1


@pytest.mark.parametrize(
    ("first", "messages", "said"),
    [
        (2, [b"a", b"b", b"c"], "can't send Opened in state ACTIVE"),
        (2, [b"a", b"123456"], "message is 6 bytes long, expected no more than 5"),
        (1, [b"a", b"b"], "exchange 1 does not come after all others"),
    ],
)
def test_sessions_are_opened_at_once_or_not_at_all(
    first: int, messages: list[bytes], said: str
) -> None:
    """The obstacle is reported before anything is sent (issue 15)."""
    session = supervisor(concurrency=3, limits=Limits(5))
    sent(session, opened(1))
    with pytest.raises((LocalProtocolError, InvalidMessage), match=said) as caught:
        session.send(Opened(first, messages, event="x"))

    assert getattr(caught.value, "index", 1) == 1
    assert (session.owed, session.data_to_send()) == (1, [])
    sent(session, Opened(2, [b"a"], event="x"))


@versions
def test_numbers_rise_and_are_never_used_again(version: CocaineVersion) -> None:
    """Otherwise a late frame could hit another session."""
    session = supervisor(version)
    session.send(opened(3))
    session.send(Cancelled(3, 0, ""))

    for id_ in (3, 2):
        with pytest.raises(LocalProtocolError, match="does not come after all others"):
            session.send(opened(id_))


@versions
def test_late_frames_are_dropped(version: CocaineVersion) -> None:
    """For a session that was cancelled, or has ended: a chunk, an end, an error."""
    ours, theirs = supervisor(version), worker(version)
    received(theirs, sent(ours, opened(1, b"m"), opened(2, b"n")))
    ours.send(Cancelled(1, 0, "took too long"))
    assert ours.data_to_send() == []

    late = received(ours, sent(theirs, Ended(1, [(b"out",)])))
    assert [type(event) for event in late] == [Noise, Noise]
    late = received(ours, sent(theirs, Ended.refused(2, 1, "no")))
    assert late[0] == Ended.refused(2, 1, "no")
    assert ours.owed == 0


@versions
def test_frame_for_what_never_was_a_session_is_a_fault(version: CocaineVersion) -> None:
    """Workers never open sessions."""
    session = supervisor(version)
    session.send(opened(1))
    number, chunk = (2, 4) if version is CocaineVersion.ZERO else (3, 4)
    frame = (
        [chunk, number, [b"x"]]
        if version is CocaineVersion.ZERO
        else [number, chunk, [b""]]
    )

    assert failure(received(session, frames(frame))) == f"there is no session {number}"


def test_chunks_of_a_session_that_goes_on_are_reported_at_once() -> None:
    """Adjacent chunks are one event; those of an ended session come with its end."""
    session = supervisor()
    session.send(opened(1))
    session.send(opened(2))
    chunk = [2, 0, [b"a"]]

    assert received(session, frames(chunk, [3, 0, [b"c"]], chunk, [3, 2, []])) == [
        Added(1, [b"a", b"a"]),
        Ended(2, [(b"c",)]),
    ]
    assert received(session, frames([2, 2, []])) == [Ended(1, [()])]


def test_chunks_may_be_one_message() -> None:
    """A head and slices of a body, say; reported at the end, if there are any."""
    session = supervisor(concat=True)
    session.send(opened(1))
    session.send(opened(2))

    assert received(session, frames([2, 0, [b"a"]], [2, 0, [b"b"]])) == []
    assert received(session, frames([2, 2, []], [3, 2, []])) == [
        Ended(1, [(b"ab",), ()])
    ]


def test_chunks_of_one_message_are_bounded() -> None:
    """Like the chunks of a reply that is held back."""
    session = supervisor(concat=True, limits=Limits(100, 300))
    session.send(opened(1))

    events = received(session, frames([2, 0, [bytes(100)]], [2, 0, [bytes(100)]]))

    assert failure(events) == (
        "reply takes more than 300 bytes of memory; see max_reply"
    )


def test_payloads_may_be_msgpack() -> None:
    """A reply that is not msgpack is refused, and the worker lives."""
    ours, theirs = supervisor(packed=True), worker(packed=True)
    data = sent(ours, opened(1, b"one"))

    assert b"\x91\xa3one" in data
    assert received(theirs, data)[-1] == Added(1, (b"one",), ended=True)
    reply = sent(theirs, Ended(1, [(b"two",)]))
    assert received(ours, reply) == [Ended(1, [(b"two",)])]
    ours.send(opened(2))
    text = "a chunk of its reply is not a msgpack string; see dialect.payload"
    assert received(ours, frames([3, 0, [b"\x01"]])) == [Ended.refused(2, 0, text)]
    received(theirs, frames([3, 0, [b"x"]]))
    assert received(theirs, frames([3, 0, [b"\x01"]])) == [Added(2, [b"\x01"])]


def test_message_is_as_long_as_it_may() -> None:
    """In both directions; the packing around a message does not count."""
    limits = Limits(100, 300)
    ours, theirs = (make(limits=limits, packed=True) for make in (supervisor, worker))
    longest, longer = bytes(100), bytes(101)

    received(theirs, sent(ours, opened(1, longest)))
    with pytest.raises(
        InvalidMessage, match="101 bytes long, expected no more than 100"
    ):
        ours.send(opened(2, longest, longer))
    assert (ours.owed, ours.data_to_send()) == (1, [])
    events = received(ours, sent(theirs, Added(1, [longest, longer])))
    assert events[0] == Added(1, [longest])
    assert failure(events) == (
        "chunk is 101 bytes long, expected no more than 100; see max_message"
    )
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, PayloadTooBig)


def test_supervisor_may_send_a_session_in_parts() -> None:
    """And read the worker's replies in between."""
    ours, theirs = supervisor(), worker()

    data = sent(ours, opened(1, ended=False), Added(1, [b"a"]))
    assert received(theirs, data) == [
        Opened(1, [], each=False, ended=False, event="x"),
        Added(1, [b"a"]),
    ]
    assert received(ours, sent(theirs, Added(1, [b"A"]))) == [Added(1, [b"A"])]
    data = sent(ours, Added(1, (b"b",), ended=True))
    assert received(theirs, data) == [Added(1, (b"b",), ended=True)]
    for event in (Added(1, [b"c"]), Added(1, (), ended=True)):
        with pytest.raises(
            LocalProtocolError, match="our half of exchange 1 is not open"
        ):
            ours.send(event)
    assert received(ours, sent(theirs, Ended(1, [()]))) == [Ended(1, [()])]


@pytest.mark.parametrize(
    ("version", "choke"),
    [(CocaineVersion.ONE, b"\x93\x02\x02\x90"), (CocaineVersion.ZERO, b"")],
)
def test_worker_may_end_a_session_first(version: CocaineVersion, choke: bytes) -> None:
    """In version 1 the worker keeps it until it receives the end of our half."""
    ours, theirs = supervisor(version), worker(version)
    received(theirs, sent(ours, opened(1, ended=False)))

    reply = sent(theirs, Ended(1, [()]))
    assert theirs.owed == 0
    assert received(ours, reply) == [Ended(1, [()])]
    data = b"".join(ours.data_to_send())
    assert data == choke
    with pytest.raises(LocalProtocolError, match="our half of exchange 1 is not open"):
        ours.send(Added(1, [b"x"]))
    assert received(theirs, data) == ([Added(1, (), ended=True)] if choke else [])
    with pytest.raises(LocalProtocolError, match="our half of exchange 1 is not open"):
        theirs.send(Added(1, [b"x"]))


def test_headers_of_an_invoke_go_with_it() -> None:
    """Written out, so that no table of headers is needed."""
    ours, theirs = supervisor(), worker()
    event = Opened(
        1, [], each=False, ended=False, event="x", headers=((b"trace_id", b"7"),)
    )

    data = sent(ours, event)

    assert data == frames([2, 0, [b"x"], [[False, b"trace_id", b"7"]]])
    assert received(theirs, data) == [event]


@versions
def test_worker_takes_sessions_as_they_come(version: CocaineVersion) -> None:
    """Before version 1 one sequence of numbers was shared by all workers."""
    session = worker(version)
    if version is CocaineVersion.ZERO:
        invokes = frames([3, 7, [b"x"]], [3, 5, [b"x"]])
    else:
        kind = 0 if version is CocaineVersion.ONE else 3
        invokes = frames([8, kind, [b"x"]], [6, kind, [b"x"]])

    later = received(session, invokes)

    assert isinstance(later[0], Opened)
    assert later[0].first == 7
    assert isinstance(later[1], Noise if version is CocaineVersion.ONE else Opened)


def test_session_numbers_may_be_long() -> None:
    """Like those of a runtime that has run for years."""
    session = worker()
    for number in (127, 128, 256, 70_000, 2**32, 2**53 + 2):
        (event,) = received(session, frames([number, 0, [b"x"]]))
        assert event == Opened(number - 1, [], each=False, ended=False, event="x")
        assert sent(session, Ended(number - 1, [(b"",)])) == frames(
            [number, 0, [b""]], [number, 2, []]
        )


def test_what_means_nothing_does_no_harm() -> None:
    """Hidden controls of the last runtimes, and sessions unknown to a worker."""
    ours, theirs = supervisor(), worker()
    ours.send(opened(1))

    assert received(ours, frames([1, 65535, [0]], [2, 65533, []])) == [
        Noise(b"frame 65535 about the connection"),
        Noise(b"frame 65533 for session 2"),
    ]
    assert received(theirs, frames([9, 2, []])) == [Noise(b"frame 2 for session 9")]


MALFORMED = {
    "a number": b"\x05",
    "a map": b"\x80",
    "too short": frames([1, 0]),
    "text for a number": frames([b"x", 0, []]),
    "text for a type": frames([1, b"x", []]),
    "true for a number": frames([True, 0, []]),
    "a number below 0": frames([-1, 0, []]),
    "no arguments": frames([1, 0, 5]),
    "headers of text": frames([1, 0, [], b"x"]),
    "an unknown header": frames([1, 0, [], [99]]),
    "a chunk without a string": frames([2, 0, []]),
    "a chunk of a number": frames([2, 0, [5]]),
    "an error without a reason": frames([2, 1, [[1, 2]]]),
    "an error of three": frames([2, 1, [[1, 2, 3], b"x"]]),
    "an error of text": frames([2, 1, [[1, b"x"], b"x"]]),
    "an error for no reason": frames([2, 1, [[1, 2], 5]]),
    "an error for too long a reason": frames([2, 1, [[1, 2], bytes(65537)]]),
    "a terminate without anything": frames([1, 1, []], [1, 1, []]),
    "no msgpack": b"\xc1",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_frame_ends_the_worker(what: str) -> None:
    """Complete frames before it count; nothing after it is read or sent."""
    session = supervisor()
    session.send(opened(1))
    session.send(opened(2))
    session.data_to_send()
    before, behind = frames([3, 0, [b"a"]], [3, 2, []]), frames([2, 2, []])

    events = received(session, before + MALFORMED[what] + behind)

    assert events[0] == Ended(2, [(b"a",)])
    assert isinstance(events[-1], Failed)
    assert session.state is ConnectionState.ERROR
    assert received(session, behind) == []
    assert (session.room, session.get_timer(), session.data_to_send()) == (0, None, [])
    session.receive_eof(1.0)
    assert session.events_received() == []
    session.send(Cancelled(1, 0, ""))
    with pytest.raises(LocalProtocolError, match="can't send Farewell in state ERROR"):
        session.send(BYE)


@pytest.mark.parametrize("data", [BEAT, frames([2, 0, [b"x"]]), frames([1, 0, []])])
def test_worker_identifies_itself_first(data: bytes) -> None:
    """Before that, frames can't be attributed to a worker."""
    events = received(CocaineSession(Side.SUPERVISOR, CocaineVersion.ONE), data)

    assert isinstance(events[-1], Failed)


def test_invoke_names_an_event() -> None:
    """The supervisor, too, may break the protocol."""
    assert failure(received(worker(), frames([2, 0, []]))) == "invoke names no event"


def test_what_is_not_in_the_protocol_is_not_sent() -> None:
    """Neither what the protocol lacks, nor what only the other side may send."""
    ours, theirs = supervisor(), worker()

    not_ours: list[Event] = [CommitAnswered(1), Ready("x"), Ended(1, [()])]
    not_theirs: list[Event] = [
        opened(1),
        Cancelled(1, 1, "no"),
        Ready("x"),
        Added(1, (), ended=True),
    ]
    for session, events in ((ours, not_ours), (theirs, not_theirs)):
        for event in events:
            with pytest.raises(LocalProtocolError, match="can't send"):
                session.send(event)
    with pytest.raises(
        LocalProtocolError, match="protocol version of the worker is not known yet"
    ):
        CocaineSession(Side.SUPERVISOR).send(BYE)


# --- the end ----------------------------------------------------------------------


def test_worker_that_has_nothing_is_asked_to_terminate_at_once() -> None:
    """Its heartbeats are answered all the same; its own terminate is the farewell."""
    session = supervisor()

    assert sent(session, BYE) == TERMINATE
    assert (session.state, session.room) == (ConnectionState.ENDED, 0)
    assert received(session, BEAT) == [Alive()]
    assert session.data_to_send() == [BEAT]
    assert received(session, TERMINATE) == [BYE]
    session.receive_eof(1.0)
    assert session.events_received() == []


def test_open_sessions_may_end_before_terminate() -> None:
    """Because frameworks drop their open sessions at a terminate."""
    session = supervisor()
    assert sent(session, opened(1), BYE) == frames([2, 0, [b"x"]], [2, 2, []])
    assert (session.state, session.room) == (ConnectionState.SEALED, 0)
    with pytest.raises(LocalProtocolError, match="in state SEALED"):
        session.send(BYE)
    with pytest.raises(LocalProtocolError, match="in state SEALED"):
        session.send(opened(2))

    received(session, frames([2, 2, []]))

    assert session.data_to_send() == [TERMINATE]


def test_open_sessions_have_so_long_to_end() -> None:
    """After ``seal`` the worker is asked to terminate anyway; it may still end them."""
    session = supervisor(deadlines=Deadlines(seal=3.0))
    sent(session, opened(1))
    received(session, BEAT, 10.0)
    session.data_to_send()
    session.send(BYE)

    assert session.get_timer() == 13.0
    session.handle_timer(12.9)
    assert session.data_to_send() == []
    session.handle_timer(13.0)
    assert session.data_to_send() == [TERMINATE]
    assert received(session, frames([2, 2, []])) == [Ended(1, [()])]
    assert session.get_timer() is None


def test_worker_beats_while_its_open_sessions_end() -> None:
    """It is at fault only once it stops, also while we don't read it (issue 22)."""
    deadlines = Deadlines(heartbeat=4.0, seal=30.0)
    session = supervisor(deadlines=deadlines)
    sent(session, opened(1), BYE)
    assert received(session, BEAT, 3.0) == [Alive()]
    assert session.get_timer() == 7.0
    session.data_to_send()
    session.reading_paused(6.0)
    assert session.get_timer() == 8.0
    session.handle_timer(8.0)
    assert session.data_to_send() == [BEAT]
    received(session, BEAT, 9.0)
    session.handle_timer(13.0)

    assert failure(session.events_received()) == ("there was no heartbeat within 4 s")


def test_cancelling_the_last_session_is_its_end() -> None:
    """Nothing is left to wait for, so terminate is sent."""
    session = supervisor()
    sent(session, opened(1), BYE)

    assert sent(session, Cancelled(1, 0, "")) == TERMINATE


def test_worker_that_terminates_loses_its_sessions() -> None:
    """As the protocol specifies; nothing more is sent to it."""
    session = supervisor()
    session.send(opened(1))
    session.send(opened(2))

    events = received(session, TERMINATE)

    assert events[0] == BYE
    assert failure(events) == (
        "it sent a terminate while it had 2 sessions: code 1, enough"
    )
    assert session.data_to_send() == []


def test_worker_that_terminates_may_end_its_sessions() -> None:
    """If so configured; it has one deadline for that, and another to exit."""
    session = supervisor(soft=True, deadlines=Deadlines(seal=3.0, terminate=5.0))
    sent(session, opened(1), opened(2))

    assert received(session, TERMINATE, 10.0) == [BYE]
    assert (session.room, session.get_timer()) == (0, 13.0)
    assert received(session, frames([2, 2, []], [3, 2, []]), 11.0) == [
        Ended(1, [(), ()])
    ]
    assert session.get_timer() == 16.0
    session.handle_timer(16.0)
    assert failure(session.events_received()) == (
        "it sent a terminate but did not exit within 5 s"
    )


def test_worker_that_terminates_gets_the_rest_of_its_open_sessions() -> None:
    """It may need that to end them; but it gets no new ones (issue 22)."""
    session = supervisor(soft=True)
    sent(session, opened(1, ended=False))
    received(session, TERMINATE)

    with pytest.raises(LocalProtocolError, match="can't send Opened in state ENDED"):
        session.send(opened(2))
    assert sent(session, Added(1, [b"a"], True)) == frames([2, 0, [b"a"]], [2, 2, []])
    received(session, frames([2, 2, []]))
    with pytest.raises(LocalProtocolError, match="can't send Added in state ENDED"):
        session.send(Added(1, [b"b"]))


def test_worker_that_terminates_has_its_open_sessions_cancelled() -> None:
    """Nothing is sent to it once they have ended (issue 22)."""
    session = supervisor(soft=True, deadlines=Deadlines(terminate=5.0))
    sent(session, opened(1, ended=False), opened(2, ended=False))
    received(session, TERMINATE, 10.0)

    cancelled = frames([2, 1, [[42, 0], "left"]], [3, 1, [[42, 7], "late"]])
    assert sent(session, Cancelled(1, 0, "left"), Cancelled(2, 7, "late")) == cancelled
    assert (session.owed, session.get_timer()) == (0, 15.0)
    assert sent(session, Cancelled(2, 7, "late")) == b""


def test_worker_that_terminates_and_does_not_end_its_sessions_is_at_fault() -> None:
    """Callers wait for its sessions."""
    session = supervisor(soft=True, deadlines=Deadlines(seal=3.0))
    sent(session, opened(1))
    received(session, TERMINATE, 10.0)
    session.handle_timer(13.0)

    assert failure(session.events_received()) == (
        "it sent a terminate but did not end its sessions within 3 s"
    )


def test_worker_that_terminates_is_not_blamed_while_it_is_not_read() -> None:
    """It hears from us, and has its time once reading goes on (issue 22)."""
    session = supervisor(soft=True, deadlines=Deadlines(seal=3.0, terminate=5.0))
    sent(session, opened(1), opened(2, ended=False), opened(3, ended=False))
    received(session, TERMINATE, 10.0)
    session.reading_paused(11.0)
    for beat in (13.0, 15.0):
        assert session.get_timer() == beat
        session.handle_timer(beat)
        assert session.data_to_send() == [BEAT]
    assert sent(session, Added(2, [b"a"])) == frames([3, 0, [b"a"]])

    received(session, frames([2, 0, [b"b"]]), 16.0)
    received(session, frames([2, 2, []]), 17.0)
    assert session.get_timer() == 19.0
    session.reading_paused(18.0)
    assert sent(session, Cancelled(2, 0, ""), Cancelled(3, 0, ""))
    assert session.get_timer() == 23.0
    session.reading_paused(21.0)
    session.handle_timer(23.0)
    assert failure(session.events_received()) == (
        "it sent a terminate but did not exit within 5 s"
    )


def test_worker_that_has_nothing_terminates() -> None:
    """The protocol allows that, but it must exit in time."""
    session = supervisor(deadlines=Deadlines(terminate=5.0))

    assert received(session, TERMINATE, 10.0) == [BYE]
    assert session.get_timer() == 15.0
    with pytest.raises(LocalProtocolError, match="can't send Farewell in state ENDED"):
        session.send(BYE)
    session.receive_eof(11.0)
    assert session.events_received() == []
    assert session.get_timer() is None


def test_worker_may_report_that_no_other_would_fare_better() -> None:
    """By code 2, which has no special meaning to a worker."""
    said = frames([1, 1, [2, b"no license"]])

    assert received(supervisor(), said) == [Farewell(2, "no license", final=True)]
    assert received(worker(), said) == [Farewell(2, "no license")]


def test_worker_is_asked_to_terminate_and_does() -> None:
    """It may first end its open sessions."""
    session = worker()
    received(session, frames([2, 0, [b"x"]], [2, 2, []]))

    assert received(session, TERMINATE) == [BYE]
    assert "SEALED" in repr(session)
    assert sent(session, Ended(1, [()]), BYE) == (frames([2, 2, []]) + TERMINATE)
    assert received(session, TERMINATE) == [BYE]
    assert session.state is ConnectionState.ENDED


# --- time -------------------------------------------------------------------------


def test_clock_begins_when_the_time_is_first_given() -> None:
    """A session is constructed without the time."""
    session = CocaineSession(
        Side.SUPERVISOR, deadlines=Deadlines(handshake=2.0, heartbeat=4.0)
    )
    assert session.get_timer() == -math.inf
    session.handle_timer(10.0)
    assert session.get_timer() == 12.0
    received(session, frames([1, 0, [b"u"]]), 11.0)
    assert session.get_timer() is None
    received(session, BEAT, 11.5)
    assert session.get_timer() == 15.5


def test_worker_that_does_not_identify_itself_is_at_fault() -> None:
    """That is, within the handshake deadline."""
    session = CocaineSession(Side.SUPERVISOR, deadlines=Deadlines(handshake=2.0))
    session.handle_timer(10.0)
    session.handle_timer(12.0)

    assert failure(session.events_received()) == (
        "it did not identify itself within 2 s"
    )


def test_worker_without_a_sign_of_life_is_at_fault() -> None:
    """Whether busy or not; any frame is a sign of life."""
    session = supervisor(deadlines=Deadlines(heartbeat=4.0))
    sent(session, opened(1))
    received(session, frames([2, 0, [b"a"]]), 3.0)
    assert session.get_timer() == 7.0
    session.handle_timer(6.9)
    assert session.events_received() == []
    session.handle_timer(7.0)
    assert failure(session.events_received()) == ("there was no heartbeat within 4 s")


def test_heartbeat_may_come_when_it_likes() -> None:
    """If no deadline is set."""
    session = supervisor(deadlines=Deadlines(heartbeat=None))

    assert session.get_timer() is None


def test_worker_beats_and_is_disowned_when_no_one_answers() -> None:
    """The deadline counts from the first unanswered heartbeat."""
    session = worker(deadlines=Deadlines(beat=10.0, disown=5.0))
    session.handle_timer(100.0)
    assert session.get_timer() == 105.0
    assert received(session, BEAT, 101.0) == [Alive()]
    assert session.get_timer() == 110.0
    session.handle_timer(110.0)
    assert session.data_to_send() == [BEAT]
    assert session.get_timer() == 115.0
    session.handle_timer(115.0)
    assert failure(session.events_received()) == (
        "the supervisor answered no heartbeat within 5 s"
    )


def test_worker_may_beat_when_it_likes() -> None:
    """And so may the supervisor, even unprompted."""
    assert sent(worker(), Alive()) == BEAT
    assert sent(supervisor(), Alive()) == BEAT


def test_answers_to_heartbeats_come_before_chunks() -> None:
    """Output is taken in small portions, so an answer never waits for all chunks."""
    session = supervisor()
    session.send(opened(1, *[bytes(1000)] * 1000))
    first = session.data_to_send()
    received(session, BEAT)
    second = session.data_to_send()

    assert 256 * 1024 <= sum(map(len, first)) < 260 * 1024
    assert second[0].startswith(BEAT)
    rest = [second[0].removeprefix(BEAT), *second[1:]]
    while more := session.data_to_send():
        rest += more
    theirs = worker()
    assert received(theirs, b"".join(first + rest))[-1] == Added(
        1, tuple([bytes(1000)] * 1000), ended=True
    )


@pytest.mark.parametrize("size", [95, 126])
def test_heartbeat_does_not_split_a_chunk(size: int) -> None:
    """On either side, with chunks that end around a full part (issue 22)."""
    ours, theirs = supervisor(), worker()
    messages = [bytes(size)] * 5000
    begun = received(theirs, sent(ours, opened(1, ended=False)))
    assert [type(event) for event in begun] == [Opened]
    for here, there in ((ours, theirs), (theirs, ours)):
        here.send(Added(1, messages))
        found: list[Event] = []
        while some := b"".join(here.data_to_send()):
            found += received(there, some)
            there.data_to_send()
            if len(some) > size:
                here.send(Alive())
        chunks = [list(event.messages) for event in found if isinstance(event, Added)]
        assert list(chain.from_iterable(chunks)) == messages
        assert {type(event) for event in found} == {Added, Alive}


def test_memory_of_output_is_known_until_it_is_taken() -> None:
    """A worker that is not read may wait with more (issue 22)."""
    session = worker()
    received(session, frames([2, 0, [b"x"]]))
    session.send(Added(1, [bytes(1000)]))
    assert session.unsent > 1000
    session.data_to_send()
    assert session.unsent == 0


def test_worker_that_is_not_read_is_not_missed_and_does_not_miss_us() -> None:
    """Its heartbeats wait after data that we don't read yet."""
    theirs = worker(deadlines=Deadlines(beat=10.0, disown=60.0))
    theirs.handle_timer(0.0)
    theirs.reading_paused(1.0)
    assert theirs.get_timer() == 10.0
    session = supervisor(deadlines=Deadlines(heartbeat=4.0))
    session.reading_paused(10.0)
    assert session.get_timer() == 12.0
    session.handle_timer(12.0)
    assert session.data_to_send() == [BEAT]
    assert session.get_timer() == 14.0
    assert received(session, BEAT, 14.0) == [Alive()]
    assert session.get_timer() == 18.0


def test_worker_that_is_read_again_has_to_beat() -> None:
    """Also if nothing that it had sent is waiting (issue 22)."""
    session = supervisor(deadlines=Deadlines(heartbeat=4.0))
    session.reading_paused(10.0)
    assert received(session, b"", 11.0) == []
    assert session.get_timer() == 15.0
    session.handle_timer(15.0)
    assert failure(session.events_received()) == "there was no heartbeat within 4 s"


def test_one_fault_is_enough() -> None:
    """Other deadlines that passed in a jump of the clock have no effect then."""
    session = supervisor(deadlines=Deadlines(heartbeat=4.0, seal=3.0))
    sent(session, opened(1), BYE)
    session.handle_timer(100.0)

    assert failure(session.events_received()) == "there was no heartbeat within 4 s"
    assert session.data_to_send() == []


def test_worker_waits_for_the_answer_to_its_oldest_heartbeat() -> None:
    """A later heartbeat does not extend the deadline."""
    session = worker(deadlines=Deadlines(beat=10.0, disown=15.0))
    session.handle_timer(0.0)
    session.handle_timer(10.0)
    assert session.get_timer() == 15.0


def test_cancelling_where_nothing_is_known_yet_is_nothing() -> None:
    """The caller need not know the state."""
    session = CocaineSession(Side.SUPERVISOR)
    session.send(Cancelled(1, 0, ""))
    assert session.data_to_send() == []


def test_nothing_is_sent_behind_a_terminate() -> None:
    """The receiver may have exited, or may no longer read."""
    session = supervisor()
    sent(session, opened(1, ended=False), opened(2, ended=False))
    session.reading_paused(0.0)
    session.send(BYE)
    session.handle_timer(3.0)
    assert session.data_to_send() == [BEAT + TERMINATE]

    assert sent(session, Cancelled(1, 0, "")) == b""
