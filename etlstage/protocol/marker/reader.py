"""
Turns the peer's bytes into events, according to the state of the session.

The events are the same however the bytes are split into reads: everything before a
fault is delivered before the fault itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from etlstage.errors import PayloadTooBig, RemoteProtocolError
from etlstage.messages import OVERHEAD, Groups, Run, counted
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.buffer import ReceiveBuffer
from etlstage.protocol.events import Added, Ended, Event, Noise, Opened, Refusal
from etlstage.protocol.marker.framing import (
    LISTS,
    end_of,
    split_run,
)
from etlstage.protocol.marker.markers import Markers
from etlstage.protocol.marker.state import (
    MarkerState,
    Mode,
    Token,
    TokenMachine,
    TransitionDenied,
)

__all__ = ("MarkerReader", "ReceiveBounds")

_DUMPED = 16  # bytes of faulty input shown in an error message
_REASON = 1000  # characters kept of a worker's reason for a refusal
_SHOWN = 64  # bytes of faulty input kept in the attribute found of an error
_PASSED_ON = (
    "sent EOB in a reply, expected no marker in a message; a worker that does not"
    " handle batches passes EOB on: remove batch from its stage"
)


class MarkerReader:
    """
    Turns received bytes into events, with the numbers of the exchanges.

    Attributes:
        events: Events that have not been fetched yet.
        echoes: Number of EOM that are still to come after an EOB or, on the
            supervisor's side, of the BNC that answer them; both are dropped.
        echoes_owed: Number of such BNC that we, the worker, still have to write.
        eob_then_eom: Whether an EOM may follow an EOB.
        bnc_after_eob: Whether we, the worker, answer it as an empty message.
        framing: How replies are found in the received bytes, and stored.
        round: Number of the open round of a worker that writes until it exits; 0: no
            round is open, and output belongs to none.
        filled: Messages in the batch that the worker is filling, if it may answer that
            batch now; 0: it has just asked for more, or EOB has closed the batch.
        suspect: Whether the batch answered last was no larger than one at which the
            worker had asked for more: the answer may be meant for the batch before.

    """

    def __init__(
        self,
        side: Side,
        session: TokenMachine,
        markers: Markers,
        limits: Limits,
    ) -> None:
        self.events: list[Event] = []
        self.echoes: int = 0
        self.echoes_owed: int = 0
        self.eob_then_eom = False
        self.bnc_after_eob = False
        self.round: int = 0
        self.filled: int = 0
        self.suspect: bool = False
        self._asked = 0  # the most messages after which the worker has asked for more
        self._session = session
        self._batches = session.mode.batches
        self._markers = markers
        # A worker that does not handle batches passes EOB on in its replies.
        passes_on = self._batches and side is Side.SUPERVISOR and markers.eob_is_apart
        self._eob = markers.eob if passes_on else None
        self._widest = max(
            map(len, (markers.bnc, markers.err or b"", self._eob or b""))
        )
        self.framing = LISTS
        self._buffer = ReceiveBuffer()
        replies = side is Side.SUPERVISOR and not session.mode.extracts
        self._bounds = ReceiveBounds(limits, markers, replies=replies)
        self._parse = self._parser(side, session.mode)
        self._pairs = replies and session.mode is not Mode.BATCH_WORKER
        self._smallest_limit = min(limits)
        single = max(map(len, markers.named.values())) == 1
        # No marker can be cut or overlap, and EOP differs from EOM.
        self._plain = self._pairs and single and markers.eop != markers.eom

    def feed(self, data: bytes) -> None:
        """
        Parse as much as is complete.

        Raises:
            RemoteProtocolError: If the peer broke the protocol; ``events`` holds
                everything before the fault.

        """
        if self._plain and self._take_one(data):
            return
        if self._pairs and (end := self._end_of_replies(data)):
            # The common case, without copies into the buffer and out of it.
            start = self._buffer.offset
            self._split_replies(self._buffer.feed_and_take(data, end), start)
            if len(self._buffer):
                self._check_rest()
                self._bounds.check_rest(self._buffer, self.framing.overhead)
            return
        self._buffer.feed(data)
        self._parse()
        self._bounds.check_rest(self._buffer, self.framing.overhead)

    def tail(self) -> bytes:
        """Return the rest; raise PayloadTooBig if a complete message in it is."""
        tail = self._buffer.take(len(self._buffer))
        self._bounds.check_tail(tail)
        return tail

    def _take_one(self, data: bytes) -> bool:
        """Take ``data`` if it is one whole reply, as in lock-step; return whether."""
        eom, eop, _, bnc, err = self._markers
        size = len(data)
        if (
            data[-1:] != eop
            or data.find(eop) != size - 1
            or (size > 1 and data[-2:-1] != eom)
            or bnc in data
            or (err is not None and err in data)
            or (self._eob is not None and self._eob in data)
            or self.framing is not LISTS
            or size > self._bounds.small
            or not self._session.owed
            or not self._buffer.pass_by(size)
        ):
            return False
        group = tuple(data[:-2].split(eom)) if size > 1 else ()
        session = self._session
        session.handle(Token.EOP)
        overhead = LISTS.overhead * (len(group) + 1)
        self.events.append(Ended(session.answered, [group], (), overhead))
        return True

    def _end_of_replies(self, data: bytes) -> int:
        """Return where the last reply in ``data`` ends; 0: a full parse is needed."""
        eop, _, bnc, err = self._markers[1:]
        err, eob = err or b"", self._eob
        held = len(self._buffer)
        if (
            (held and self._widest > 1)  # a marker may have begun in the buffer
            or held + len(data) > self._smallest_limit
            or bnc in data
            or (eob is not None and eob in data)
        ):
            return 0
        at = data.rfind(eop)
        end = at + len(eop) if at >= 0 else 0
        at = data.rfind(err, end) if err else -1
        return at + len(err) if at >= 0 else end

    def _parser(self, side: Side, mode: Mode) -> Callable[[], None]:
        m = self._markers
        bnc = {Token.BNC: m.bnc}
        eop = {} if m.eop == m.eom else {Token.EOP: m.eop}
        if side is Side.WORKER:
            if mode.batches:
                return self._parse_batches
            return partial(self._parse_before, {Token.EOB: m.eob}, self._parse_messages)
        eob = {} if self._eob is None else {Token.EOB: self._eob}
        replies = partial(self._parse_before, eob | bnc, self._parse_replies)
        parsers: dict[Mode, Callable[[], None]] = {
            Mode.PLAIN: partial(self._parse_before, eop | bnc, self._parse_output),
            Mode.CYCLIC: partial(self._parse_before, bnc, self._parse_cycles),
            Mode.SINGLE: replies,
            Mode.BATCH_SUPERVISOR: replies,
            Mode.BATCH_WORKER: self._parse_worker_driven,
        }
        return parsers[mode]

    def _parse_before(
        self, forbidden: dict[Token, bytes], parse: Callable[[], None]
    ) -> None:
        """Parse what comes before the first marker that has no place in this mode."""
        found = [
            (at, token, marker)
            for token, marker in forbidden.items()
            if (at := self._buffer.find(marker)) >= 0
        ]
        if not found:
            parse()
            return
        at, token, marker = min(found, key=lambda hit: hit[0])
        offset = self._buffer.offset + at
        self._buffer.truncate(at)
        parse()
        passed_on = self._eob is not None and token is Token.EOB
        if len(self._buffer) and (passed_on or token is not Token.EOB):
            self._got(Token.OUTPUT)  # it is not the beginning of a marker
        if passed_on:
            raise self._blame(_PASSED_ON, offset, marker)
        self._got(token, at=offset, found=marker)
        raise AssertionError("unreachable: a marker without a place was allowed")

    def _parse_output(self) -> None:
        self._take_output(self._buffer.end_of_last(self._markers.eom))

    def _parse_replies(self) -> None:
        ends = (m for m in (self._markers.eop, self._markers.err) if m is not None)
        end = max(map(self._buffer.end_of_last, ends))
        if end:
            self._take_replies(end)
        self._check_rest()

    def _parse_cycles(self) -> None:
        eom, eop = self._markers.eom, self._markers.eop
        while (end := self._find_end()) >= 0:
            if end == self._find_err():
                if eop != eom:
                    self._take_output(self._buffer.end_of_last(eom, end))
                self._take_refusal()
                continue
            if eop == eom:
                # Then a round is one message, by definition: nothing else separates
                # the end of a message from that of a round.
                if end:
                    self._got(Token.OUTPUT)
                reply = self._buffer.take(end)
                self._bounds.check_messages([reply])
                self._got(Token.EOP)
                self.events.append(Ended(self._session.answered, [(reply,)]))
            else:
                self._take_output(end)
                if not self._buffer.startswith(eop):
                    raise self._blame("message without EOM before EOP")
                self._got(Token.EOP)
                self.events.append(Ended(self._session.answered, [()]))
            self._buffer.drop(len(eop))
        if eop != eom:
            self._take_output(self._buffer.end_of_last(eom))
        self._check_rest()

    def _parse_worker_driven(self) -> None:
        bnc, eob = self._markers.bnc, self._eob
        if eob is not None and self._buffer.find(eob) >= 0:
            self._parse_before({Token.EOB: eob}, self._parse_worker_driven)
        while len(self._buffer):
            end = self._find_end()
            stray = self._buffer.find(bnc)
            # BNC is a request only where a message may begin; inside a message it is
            # a fault, as no message contains a marker ("General terms", 4).
            if stray == 0:
                self._take_request()
            elif bnc.startswith(self._buffer.peek(len(bnc))):
                break  # the rest of BNC is still to come
            elif stray > 0 and not 0 <= end < stray:
                self._got(Token.OUTPUT)
                self._got(Token.BNC, at=self._buffer.offset + stray, found=bnc)
            elif end >= 0 and self._session.owed:
                refused = end == self._find_err()
                marker = self._markers.err if refused else self._markers.eop
                self._take_replies(end + len(marker or b""))
                self.suspect = 0 < self.filled <= self._asked
            else:
                self._check_rest()
                break

    def _parse_messages(self) -> None:
        self._take_messages(self._buffer.end_of_last(self._markers.eom))

    def _parse_batches(self) -> None:
        eob = self._markers.eob
        while (at := self._buffer.find(eob)) >= 0:
            self._take_messages(at)
            if not self._buffer.startswith(eob):
                raise self._blame("message without EOM before EOB")
            self._end_batch()
            self._buffer.drop(len(eob))
            if self.eob_then_eom:
                self.echoes = 1
                self.echoes_owed += self.bnc_after_eob
        self._parse_messages()

    def _end_batch(self) -> None:
        session, began = self._session, self._session.filling
        self._got(Token.EOB)
        if not began:
            self.events.append(Opened(session.opened, (), each=False))
        elif self.events and isinstance(last := self.events[-1], Opened | Added):
            self.events[-1] = last._replace(ended=True)
        else:
            self.events.append(Added(session.opened, (), ended=True))

    def _take_request(self) -> None:
        # An echo comes right after EOP, but the next batch may be on its way already.
        if self.echoes > (self._session.state is MarkerState.BUSY):
            self.echoes -= 1
        else:
            self._got(Token.BNC)  # which makes room
            self._asked = max(self._asked, self.filled)
            self.filled = 0
        self._buffer.drop(len(self._markers.bnc))

    def _take_output(self, end: int) -> None:
        if not end:
            return
        self._got(Token.OUTPUT)
        messages = self._take_run(end)
        sound = self._bounds.sound(messages)
        number = self.round
        if self._session.mode is not Mode.PLAIN:
            number = self._session.answered + 1
        if sound and number:
            self.events.append(Added(number, messages[:sound]))
        elif sound:
            eom = self._markers.eom
            self.events.append(Noise(eom.join((*messages[:sound], b""))))
        self._bounds.check_messages(messages[sound:])

    def _take_messages(self, end: int) -> None:
        start, width = self._buffer.offset, len(self._markers.eom)
        messages = self._take_run(end) if end else []
        if messages and self.echoes:
            self.echoes -= 1
            if not messages[0]:
                del messages[0]
                start += width
        sound = self._bounds.sound(messages)
        # In lock-step each message needs a BNC before it, so a run is passed one by
        # one: its first message may be in order where the second is not.
        session = self._session
        step = 1 if session.mode is Mode.BATCH_WORKER else max(1, sound)
        for at in range(0, sound, step):
            run = messages[at : min(sound, at + step)]
            offset = start + sum(len(m) + width for m in messages[:at])
            found = (run[0][:_DUMPED] + self._markers.eom)[:_DUMPED]
            goes_on = self._batches and session.filling
            self._got(Token.MESSAGE, len(run), at=offset, found=found)
            if goes_on:
                self.events.append(Added(session.opened, run))
            elif self._batches:
                self.events.append(Opened(session.opened, run, each=False, ended=False))
            else:
                first = session.answered + session.owed - len(run) + 1
                self.events.append(Opened(first, run))
        self._bounds.check_messages(messages[sound:])

    def _take_run(self, end: int) -> list[bytes]:
        messages, rest = split_run(self._buffer.take(end), self._markers.eom)
        # The rest is not empty if EOM overlaps itself, or a message is unfinished.
        self._buffer.put_back(rest)
        return messages

    def _find_err(self) -> int:
        """Return where the next ERR begins, or -1."""
        err = self._markers.err
        return -1 if err is None else self._buffer.find(err)

    def _find_end(self) -> int:
        """Return where the next EOP or ERR begins, or -1."""
        found = self._buffer.find(self._markers.eop), self._find_err()
        return min((at for at in found if at >= 0), default=-1)

    def _take_refusal(self) -> None:
        """Take the next ERR and the bytes before it, which hold no EOP."""
        if not self._session.owed:
            self._check_rest()
        self._take_replies(self._find_err() + len(self._markers.err or b""))

    def _take_replies(self, end: int) -> None:
        start = self._buffer.offset
        self._split_replies(self._buffer.take(end), start)

    def _split_replies(self, data: bytes, start: int) -> None:
        """Deliver the replies in ``data``, which began at offset ``start``."""
        owed = self._session.owed
        found = self.framing.split_replies(data, self._markers)
        # Not counted beforehand: nearly always there are no more than are owed.
        if len(found.groups) + (found.broken is not None) > owed:
            cut = end_of(data, self._markers, owed)
            self._buffer.put_back(data[cut:])
            data = data[:cut]
            found = self.framing.split_replies(data, self._markers)
        groups, rest, total, reasons, broken = found
        overhead = self.framing.overhead
        fault: RemoteProtocolError | None = None
        if broken is not None:
            at = end_of(data, self._markers, len(groups))
            fault = self._blame(str(broken), start + at, data[at : at + _DUMPED])
        self._buffer.put_back(rest)
        sound = self._bounds.sound_replies(groups, len(data), total, overhead)
        if sound < len(groups):
            fault = self._bounds.fault(groups[sound], overhead)
        refusals: list[Refusal] = []
        small = not reasons or len(data) <= self._bounds.small
        for place, reply in reasons:
            messages = reply.split(self._markers.eom)
            if not small and place < sound and self._bounds.too_big(messages):
                sound, fault = place, self._bounds.fault(messages)
            if place >= sound:
                break
            refusals.append(Refusal(place, 0, 0, _reason(messages)))
        if sound:
            first = self._session.answered + 1
            self._got(Token.EOP, sound)
            beside = overhead * (total + len(groups))
            groups = groups if sound == len(groups) else groups[:sound]
            self.events.append(Ended(first, groups, refusals, beside))
        if fault:
            raise fault

    def _check_rest(self) -> None:
        """Raise as soon as the buffer holds what can't be a part of a reply."""
        if not len(self._buffer):
            return
        if self._session.owed:
            self._got(Token.OUTPUT)
            return
        eop, _, bnc, err = self._markers[1:]
        if not any(
            marker is not None and marker.startswith(self._buffer.peek(len(marker)))
            for marker in (eop, bnc, err, self._eob)
        ):
            self._got(Token.OUTPUT)
        at = self._find_end()
        if at >= 0:
            refused = at == self._find_err()
            token, found = (Token.ERR, err) if refused else (Token.EOP, eop)
            self._got(token, at=self._buffer.offset + at, found=found)

    # --- what the peer did wrong --------------------------------------------

    def _got(
        self,
        token: Token,
        count: int = 1,
        *,
        at: int | None = None,
        found: bytes | None = None,
    ) -> None:
        try:
            self._session.handle(token, count)
        except TransitionDenied as refusal:
            raise self._blame(str(refusal), at, found) from None

    def _blame(
        self, text: str, at: int | None = None, found: bytes | None = None
    ) -> RemoteProtocolError:
        at = self._buffer.offset if at is None else at
        found = self._buffer.peek(_DUMPED) if found is None else found
        dump = f", found {found.hex(' ')}" if found else ""
        error = RemoteProtocolError(f"{text} (offset {at}{dump})")
        error.found = self._buffer.peek(_SHOWN)
        return error


def _reason(messages: list[bytes]) -> str:
    """Return the reason for a refusal: the last of the messages before ERR."""
    # The messages before it are the discarded beginning of a reply.
    *_, before, rest = (b"", *messages)
    reason = (rest or before).decode(errors="replace")
    return f"{reason[:_REASON]}..." if len(reason) > _REASON else reason


class ReceiveBounds:
    """
    Checks what has been received against the limits of a session.

    A message counts by its length. A reply counts by the memory that it takes: each
    message has an overhead, which for short messages exceeds the bytes read. With
    ``replies``, incomplete replies are held in the buffer, and checked, too.
    """

    def __init__(self, limits: Limits, markers: Markers, *, replies: bool) -> None:
        self._message, self._reply = limits
        self._eom = markers.eom
        self._holds_replies = replies
        # A part of a marker, which the limits do not count, may be here already.
        self._slack = max(map(len, markers.named.values())) - 1
        # At worst each byte is an EOM.
        most = self._reply // (1 + OVERHEAD) - len(self._eom)
        self.small: int = min(self._message, most)
        """Largest size, in bytes, at which no reply can be too big."""

    def sound(self, messages: Run) -> int:
        """Return how many messages come before the first that is too long."""
        limit = self._message
        return next(
            (n for n, m in enumerate(messages) if len(m) > limit), len(messages)
        )

    def sound_replies(
        self, groups: Groups, size: int, count: int, overhead: int
    ) -> int:
        """
        Return how many replies come before the first that is too big.

        Together they have ``size`` bytes, markers included, and ``count`` messages,
        each of which takes ``overhead`` bytes of memory beyond its own bytes.
        """
        # Nearly always the totals suffice, without a look at each reply.
        if size <= self._message and (
            size + overhead * count <= self._reply
            or size + overhead * max(map(len, groups), default=0) <= self._reply
        ):
            return len(groups)
        return next(
            (n for n, group in enumerate(groups) if self.too_big(group, overhead)),
            len(groups),
        )

    def check_messages(self, messages: Run) -> None:
        """Raise for the first message that is too long."""
        sound = self.sound(messages)
        if sound < len(messages):
            raise self.fault((messages[sound],))

    def too_big(self, reply: Sequence[bytes], overhead: int = OVERHEAD) -> bool:
        """Return whether a reply, or a message in it, is too big."""
        return (
            self._cost(reply, overhead) > self._reply
            or max(map(len, reply), default=0) > self._message
        )

    def fault(self, reply: Sequence[bytes], overhead: int = OVERHEAD) -> PayloadTooBig:
        """Return the error for a reply that is too big."""
        longest = max(map(len, reply))
        if longest > self._message:
            return PayloadTooBig(
                f"message is {longest} bytes long, expected no more than"
                f" {self._message} bytes; see max_message"
            )
        return PayloadTooBig(
            f"reply of {counted(len(reply), 'message')} takes"
            f" {self._cost(reply, overhead)} bytes of memory, expected no more than"
            f" {self._reply} bytes; see max_reply"
        )

    def check_tail(self, tail: bytes) -> None:
        """Raise for the first complete message in ``tail`` that is too long."""
        eom, most, at = self._eom, self._message, 0
        # Jump to the farthest EOM within the limit: splitting would take more memory.
        while len(tail) - at > most:
            last = tail.rfind(eom, at, at + most + len(eom))
            if last < 0 and (last := tail.find(eom, at)) >= 0:
                raise self.fault((tail[at:last],))
            if last < 0:
                return
            at = last + len(eom)

    def check_rest(self, buffer: ReceiveBuffer, overhead: int) -> None:
        """Raise if the incomplete rest in the buffer is too long already."""
        held, at = len(buffer), buffer.offset + len(buffer)
        most = self._message + self._slack
        if held > most and held - buffer.end_of_last(self._eom) > most:
            raise PayloadTooBig(
                f"message is more than {self._message} bytes long, with no EOM yet at"
                f" offset {at}; see max_message"
            )
        most = self._reply + self._slack
        # Counted only if that many bytes could hold too many messages.
        if (
            self._holds_replies
            and held * (1 + overhead) > most
            and held + overhead * buffer.count(self._eom) > most
        ):
            raise PayloadTooBig(
                f"reply takes more than {self._reply} bytes of memory, with no EOP yet"
                f" at offset {at}; see max_reply"
            )

    def _cost(self, reply: Sequence[bytes], overhead: int) -> int:
        """Return the bytes of memory that a reply takes: as read, plus overhead."""
        return sum(map(len, reply)) + len(reply) * (len(self._eom) + overhead)
