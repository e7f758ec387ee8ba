"""The supervisor's side of a session: which events may follow which."""

from __future__ import annotations

import json

import pytest

from etlstage.errors import InvalidMessage, LocalProtocolError, RemoteProtocolError
from etlstage.messages import AnnotatedRun
from etlstage.protocol.base import SEND_EOF
from etlstage.protocol.events import (
    Added,
    Alive,
    Assignment,
    CommitAnswered,
    CommitAsked,
    Ended,
    Failed,
    Farewell,
    FarewellReason,
    Opened,
)
from etlstage.protocol.kcl.checkpoint import SHARD_END, ShardPosition
from etlstage.protocol.kcl.lines import Version
from etlstage.protocol.kcl.session import MOST_ASKED, KclSession, State
from tests.protocol.kcl.life import (
    begun,
    checkpoint,
    failure,
    given,
    said,
    status,
    typed,
)

OLD = pytest.mark.parametrize("version", [Version.LEGACY, Version.V1])
NEW = pytest.mark.parametrize("version", [Version.DOCUMENT, Version.V2])
ALL = pytest.mark.parametrize("version", Version)


def error_in(data: bytes) -> object:
    """Return the error in an answer to a checkpoint."""
    return json.loads(data)["error"]


# --- the course of an action ------------------------------------------------------


@ALL
def test_a_life_begins_with_initialize(version: Version) -> None:
    """And no records may be given before it is answered."""
    session = KclSession(Assignment("s-1", ["5", 0]), version)

    assert json.loads(said(session))["action"] == "initialize"
    assert session.room == 0
    with pytest.raises(LocalProtocolError, match="in state INITIALIZING"):
        session.send(Opened(1, [b"x"]), 0.0)

    session.receive_data(status("initialize"), 0.0)
    assert typed(session.events_received()) == [("Ready", "s-1")]
    assert session.room == 10_000


def test_one_action_is_in_flight() -> None:
    """The next one waits for the status."""
    session = begun()
    session.send(Opened(1, [b"x", b"y"]), 0.0)

    assert b"processRecords" in said(session)
    assert (session.room, session.owed, session.uncommitted) == (0, 2, 2)
    with pytest.raises(LocalProtocolError, match="in state PROCESSING"):
        session.send(Opened(3, [b"z"]), 0.0)
    session.receive_data(status("processRecords"), 0.0)
    assert session.events_received() == [Alive()]
    assert (session.room, session.owed, session.uncommitted) == (10_000, 0, 2)


def test_an_action_has_so_many_records_at_most() -> None:
    """By the batch's settings."""
    session = begun(batch=2)
    assert session.room == 2
    with pytest.raises(LocalProtocolError, match="with room for 2"):
        session.send(Opened(1, [b"x"] * 3), 0.0)


def test_only_runs_of_records_are_given() -> None:
    """Each record is one exchange; an invalid sequence number is refused."""
    session = begun()
    for event in (
        Opened(1, [b"x"], each=False),
        Opened(1, [b"x"], ended=False),
        Added(1, [b"x"]),
    ):
        with pytest.raises(LocalProtocolError, match="can't send"):
            session.send(event, 0.0)
    with pytest.raises(InvalidMessage):
        session.send(Opened(1, AnnotatedRun([b"x"], sequence=["?"])), 0.0)
    assert (session.state, said(session)) == (State.READY, b"")


@ALL
def test_record_that_can_not_be_sent_is_not_open(version: Version) -> None:
    """It is refused, or the caller's error; the next has its number (issue 25)."""
    session = begun(version)
    wrong = AnnotatedRun([b"x"], sequence=["1"], arrival=["2026-01-01"])
    with pytest.raises(InvalidMessage, match="its arrival is '2026-01-01'"):
        session.send(Opened(1, wrong), 0.0)
    with pytest.raises(ValueError, match="zip"):
        session.send(Opened(1, AnnotatedRun([b"x", b"y"], partition=["k"])), 0.0)
    assert (session.state, session.uncommitted) == (State.READY, 0)
    session.send(Opened(1, AnnotatedRun([b"x"], sequence=["1"])), 0.0)
    assert session.uncommitted == 1


def test_an_empty_list_may_be_given() -> None:
    """It opens no exchange."""
    session = begun()
    session.send(Opened(1, []), 0.0)

    assert b'"records":[]' in said(session)
    assert (session.state, session.uncommitted) == (State.PROCESSING, 0)


def test_what_is_committed_is_not_given_again() -> None:
    """After a restart within records that were put as one."""
    session = begun(position=["5", 1])
    run = AnnotatedRun([b"a", b"b", b"c"], sequence=["5", "5", "5"], sub=[0, 1, 2])
    session.send(Opened(1, run), 0.0)

    assert typed(session.events_received()) == [("Ended", 1, 2)]
    records = json.loads(said(session))["records"]
    assert [record["subSequenceNumber"] for record in records] == [2]
    assert session.uncommitted == 1
    # Its number still counts the two that were not given.
    session.receive_data(checkpoint(), 0.0)
    session.send(CommitAnswered(["5", 2]), 0.0)
    assert typed(session.events_received())[-1] == ("Ended", 3, 1)


def test_what_is_committed_as_a_whole_needs_no_action() -> None:
    """No action is sent to the processor."""
    session = begun(position="5")
    given(session, 4, 5)

    assert typed(session.events_received()) == [("Ended", 1, 2)]
    assert (session.state, session.room) == (State.READY, 10_000)


# --- checkpoints ------------------------------------------------------------------


def test_records_are_open_until_a_checkpoint_covers_them() -> None:
    """The status of an action ends none of them."""
    session = begun()
    given(session, 5, 6, 7)
    session.receive_data(status("processRecords"), 0.0)
    session.reading_paused(0.0)
    assert session.events_received() == [Alive()]

    given(session, 8, first=4)
    session.receive_data(checkpoint("6"), 0.0)
    assert session.events_received() == [CommitAsked(4, ShardPosition("6"))]
    assert session.uncommitted == 4
    session.send(CommitAnswered(["6", 0]), 0.0)
    assert typed(session.events_received()) == [("Ended", 1, 2)]
    assert (session.uncommitted, session.stored) == (2, ShardPosition("6"))
    assert error_in(said(session)) is None


def test_a_checkpoint_in_the_middle_of_an_action_ends_what_it_covers() -> None:
    """When it is answered, not when it is asked for (issue 25)."""
    session = begun()
    given(session, 1, 2, 3)
    session.receive_data(checkpoint("2"), 0.0)
    assert session.uncommitted == 3
    session.send(CommitAnswered(["2", 0]), 0.0)
    session.receive_eof(0.0)

    assert typed(session.events_received())[:2] == [
        ("CommitAsked", 3, ShardPosition("2"), False),
        ("Ended", 1, 2),
    ]
    assert session.uncommitted == 1


def test_ended_records_have_no_outputs() -> None:
    """But one empty group for each record."""
    session = begun()
    given(session, 1, 2)
    session.receive_data(checkpoint(), 0.0)
    session.send(CommitAnswered(["2", 0]), 0.0)
    ended = session.events_received()[-1]

    assert isinstance(ended, Ended)
    assert list(ended.groups) == [(), ()]


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("ThrottlingException", "ThrottlingException"),
        ("the disk is full", "KinesisClientLibDependencyException"),
    ],
)
def test_a_checkpoint_that_was_not_stored(error: str, name: str) -> None:
    """The processor gets the error's name, and nothing ends."""
    session = begun()
    given(session, 1)
    session.receive_data(checkpoint("1"), 0.0)
    session.events_received()
    session.send(CommitAnswered(["1", 0], error), 0.0)

    assert error_in(said(session)) == name
    assert (session.events_received(), session.uncommitted) == ([], 1)
    session.receive_data(checkpoint("1"), 0.0)
    assert session.events_received() == [CommitAsked(1, ShardPosition("1"))]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (checkpoint("1"), None),
        (checkpoint("0"), "IllegalArgumentException"),
        (checkpoint("4"), "IllegalArgumentException"),
        (checkpoint("None"), "IllegalArgumentException"),
        (
            b'{"action":"checkpoint","sequenceNumber":{}}\n',
            "IllegalArgumentException",
        ),
    ],
)
def test_checkpoints_that_need_no_store_are_answered_at_once(
    line: bytes, error: str | None
) -> None:
    """Those equal to the last one, or out of range."""
    session = begun(position="1")
    given(session, 2, 3)
    session.receive_data(line, 0.0)

    assert error_in(said(session)) == error
    assert session.events_received() == []


@pytest.mark.parametrize("version", Version)
def test_checkpoint_in_initialize(version: Version) -> None:
    """It fails, as there is no checkpointer yet; the processor may go on."""
    session = KclSession(Assignment("s-1"), version)
    session.data_to_send()
    session.receive_data(checkpoint() + status("initialize"), 0.0)

    assert error_in(said(session)) == "InvalidStateException"
    assert session.state is State.READY


@pytest.mark.parametrize(
    ("version", "error"),
    [
        (Version.LEGACY, "ShutdownException"),
        (Version.DOCUMENT, "InvalidStateException"),
        (Version.V1, "ShutdownException"),
        (Version.V2, "InvalidStateException"),
    ],
)
def test_checkpoint_when_the_lease_is_lost(version: Version, error: str) -> None:
    """In old versions a checkpointer is passed, and the store refuses."""
    session = begun(version)
    session.send(Farewell(why=FarewellReason.LOST), 0.0)
    session.data_to_send()
    session.receive_data(checkpoint(), 0.0)

    assert error_in(said(session)) == error


def test_checkpoint_in_an_action_when_the_lease_has_been_lost() -> None:
    """The store is not asked any more."""
    session = begun()
    given(session, 1)
    session.send(Farewell(why=FarewellReason.LOST), 0.0)
    session.receive_data(checkpoint(), 0.0)

    assert error_in(said(session)) == "ShutdownException"


@pytest.mark.parametrize(
    ("version", "line", "member"),
    [
        (Version.V2, b'{"action":"checkpoint","checkpoint":"1"}\n', "checkpoint"),
        (Version.LEGACY, b'{"action":"checkpoint","sequenceNumber":"1"}\n', None),
        (Version.LEGACY, b'{"action":"checkpoint"}\n', "checkpoint"),
        (Version.V1, b'{"action":"checkpoint"}\n', None),
    ],
)
def test_a_checkpoint_is_answered_in_the_words_of_who_asked(
    version: Version, line: bytes, member: str | None
) -> None:
    """With the request's own member; without one, with that of the version."""
    session = begun(version, position="1")
    given(session, 2)
    session.receive_data(line, 0.0)
    if session.events_received():
        session.send(CommitAnswered(["2", 0]), 0.0)

    assert (member or "sequenceNumber") in json.loads(said(session))


def test_threads_may_ask_at_once() -> None:
    """Each is answered in turn, and judged by the result of the one before."""
    session = begun()
    given(session, 1, 2, 3)
    session.receive_data(checkpoint("1") + checkpoint("9") + checkpoint("2"), 0.0)
    assert session.events_received() == [CommitAsked(3, ShardPosition("1"))]
    session.send(CommitAnswered(["1", 0]), 0.0)

    answers = said(session).splitlines()
    assert [error_in(line) for line in answers] == [None, "IllegalArgumentException"]
    assert typed(session.events_received()) == [
        ("Ended", 1, 1),
        ("CommitAsked", 3, ShardPosition("2"), False),
    ]


def test_answers_that_no_one_waits_for_are_our_mistake() -> None:
    """Those without a request, and those for another position."""
    session = begun()
    given(session, 1)
    with pytest.raises(LocalProtocolError, match="expected None"):
        session.send(CommitAnswered(["1", 0]), 0.0)
    session.receive_data(checkpoint(), 0.0)
    with pytest.raises(LocalProtocolError, match="can't answer a checkpoint at"):
        session.send(CommitAnswered(["2", 0]), 0.0)


def test_what_was_stored_for_a_processor_that_died_counts() -> None:
    """Its records must not come again, though the processor can't be answered."""
    session = begun()
    given(session, 1, 2)
    session.receive_data(checkpoint("1"), 0.0)
    session.receive_eof(0.0)
    session.events_received()
    session.send(CommitAnswered(["1", 0]), 0.0)

    assert typed(session.events_received()) == [("Ended", 1, 1)]
    assert said(session) == b""


# --- ends -------------------------------------------------------------------------


@ALL
def test_the_shard_ends(version: Version) -> None:
    """The processor checkpoints without a number, and then its input ends."""
    session = begun(version)
    given(session, 1)
    session.receive_data(status("processRecords"), 0.0)
    session.send(Farewell(why=FarewellReason.ENDED), 0.0)
    action = json.loads(said(session))["action"]
    session.receive_data(checkpoint(), 0.0)
    assert session.events_received()[-1] == CommitAsked(
        1, ShardPosition(SHARD_END), True
    )
    session.send(CommitAnswered([SHARD_END, 0]), 0.0)
    assert typed(session.events_received()) == [("Ended", 1, 1)]
    session.data_to_send()
    session.receive_data(status(action), 0.0)

    assert session.data_to_send() == [SEND_EOF]
    assert (session.state, session.uncommitted) == (State.ENDED, 0)


@pytest.mark.parametrize(
    ("before", "ask", "answer", "text"),
    [
        ("", b"", None, "answered shardEnded without a checkpoint, expected one"),
        ("", checkpoint(), "ThrottlingException", "again after ThrottlingException"),
        ("1", checkpoint("1"), None, "that of the last record was stored before"),
    ],
)
def test_shard_end_without_a_checkpoint_is_found_at_once(
    before: str, ask: bytes, answer: str | None, text: str
) -> None:
    """Daemons wait forever, and never start the children (issue 25)."""
    session = begun()
    given(session, 1)
    if before:
        session.receive_data(checkpoint(before), 0.0)
        session.send(CommitAnswered([before, 0]), 0.0)
    session.receive_data(status("processRecords"), 0.0)
    session.send(Farewell(why=FarewellReason.ENDED), 0.0)
    session.receive_data(ask, 0.0)
    if answer:
        session.send(CommitAnswered([SHARD_END, 0], answer), 0.0)
    session.receive_data(status("shardEnded"), 0.0)

    assert text in str(failure(session))
    assert session.state is State.ERROR


@NEW
def test_the_lease_is_lost(version: Version) -> None:
    """No position is stored."""
    session = begun(version)
    given(session, 1)
    session.receive_data(status("processRecords"), 0.0)
    session.send(Farewell(why=FarewellReason.LOST), 0.0)
    assert said(session) == b'{"action":"leaseLost"}\n'
    session.receive_data(status("leaseLost"), 0.0)

    assert session.data_to_send() == [SEND_EOF]
    assert session.uncommitted == 1


@ALL
@pytest.mark.parametrize("asks", [False, True])
def test_lease_is_lost_at_the_end_of_a_shard(version: Version, asks: bool) -> None:
    """A processor that could not store the end is not at fault (issue 25)."""
    session = begun(version)
    session.send(Farewell(why=FarewellReason.ENDED), 0.0)
    session.data_to_send()
    session.send(Farewell(why=FarewellReason.LOST), 0.0)
    if asks:
        session.receive_data(checkpoint(), 0.0)
        assert error_in(said(session)) == "ShutdownException"
    new = version in (Version.DOCUMENT, Version.V2)
    session.receive_data(status("shardEnded" if new else "shutdown"), 0.0)
    assert (b"leaseLost" if new else b"ZOMBIE") in said(session)
    session.receive_data(status("leaseLost" if new else "shutdown"), 0.0)

    assert session.data_to_send() == [SEND_EOF]


@NEW
def test_a_processor_is_asked_to_stop(version: Version) -> None:
    """It may checkpoint once more; then its lease is lost."""
    session = begun(version)
    given(session, 1)
    session.send(Farewell(why=FarewellReason.DRAIN), 0.0)
    assert said(session) == b""
    session.receive_data(status("processRecords"), 0.0)
    assert json.loads(said(session))["action"] == "shutdownRequested"
    session.receive_data(checkpoint(), 0.0)
    session.send(CommitAnswered(["1", 0]), 0.0)
    session.data_to_send()
    session.receive_data(status("shutdownRequested"), 0.0)
    assert said(session) == b'{"action":"leaseLost"}\n'
    session.receive_data(status("leaseLost"), 0.0)

    assert session.data_to_send() == [SEND_EOF]


@pytest.mark.parametrize("records", [[b"x"], []])
def test_an_action_defers_the_farewell(records: list[bytes]) -> None:
    """An empty list does so, too; the time for the farewell begins later (issue 25)."""
    session = begun()
    assert not session.defers_farewell
    session.send(Opened(1, records), 0.0)
    session.send(Farewell(), 0.0)
    assert session.defers_farewell
    session.receive_data(status("processRecords"), 0.0)

    assert not session.defers_farewell


@OLD
def test_old_processors_are_given_zombie(version: Version) -> None:
    """Those of 2014 do not know ``shutdownRequested``."""
    session = begun(version)
    session.send(Farewell(), 0.0)
    if version is Version.V1:
        assert json.loads(said(session))["action"] == "shutdownRequested"
        session.receive_data(status("shutdownRequested"), 0.0)

    assert said(session) == b'{"action":"shutdown","reason":"ZOMBIE"}\n'


def test_a_later_reason_overrides_an_earlier_one_upwards() -> None:
    """A lost lease overrides the end of a shard, and that a stop; never the reverse."""
    session = begun()
    given(session, 1)
    for reason in (FarewellReason.DRAIN, FarewellReason.LOST, FarewellReason.ENDED):
        session.send(Farewell(why=reason), 0.0)
    session.receive_data(status("processRecords"), 0.0)

    assert said(session) == b'{"action":"leaseLost"}\n'


@pytest.mark.parametrize("why", [FarewellReason.DRAIN, FarewellReason.LOST])
def test_farewell_before_initialize_is_answered(why: FarewellReason) -> None:
    """Nothing is sent, its input ends, and anything that it still sends is noise."""
    session = KclSession(Assignment("s-1"))
    session.data_to_send()
    session.send(Farewell(why=why), 0.0)
    assert session.data_to_send() == [SEND_EOF]
    session.receive_data(status("initialize"), 0.0)
    session.receive_eof(0.0)

    assert typed(session.events_received()) == [("Noise", status("initialize")[:-1])]


def test_shard_ends_before_initialize_is_answered() -> None:
    """A shard without records ends like others, once initialize is answered."""
    session = KclSession(Assignment("s-1"))
    session.data_to_send()
    session.send(Farewell(why=FarewellReason.ENDED), 0.0)
    assert session.data_to_send() == []
    session.receive_data(status("initialize"), 0.0)
    assert said(session) == b'{"action":"shardEnded"}\n'


# --- what processors do wrong -----------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            status("shardEnded"),
            "sent a status for shardEnded, expected one for processRecords",
        ),
        (
            b'{"action":"status"}\n',
            "sent a status that names no action, expected responseFor processRecords",
        ),
        (
            status("processRecords") * 2,
            "sent a status for processRecords with no action in flight",
        ),
        (
            checkpoint() + status("processRecords"),
            "sent its status for processRecords before it had the answer",
        ),
        (
            status("processRecords") + checkpoint(),
            "asked for a checkpoint with no action in flight",
        ),
        (
            checkpoint() * (MOST_ASKED + 1),
            f"asked for {MOST_ASKED + 1} checkpoints without waiting for an answer",
        ),
    ],
)
def test_each_mistake_has_its_text(wrong: bytes, text: str) -> None:
    """It states what was found, and what was expected."""
    session = begun()
    given(session, 1)
    session.receive_data(wrong, 0.0)
    error = failure(session)

    assert str(error).startswith(f"shard s-1: the processor {text}")
    assert isinstance(error, RemoteProtocolError)
    assert (session.state, session.room, said(session)) == (State.ERROR, 0, b"")


def test_surplus_status_after_a_quiet_time() -> None:
    """It would be taken for the answer to the next action."""
    session = begun()
    given(session, 1)
    session.receive_data(status("processRecords"), 0.0)
    session.events_received()
    session.receive_data(status("processRecords"), 60.0)

    assert "is a callback called twice?" in str(failure(session))


@pytest.mark.parametrize(
    ("reason", "action"),
    [
        (None, "between two actions"),
        (FarewellReason.DRAIN, "status for shutdownRequested"),
        (FarewellReason.ENDED, "status for shardEnded"),
        (FarewellReason.LOST, "status for leaseLost"),
    ],
)
def test_end_of_stdout(reason: FarewellReason | None, action: str) -> None:
    """The reason names the current action; the exit status tells the rest."""
    session = begun()
    if reason:
        session.send(Farewell(why=reason), 0.0)
    session.receive_eof(0.0)

    (farewell,) = session.events_received()
    assert isinstance(farewell, Farewell)
    assert action in farewell.reason
    assert session.owed == 0


def test_checkpoint_between_records_ends_none() -> None:
    """The position is stored, and the request answered."""
    session = begun(position="5")
    given(session, 7)
    session.receive_data(checkpoint("6"), 0.0)
    session.events_received()
    session.send(CommitAnswered(["6", 0]), 0.0)

    assert session.events_received() == []
    assert session.stored == ShardPosition("6")
    assert error_in(said(session)) is None


def test_nothing_is_written_behind_a_failure() -> None:
    """Neither answers to earlier requests, nor late results of the store."""
    session = begun()
    given(session, 1)
    session.receive_data(checkpoint("None") + checkpoint() + status("initialize"), 0.0)
    assert session.state is State.ERROR
    assert said(session) == b""
    session.send(CommitAnswered(["1", 0]), 0.0)
    assert said(session) == b""


@pytest.mark.parametrize("wrong", [b"", status("initialize")])
def test_action_in_flight_at_a_failure_is_owed(wrong: bytes) -> None:
    """Records of earlier actions, already answered, are not suspect."""
    session = begun()
    given(session, 1, 2)
    session.receive_data(status("processRecords"), 0.0)
    given(session, 3, 4, 5, first=3)
    if wrong:
        session.receive_data(wrong, 0.0)
    else:
        session.receive_eof(0.0)

    assert (session.owed, session.uncommitted) == (3, 5)


def test_nothing_is_owed_behind_a_surplus_status() -> None:
    """The first of the two has answered the action."""
    session = begun()
    given(session, 1)
    session.receive_data(status("processRecords") * 2, 0.0)

    assert (session.owed, session.uncommitted) == (0, 1)


def test_status_without_a_line_end_counts_at_the_end() -> None:
    """As it does for daemons."""
    session = begun()
    session.send(Farewell(why=FarewellReason.LOST), 0.0)
    session.receive_data(status("leaseLost")[:-1], 0.0)
    session.receive_eof(0.0)

    assert session.state is State.ENDED
    assert session.events_received() == []


def test_noise_is_passed_on_in_its_place() -> None:
    """Consecutive lines are one event, before the events of later lines."""
    session = begun()
    given(session, 1)
    session.receive_data(b"one\nnull\n" + status("processRecords") + b"two\n", 0.0)

    assert typed(session.events_received()) == [
        ("Noise", b"one\nnull"),
        ("Alive",),
        ("Noise", b"two"),
    ]


def test_line_that_is_too_long() -> None:
    """The limit is named, and nothing after the line is read."""
    session = begun(max_line=100)
    session.receive_data(b"x" * 101, 0.0)
    assert "max_line" in str(failure(session))
    session.receive_data(status("processRecords"), 0.0)
    session.receive_eof(0.0)
    assert session.events_received() == []


# --- time and bounds --------------------------------------------------------------


def test_empty_lists_are_given_by_time() -> None:
    """As long as the processor waits for records."""
    session = begun(empty_after=1.5)
    assert session.get_timer() == 1.5
    session.handle_timer(1.4)
    assert said(session) == b""
    session.handle_timer(1.5)
    assert b'"records":[]' in said(session)
    assert session.get_timer() is None
    session.receive_data(status("processRecords"), 2.0)
    assert session.get_timer() == 3.5


def test_without_settings_of_time_there_is_no_timer() -> None:
    """Whatever is open."""
    session = begun()
    given(session, 1, 2)
    assert session.get_timer() is None


def test_empty_list_is_answered_in_time() -> None:
    """No caller waits for it: an empty list is not an exchange."""
    session = begun(empty_after=1.0, answer=5.0)
    session.handle_timer(1.0)
    assert session.get_timer() == 6.0
    session.handle_timer(5.9)
    assert session.state is State.PROCESSING
    session.handle_timer(6.0)
    assert str(failure(session)) == (
        "shard s-1: the processor did not answer an empty list within 5 s"
        " (timeout.message)"
    )
    assert session.get_timer() is None


def test_time_to_store_is_not_that_of_an_empty_list() -> None:
    """The deadline starts anew when the checkpoint is answered."""
    session = begun(empty_after=1.0, answer=5.0)
    given(session, 1)
    session.receive_data(status("processRecords"), 0.0)
    session.handle_timer(1.0)
    session.receive_data(checkpoint("1"), 3.0)
    session.send(CommitAnswered(["1", 0]), 20.0)
    session.handle_timer(20.0)
    assert session.get_timer() == 25.0
    session.receive_data(status("processRecords"), 21.0)
    assert session.get_timer() == 22.0


def test_so_much_may_be_uncommitted() -> None:
    """Then there is no room for anything but an empty list."""
    session = begun(max_uncommitted=3, empty_after=1.0)
    given(session, 1, 2)
    session.receive_data(status("processRecords"), 0.0)
    assert session.room == 1
    given(session, 3, first=3)
    session.receive_data(status("processRecords"), 0.0)
    assert session.room == 0
    session.handle_timer(1.0)
    session.receive_data(checkpoint("1"), 0.0)
    session.send(CommitAnswered(["1", 0]), 0.0)
    session.receive_data(status("processRecords"), 0.0)
    assert session.room == 1


def test_so_many_bytes_may_be_uncommitted() -> None:
    """The last record may exceed the limit."""
    session = begun(max_uncommitted_bytes=2)
    given(session, 1)
    session.receive_data(status("processRecords"), 0.0)
    assert session.room > 0
    given(session, 2, first=2)
    session.receive_data(status("processRecords"), 0.0)
    assert session.room == 0


def test_a_checkpoint_is_overdue() -> None:
    """The shard fails, and the error names the setting (issue 25)."""
    session = begun(max_uncommitted=1, commit_overdue=30.0)
    assert session.get_timer() is None
    given(session, 1)
    session.receive_data(status("processRecords"), 5.0)
    assert session.get_timer() == 30.0
    session.handle_timer(29.0)
    assert session.state is State.READY
    session.handle_timer(30.0)

    text = str(failure(session))
    assert "1 record (1 byte) without a checkpoint 30 s" in text
    assert "max_uncommitted" in text
    assert session.get_timer() is None


def test_no_processor_follows_one_whose_checkpoint_is_overdue() -> None:
    """It would be given the same records; other failures are not final (issue 25)."""
    session = begun(max_uncommitted=1, commit_overdue=30.0)
    given(session, 1)
    session.receive_data(status("processRecords"), 5.0)
    session.handle_timer(30.0)
    overdue = session.events_received()[-1]
    assert isinstance(overdue, Failed)
    assert overdue.final

    session = begun()
    session.receive_data(status("processRecords"), 5.0)
    wrong = session.events_received()[-1]
    assert isinstance(wrong, Failed)
    assert not wrong.final


def test_time_to_store_a_checkpoint_is_not_overdue() -> None:
    """The clock starts anew when it could not be stored (issue 25)."""
    session = begun(max_uncommitted=1, commit_overdue=30.0)
    given(session, 1)
    assert session.get_timer() == 30.0
    session.receive_data(checkpoint(), 10.0)
    assert session.get_timer() is None
    session.send(CommitAnswered(["1", 0], "not stored"), 50.0)
    assert session.get_timer() == 80.0


def test_a_checkpoint_in_time_stops_the_clock() -> None:
    """The clock starts anew when the limit is next reached."""
    session = begun(max_uncommitted=1, commit_overdue=30.0)
    given(session, 1)
    session.receive_data(checkpoint(), 0.0)
    session.send(CommitAnswered(["1", 0]), 1.0)

    assert session.get_timer() is None


def test_no_checkpoint_is_overdue_of_one_that_may_not_ask() -> None:
    """The shard is not its own any more, or it has to exit (issue 25)."""
    session = begun(max_uncommitted=1, commit_overdue=30.0)
    given(session, 1)
    session.send(Farewell(why=FarewellReason.LOST), 1.0)
    assert (session.state, session.get_timer()) == (State.PROCESSING, None)

    session = begun(max_uncommitted=1, commit_overdue=30.0)
    given(session, 1)
    session.receive_data(status("processRecords"), 1.0)
    session.send(Farewell(why=FarewellReason.DRAIN), 1.0)
    assert (session.state, session.get_timer()) == (State.REQUESTED, 30.0)
    session.receive_data(status("shutdownRequested"), 2.0)
    assert (session.state, session.get_timer()) == (State.LOSING, None)
    session.receive_data(status("leaseLost"), 3.0)
    assert (session.state, session.get_timer()) == (State.ENDED, None)
    session.handle_timer(99.0)
    assert session.state is State.ENDED


def test_repr() -> None:
    """The shard, its state, and the number of records that no checkpoint covers."""
    assert repr(begun()) == "<KclSession 's-1' READY uncommitted=0>"
