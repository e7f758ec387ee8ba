"""
A supervisor and a worker that talk in any order, over slow wires.

Both write at any time, and read what has arrived, cut anywhere. Each exchange must
reach the worker complete and in order, and its reply the supervisor. Each output begins
with the number of the exchange that it belongs to.
"""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from etlstage.protocol.base import SEND_EOF, Side
from etlstage.protocol.events import Added, Event, Farewell, Opened
from etlstage.protocol.marker import MarkerProtocol, Markers, MarkerState, Mode
from etlstage.testing.pair import Atom, atoms
from etlstage.testing.strategies import MARKER_SETS, messages
from tests.protocol.pair import S, W
from tests.protocol.strategies import reasons
from tests.protocol.words import (
    Answers,
    BatchEnd,
    Eof,
    Messages,
    More,
    Output,
    Reasons,
    Word,
    begin,
    event_of,
    note,
    words_of,
)

Exchanges = list[list[bytes]]

COUNT: Final = st.integers(1, 3)
READ: Final = st.integers(0, 3) | st.integers(0, 40)


class Wire:
    """Bytes in transit to one end."""

    def __init__(self, end: MarkerProtocol) -> None:
        self.end = end
        self.data = b""
        self.closed = False

    def push(self, chunks: list[bytes]) -> None:
        """Accept what the other end has to write."""
        for chunk in chunks:
            assert not self.closed
            self.closed = chunk == SEND_EOF
            self.data += chunk

    def arrive(self, count: int) -> list[Event]:
        """Deliver some bytes, and the end of the stream after the last of them."""
        chunk, self.data = self.data[:count], self.data[count:]
        self.end.receive_data(chunk)
        if self.closed and not self.data:
            self.closed = False
            self.end.receive_eof()
        events = self.end.events_received()
        words_of(self.end, events)  # counts them, too
        return events


class Talk(RuleBasedStateMachine):
    """One session of one mode; subclasses name the mode."""

    mode: Mode

    # --- the two ends -------------------------------------------------------

    @initialize(
        markers=st.sampled_from(MARKER_SETS),
        echo=st.booleans(),
        answered=st.booleans(),
        literal=st.booleans(),
        size=COUNT,
    )
    def begin(
        self, markers: Markers, echo: bool, answered: bool, literal: bool, size: int
    ) -> None:
        """Start; ``size`` and ``literal`` set how a worker fills its batches."""
        self.markers = markers
        self.s, self.w = (
            MarkerProtocol(
                side, self.mode, markers, eob_then_eom=echo, bnc_after_eob=answered
            )
            for side in (S, W)
        )
        begin(self.s)
        self.to_s, self.to_w = Wire(self.s), Wire(self.w)
        self.size, self.literal = size, literal
        self.sent: dict[Side, list[Atom]] = {S: [], W: []}
        self.seen: dict[Side, list[Atom]] = {S: [], W: []}
        # What the supervisor asked; what the worker was asked, and has answered.
        self.asked: Exchanges = []
        self.open_at_s = False
        self.taken: Exchanges = []
        self.filling: list[bytes] = []
        self.answered = 0
        self.ended = False

    def tell(self, side: Side, word: Word) -> None:
        """Send an event, and put its bytes on the wire."""
        end, wire = (self.s, self.to_w) if side is S else (self.w, self.to_s)
        event = event_of(end, word)
        end.send(event)
        note(end, event)
        if side is S or not isinstance(event, Farewell):
            self.sent[side] += atoms(side, [event])
        wire.push(end.data_to_send())

    def outputs(self, data: st.DataObject, number: int, most: int) -> list[bytes]:
        """Draw outputs of one exchange."""
        prefix = b"%d|" % number
        drawn = data.draw(st.lists(messages(self.markers), max_size=most))
        return [prefix + message for message in drawn]

    @property
    def one_to_one(self) -> bool:
        """Whether a reply is one message."""
        return self.markers.eop == self.markers.eom

    @property
    def full(self) -> bool:
        """Whether the supervisor knows that the worker's batch is full."""
        literal = self.mode is Mode.BATCH_WORKER and self.literal
        return literal and self.open_at_s and len(self.asked[-1]) == self.size

    # --- what the supervisor does -------------------------------------------

    @precondition(lambda self: self.s.state in self.may_ask and not self.ended)
    @rule(data=st.data(), count=COUNT)
    def ask(self, data: st.DataObject, count: int) -> None:
        """Send messages."""
        if self.full:
            return
        count = 1 if self.mode is Mode.BATCH_WORKER else count
        run = data.draw(
            st.lists(messages(self.markers), min_size=count, max_size=count)
        )
        self.tell(S, Messages(run))
        if not self.mode.batches:
            self.asked += [[message] for message in run]
        elif self.open_at_s:
            self.asked[-1] += run
        else:
            self.asked.append(run)
            self.open_at_s = True

    @precondition(lambda self: self.mode.batches and self.s.state in self.may_ask)
    @precondition(lambda self: not self.ended)
    @rule()
    def close(self) -> None:
        """Close the batch; an empty one, if none is open."""
        if not self.full:
            self.tell(S, BatchEnd())
            if not self.open_at_s:
                self.asked.append([])
            self.open_at_s = False

    @precondition(lambda self: not self.ended and not self.open_at_s)
    @rule(sure=st.integers(0, 9))
    def end(self, sure: int) -> None:
        """End the input, now and then, though replies may be owed or in transit."""
        if not sure:
            self.tell(S, Eof())
            self.ended = True

    # --- what the worker does -----------------------------------------------

    @property
    def may_answer(self) -> bool:
        """Whether it is the worker's turn to write a part of a reply."""
        if self.w.state is MarkerState.WANTED:
            return self.literal and len(self.filling) == self.size
        return self.w.state not in (MarkerState.IDLE, MarkerState.ERROR)

    @precondition(lambda self: self.may_answer)
    @rule(data=st.data())
    def output(self, data: st.DataObject) -> None:
        """Write a part of the oldest reply that is owed."""
        if self.mode is Mode.PLAIN or not self.one_to_one:
            self.tell(W, Output(self.outputs(data, self.answered, 3)))

    @precondition(lambda self: self.may_answer and self.w.owed)
    @rule(data=st.data(), count=COUNT)
    def answer(self, data: st.DataObject, count: int) -> None:
        """Complete replies, oldest first, and reject some messages."""
        groups: list[tuple[bytes, ...]] = []
        refusals = []
        for number in range(self.answered, self.answered + min(count, self.w.owed)):
            if self.markers.err and not data.draw(st.integers(0, 3)):
                reason = data.draw(reasons(self.markers))
                refusals.append((len(groups), f"{number}|{reason}"))
                groups.append(())
                continue
            group = self.outputs(data, number, 2)
            if self.one_to_one:
                group = (group or [b"%d|" % number])[:1]
            groups.append(tuple(group))
        if refusals[:1] and not refusals[0][0]:
            self.take_back()
        self.complete(groups, refusals)

    def complete(self, groups: list[tuple[bytes, ...]], refusals: Reasons = ()) -> None:
        """Write complete replies; this closes a batch that the worker fills."""
        if self.mode is Mode.BATCH_WORKER and self.filling:
            self.taken.append(self.filling)
            self.filling = []
        self.tell(W, Answers(groups, 0, refusals))
        self.answered += len(groups)

    def take_back(self) -> None:
        """Discard the outputs that were written for the oldest exchange."""
        while self.mode is not Mode.CYCLIC and self.sent[W][-1:]:
            if self.sent[W][-1][0] != "output":
                break
            self.sent[W].pop()

    @precondition(lambda self: self.mode is Mode.BATCH_WORKER)
    @precondition(lambda self: self.w.state is MarkerState.FILLING)
    @rule()
    def want(self) -> None:
        """Ask for one more message."""
        if len(self.filling) < self.size or self.literal:
            self.tell(W, More())

    # --- what the wires do --------------------------------------------------

    @rule(to_worker=READ, to_supervisor=READ)
    def reach(self, to_worker: int, to_supervisor: int) -> None:
        """Deliver some bytes to both ends."""
        self.reach_worker(to_worker)
        self.reach_supervisor(to_supervisor)

    def reach_worker(self, count: int) -> None:
        """Deliver bytes to the worker."""
        for event in self.to_w.arrive(count):
            self.seen[W] += atoms(S, [event])
            match event:
                case Opened(_, run, each=True):
                    self.taken += [[message] for message in run]
                case Opened(_, run, _, ended) | Added(_, run, ended):
                    self.filling += run
                    if ended:
                        self.taken.append(self.filling)
                        self.filling = []
                case _:
                    assert isinstance(event, Farewell)

    def reach_supervisor(self, count: int) -> None:
        """Deliver bytes to the supervisor."""
        for atom in atoms(W, self.to_s.arrive(count)):
            self.seen[S].append(atom)
            if atom[0] in ("answered", "refused") and self.mode is Mode.BATCH_WORKER:
                self.open_at_s = False

    # --- what must hold -----------------------------------------------------

    @precondition(lambda self: hasattr(self, "s"))
    @invariant()
    def nothing_is_lost_doubled_or_moved(self) -> None:
        """What one end has seen is a prefix of what the other has sent."""
        for side, other in ((S, W), (W, S)):
            assert self.seen[side] == self.sent[other][: len(self.seen[side])]

    @precondition(lambda self: hasattr(self, "s"))
    @invariant()
    def replies_find_their_exchange(self) -> None:
        """The k-th EOP ends the outputs of the k-th exchange."""
        number = 0
        for kind, id_, message in self.seen[S]:
            if self.mode is not Mode.PLAIN:
                assert id_ == number + 1
            if kind in ("output", "refused"):
                assert message.startswith(b"%d|" % number)
            number += kind in ("answered", "refused")
        assert self.taken == self.asked[: len(self.taken)]

    @precondition(lambda self: hasattr(self, "s"))
    @invariant()
    def ends_agree_when_nothing_is_on_its_way(self) -> None:
        """Both follow the same state table."""
        if not self.to_s.data and not self.to_w.data:
            assert self.s.state is self.w.state
            assert self.s.owed == self.w.owed

    # --- and in the end -----------------------------------------------------

    def settle(self) -> None:
        """Deliver everything."""
        self.reach(1_000_000, 1_000_000)

    def teardown(self) -> None:
        """Close what is open, answer what is owed, and compare everything."""
        if not hasattr(self, "s"):
            return
        self.settle()
        while self.w.owed or self.filling:
            if self.may_answer and self.w.owed:
                count = 1 if self.one_to_one else 0
                self.complete([(b"%d|" % self.answered,) * count])
            else:
                self.close()
            self.settle()
        for side in (W,) if self.ended else (W, S):
            self.tell(side, Eof())
        self.settle()
        assert self.seen == {S: self.sent[W], W: self.sent[S]}
        assert self.taken == self.asked
        replies = sum(kind in ("answered", "refused") for kind, *_ in self.seen[S])
        assert replies == len(self.asked)

    @property
    def may_ask(self) -> tuple[MarkerState, ...]:
        """The states in which the supervisor may send a message or EOB."""
        if self.mode is Mode.PLAIN:
            return ()
        if self.mode is Mode.BATCH_WORKER:
            return (MarkerState.IDLE, MarkerState.WANTED)
        return (
            MarkerState.IDLE,
            MarkerState.BUSY,
            MarkerState.FILLING,
            MarkerState.AHEAD,
        )


@pytest.mark.no_cover  # smaller tests cover everything in a third of the time
@pytest.mark.parametrize("mode", list(Mode))
def test_ends_understand_each_other_whatever_they_send(mode: Mode) -> None:
    """In every mode, with every set of markers, however the bytes are cut."""
    machine = type("Talk", (Talk,), {"mode": mode})
    run_state_machine_as_test(
        machine,
        settings=settings(deadline=None, max_examples=80, stateful_step_count=50),
    )
