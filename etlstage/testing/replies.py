"""What a worker has said, as its dialect understands it; nothing here waits."""

from __future__ import annotations

from typing import Final, NamedTuple

from etlstage.protocol.base import Dialect, Limits, Session, Shape, Side
from etlstage.protocol.events import (
    Event,
    OutputPassed,
    ProtocolFailed,
    RepliesCompleted,
    StreamEnded,
)

__all__ = ("TAIL", "Replies", "Reply")

TAIL: Final = 64  # bytes shown of what is not complete


class Reply(NamedTuple):
    """What a worker said to one exchange."""

    outputs: tuple[bytes, ...] = ()
    refused: str | None = None
    """Why it said no, if it did."""


class Replies:
    """
    Understands a worker.

    Args:
        dialect: What it speaks.
        limits: How much it may make us hold.

    Attributes:
        session: Our side of the conversation.
        events: All that it has said.
        fault: How it has broken the protocol, as a part of a sentence.
        stray: Before which of its bytes, counted from 0, what nobody asked for begins;
            what of it was read at once is chance.
        unfinished: How many bytes came behind the last reply.
        partial: Outputs of a reply that is not complete.
        complete: Replies that nobody has taken.

    """

    def __init__(self, dialect: Dialect, limits: Limits) -> None:
        self.session: Session = dialect.open(Side.SUPERVISOR, limits)
        self.events: list[Event] = []
        self.fault: str | None = None
        self.stray: int | None = None
        self.unfinished: int = 0
        self.partial: list[bytes] = []
        self.complete: list[Reply] = []
        self._dialect = dialect
        self._received = 0

    def receive(self, data: bytes, now: float) -> bool:
        """Take what it wrote, ``b""`` at the end; return whether that makes sense."""
        owed, dialect = self.session.owed, self._dialect
        if data:
            self.unfinished += len(data)
            self.session.receive_data(data, now)
        else:
            self.session.receive_eof(now)
        self._take_events()
        # The protocol's own words for this are about states.
        if self.fault is not None and data and dialect.shape is not Shape.STREAM:
            if not owed:
                self.fault = dialect.unasked(data[:TAIL])
                self.stray = self._received
            elif not self.session.owed:
                self.fault = f"wrote more than its reply: {dialect.shown(data[-TAIL:])}"
        self._received += len(data)
        return self.fault is None

    def _take_events(self) -> None:
        for event in self.session.events_received():
            self.events.append(event)
            match event:
                case OutputPassed(messages):
                    self.partial += messages
                case RepliesCompleted(groups, _, refusals):
                    said = dict(refusals)
                    self.unfinished = 0
                    for place, group in enumerate(groups):
                        outputs = (*self.partial, *group)
                        self.partial = []
                        self.complete.append(Reply(outputs, said.get(place)))
                case StreamEnded(tail) if tail:
                    shown = self._dialect.shown(tail[:TAIL])
                    self.fault = f"ended its output with what is not complete: {shown}"
                case ProtocolFailed(error):
                    self.fault = f"broke the protocol: {error}"
