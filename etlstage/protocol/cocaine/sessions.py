"""
The sessions of one connection: which are open, and what has been received in each.

Their numbers rise, and none is used again: a frame for a session that has ended is late
and affects no other. Other modules use the numbers of exchanges, which begin at 1.

What must be kept in sync: each half of a session is kept until it has ended. Once the
worker has ended its half, our side sends nothing more in that session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from etlstage.errors import (
    InvalidMessage,
    LocalProtocolError,
    PayloadTooBig,
    RemoteProtocolError,
)
from etlstage.messages import Run, cost_of
from etlstage.protocol.base import Limits
from etlstage.protocol.cocaine.frame import (
    ONE,
    Headers,
    Outgoing,
    Words,
    text_of,
    unpacked_text,
)
from etlstage.protocol.events import Added, Cancelled, Ended, Event, Noise, Opened

__all__ = ("WORKER_CATEGORY", "Sessions", "code_of")

WORKER_CATEGORY: Final = 42
"""Category of the errors that frameworks of version 1 send."""


class Sessions:
    """
    Writes sessions to ``outgoing``, and reports what is received in ``events``.

    The other arguments are those of the connection, see ``session.py``; ``ours``: this
    is the supervisor's side.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        events: list[Event],
        limits: Limits,
        *,
        ours: bool,
        concat: bool,
        packed: bool,
    ) -> None:
        self._ours = ours
        self._outgoing = outgoing
        self._events = events
        self._limits = limits
        self._concat = concat and ours
        self._packed = packed and ours
        # Halves that the peer has not ended: messages received and not passed on.
        self._theirs: dict[int, list[bytes]] = {}
        self._mine: set[int] = set()  # halves that we have not ended
        self._last = 0  # the highest number so far
        self._costs: dict[int, int] = {}  # bytes of memory of parts to be joined
        self._ends: list[tuple[int, tuple[bytes, ...]]] = []

    def __len__(self) -> int:
        """Return how many sessions the worker has not ended."""
        return len(self._theirs if self._ours else self._mine)

    # --- receiving ------------------------------------------------------------

    def take_all(
        self, frames: Iterable[object], other: Callable[[object], None]
    ) -> None:
        """
        Handle valid chunks and chokes, which nearly all frames are.

        ``other`` is called for any other frame, valid or not.
        """
        theirs, mine, outgoing = self._theirs, self._mine, self._outgoing
        plain, most = not (self._concat or self._packed), self._limits.max_message_bytes
        words = first = chunk = choke = None
        shift = 0
        for frame in frames:
            if words is not outgoing.words:
                words = outgoing.said
                first, chunk, choke = words.channel_first, words.chunk, words.choke
                shift = words.first - 1
            if plain and type(frame) is tuple and len(frame) == 3:
                number, kind, arguments = frame
                if not first:
                    number, kind = kind, number
                if (
                    type(number) is int
                    and number in theirs
                    and type(kind) is int
                    and type(arguments) is tuple
                ):
                    if kind == choke and number not in mine:
                        parts = theirs.pop(number)
                        self._ends.append((number - shift, tuple(parts)))
                        continue
                    if (
                        kind == chunk
                        and arguments
                        and type(payload := arguments[0]) is bytes
                        and len(payload) <= most
                    ):
                        theirs[number].append(payload)
                        continue
            other(frame)

    def take(
        self,
        words: Words,
        number: int,
        kind: int,
        arguments: tuple[object, ...],
        headers: Headers,
    ) -> None:
        """Handle a frame about a session."""
        if number not in self._theirs:
            known = self._ours or number in self._mine
            if not known and kind == words.invoke:
                self._begin(words, number, arguments, headers)
                return
            if number > self._last and self._ours:
                raise RemoteProtocolError(f"there is no session {number}")
            self._drop(kind, number)
        elif kind == words.chunk:
            self._take_chunk(number, arguments)
        elif kind == words.choke:
            self._take_choke(number)
        elif kind == words.error:
            self._take_error(number, arguments)
        else:
            self._drop(kind, number)

    def tell(self) -> None:
        """Report what has been received."""
        if not self._concat:
            for number, parts in self._theirs.items():
                if parts:
                    self._events.append(Added(self._id(number), parts))
                    self._theirs[number] = []
        if self._ends:
            ends, self._ends = self._ends, []
            if self._ours:
                self._events += _in_runs(ends)
            else:
                self._events += [Added(id_, group, ended=True) for id_, group in ends]

    def _drop(self, kind: int, number: int) -> None:
        self._events.append(Noise(b"frame %d for session %d" % (kind, number)))

    def _begin(
        self,
        words: Words,
        number: int,
        arguments: tuple[object, ...],
        headers: Headers,
    ) -> None:
        """Take a new session, on the worker's side."""
        # Only version 1 counts per worker: before, all workers shared one sequence.
        if words is ONE and number <= self._last:
            self._drop(words.invoke, number)
            return
        if not arguments:
            raise RemoteProtocolError("invoke names no event")
        event = text_of(arguments[0], "the event of an invoke")
        self._last = max(number, self._last)
        self._theirs[number] = []
        self._mine.add(number)
        self._events.append(Opened(self._id(number), [], False, False, event, headers))

    def _take_chunk(self, number: int, arguments: tuple[object, ...]) -> None:
        payload = arguments[0] if arguments else None
        if type(payload) is not bytes:
            raise RemoteProtocolError("a chunk holds no string")
        if self._packed:
            payload = unpacked_text(payload)
            if payload is None:
                text = (
                    "a chunk of its reply is not a msgpack string; see dialect.payload"
                )
                self._events.append(Ended.refused(self._id(number), 0, text))
                self._end_theirs(number)
                return
        if len(payload) > (most := self._limits.max_message_bytes):
            raise PayloadTooBig(
                f"chunk is {len(payload)} bytes long, expected no more than {most};"
                " see max_message"
            )
        self._theirs[number].append(payload)
        if self._concat:
            cost = self._costs.get(number, 0) + cost_of([payload])
            self._costs[number] = cost
            if cost > (most := self._limits.max_reply_bytes):
                raise PayloadTooBig(
                    f"reply takes more than {most} bytes of memory; see max_reply"
                )

    def _take_choke(self, number: int) -> None:
        parts = self._theirs[number]
        if self._concat and parts:
            parts = [b"".join(parts)]
        self._ends.append((self._id(number), tuple(parts)))
        self._end_theirs(number)

    def _take_error(self, number: int, arguments: tuple[object, ...]) -> None:
        category, code, reason = code_of(arguments)
        self.tell()
        id_ = self._id(number)
        if self._ours:
            self._events.append(Ended.refused(id_, code, reason, category))
        else:
            self._events.append(Cancelled(id_, code, reason))
        # In version 0 a choke follows, which is then dropped as late.
        self._end_theirs(number)

    def _end_theirs(self, number: int) -> None:
        self._forget(number)
        if self._ours and number in self._mine:
            self._mine.remove(number)
            if self._outgoing.said.error_ends:
                # In version 1 a worker keeps a session until both halves have ended.
                self._outgoing.choke(number)

    def _forget(self, number: int) -> None:
        """Accept and report nothing more from the peer's half of a session."""
        self._theirs.pop(number, None)
        if self._concat:
            self._costs.pop(number, None)

    # --- sending --------------------------------------------------------------

    def open(self, event: Opened, name: str) -> None:
        """
        Open a session, or one for each message, in which our half has ended.

        Raises:
            LocalProtocolError: If the numbers do not rise; none is open then.
            InvalidMessage: If a message is too long, likewise.

        """
        number = self._fresh(event.first, event.messages)
        if event.each:
            self._last = number + len(event.messages) - 1
            for each in range(number, self._last + 1):
                self._theirs[each] = []
            self._outgoing.whole(number, name, event.messages)
            return
        self._last = number
        self._theirs[number] = []
        self._mine.add(number)
        self._outgoing.invoke(number, name, event.headers)
        self._outgoing.chunks(number, event.messages)
        if event.ended:
            self._end(number)

    def _fresh(self, id_: int, messages: Run) -> int:
        """Return the session number for an exchange that is being opened."""
        number = self._number(id_)
        if number <= self._last:
            text = f"exchange {id_} does not come after all others"
            raise LocalProtocolError(text)
        most = self._limits.max_message_bytes
        sizes = list(map(len, messages))
        if max(sizes, default=0) > most:
            index = next(at for at, size in enumerate(sizes) if size > most)
            text = f"message is {sizes[index]} bytes long, expected no more than"
            raise InvalidMessage(f"{text} {most}; see max_message", index=index)
        return number

    def pass_on(self, event: Added) -> None:
        """Send messages of an open session, and end our half if they are the last."""
        number = self._open(event.id)
        self._outgoing.chunks(number, event.messages)
        if event.ended:
            self._end(number)

    def end(self, event: Ended) -> None:
        """End our half of sessions, some with an error, on the worker's side."""
        refusals = {refusal.place: refusal for refusal in event.refusals}
        for place, messages in enumerate(event.groups):
            number = self._open(event.first + place)
            if (refusal := refusals.get(place)) is None:
                self._outgoing.chunks(number, messages)
                self._end(number)
                continue
            _, code, category, reason = refusal
            self._outgoing.error(number, category, code, reason)
            self._mine.remove(number)

    def cancel(self, event: Cancelled, *, silent: bool) -> None:
        """
        Forget a session, if it is open: its later frames are dropped.

        ``silent``: nothing is sent to the worker any more.
        """
        if self._outgoing.words is None:
            return
        number = self._number(event.id)
        self._forget(number)
        # Nothing follows the end of our half.
        if number in self._mine:
            self._mine.remove(number)
            if not silent:
                self._outgoing.error(number, WORKER_CATEGORY, event.code, event.reason)

    def _end(self, number: int) -> None:
        self._outgoing.choke(number)
        self._mine.remove(number)

    def _open(self, id_: int) -> int:
        """Return the session number of an exchange in which our half has not ended."""
        number = self._number(id_)
        if number not in self._mine:
            raise LocalProtocolError(f"our half of exchange {id_} is not open")
        return number

    def _id(self, number: int) -> int:
        return number - self._outgoing.said.first + 1

    def _number(self, id_: int) -> int:
        return id_ + self._outgoing.said.first - 1


def _in_runs(ends: list[tuple[int, tuple[bytes, ...]]]) -> list[Event]:
    """
    Return the ends of sessions, with one event for each run of consecutive numbers.

    The order within one read means nothing; sorted, sessions that were opened together
    end together.
    """
    ends.sort()
    found: list[Event] = []
    groups: list[tuple[bytes, ...]] = []
    behind = 0
    for number, group in ends:
        if number != behind or not groups:
            groups = [group]
            found.append(Ended(number, groups))
        else:
            groups.append(group)
        behind = number + 1
    return found


def code_of(arguments: tuple[object, ...]) -> tuple[int, int, str]:
    """
    Return the category, code and reason of an error or a terminate.

    The category is 0 before version 1, which had none.

    Raises:
        RemoteProtocolError: If there are none.

    """
    if len(arguments) < 2:
        raise RemoteProtocolError("an error or terminate has no code and reason")
    code, reason = arguments[:2]
    pair = code if type(code) is tuple else (0, code)
    if len(pair) != 2 or not all(type(number) is int for number in pair):
        raise RemoteProtocolError("the code of an error or terminate is not a number")
    category, number = pair
    return category, number, text_of(reason, "the reason of an error or terminate")
