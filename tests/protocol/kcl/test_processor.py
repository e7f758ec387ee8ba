"""The processor's side of a session, and both sides back to back."""

from __future__ import annotations

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from etlstage.errors import LocalProtocolError, PayloadTooBig
from etlstage.messages import AnnotatedRun
from etlstage.protocol.events import (
    Added,
    Assignment,
    CommitAnswered,
    CommitAsked,
    Ended,
    Failed,
    Farewell,
    FarewellReason,
    Opened,
    Ready,
)
from etlstage.protocol.kcl.checkpoint import SHARD_END, ShardPosition, rank
from etlstage.protocol.kcl.lines import Version
from etlstage.protocol.kcl.processor import ProcessorSession, Turn
from etlstage.protocol.kcl.session import KclSession, State

ALL = pytest.mark.parametrize("version", Version)
RECORDS = AnnotatedRun(
    [b"one", b""],
    sequence=["5", "5"],
    sub=[None, 2],
    partition=["k\u00e4", "b"],
    arrival=[7, None],
    behind=[3, 3],
)


class Pair:
    """A supervisor and a processor, connected without delay."""

    def __init__(self, version: Version = Version.V2, position: object = None) -> None:
        self.ours = KclSession(Assignment("s-1", position), version)
        self.theirs = ProcessorSession()

    def move(self, step: int = 2**31) -> None:
        """Deliver what each side has to send, in pieces of ``step`` bytes."""
        for data in self.ours.data_to_send():
            if not data:
                self.theirs.receive_eof(0.0)
            for piece in _pieces(data, step):
                self.theirs.receive_data(piece, 0.0)
        for data in self.theirs.data_to_send():
            for piece in _pieces(data, step):
                self.ours.receive_data(piece, 0.0)


def _pieces(data: bytes, step: int) -> list[bytes]:
    return [data[at : at + step] for at in range(0, len(data), step)]


def begun(version: Version = Version.V2, position: object = None) -> Pair:
    """Return a pair whose processor has initialized."""
    pair = Pair(version, position)
    pair.move()
    pair.theirs.send(Ready(), 0.0)
    pair.move()
    pair.ours.events_received()
    pair.theirs.events_received()
    return pair


@ALL
def test_a_life(version: Version) -> None:
    """In each version, with what that version sends."""
    pair = Pair(version, ["4", 1])
    pair.move()
    assert pair.theirs.events_received() == [Ready("s-1")]
    full = version in (Version.V1, Version.V2)
    assert pair.theirs.assignment == Assignment(
        "s-1", ShardPosition("4", 1) if full else None
    )
    pair.theirs.send(Ready(), 0.0)
    pair.theirs.reading_paused(0.0)
    pair.move()

    pair.ours.send(Opened(1, RECORDS), 0.0)
    pair.move()
    (opened,) = pair.theirs.events_received()
    assert isinstance(opened, Opened)
    assert list(opened.messages) == [b"one", b""]
    assert isinstance(opened.messages, AnnotatedRun)
    columns = opened.messages.columns
    assert columns["sequence"] == ["5", "5"]
    assert columns["partition"] == ["k\u00e4", "b"]
    none = {Version.V1: None, Version.V2: 0}
    assert columns["sub"] == ([none[version], 2] if full else [None, None])
    assert columns["arrival"] == ([7, None] if full else [None, None])
    assert columns["behind"] == ([3, 3] if full else [None, None])

    pair.theirs.send(CommitAsked(1, None), 0.0)
    assert (pair.theirs.turn, pair.theirs.owed) == (Turn.ANSWER, 1)
    pair.move()
    pair.ours.send(CommitAnswered(["5", 2], "ThrottlingException"), 0.0)
    pair.move()
    assert pair.theirs.events_received() == [
        CommitAnswered(None, "ThrottlingException")
    ]
    pair.theirs.send(Added(1, (), ended=True), 0.0)
    pair.move()

    for reason in (FarewellReason.DRAIN, FarewellReason.LOST):
        pair.ours.send(Farewell(why=FarewellReason.DRAIN), 0.0)
        pair.move()
        if version is Version.LEGACY and reason is FarewellReason.DRAIN:
            continue
        assert pair.theirs.events_received() == [Farewell(why=reason)]
        pair.theirs.send(Farewell(why=reason), 0.0)
        pair.move()
    pair.move()
    assert (pair.theirs.turn, pair.ours.state) == (Turn.OVER, State.ENDED)


@ALL
def test_lease_may_be_lost_at_the_end_of_a_shard(version: Version) -> None:
    """Nothing but that comes after the end (issue 25)."""
    pair = begun(version)
    for why in (FarewellReason.ENDED, FarewellReason.LOST):
        pair.ours.send(Farewell(why=why), 0.0)
    for why in (FarewellReason.ENDED, FarewellReason.LOST):
        pair.move()
        assert pair.theirs.events_received() == [Farewell(why=why)]
        pair.theirs.send(Farewell(why=why), 0.0)
        pair.move()
    pair.move()
    assert (pair.theirs.turn, pair.ours.state) == (Turn.OVER, State.ENDED)


def test_no_records_come_after_the_end_of_a_shard() -> None:
    """They would be no one's (issue 25)."""
    theirs = begun().theirs
    theirs.receive_data(b'{"action":"shardEnded"}\n', 0.0)
    theirs.send(Farewell(why=FarewellReason.ENDED), 0.0)
    theirs.receive_data(b'{"action":"processRecords","records":[]}\n', 0.0)

    failed = theirs.events_received()[-1]
    assert isinstance(failed, Failed)
    assert "processRecords, expected the end of input" in str(failed.error)


@ALL
def test_the_end_of_a_shard(version: Version) -> None:
    """It is checkpointed, and the processor receives the end of its input."""
    pair = begun(version)
    pair.ours.send(Farewell(why=FarewellReason.ENDED), 0.0)
    pair.move()
    assert pair.theirs.events_received() == [Farewell(why=FarewellReason.ENDED)]
    pair.theirs.send(CommitAsked(0, None), 0.0)
    pair.move()
    pair.ours.send(CommitAnswered([SHARD_END, 0]), 0.0)
    pair.move()
    pair.theirs.send(Farewell(why=FarewellReason.ENDED), 0.0)
    pair.move()
    pair.move()

    assert pair.ours.state is State.ENDED
    assert pair.theirs.turn is Turn.OVER


def test_a_checkpoint_names_its_number() -> None:
    """With the sub-sequence number."""
    pair = begun()
    pair.ours.send(Opened(1, RECORDS), 0.0)
    pair.move()
    pair.theirs.send(CommitAsked(1, ["5", 1]), 0.0)

    assert b'"sequenceNumber":"5","subSequenceNumber":1}' in b"".join(
        pair.theirs.data_to_send()
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"hello\n", "a line of 5 bytes is not a JSON object"),
        (b'{"action":"leap"}\n', "action leap is not known"),
        (b'{"action":"shutdown","reason":"BORED"}\n', "action shutdown is not known"),
        (b"{}\n", "action None is not known"),
        (b'{"action":"initialize","shardId":"x"}\n', "expected initialize once"),
        (b'{"action":"checkpoint","error":null}\n', "action checkpoint is not known"),
        (b'{"action":"processRecords"}\n', "is malformed: KeyError"),
        (
            (
                b'{"action":"processRecords","records":[{"data":"x","partitionKey":"a",'
                b'"sequenceNumber":"1"}]}\n'
            ),
            "is malformed: Error",
        ),
        (
            b'{"action":"processRecords","records":[],"millisBehindLatest":{}}\n',
            "is malformed: ValueError",
        ),
        (
            b'{"action":"processRecords","records":[],"millisBehindLatest":1e999}\n',
            "is malformed: OverflowError",
        ),
        (b'{"action":"leaseLost"}\n' * 2, "action leaseLost, expected a status"),
    ],
)
def test_mistakes_of_a_supervisor(line: bytes, text: str) -> None:
    """Each has its own error, and nothing after it is read (issue 25)."""
    theirs = begun().theirs
    theirs.receive_data(line + line, 0.0)
    last = theirs.events_received()[-1]
    theirs.receive_data(line, 0.0)
    theirs.receive_eof(0.0)

    assert isinstance(last, Failed)
    assert text in str(last.error)
    assert (theirs.turn, theirs.events_received()) == (Turn.ERROR, [])


def test_the_first_action_is_initialize() -> None:
    """Anything else is an error."""
    theirs = ProcessorSession()
    theirs.receive_data(b'{"action":"leaseLost"}\n', 0.0)
    (failed,) = theirs.events_received()

    assert isinstance(failed, Failed)
    assert "expected initialize once, before all else" in str(failed.error)


def test_an_action_in_place_of_an_answer() -> None:
    """Or the end of input."""
    for wrong in (b'{"action":"leaseLost"}\n', b""):
        pair = begun()
        pair.ours.send(Opened(1, RECORDS), 0.0)
        pair.move()
        pair.theirs.send(CommitAsked(1, None), 0.0)
        if wrong:
            pair.theirs.receive_data(wrong, 0.0)
        else:
            pair.theirs.receive_eof(0.0)
        last = pair.theirs.events_received()[-1]
        assert isinstance(last, Failed)
        assert "expected the answer to a checkpoint" in str(last.error)


def test_line_that_is_too_long() -> None:
    """A worker may bound what it reads."""
    theirs = ProcessorSession(max_line=10)
    theirs.receive_data(b"x" * 11, 0.0)
    (failed,) = theirs.events_received()

    assert isinstance(failed, Failed)
    assert isinstance(failed.error, PayloadTooBig)


def test_what_a_processor_may_not_send() -> None:
    """Nothing between actions, and nothing that does not answer the current one."""
    pair = begun()
    with pytest.raises(LocalProtocolError, match="while an action is awaited"):
        pair.theirs.send(CommitAsked(1, None), 0.0)
    pair.ours.send(Opened(1, RECORDS), 0.0)
    pair.move()
    for event in (
        Ready(),
        Farewell(why=FarewellReason.LOST),
        Added(1, ()),
        Ended(1, []),
    ):
        with pytest.raises(LocalProtocolError, match="in answer to processRecords"):
            pair.theirs.send(event, 0.0)
    assert pair.theirs.get_timer() is None
    pair.theirs.handle_timer(0.0)
    assert "processRecords" in repr(pair.theirs)


@settings(deadline=None)
@drawn(st.lists(st.binary(max_size=20), max_size=5), st.integers(1, 90))
def test_any_cut_of_the_bytes(messages: list[bytes], step: int) -> None:
    """In both directions: what was given is what is received."""
    pair = Pair()
    pair.move(step)
    pair.theirs.send(Ready(), 0.0)
    pair.move(step)
    pair.ours.send(Opened(1, messages), 0.0)
    pair.move(step)
    opened = pair.theirs.events_received()[-1]
    assert isinstance(opened, Opened)
    assert list(opened.messages) == messages
    pair.theirs.send(Added(1, (), ended=True), 0.0)
    pair.move(step)
    assert pair.ours.state is State.READY


class Lives(RuleBasedStateMachine):
    """
    A shard from its beginning to its end, with events in any order.

    Processors checkpoint at any time, die at any time, and the store fails.
    Acknowledged records are covered by the stored position, and that by what was
    delivered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stored: object = None
        self.done = 0  # records that have ended, in order
        self.delivered = 0
        self.asked: CommitAsked | None = None
        self.lives = 0
        self.live()

    def live(self) -> None:
        """Start a processor at the stored position."""
        self.pair = Pair(position=self.stored)
        self.base = self.done  # exchange 1 of this session is the next record
        self.given = 0
        self.asked = None
        self.pair.move()
        self.pair.theirs.send(Ready(), 0.0)
        self.lives += 1
        self.take()

    def take(self) -> None:
        """Deliver bytes, and record the supervisor's events."""
        self.pair.move()
        self.pair.theirs.events_received()
        for event in self.pair.ours.events_received():
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Ended):
                assert self.base + event.first == self.done + 1
                self.done += len(event.groups)
            elif isinstance(event, CommitAsked):
                self.asked = event

    @property
    def ready(self) -> bool:
        """Whether records may be given."""
        return self.pair.ours.state is State.READY

    @precondition(lambda self: self.ready)
    @rule(count=st.integers(0, 5))
    def give(self, count: int) -> None:
        """Give the next records; after a death, all that were not committed."""
        messages = [b"%d" % (self.base + self.given + 1 + n) for n in range(count)]
        self.pair.ours.send(Opened(self.given + 1, messages), 0.0)
        self.given += count
        self.delivered = max(self.delivered, self.base + self.given)
        self.take()

    @precondition(lambda self: self.pair.theirs.turn is Turn.OURS)
    @rule(at=st.none() | st.integers(0, 30))
    def ask(self, at: int | None) -> None:
        """Ask for a checkpoint at any position."""
        position = None if at is None else [str(at), 0]
        self.pair.theirs.send(CommitAsked(0, position), 0.0)
        self.take()

    @precondition(lambda self: self.asked is not None)
    @rule(fails=st.booleans())
    def store(self, fails: bool) -> None:
        """Store the position, or fail to."""
        assert self.asked is not None
        position, self.asked = self.asked.position, None
        if not fails:
            self.stored = position
        error = "ThrottlingException" if fails else None
        self.pair.ours.send(CommitAnswered(position, error), 0.0)
        self.take()

    @precondition(lambda self: self.pair.theirs.turn is Turn.OURS)
    @rule()
    def answer(self) -> None:
        """Report that the action is done."""
        self.pair.theirs.send(Added(0, (), ended=True), 0.0)
        self.take()

    @rule(stored=st.booleans())
    def die(self, stored: bool) -> None:
        """Die, possibly while a position is stored, and start again."""
        self.pair.ours.receive_eof(0.0)
        self.pair.ours.events_received()
        if self.asked is not None and stored:
            self.stored = self.asked.position
            self.pair.ours.send(CommitAnswered(self.stored), 0.0)
            self.take()
        self.live()

    @invariant()
    def covered(self) -> None:
        """Exactly the stored records are acknowledged, and those were delivered."""
        position = ["0", 0] if self.stored is None else self.stored
        assert isinstance(position, list | tuple)
        number, _ = rank(ShardPosition(*position))
        assert self.done == number <= self.delivered
        assert self.pair.ours.uncommitted == self.given - (self.done - self.base)


TestLives = pytest.mark.no_cover(Lives.TestCase)
TestLives.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
