"""Reads a worker's output with its dialect; nothing here does I/O, or waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from etlstage.messages import Run, StageKind
from etlstage.protocol.base import Dialect, DialectSession, Limits, Shape, Side
from etlstage.protocol.events import (
    Added,
    Alive,
    Cancelled,
    Ended,
    Event,
    Failed,
    Farewell,
    Opened,
    Ready,
)
from etlstage.testing.dialect import kit_of

__all__ = ("TAIL", "Reply", "ReplyReader")

TAIL: Final = 64  # bytes shown of incomplete output


class Reply(NamedTuple):
    """A worker's reply to one exchange."""

    outputs: tuple[bytes, ...] = ()
    refused: str | None = None
    """Why the worker refused, if it did."""


class ReplyReader:
    """
    Turns the output of a worker into replies.

    Args:
        dialect: The dialect of the worker.
        limits: Size limits for its messages and replies.
        kind: Kind of the stage.
        batch: Messages that fill a batch.

    Attributes:
        session: Our side of the conversation.
        events: All events received from the worker.
        fault: How it has broken the protocol, as part of a sentence.
        stray: Offset in its output at which unsolicited output begins; how much of that
            is read at once is a matter of timing.
        unfinished: Number of bytes received after the last reply.
        partial: Outputs of a reply that is not complete.
        complete: Complete replies not yet taken, in the order of the exchanges.
        ended: Replies to named exchanges, by number.
        asked: Numbers of named exchanges whose replies are not complete, in order.
        heard: Number of bytes received, heartbeats aside.
        filling: Whether the last exchange is still open on our side.
        last: Number of the last exchange that was opened.
        farewell: The end that it announced, as the end of a sentence; empty: none.

    """

    def __init__(
        self, dialect: Dialect, limits: Limits, kind: StageKind, batch: int
    ) -> None:
        self.session: DialectSession = dialect.open(
            Side.SUPERVISOR, limits, batch=batch, kind=kind
        )
        self.events: list[Event] = []
        self.fault: str | None = None
        self.stray: int | None = None
        self.unfinished: int = 0
        self.partial: list[bytes] = []
        self.complete: list[Reply] = []
        self.asked: list[int] = []
        self.heard: int = 0
        self.last: int = 0
        self.filling: bool = False
        self.farewell: str = ""
        self._given: defaultdict[int, list[bytes]] = defaultdict(list)
        self.ended: dict[int, Reply] = {}
        self._dialect = dialect
        self._kit = kit_of(dialect)
        self._kind = kind.value
        self._received = 0
        self._asks = dialect.shape is Shape.ASKED_BATCH
        if dialect.shape is Shape.STREAM:
            self.session.send(Opened(1, (), each=False), 0.0)
            self.note(Opened(1, (), each=False))

    def receive(self, data: bytes, now: float) -> bool:
        """Receive output, ``b""`` at its end; return False on a protocol error."""
        owed, dialect = self.session.owed, self._dialect
        if data:
            self.session.receive_data(data, now)
        else:
            self.session.receive_eof(now)
            # Output after its last complete message.
            if tail := getattr(self.session, "tail", b""):
                shown = self._kit.shown(tail[:TAIL])
                self.fault = f"ended its output with incomplete data: {shown}"
        self.unfinished += len(data)
        if self.take_events():
            self.unfinished = max(0, self.unfinished - len(data))
        else:
            self.heard += len(data)
        # The dialect's own error would be about its states.
        if (
            self.fault is not None
            and data
            and dialect.shape is not Shape.STREAM
            and self.session.in_order
        ):
            if not owed:
                self.fault = self._kit.unsolicited(data[:TAIL])
                self.stray = self._received
            elif not self.session.owed:
                self.fault = (
                    f"wrote more than its reply: {self._kit.shown(data[-TAIL:])}"
                )
        self._received += len(data)
        return self.fault is None

    def take_events(self) -> bool:
        """Take the session's events; return whether all were signs of life."""
        new = self.session.events_received()
        self.events += new
        for event in new:
            match event:
                case Added(_, messages) if self.session.in_order:
                    self.partial += messages
                case Ended(_, groups, refusals) if self.session.in_order:
                    # Only a worker that fills its own batches may end one that is open.
                    self.filling = self.filling and not self._asks
                    reasons = {refusal.place: refusal.reason for refusal in refusals}
                    self.unfinished = 0
                    for place, group in enumerate(groups):
                        outputs = (*self.partial, *group)
                        self.partial = []
                        self.complete.append(Reply(outputs, reasons.get(place)))
                case Added(id_, messages):
                    self._given[id_] += messages
                case Ended(first, groups, refusals):
                    why = {refusal.place: refusal.reason for refusal in refusals}
                    for place, group in enumerate(groups):
                        given = self._given.pop(first + place, ())
                        outputs = () if place in why else (*given, *group)
                        self.ended[first + place] = Reply(outputs, why.get(place))
                    self.unfinished = 0
                    self._release()
                case Ready():
                    self.unfinished = 0
                case Farewell(code, reason, final):
                    what = "no worker could do the work" if final else "it terminates"
                    self.farewell = (
                        f", having announced that {what}: {reason} (code {code})"
                    )
                case Failed(error):
                    self.fault = f"broke the protocol: {error}"
        return bool(new) and all(isinstance(e, Alive | Ready) for e in new)

    def opened(self, runs: Sequence[Run]) -> list[Event]:
        """
        Return the events that open an exchange for each of these runs.

        With named exchanges, only as many as the worker has room for, and at least one.
        """
        dialect, in_order = self._dialect, self.session.in_order
        if in_order and not dialect.shape.batches:
            return [Opened(self.last + 1, [m for run in runs for m in run])]
        if in_order:
            return [Opened(n, r, each=False) for n, r in enumerate(runs, self.last + 1)]
        room = max(1, min(len(runs), int(self.session.room)))
        return [
            Opened(self.last + number, run, each=False)
            for number, run in enumerate(runs[:room], 1)
        ]

    def note(self, event: Event) -> None:
        """Record an event that is sent to the worker."""
        match event:
            case Opened(first, messages, each, ended):
                self.last = first + len(messages) - 1 if each else first
                self.filling = not ended
                if not self.session.in_order:
                    self.asked += range(first, self.last + 1)
            case Added(id_, _, True) if id_ == self.last:
                self.filling = False
            case Cancelled(id_):
                if id_ in self.asked:
                    self.asked.remove(id_)
                self.ended.pop(id_, None)
                self._release()
            case _:
                pass

    def _release(self) -> None:
        while self.asked and self.asked[0] in self.ended:
            self.complete.append(self.ended[self.asked.pop(0)])
