"""
One life of a record processor, on the supervisor's side: what may follow what.

``lines.py`` reads and writes lines, ``checkpoint.py`` judges checkpoints, and
``uncommitted.py`` holds the records without one. ``processor.py`` is the other side.

At most one action is in flight; the next one follows its status. A processor may ask
for checkpoints only while it works on an action. The status of an action ends no
exchange: each record is an exchange, and ends when a checkpoint that covers it has been
stored. Records that are open when a processor is lost must be given again, in order,
after the position that the next ``initialize`` names.

What must be kept in sync: ``owed`` and ``room`` are plain attributes, since they are
read at every turn; :meth:`KclSession._settle` updates them at the end of each call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from etlstage.errors import (
    LocalProtocolError,
    PayloadTooBig,
    ProtocolError,
    RemoteProtocolError,
)
from etlstage.messages import Run, Singles, counted
from etlstage.protocol.base import SEND_EOF, IdentityEnum, Side
from etlstage.protocol.events import (
    Alive,
    Assignment,
    CommitAnswered,
    CommitAsked,
    Ended,
    Event,
    Failed,
    Farewell,
    FarewellReason,
    Noise,
    Opened,
    Ready,
)
from etlstage.protocol.kcl.checkpoint import (
    INVALID_STATE,
    SHARD_END,
    SHUTDOWN,
    ShardPosition,
    Standing,
    error_name,
    judge,
    position_of,
)
from etlstage.protocol.kcl.lines import (
    ROWS,
    Ask,
    Lines,
    StatusReply,
    Version,
    answer_line,
    initialize_line,
    read_reply,
    records_line,
    requested_line,
)
from etlstage.protocol.kcl.uncommitted import Uncommitted

__all__ = ("MOST_ASKED", "KclSession", "State")

MOST_ASKED: Final = 1_000
"""Checkpoints that may await answers; threads of a processor may ask concurrently."""


class State(IdentityEnum):
    """The action that a processor is working on."""

    INITIALIZING = "initialize"
    """It is given its shard."""
    READY = "nothing"
    """It waits for an action."""
    PROCESSING = "processRecords"
    """It has records."""
    REQUESTED = "shutdownRequested"
    """It will be shut down, and may checkpoint once more."""
    ENDING = "shardEnded"
    """The shard has no more records; the processor must checkpoint the end."""
    LOSING = "leaseLost"
    """The shard no longer belongs to it."""
    ENDED = "its exit"
    """It must exit."""
    ERROR = "error"
    """It broke the protocol, or closed stdout."""


_RANK: Final = {why: rank for rank, why in enumerate(FarewellReason)}
_CHECKPOINTS: Final[Mapping[State, bool]] = {
    State.INITIALIZING: False,
    State.PROCESSING: True,
    State.REQUESTED: True,
    State.ENDING: True,
    State.LOSING: False,
}
"""Actions, and whether a processor may checkpoint in them."""


class KclSession:
    """
    A processor of one shard, without I/O.

    Args:
        assignment: The shard, and the position committed in it.
        version: The version of the protocol.
        batch: Maximal number of records in an action.
        max_line: Maximal length of a line of the processor, in bytes.
        max_uncommitted: Maximal number of records that no checkpoint covers.
        max_uncommitted_bytes: Bytes of such records at which no more are given.
        empty_after: Seconds without records after which an empty list is given; None:
            never.
        commit_overdue: Seconds after which a processor that has reached
            ``max_uncommitted`` (or its bytes) has failed; None: never.
        answer: Seconds after which a processor that has not answered an empty list has
            failed; None: never.

    """

    side: Final = Side.SUPERVISOR
    in_order: Final = True
    unprompted: Final = True
    sends_farewell: Final = True

    def __init__(
        self,
        assignment: Assignment,
        version: Version = Version.V2,
        *,
        batch: int = 10_000,
        max_line: int = 64 * 1024 * 1024,
        max_uncommitted: int = 100_000,
        max_uncommitted_bytes: int = 256 * 1024 * 1024,
        empty_after: float | None = None,
        commit_overdue: float | None = None,
        answer: float | None = None,
    ) -> None:
        self.shard: str = assignment.name
        self.state: State = State.INITIALIZING
        self._row = ROWS[version]
        self._batch = batch
        self._most = max_uncommitted
        self._most_bytes = max_uncommitted_bytes
        self._empty_after = empty_after
        self._overdue_after = commit_overdue
        self._answer_after = answer
        self._has_timers = (empty_after, commit_overdue, answer) != (None, None, None)
        self._lines = Lines(max_line)
        self._open = Uncommitted(self.shard, position_of(assignment.position))
        self._asks: deque[Ask] = deque()
        self._position: ShardPosition | None = None  # the one being stored
        self._refused: str | None = None  # error in the last answer to a checkpoint
        self._reason: FarewellReason | None = None
        self._requested = False
        self._given = 0  # records of the action given last
        self._idle_since: float | None = None
        self._full_since: float | None = None
        self._empty_since: float | None = None  # since when an empty list is unanswered
        self._events: list[Event] = []
        self._noise: list[bytes] = []
        self._out: list[bytes] = [
            initialize_line(self._row, self.shard, self._open.stored)
        ]
        self.owed: int = 0
        """Number of records in the action in flight."""
        self.uncommitted: int = 0
        """Number of open exchanges: records that no stored checkpoint covers."""
        self.room: float = 0
        """Records that may be given now, as one action."""

    def __repr__(self) -> str:
        open_ = self.uncommitted
        return f"<KclSession {self.shard!r} {self.state.name} uncommitted={open_}>"

    @property
    def stored(self) -> ShardPosition:
        """The committed position."""
        return self._open.stored

    @property
    def defers_farewell(self) -> bool:
        """Whether the processor has records, or an empty list, to work on first."""
        # If its lease is lost, nothing that it still does can be stored.
        lost = self._reason is FarewellReason.LOST
        return self.state is State.PROCESSING and not lost

    # --- receiving ------------------------------------------------------------

    def receive_data(self, data: bytes, now: float, /) -> None:
        if self.state is State.ERROR:
            return
        try:
            self._take(self._lines.feed(data), now)
        except PayloadTooBig as error:
            self._fail(error)
        self._settle(now)

    def reading_paused(self, now: float, /) -> None:
        """Do nothing: there are no heartbeats."""

    def receive_eof(self, now: float, /) -> None:
        """Take the end of its stdout; its exit will show whether that is a failure."""
        if self.state is State.ERROR:
            return
        # A last line without an end counts, as it does for daemons.
        self._take(self._lines.rest(), now)
        if self.state is State.READY:
            self._close(
                "closed stdout between two actions, expected it to wait for the next"
            )
        elif self.state in _CHECKPOINTS:
            self._close(f"closed stdout, expected its status for {self._action}")
        self._settle(now)

    def peer_exited(self, clean: bool, now: float) -> None:
        """Do nothing: records without a checkpoint stay open, however it exited."""

    def events_received(self) -> list[Event]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _take(self, lines: list[bytes], now: float) -> None:
        for line in lines:
            reply = None if self.state is State.ENDED else read_reply(line)
            if reply is None:
                self._noise.append(line)
                continue
            self._flush()
            if isinstance(reply, StatusReply):
                self._take_status(reply.action, now)
            else:
                self._take_ask(reply)
            if self.state is State.ERROR:
                return

    def _flush(self) -> None:
        """Pass on the noise that came before the next event."""
        if self._noise:
            self._events.append(Noise(b"\n".join(self._noise)))
            self._noise = []

    @property
    def _action(self) -> str:
        """Name of the action in flight, in this version."""
        if self.state is State.ENDING:
            return self._row.ended[0]
        return self._row.lost[0] if self.state is State.LOSING else self.state.value

    def _take_status(self, action: str | None, now: float) -> None:
        wanted = self._action
        if self.state is State.READY:
            self._wrong(
                f"sent a status for {action} with no action in flight, expected one for"
                " each action; is a callback called twice?"
            )
        elif action is None:
            self._wrong(
                f"sent a status that names no action, expected responseFor {wanted}"
            )
        elif action != wanted:
            self._wrong(f"sent a status for {action}, expected one for {wanted}")
        elif self._asks:
            self._wrong(
                f"sent its status for {action} before it had the answer to a"
                " checkpoint, expected it to read that first"
            )
        else:
            self._finish(now)

    def _finish(self, now: float) -> None:
        """Continue after an action that is done."""
        done, self.state = self.state, State.READY
        self._idle_since = now
        match done:
            case State.INITIALIZING:
                self._events.append(Ready(self.shard))
            case State.ENDING if self._open.stored.sequence != SHARD_END:
                # Without the lease it could not store the end: leaseLost is next.
                if self._reason is not FarewellReason.LOST:
                    self._wrong(self._unended())
            case State.ENDING | State.LOSING:
                self._leave()
            case _:
                self._requested |= done is State.REQUESTED
                self._events.append(Alive())
        self._part()

    def _unended(self) -> str:
        text = (
            f"answered {self._row.ended[0]} without a checkpoint, expected one without"
            " a sequence number"
        )
        if self._refused is not None:
            return f"{text}, tried again after {self._refused}"
        if self._open.stored == self._open.largest:
            # Daemons take it for done: they store nothing, and start no child shards.
            text += "; that of the last record was stored before, and does not count"
        return text

    def _take_ask(self, ask: Ask) -> None:
        if self.state is State.READY:
            self._wrong(
                "asked for a checkpoint with no action in flight, expected it between"
                " an action and its status"
            )
            return
        if len(self._asks) == MOST_ASKED:
            self._wrong(
                f"asked for {MOST_ASKED + 1} checkpoints without waiting for an"
                " answer, expected it to wait for each"
            )
            return
        self._asks.append(
            ask if ask.member else ask._replace(member=self._row.position)
        )
        if len(self._asks) == 1:
            self._consider()

    def _consider(self) -> None:
        """Answer waiting checkpoints, up to the first that has to be stored."""
        while self._asks and self._position is None:
            ask = self._asks[0]
            error = self._forbidden()
            position = None
            if error is None:
                # Values of a wrong type are refused like a wrong number.
                sequence, sub = ask.sequence, ask.sub
                if not ask.legal:
                    sequence, sub = "", 0
                position, error = judge(sequence, sub, self._standing())
            if position is None:
                self._answer(error)
            else:
                self._position = position
                ended = position.sequence == SHARD_END
                self._events.append(CommitAsked(self._open.last, position, ended))

    def _standing(self) -> Standing:
        ended = self.state is State.ENDING
        return Standing(self._open.stored, self._open.largest, ended)

    def _forbidden(self) -> str | None:
        """Return why nothing can be stored now, as an exception's name, or None."""
        if not _CHECKPOINTS[self.state]:
            lost = self.state is State.LOSING and self._row.checkpointer
            return SHUTDOWN if lost else INVALID_STATE
        return SHUTDOWN if self._reason is FarewellReason.LOST else None

    def _answer(self, error: str | None) -> None:
        self._refused = error
        self._out.append(answer_line(self._asks.popleft(), error))

    # --- sending --------------------------------------------------------------

    def send(self, event: Event, now: float) -> None:
        """
        Queue an event for the processor.

        Raises:
            InvalidMessage: If a record has no number that rises, or no key.
            LocalProtocolError: If the event may not be sent now, or not at all.

        """
        match event:
            case CommitAnswered(position, error):
                self._committed(position, error)
            case Farewell(why=why):
                self._send_farewell(why)
            case Opened(first, messages, each=True, ended=True) if (
                self.state is State.READY and len(messages) <= self.room
            ):
                self._give(first, messages)
            case _:
                raise LocalProtocolError(
                    f"can't send {type(event).__name__} in state {self.state.name}"
                    f" with room for {self.room:.0f}"
                )
        self._settle(now)

    def _give(self, first: int, messages: Run) -> None:
        ranks = self._open.ranks(messages)
        covered = self._open.covers(ranks)
        if covered:
            # After a restart in the middle of records that were put as one.
            self._end(first, covered)
            first, messages, ranks = (
                first + covered,
                messages[covered:],
                ranks[covered:],
            )
            if not ranks:
                return
        self._out.append(records_line(self._row, messages, ranks))
        self._open.give(first, messages, ranks)
        self._given = len(ranks)
        self.state = State.PROCESSING

    def _committed(self, position: object, error: str | None) -> None:
        if self._position is None or position_of(position) != self._position:
            raise LocalProtocolError(
                f"can't answer a checkpoint at {position}, expected {self._position}"
            )
        stored, self._position = self._position, None
        if error is None:
            first, count = self._open.commit(stored)
            if count:
                self._flush()
                self._end(first, count)
        # The position is stored even if the processor is gone.
        if self.state is not State.ERROR:
            self._answer(None if error is None else error_name(error))
            self._consider()

    def _end(self, first: int, count: int) -> None:
        self._events.append(Ended(first, Singles([], range(count))))

    def _send_farewell(self, why: FarewellReason) -> None:
        if self._reason is None or _RANK[why] > _RANK[self._reason]:
            self._reason = why
        if self.state is State.INITIALIZING and why is not FarewellReason.ENDED:
            # Like daemons, end a processor that is not initialized without an action.
            # But a shard without records has to end like others.
            self._leave()
        self._part()

    def _part(self) -> None:
        """Take the next step of a farewell, if nothing is in flight."""
        if self.state is not State.READY or self._reason is None:
            return
        request = requested_line(self._row, self._open.largest)
        if self._reason is FarewellReason.ENDED:
            self.state = State.ENDING
            self._out.append(self._row.ended[1])
        elif self._reason is FarewellReason.DRAIN and request and not self._requested:
            self.state = State.REQUESTED
            self._out.append(request)
        else:
            self.state = State.LOSING
            self._out.append(self._row.lost[1])

    def _leave(self) -> None:
        self.state = State.ENDED
        self._out.append(SEND_EOF)

    def data_to_send(self) -> list[bytes]:
        out, self._out = self._out, []
        return out

    # --- time -----------------------------------------------------------------

    def get_timer(self) -> float | None:
        if not self._has_timers:
            return None
        due = (self._empty_due(), self._overdue(), self._unanswered())
        return min((time for time in due if time is not None), default=None)

    def handle_timer(self, now: float) -> None:
        """Give an empty list, or fail the processor, if the time has come."""
        overdue, empty = self._overdue(), self._empty_due()
        if overdue is not None and now >= overdue:
            error = RemoteProtocolError(
                f"shard {self.shard}: {counted(self.uncommitted, 'record')}"
                f" ({counted(self._open.size, 'byte')}) without a checkpoint"
                f" {self._overdue_after:g} s (commit_overdue) after"
                " max_uncommitted or max_uncommitted_bytes was reached, expected"
                " one; does the processor checkpoint?"
            )
            # The next processor would be given the same records, and so on for ever.
            self._end_life(Failed(error, final=True))
        elif empty is not None and now >= empty:
            self._give(self._open.last + 1, [])
        elif (unanswered := self._unanswered()) is not None and now >= unanswered:
            self._wrong(
                f"did not answer an empty list within {self._answer_after:g} s"
                " (timeout.message)"
            )
        self._settle(now)

    def _empty_due(self) -> float | None:
        if self._empty_after is None or self._idle_since is None:
            return None
        idle = self.state is State.READY
        return self._idle_since + self._empty_after if idle else None

    def _overdue(self) -> float | None:
        if self._overdue_after is None or self._full_since is None:
            return None
        return self._full_since + self._overdue_after

    def _unanswered(self) -> float | None:
        if self._answer_after is None or self._empty_since is None:
            return None
        return self._empty_since + self._answer_after

    # --- internals ------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Update the attributes that are read at every turn."""
        self.uncommitted = self._open.count
        if self.state is not State.ERROR:
            self.owed = self._in_flight
        free = (
            self._most - self.uncommitted if self._open.size < self._most_bytes else 0
        )
        ready = self.state is State.READY
        self.room = max(0, min(self._batch, free)) if ready else 0
        # The time that we take to store a position does not count, here and below.
        if self.state is not State.PROCESSING or self._given or self._asks:
            self._empty_since = None
        elif self._empty_since is None:
            self._empty_since = now
        if free > 0 or self._asks or not self._may_ask:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now

    @property
    def _may_ask(self) -> bool:
        """Whether the processor may still ask for a checkpoint, now or later."""
        over = self.state in (State.LOSING, State.ENDED, State.ERROR)
        return not over and self._reason is not FarewellReason.LOST

    @property
    def _in_flight(self) -> int:
        return self._given if self.state is State.PROCESSING else 0

    def _close(self, text: str) -> None:
        self._end_life(Farewell(reason=f"shard {self.shard}: the processor {text}"))

    def _wrong(self, text: str) -> None:
        self._fail(RemoteProtocolError(f"shard {self.shard}: the processor {text}"))

    def _fail(self, error: ProtocolError) -> None:
        self._end_life(Failed(error))

    def _end_life(self, event: Event) -> None:
        self._flush()
        self.owed = self._in_flight  # the records in flight may be at fault
        self.state = State.ERROR
        self._asks.clear()
        self._out.clear()
        self._events.append(event)
