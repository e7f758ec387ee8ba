"""
What the peer's bytes mean, in the state of the session.

However the bytes are cut into reads, the same events come out: what stands before
a fault is delivered before the fault is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from etlstage.errors import PayloadTooBig, RemoteProtocolError
from etlstage.messages import Run
from etlstage.protocol.base import Limits, Side
from etlstage.protocol.buffer import ReceiveBuffer
from etlstage.protocol.events import (
    BatchEnded,
    Event,
    MessagesPassed,
    MoreRequested,
    OutputPassed,
    RepliesCompleted,
)
from etlstage.protocol.marker.framing import Unterminated, split_groups, split_run
from etlstage.protocol.marker.markers import Markers
from etlstage.protocol.marker.state import Mode, Refused, Session, State, Token

__all__ = ("Reader",)

_DUMPED = 16  # bytes shown of what the peer did wrong


class Reader:
    """
    Turns received bytes into events.

    Attributes:
        events: What has been understood and not been fetched yet.
        echoes: Answers still to come to the EOM behind an EOB; they are left out.

    """

    def __init__(
        self, side: Side, session: Session, markers: Markers, limits: Limits
    ) -> None:
        self.events: list[Event] = []
        self.echoes = 0
        self.eob_then_eom = False
        self._session = session
        self._markers = markers
        self._limits = limits
        self._buffer = ReceiveBuffer()
        self._parse = self._parser(side, session.mode)

    def feed(self, data: bytes) -> None:
        """
        Understand as much as can be.

        Raises:
            RemoteProtocolError: If the peer broke the protocol; ``events`` holds what
                came before.

        """
        self._buffer.feed(data)
        self._parse()
        self._check_size()

    def tail(self) -> bytes:
        """Remove and return what is not complete."""
        return self._buffer.take(len(self._buffer))

    def _parser(self, side: Side, mode: Mode) -> Callable[[], None]:
        m = self._markers
        bnc = {Token.BNC: m.bnc}
        eop = {} if m.eop == m.eom else {Token.EOP: m.eop}
        if side is Side.WORKER:
            if mode.batches:
                return self._parse_batches
            return partial(self._parse_before, {Token.EOB: m.eob}, self._parse_messages)
        parsers: dict[Mode, Callable[[], None]] = {
            Mode.PLAIN: partial(self._parse_before, eop | bnc, self._parse_output),
            Mode.CYCLIC: partial(self._parse_before, bnc, self._parse_cycles),
            Mode.SINGLE: partial(self._parse_before, bnc, self._parse_replies),
            Mode.BATCH_SUPERVISOR: partial(
                self._parse_before, bnc, self._parse_replies
            ),
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
        self._got(token, at=offset, found=marker)
        raise AssertionError(f"unreachable: {token.value} is allowed here")

    def _parse_output(self) -> None:
        self._take_output(self._buffer.end_of_last(self._markers.eom))

    def _parse_replies(self) -> None:
        end = self._buffer.end_of_last(self._markers.eop)
        if end:
            self._take_replies(end)
        self._check_rest()

    def _parse_cycles(self) -> None:
        eom, eop = self._markers.eom, self._markers.eop
        while (end := self._buffer.find(eop)) >= 0:
            if eop == eom:
                self._got(Token.EOP)
                reply = self._buffer.take(end)
                self._refuse_size([reply][self._sound([reply]) :])
                self.events.append(RepliesCompleted([(reply,)]))
            else:
                self._take_output(end)
                if not self._buffer.startswith(eop):
                    raise self._blame("message without EOM before EOP")
                self._got(Token.EOP)
                self.events.append(RepliesCompleted([()]))
            self._buffer.drop(len(eop))
        if eop != eom:
            self._take_output(self._buffer.end_of_last(eom))
        self._check_rest()

    def _parse_worker_driven(self) -> None:
        bnc, eop = self._markers.bnc, self._markers.eop
        while len(self._buffer):
            end = self._buffer.find(eop)
            stray = self._buffer.find(bnc)
            if stray == 0:
                self._take_request()
            elif bnc.startswith(self._buffer.peek(len(bnc))):
                break  # the rest of BNC is still to come
            elif stray > 0 and not 0 <= end < stray:
                self._got(Token.OUTPUT)
                self._got(Token.BNC, at=self._buffer.offset + stray, found=bnc)
            elif end >= 0:
                self._take_replies(end + len(eop))
                self._check_rest()
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
            self._got(Token.EOB)
            self._buffer.drop(len(eob))
            self.echoes += self.eob_then_eom
            self.events.append(BatchEnded())
        self._parse_messages()

    def _take_request(self) -> None:
        if self._session.state is State.IDLE and self.echoes:
            self.echoes -= 1
        else:
            self._got(Token.BNC)
            self.events.append(MoreRequested())
        self._buffer.drop(len(self._markers.bnc))

    def _take_output(self, end: int) -> None:
        if not end:
            return
        self._got(Token.OUTPUT)
        messages = self._take_run(end)
        sound = self._sound(messages)
        if sound:
            self.events.append(OutputPassed(messages[:sound]))
        self._refuse_size(messages[sound:])

    def _take_messages(self, end: int) -> None:
        messages = self._take_run(end) if end else []
        if messages and self.echoes:
            self.echoes -= 1
            if not messages[0]:
                del messages[0]
        sound = self._sound(messages)
        # In lock-step each message needs a BNC before it: the first may be sound.
        step = 1 if self._session.mode is Mode.BATCH_WORKER else max(1, sound)
        for at in range(0, sound, step):
            run = messages[at : min(sound, at + step)]
            self._got(Token.MESSAGE, len(run))
            self.events.append(MessagesPassed(run))
        self._refuse_size(messages[sound:])

    def _take_run(self, end: int) -> Run:
        messages, rest = split_run(self._buffer.take(end), self._markers.eom)
        # Not empty when EOM overlaps itself, or an unfinished message is cut.
        self._buffer.put_back(rest)
        return messages

    def _take_replies(self, end: int) -> None:
        start = self._buffer.offset
        data = self._buffer.take(end)
        eop = self._markers.eop
        if data.count(eop) > self._session.owed:
            cut = _end_of(data, eop, self._session.owed)
            self._buffer.put_back(data[cut:])
            data = data[:cut]
        fault: RemoteProtocolError | None = None
        rest = b""
        try:
            groups, rest = split_groups(data, self._markers)
        except Unterminated as error:
            groups = error.groups
            at = _end_of(data, eop, len(groups))
            fault = self._blame(str(error), start + at, data[at : at + _DUMPED])
        self._buffer.put_back(rest)
        if len(data) > min(self._limits):
            sound = next(
                (n for n, g in enumerate(groups) if self._too_big(g)), len(groups)
            )
            fault = self._size_fault(groups[sound]) if sound < len(groups) else fault
            del groups[sound:]
        if groups:
            self._got(Token.EOP, len(groups))
            self.events.append(RepliesCompleted(groups))
        if fault:
            raise fault

    def _check_rest(self) -> None:
        """Refuse what can't be a part of a reply, as soon as it is there."""
        eop = self._markers.eop
        if not len(self._buffer):
            return
        if self._session.owed:
            self._got(Token.OUTPUT)
            return
        at = self._buffer.find(eop)
        if at and not eop.startswith(self._buffer.peek(len(eop))):
            self._got(Token.OUTPUT)
        if at >= 0:
            self._got(Token.EOP, at=self._buffer.offset + at, found=eop)

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
        except Refused as refusal:
            raise self._blame(str(refusal), at, found) from None

    def _blame(
        self, text: str, at: int | None = None, found: bytes | None = None
    ) -> RemoteProtocolError:
        at = self._buffer.offset if at is None else at
        found = self._buffer.peek(_DUMPED) if found is None else found
        dump = f", found {found.hex(' ')}" if found else ""
        return RemoteProtocolError(f"{text} (offset {at}{dump})")

    def _sound(self, messages: Run) -> int:
        """Return how many messages come before the first that is too long."""
        limit = self._limits.max_message_bytes
        return next(
            (n for n, m in enumerate(messages) if len(m) > limit), len(messages)
        )

    def _refuse_size(self, messages: Run) -> None:
        if messages:
            raise self._size_fault((messages[0],))

    def _too_big(self, group: tuple[bytes, ...]) -> bool:
        wire = sum(map(len, group)) + len(group) * len(self._markers.eom)
        return (
            wire > self._limits.max_reply_bytes
            or max(map(len, group), default=0) > self._limits.max_message_bytes
        )

    def _size_fault(self, group: tuple[bytes, ...]) -> PayloadTooBig:
        longest, limit = max(map(len, group)), self._limits.max_message_bytes
        if longest > limit:
            return PayloadTooBig(
                f"message is {longest} bytes long, expected no more than {limit} bytes;"
                " see max_message_bytes"
            )
        return PayloadTooBig(
            f"reply is {sum(map(len, group))} bytes long, expected no more than"
            f" {self._limits.max_reply_bytes} bytes; see max_reply_bytes"
        )

    def _check_size(self) -> None:
        """Refuse what is still incomplete and too long already."""
        held = len(self._buffer)
        limit = self._limits.max_message_bytes
        eom = self._markers.eom
        most = limit + len(eom) - 1  # a part of EOM may be here already
        if held > most and held - self._buffer.end_of_last(eom) > most:
            raise PayloadTooBig(
                f"message is more than {limit} bytes long, with no EOM yet at offset"
                f" {self._buffer.offset + held}; see max_message_bytes"
            )
        if held > self._limits.max_reply_bytes:
            raise PayloadTooBig(
                f"reply is more than {self._limits.max_reply_bytes} bytes long, with no"
                f" EOP yet at offset {self._buffer.offset + held}; see max_reply_bytes"
            )


def _end_of(data: bytes, marker: bytes, count: int) -> int:
    """Return where number ``count`` of the pieces that ``marker`` ends begins."""
    at = 0
    for _ in range(count):
        at = data.find(marker, at) + len(marker)
    return at
