"""The sequencer: scenarios recorded from the real package, and properties."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.errors import LocalProtocolError
from etlstage.sequencing import (
    Checkpoint,
    Envelope,
    Flags,
    MustStartReplay,
    Opaque,
    ProducerState,
    QueueOutcome,
    ReplayFailed,
    ReplayRange,
    ReplayWaits,
    Sequencer,
    build_uuid,
)
from etlstage.testing.journal import PRODUCERS as WRITERS
from etlstage.testing.journal import (
    Crash,
    JournalHistory,
    ProducerAct,
    Publication,
    crashes,
    histories,
)
from tests.dice import diced
from tests.sequencing.journals import A, B, C, envelope
from tests.sequencing.vectors import VECTORS

PRODUCERS = [bytes.fromhex(one) for one in VECTORS["producers"]]
SCENARIOS = {one["id"]: one for one in VECTORS["scenarios"]}


class Scenario:
    """Runs the steps of a scenario against a sequencer."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.envelopes = []
        for journal, producer, clock, flags, begin, end in scenario["envelopes"]:
            message = Opaque()
            if producer >= 0:
                message.set_uuid(build_uuid(PRODUCERS[producer], clock, flags))
            name = VECTORS["journals"][journal]
            self.envelopes.append(Envelope(name, begin, end, message))
        self.rows = scenario["envelopes"]
        self.sequencer = Sequencer(ring=scenario["buffer"])
        self.checkpointed = Checkpoint({}, [])

    def queue(self, index: int, outcome: str, numbers: list[int] | None) -> None:
        """Queue a message, and compare the outcome and the state."""
        envelope = self.envelopes[index]
        assert self.sequencer.queue_uncommitted(envelope).value == outcome
        producer = int.from_bytes(PRODUCERS[self.rows[index][1]], "big")
        span = self.sequencer._spans.get((envelope.journal, producer))
        if numbers is None:
            assert self.rows[index][1] < 0 or span is None
        else:
            assert span is not None
            assert [span.last, span.top, span.begin] == numbers

    def replay(self, *expected: object) -> None:
        """Check that a replay is required, and start it."""
        with pytest.raises(MustStartReplay, match=r"^must start reader$"):
            self.sequencer.deque_committed()
        found = self.sequencer.replay_range()
        assert found == expected
        journal, begin, end = found
        self.sequencer.start_replay(
            one
            for one in self.envelopes
            if one.journal == journal and begin <= one.begin < end
        )

    def step(self, expected: int | str) -> None:
        """Dequeue a message, and compare it."""
        found = self.sequencer.deque_committed()
        assert found is (
            None if isinstance(expected, str) else self.envelopes[expected]
        )

    def pending(self, expected: bool) -> None:
        """Check whether spans are open."""
        assert self.sequencer.has_pending() is expected

    def checkpoint(self, horizon: int, offsets: object, states: list[Any]) -> None:
        """Take a checkpoint, and compare it."""
        self.checkpointed = self.sequencer.checkpoint(horizon / 1e9)
        assert self.checkpointed.offsets == offsets
        assert sorted(self.checkpointed.states) == sorted(
            ProducerState(journal, bytes.fromhex(producer), last, begin)
            for journal, producer, last, begin in states
        )

    def recover(self, ring: int) -> None:
        """Start a new sequencer from the last checkpoint."""
        self.sequencer = Sequencer(*self.checkpointed, ring=ring)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_of_the_real_package(name: str) -> None:
    """Outcomes, states, replay ranges, deliveries and checkpoints are the same."""
    scenario = Scenario(SCENARIOS[name])
    for act, *arguments in SCENARIOS[name]["ops"]:
        getattr(scenario, act)(*arguments)


def test_outcomes_have_the_names_of_the_real_package() -> None:
    """The scenarios cover all outcomes."""
    seen = {
        op[2]
        for scenario in SCENARIOS.values()
        for op in scenario["ops"]
        if op[0] == "queue"
    }
    assert {one.value for one in QueueOutcome} == seen


# --- any history ------------------------------------------------------


def dequeued(sequencer: Sequencer, log: JournalHistory) -> Iterator[Envelope]:
    """Yield all messages that can be dequeued, doing replays as needed."""
    while True:
        try:
            found = sequencer.deque_committed()
        except MustStartReplay:
            _, begin, end = sequencer.replay_range()
            sequencer.start_replay(log.between(begin, end))
            continue
        if found is None:
            return
        yield found


def read(log: JournalHistory, ring: int) -> list[tuple[bytes, int]]:
    """Return what is delivered with a ring of a given size."""
    sequencer, found = Sequencer(ring=ring), list[tuple[bytes, int]]()
    for message in log.messages:
        sequencer.queue_uncommitted(message)
        found += map(JournalHistory.name, dequeued(sequencer, log))
    return found


NEVER = Crash(-1, False, 0)
RINGS = 0, 1, 2, 3, 5, 1000


def check_rings(log: JournalHistory) -> None:
    """Assert that all ring sizes deliver the same as the model."""
    for ring in RINGS:
        assert read(log, ring) == log.delivered


def check_crashes(log: JournalHistory, events: list[Crash]) -> None:
    """Assert that despite crashes the same is delivered as by the model."""
    sequencer, kept, position = Sequencer(ring=3), Checkpoint({}, []), 0
    found: list[tuple[bytes, int]] = []
    sure = 0
    schedule = iter(events)
    steps, crash, ring = next(schedule, NEVER)
    crashed = False

    def step() -> None:
        nonlocal steps, crash, ring, kept, sure, crashed
        steps -= 1
        if steps != 0:
            return
        if crash:
            crashed = True
            return
        kept = sequencer.checkpoint()
        # The last message counts as unprocessed until the span is at its end.
        sure = len(found) - (1 if sequencer._delivered is not None else 0)
        steps, crash, ring = next(schedule, NEVER)

    while position < len(log.messages) or crashed:
        if crashed:
            crashed = False
            sequencer = Sequencer(kept.offsets, kept.states, ring=ring)
            del found[sure:]
            begin = kept.offsets.get("j", 0)
            position = sum(m.begin < begin for m in log.messages)
            steps, crash, ring = next(schedule, NEVER)
            continue
        sequencer.queue_uncommitted(log.messages[position])
        position += 1
        step()
        if crashed:
            continue
        for message in dequeued(sequencer, log):
            found.append(JournalHistory.name(message))
            step()
            if crashed:
                break
    assert found == log.delivered


@settings(deadline=None, max_examples=300)
@given(histories())
def test_ring_changes_nothing(log: JournalHistory) -> None:
    """With any ring size the model's messages come in the model's order."""
    check_rings(log)


@settings(deadline=None, max_examples=300)
@given(histories(), crashes())
def test_crash_changes_nothing(log: JournalHistory, events: list[Crash]) -> None:
    """This holds for any place, checkpoint, and size of the next ring."""
    check_crashes(log, events)


def thrown_history(dice: Random) -> JournalHistory:
    """Return a history drawn by dice; Hypothesis takes ten times as long to draw it."""
    acts = [ProducerAct.CONTINUE] * 4 + [*ProducerAct]
    return JournalHistory.of(
        [
            Publication(dice.choice(WRITERS), dice.choice(acts), dice.randint(1, 4))
            for _ in range(dice.randint(0, 40))
        ]
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@diced(400)
def test_ring_changes_nothing_at_length(dice: Random) -> None:
    """Ten thousand histories."""
    check_rings(thrown_history(dice))


@pytest.mark.slow
@pytest.mark.timeout(900)
@diced(400)
def test_crash_changes_nothing_at_length(dice: Random) -> None:
    """Ten thousand histories."""
    events = [
        Crash(dice.randint(1, 12), dice.random() < 0.5, dice.choice(RINGS))
        for _ in range(dice.randint(0, 12))
    ]
    check_crashes(thrown_history(dice), events)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from([A, B]), st.integers(0, 6), st.integers(0, 4)),
        max_size=30,
    ),
    st.sampled_from([0, 1, 2, 5]),
)
def test_no_log_is_too_bad(acts: list[tuple[bytes, int, int]], ring: int) -> None:
    """Whatever faulty producers write, nothing raises, and checkpoints can be taken."""
    log = JournalHistory([envelope(*act, at) for at, act in enumerate(acts)], [])
    sequencer = Sequencer(ring=ring)
    for message in log.messages:
        sequencer.queue_uncommitted(message)
        list(dequeued(sequencer, log))
        sequencer = Sequencer(*sequencer.checkpoint(), ring=ring)


# --- one by one --------------------------------------------------------------------


def queued(*messages: Envelope, ring: int = 8192) -> Sequencer:
    """Return a sequencer to which messages were queued, the last not yet dequeued."""
    sequencer = Sequencer(ring=ring)
    for message in messages:
        assert sequencer.deque_committed() is None
        sequencer.queue_uncommitted(message)
    return sequencer


def test_all_has_to_be_dequeued_before_the_next_is_queued() -> None:
    """Until then states can't be taken either, but a checkpoint can."""
    sequencer = queued(envelope(A, 1, 2, 0))
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="committed messages remain"):
            sequencer.queue_uncommitted(envelope(A, 2, 1, 1))
        with pytest.raises(LocalProtocolError, match="messages remain to dequeue"):
            sequencer.producer_states()
        assert sequencer.checkpoint() == ({}, [("j", A, 0, 0)])
        sequencer.deque_committed()
    # The last call returned None, so everything is dequeued.
    sequencer.queue_uncommitted(envelope(A, 2, 1, 1))
    assert sequencer.producer_states() == [("j", A, 1, 102)]
    assert sequencer.checkpoint().offsets == {"j": 202}


@given(st.binary(min_size=6, max_size=6), st.integers(1, (1 << 64) - 1))
def test_uuids_are_read_to_the_last_bit(producer: bytes, clock: int) -> None:
    """This holds for any producer and clock; the sequencer doesn't use ``clock_of``."""
    sequencer = queued(envelope(producer, clock, 0, 0))
    assert list(dequeued(sequencer, JournalHistory([], [])))
    assert sequencer.producer_states() == [("j", producer, clock, -1)]


def test_checkpoint_is_a_copy() -> None:
    """Later messages don't change it."""
    sequencer = queued(envelope(A, 1, 1, 0))
    before = sequencer.checkpoint()
    sequencer.queue_uncommitted(envelope(A, 2, 1, 1))
    assert before.offsets == {"j": 100}


@pytest.mark.parametrize("act", ["replay_range", "start"])
def test_replay_that_is_not_wanted_is_refused(act: str) -> None:
    """With nothing to dequeue, with a span held in the ring, or during a replay."""

    def replay(sequencer: Sequencer) -> None:
        with pytest.raises(LocalProtocolError, match="there is no replay to start"):
            sequencer.replay_range() if act != "start" else sequencer.start_replay([])

    replay(Sequencer())
    replay(queued(envelope(A, 1, 1, 0), envelope(A, 2, 2, 1)))
    sequencer = queued(envelope(A, 1, 1, 0), envelope(A, 2, 2, 1), ring=1)
    sequencer.start_replay([])
    replay(sequencer)


FEED = [envelope(B, 1, 1, 0), envelope(A, 2, 1, 1), envelope(A, 3, 2, 2)]


def moved(message: Envelope, **fields: Any) -> Envelope:  # noqa: ANN401
    """Return a message with some fields replaced."""
    return message._replace(**fields)


def failing(error: Exception) -> Iterator[Envelope]:
    """Raise an error where a message should be."""
    raise error
    yield


@pytest.mark.parametrize(
    ("feed", "error"),
    [
        (lambda: failing(EOFError("unexpected EOF")), "replay reader: unexpected EOF"),
        (
            lambda: [moved(FEED[1], journal="wrong/journal")],
            "replay of wrong journal (wrong/journal; expected j)",
        ),
        (
            lambda: [moved(FEED[1], begin=101)],
            "replay has wrong Begin (101; expected >= 102)",
        ),
        (
            lambda: [moved(FEED[1], end=302)],
            "replay has wrong End (302; expected <= 204)",
        ),
    ],
)
def test_replay_that_gives_something_else(feed: Any, error: str) -> None:  # noqa: ANN401
    """The errors have the real package's texts; another replay may be started."""
    sequencer = queued(*FEED, ring=0)
    for _ in range(2):
        with pytest.raises(MustStartReplay):
            sequencer.deque_committed()
        assert sequencer.replay_range() == ReplayRange("j", 102, 204)
        sequencer.start_replay(feed())
        with pytest.raises(ReplayFailed) as caught:
            sequencer.deque_committed()
        assert str(caught.value) == error
    sequencer.start_replay(FEED[1:2])
    assert sequencer.deque_committed() is FEED[1]
    assert sequencer.deque_committed() is FEED[2]
    assert sequencer.deque_committed() is None


def test_replay_may_end_where_the_ring_begins() -> None:
    """It may end exactly there; messages of other producers in between are skipped."""
    messages = [envelope(A, 1, 1, 0), envelope(B, 1, 1, 1), envelope(A, 2, 2, 2)]
    messages[1] = moved(messages[1], end=204)
    sequencer = queued(*messages, ring=1)
    sequencer.start_replay(messages[:2])
    assert sequencer.deque_committed() is messages[0]
    assert sequencer.deque_committed() is messages[2]


def test_replay_that_failed_midway_goes_on_from_there() -> None:
    """Messages that were already delivered are not delivered again."""
    messages = [envelope(A, n, 1, n) for n in (1, 2, 3)] + [envelope(A, 4, 2, 4)]

    def broken() -> Iterator[Envelope]:
        yield from messages[:2]
        raise OSError("gone")

    sequencer = queued(*messages, ring=1)
    sequencer.start_replay(broken())
    assert sequencer.deque_committed() is messages[0]
    assert sequencer.deque_committed() is messages[1]
    with pytest.raises(ReplayFailed, match=r"^replay reader: gone$"):
        sequencer.deque_committed()
    assert sequencer.replay_range() == ReplayRange("j", 204, 408)
    sequencer.start_replay(messages[1:3])
    assert [sequencer.deque_committed() for _ in range(3)] == [*messages[2:], None]


def test_replay_may_wait() -> None:
    """The caller tries the dequeue again after ``ReplayWaits``."""
    sequencer = queued(*FEED, ring=0)

    class Slow:
        waited = False

        def __iter__(self) -> Iterator[Envelope]:
            return self

        def __next__(self) -> Envelope:
            if not self.waited:
                self.waited = True
                raise ReplayWaits
            raise StopIteration

    sequencer.start_replay(Slow())
    with pytest.raises(ReplayWaits):
        sequencer.deque_committed()
    assert sequencer.deque_committed() is FEED[2]


def test_unknown_flags_are_logged_once_for_each_producer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The messages are handled as OUTSIDE_TXN."""
    sequencer = Sequencer()
    for at, (producer, flags) in enumerate([(A, 3), (A, 0x100), (B, 7), (A, 0)]):
        message = envelope(producer, at + 1, flags, at)
        assert sequencer.queue_uncommitted(message) is QueueOutcome.OUTSIDE_COMMIT
        assert sequencer.deque_committed() is message
        assert sequencer.deque_committed() is None
    assert caplog.messages == [
        "j: producer 01aaaaaaaa01 sent flags 0x3 at offset 0: handled as OUTSIDE_TXN",
        "j: producer 03bbbbbbbb02 sent flags 0x7 at offset 204: handled as OUTSIDE_TXN",
    ]


def test_deep_rollback_is_logged_as_what_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged as an error; an acknowledgement of the same clock is not."""
    sequencer = queued(envelope(A, 9, 2, 0))
    list(dequeued(sequencer, JournalHistory([], [])))
    sequencer.queue_uncommitted(envelope(A, 9, 2, 1))
    assert caplog.messages == []
    sequencer.queue_uncommitted(envelope(A, 5, 2, 2))
    assert caplog.messages == [
        (
            "j: loss of exactly-once semantics: producer 01aaaaaaaa01 acknowledged clock 5"
            " at offset 204, and 9 before"
        )
    ]
    assert caplog.records[0].levelno == logging.ERROR


def test_rollback_to_what_was_not_read_is_no_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """
    The segments before the span may have been dropped, with the last acknowledgement.

    Later rollbacks are judged by the one that was read (issue 24).
    """
    sequencer = queued(envelope(A, 9, 1, 0))
    outcome = sequencer.queue_uncommitted(envelope(A, 5, 2, 1))
    assert outcome is QueueOutcome.ACK_ROLLBACK
    assert (sequencer.has_pending(), caplog.messages) == (False, [])
    sequencer.queue_uncommitted(envelope(A, 10, 1, 2))
    assert sequencer.queue_uncommitted(envelope(A, 4, 2, 3)).name == "ACK_ROLLBACK"
    (text,) = caplog.messages
    assert "acknowledged clock 4 at offset 306, and 5 before" in text


def test_committed_message_within_a_span_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The span is dropped, and the message delivered."""
    sequencer = queued(envelope(A, 1, 1, 0), envelope(A, 2, 0, 1))
    assert caplog.messages == [
        (
            "j: producer 01aaaaaaaa01 committed a message at offset 102 within its open span:"
            " the span, from offset 0 on, is dropped"
        )
    ]
    found = sequencer.deque_committed()
    assert found is not None
    assert found.begin == 102
    assert sequencer.deque_committed() is None
    assert not sequencer.has_pending()


def test_message_behind_which_a_checkpoint_was_is_no_open_span(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If it is read again, the next message drops no span (issue 24)."""
    message = envelope(A, 1, 0, 0)
    before = queued(message)
    assert before.deque_committed() is not None
    before.finish_message()
    sequencer = Sequencer(*before.checkpoint())
    outcome = sequencer.queue_uncommitted(message)
    assert outcome is QueueOutcome.OUTSIDE_ALREADY_ACKED
    assert not sequencer.has_pending({})
    sequencer.queue_uncommitted(envelope(A, 2, 0, 1))
    assert caplog.messages == []


def test_messages_without_uuid_are_counted() -> None:
    """Each is delivered as often as it is there, and belongs to no producer."""
    sequencer = Sequencer(ring=2)
    message = Envelope("j", 0, 100, Opaque())
    for count in (1, 2, 3):
        assert sequencer.queue_uncommitted(message) is QueueOutcome.OUTSIDE_COMMIT
        assert sequencer.deque_committed() is message
        assert sequencer.deque_committed() is None
        assert sequencer.without_uuid == count
    assert sequencer.checkpoint() == ({"j": 100}, [])


def test_message_without_uuid_that_is_done_is_before_the_checkpoint() -> None:
    """No state of a producer would tell that it was read before (issue 24)."""
    before = Sequencer()
    before.queue_uncommitted(Envelope("j", 0, 100, Opaque()))
    assert before.deque_committed() is not None
    assert before.checkpoint() == ({}, [])
    before.finish_message()
    assert before.checkpoint() == ({"j": 100}, [])


def test_message_of_clock_0_leaves_what_is_acknowledged() -> None:
    """A replay delivers it twice, but not the duplicate of another message."""
    messages = [envelope(A, 6, 1, 0), envelope(A, 0, 1, 1), envelope(A, 6, 1, 2)]
    messages.append(envelope(A, 13, 2, 3))
    log = JournalHistory(messages, [])
    found = [clock for _, clock in read(log, 1)]
    assert found[1:] == [6, 0, 13]


def test_payloads_are_let_go() -> None:
    """They are freed once delivered, rolled back, or dropped from the ring."""
    import weakref

    class Payload(Opaque):
        __slots__ = ("__weakref__",)

    def payload(clock: int, flags: int, at: int, producer: bytes = A) -> Envelope:
        message = Payload()
        message.set_uuid(build_uuid(producer, clock, flags))
        alive.append(weakref.ref(message))
        return Envelope("j", at, at + 1, message)

    alive: list[Any] = []
    sequencer = Sequencer(ring=3)
    for n in range(4):
        sequencer.queue_uncommitted(payload(n + 1, 1, n))
    assert [one() is None for one in alive] == [True, False, False, False]
    sequencer.queue_uncommitted(payload(0, 0, 9, B))
    sequencer.deque_committed()
    sequencer.deque_committed()
    sequencer.queue_uncommitted(payload(5, 2, 10))
    sequencer.start_replay([])
    while sequencer.deque_committed() is not None:
        pass
    assert all(one() is None for one in alive)
    sequencer.queue_uncommitted(payload(6, 1, 11))
    sequencer.queue_uncommitted(payload(5, 2, 12))
    assert all(one() is None for one in alive)


def test_pending_since_offsets() -> None:
    """Only open spans that begin at an offset, or after it, count as pending."""
    sequencer = queued(envelope(A, 1, 1, 3), envelope(B, 1, 2, 4))
    list(dequeued(sequencer, JournalHistory([], [])))
    assert sequencer.has_pending({})
    assert sequencer.has_pending({"j": 306})
    assert not sequencer.has_pending({"j": 307})
    assert sequencer.has_pending({"other": 999})
    sequencer.checkpoint()
    assert not sequencer.has_pending()
    assert sequencer.has_pending({})
    sequencer.queue_uncommitted(envelope(A, 1, 2, 5))
    list(dequeued(sequencer, JournalHistory([envelope(A, 1, 1, 3)], [])))
    assert not sequencer.has_pending({})
    sequencer.queue_uncommitted(envelope(A, 2, 1, 6))
    assert sequencer.has_pending()


def test_producers_are_pruned_within_their_journal() -> None:
    """Their newest message's age counts, relative to the newest acknowledgement."""
    sequencer = Sequencer()
    for journal, producer, clock in (
        ("j", A, 16_000), ("j", B, 16_320), ("k", C, 10)
    ):  # fmt: skip
        sequencer.queue_uncommitted(envelope(producer, clock, 0, 0, journal=journal))
        list(dequeued(sequencer, JournalHistory([], [])))
    producers = {state.producer for state in sequencer.producer_states(2e-6)}
    assert producers == {A, B, C}
    assert len(sequencer.producer_states(0)) == 3
    producers = {state.producer for state in sequencer.producer_states(1.9e-6)}
    assert producers == {B, C}
    # A horizon beyond 1582 prunes nothing.
    assert len(sequencer.producer_states(86400)) == 2


def test_clock_that_is_ahead_makes_no_other_producer_old() -> None:
    """Else their open spans would be dropped (issue 24)."""
    sequencer, now = Sequencer(), 10**6 << 4
    sequencer.queue_uncommitted(envelope(A, 2 * now, Flags.OUTSIDE_TXN, 0))
    list(dequeued(sequencer, JournalHistory([], [])))
    sequencer.queue_uncommitted(envelope(B, now, Flags.CONTINUE_TXN, 1))
    known = {state.producer for state in sequencer.checkpoint(0.01, now).states}
    assert known == {A, B}
    known = {state.producer for state in sequencer.checkpoint(0.01).states}
    assert known == {A}


def test_open_span_of_a_forgotten_producer_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its messages would be missing without a trace (issue 24)."""
    sequencer = queued(
        envelope(A, 16_000, Flags.CONTINUE_TXN, 7), envelope(B, 64_000, 0, 8)
    )
    list(dequeued(sequencer, JournalHistory([], [])))
    sequencer.checkpoint(3.1e-4)
    assert not caplog.records
    assert [s.producer for s in sequencer.checkpoint(2.9e-4).states] == [B]
    assert caplog.messages[0].endswith(
        "01aaaaaaaa01 has been silent for longer than the horizon, by the messages'"
        " clocks: its open span, from offset 714 on, is dropped"
    )
    sequencer.checkpoint(2.9e-4)
    assert len(caplog.records) == 1


def test_no_producer_is_forgotten_unless_that_is_asked_for() -> None:
    """Without a horizon, states are kept however long a producer has been silent."""
    sequencer = Sequencer()
    for producer, clock in ((A, 16), (B, 10**12)):
        sequencer.queue_uncommitted(envelope(producer, clock, 0, 0))
        list(dequeued(sequencer, JournalHistory([], [])))
    assert len(sequencer.producer_states()) == 2
    assert len(sequencer.checkpoint().states) == 2


def test_producer_with_an_open_span_is_as_old_as_its_newest_message() -> None:
    """The age doesn't count from its last acknowledgement."""
    sequencer = queued(
        envelope(A, 16_000, 1, 0), envelope(A, 32_000, 1, 1), envelope(B, 32_000, 0, 2)
    )
    list(dequeued(sequencer, JournalHistory([], [])))
    assert len(sequencer.producer_states(1e-7)) == 2


def test_journals_are_apart() -> None:
    """A producer has separate spans in two journals."""
    one, two = envelope(A, 1, 1, 0), envelope(A, 1, 1, 0, journal="k")
    sequencer = queued(one, two, envelope(A, 2, 2, 1))
    assert [found.journal for found in dequeued(sequencer, JournalHistory([], []))] == [
        "j",
        "j",
    ]
    assert sequencer.producer_states() == [("j", A, 2, -1), ("k", A, 0, 0)]
