"""
One life of a record processor, on its own side: for the SDK, tests and checks.

The version is detected from what arrives: ``initialize`` with or without a sequence
number, ``shutdown`` with a reason or the actions that replaced it. Answers are in the
same version. ``session.py`` is the supervisor's side.
"""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from etlstage.errors import (
    LocalProtocolError,
    PayloadTooBig,
    ProtocolError,
    RemoteProtocolError,
)
from etlstage.messages import AnnotatedRun
from etlstage.protocol.base import Side
from etlstage.protocol.events import (
    Added,
    Assignment,
    CommitAnswered,
    CommitAsked,
    Event,
    Failed,
    Farewell,
    FarewellReason,
    Opened,
    Ready,
)
from etlstage.protocol.kcl.checkpoint import ShardPosition, position_of
from etlstage.protocol.kcl.lines import (
    Lines,
    RecordColumn,
    ask_line,
    read_object,
    status_line,
    text_of,
    whole_of,
)

__all__ = ("ProcessorSession", "Turn")

_ENDS: Final = {
    ("leaseLost", None): FarewellReason.LOST,
    ("shardEnded", None): FarewellReason.ENDED,
    ("shutdownRequested", None): FarewellReason.DRAIN,
    ("shutdown", "ZOMBIE"): FarewellReason.LOST,
    ("shutdown", "TERMINATE"): FarewellReason.ENDED,
}
"""Actions that end a life, with the value of ``reason``, if they have one."""


class Turn(Enum):
    """The side whose line comes next."""

    THEIRS = "an action"
    """The supervisor's: the next action is awaited."""
    OURS = "a status"
    """The processor's: it is working on an action."""
    ANSWER = "the answer to a checkpoint"
    """The supervisor's: the processor has asked for a checkpoint."""
    OVER = "the end of input"
    """Neither side's: the life has ended."""
    ERROR = "nothing"
    """Neither side's: the supervisor broke the protocol."""


class ProcessorSession:
    """
    The life of a processor, without I/O.

    It receives :class:`~etlstage.protocol.events.Ready` when it must initialize, with
    :attr:`assignment` set; ``Opened`` with records; and ``Farewell``. It answers each
    of them with ``Ready``, ``Added`` with ``ended``, or ``Farewell``. Before that, it
    may ask for checkpoints, one at a time.

    Args:
        max_line: Maximal length of a line of the supervisor, in bytes.

    """

    side: Final = Side.WORKER
    in_order: Final = True
    unprompted: Final = False
    sends_farewell: Final = False
    defers_farewell: Final = False
    room: Final = 0.0

    def __init__(self, max_line: int = 2**31) -> None:
        self.turn: Turn = Turn.THEIRS
        self.assignment: Assignment | None = None
        """The shard, and the position to resume from; None: not known yet."""
        self._lines = Lines(max_line)
        self._member = "sequenceNumber"
        self._action = ""  # in flight
        self._farewell: FarewellReason | None = None  # of the farewell in flight
        self._shard_ended = False  # the end of the shard was answered
        self._given = 0  # records
        self._asked: object = None
        self._events: list[Event] = []
        self._out: list[bytes] = []

    def __repr__(self) -> str:
        return f"<ProcessorSession {self.turn.name} action={self._action!r}>"

    @property
    def owed(self) -> int:
        """How many actions we have not answered."""
        return int(self.turn in (Turn.OURS, Turn.ANSWER))

    # --- receiving ------------------------------------------------------------

    def receive_data(self, data: bytes, now: float, /) -> None:
        try:
            for line in self._lines.feed(data):
                if self.turn is Turn.ERROR:
                    return
                self._take(line)
        except PayloadTooBig as error:
            self._fail(error)

    def reading_paused(self, now: float, /) -> None:
        """Do nothing: there are no heartbeats."""

    def receive_eof(self, now: float, /) -> None:
        """Take the end of stdin: the life is over, unless an answer is awaited."""
        if self.turn is Turn.ANSWER:
            self._wrong("stdin ended, expected the answer to a checkpoint")
        elif self.turn is not Turn.ERROR:
            self.turn = Turn.OVER

    def peer_exited(self, clean: bool, now: float) -> None:
        """Do nothing: a supervisor that is gone sends no answer."""

    def events_received(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _take(self, line: bytes) -> None:
        fields = read_object(line)
        if fields is None:
            self._wrong(f"a line of {len(line)} bytes is not a JSON object")
            return
        action = text_of(fields.get("action"))
        if self.turn is Turn.ANSWER and action == "checkpoint":
            self.turn = Turn.OURS
            self._events.append(
                CommitAnswered(self._asked, text_of(fields.get("error")))
            )
        elif self.turn is not Turn.THEIRS:
            self._wrong(f"received action {action}, expected {self.turn.value}")
        elif (action == "initialize") != (self.assignment is None):
            wanted = "initialize once, before all else"
            self._wrong(f"received action {action}, expected {wanted}")
        else:
            self._begin(action, fields)

    def _begin(self, action: str | None, fields: dict[str, Any]) -> None:
        try:
            event = self._understood(action, fields)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            self._wrong(f"action {action} is malformed: {error!r}")
            return
        if event is None:
            self._wrong(f"action {action} is not known")
            return
        if self._shard_ended and event != Farewell(why=FarewellReason.LOST):
            wanted = "the end of input, or that the lease is lost"
            self._wrong(f"received action {action}, expected {wanted}")
            return
        self._action, self.turn = str(action), Turn.OURS
        self._events.append(event)

    def _understood(self, action: str | None, fields: dict[str, Any]) -> Event | None:
        if action == "initialize":
            if "sequenceNumber" not in fields:
                self._member = "checkpoint"
            number = text_of(fields.get("sequenceNumber"))
            sub = whole_of(fields.get("subSequenceNumber")) or 0
            position = None if number is None else position_of([number, sub])
            self.assignment = Assignment(text_of(fields["shardId"]) or "", position)
            return Ready(self.assignment.name)
        if action == "processRecords":
            return self._opened(fields)
        end = _ENDS.get((action or "", text_of(fields.get("reason"))))
        if end is None:
            return None
        self._farewell = end
        return Farewell(why=end)

    def _opened(self, fields: dict[str, Any]) -> Event:
        records = fields["records"]
        behind = whole_of(fields.get("millisBehindLatest"))
        columns: dict[str, Sequence[Any]] = {
            RecordColumn.SEQUENCE: [
                str(record["sequenceNumber"]) for record in records
            ],
            RecordColumn.SUB: [
                whole_of(record.get("subSequenceNumber")) for record in records
            ],
            RecordColumn.PARTITION: [record["partitionKey"] for record in records],
            RecordColumn.ARRIVAL: [
                whole_of(record.get("approximateArrivalTimestamp"))
                for record in records
            ],
            RecordColumn.BEHIND: [behind] * len(records),
        }
        data = [a2b_base64(record["data"] or "") for record in records]
        run = AnnotatedRun(data, **columns)
        first, self._given = self._given + 1, self._given + len(records)
        return Opened(first, run)

    # --- sending --------------------------------------------------------------

    def send(self, event: Event, now: float) -> None:
        """
        Queue an event for the supervisor.

        Raises:
            LocalProtocolError: If the event may not be sent now.

        """
        if self.turn is not Turn.OURS:
            raise LocalProtocolError(
                f"can't send {type(event).__name__} while {self.turn.value} is awaited"
            )
        match event:
            case CommitAsked(_, position):
                self._ask(position)
            case Ready() if self._action == "initialize":
                self._answer(Turn.THEIRS)
            case Added(ended=True) if self._action == "processRecords":
                self._answer(Turn.THEIRS)
            case Farewell(why=why) if why is self._farewell:
                # A lease may be lost before the end of its shard is stored.
                self._shard_ended |= why is FarewellReason.ENDED
                self._answer(Turn.OVER if why is FarewellReason.LOST else Turn.THEIRS)
            case _:
                raise LocalProtocolError(
                    f"can't send {type(event).__name__} in answer to {self._action}"
                )

    def _ask(self, position: object) -> None:
        self._asked = position
        where = ShardPosition("") if position is None else position_of(position)
        named = where.sequence or None
        sub = where.sub if named else None
        self._out.append(ask_line(self._member, named, sub))
        self.turn = Turn.ANSWER

    def _answer(self, turn: Turn) -> None:
        self._out.append(status_line(self._action))
        self._action, self._farewell, self.turn = "", None, turn

    def data_to_send(self) -> list[bytes]:
        out, self._out = self._out, []
        return out

    def get_timer(self) -> float | None:
        """Nothing here depends on time."""
        return None

    def handle_timer(self, now: float) -> None:
        """Nothing here depends on time."""

    def _wrong(self, text: str) -> None:
        self._fail(RemoteProtocolError(text))

    def _fail(self, error: ProtocolError) -> None:
        self.turn = Turn.ERROR
        self._out.clear()
        self._events.append(Failed(error))
