"""
What is too big: messages and replies, against the limits of a session.

``reader.py`` asks; here is how sizes are counted, and what is said. A message is as
long as it is; a reply costs what it takes in memory, where each message has an
overhead: the bytes that were read are the smaller part of short ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from etlstage.errors import PayloadTooBig
from etlstage.messages import OVERHEAD, Groups, Run, counted
from etlstage.protocol.base import Limits
from etlstage.protocol.buffer import ReceiveBuffer
from etlstage.protocol.marker.markers import Markers

__all__ = ("Bounds",)


class Bounds:
    """
    Holds what has been received against the limits.

    Args:
        limits: How much the peer may make us hold.
        markers: Those of the session.
        replies: Whether replies are held until they are complete.

    """

    def __init__(self, limits: Limits, markers: Markers, *, replies: bool) -> None:
        self._message, self._reply = limits
        self._eom = markers.eom
        self._holds_replies = replies
        # A part of a marker may be here already, behind what the limits are for.
        self._slack = max(map(len, markers.named.values())) - 1

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

        Args:
            groups: The replies.
            size: Bytes in all of them, with their markers.
            count: Messages in all of them.
            overhead: Bytes of memory that each takes beside its own.

        """
        # Nearly always it takes no look at each of them.
        if size <= self._message and (
            size + overhead * count <= self._reply
            or size + overhead * max(map(len, groups), default=0) <= self._reply
        ):
            return len(groups)
        return next(
            (n for n, group in enumerate(groups) if self.too_big(group, overhead)),
            len(groups),
        )

    def fits(self, size: int) -> bool:
        """Return whether no reply in so many bytes can be too big."""
        # At worst each byte is an EOM.
        most = (size + len(self._eom)) * (1 + OVERHEAD)
        return size <= self._message and most <= self._reply

    def check_messages(self, messages: Run) -> None:
        """Raise for the first message that is too long."""
        sound = self.sound(messages)
        if sound < len(messages):
            raise self.fault((messages[sound],))

    def too_big(self, reply: Sequence[bytes], overhead: int = OVERHEAD) -> bool:
        """Return whether a reply is too big, or a message in it."""
        return (
            self._cost(reply, overhead) > self._reply
            or max(map(len, reply), default=0) > self._message
        )

    def fault(self, reply: Sequence[bytes], overhead: int = OVERHEAD) -> PayloadTooBig:
        """Return the error of a reply that is too big."""
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
        """Raise for the first complete message that is too long in what came last."""
        eom, most, at = self._eom, self._message, 0
        # From one EOM to another as far away as may be: split up, it would be larger.
        while len(tail) - at > most:
            last = tail.rfind(eom, at, at + most + len(eom))
            if last < 0 and (last := tail.find(eom, at)) >= 0:
                raise self.fault((tail[at:last],))
            if last < 0:
                return
            at = last + len(eom)

    def check_rest(self, buffer: ReceiveBuffer, overhead: int) -> None:
        """Raise for what is still incomplete and too long already."""
        held, at = len(buffer), buffer.offset + len(buffer)
        most = self._message + self._slack
        if held > most and held - buffer.end_of_last(self._eom) > most:
            raise PayloadTooBig(
                f"message is more than {self._message} bytes long, with no EOM yet at"
                f" offset {at}; see max_message"
            )
        most = self._reply + self._slack
        # Counted only where so many bytes may be too many messages.
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
        """Return what a reply takes: as it was read, and beside that."""
        return sum(map(len, reply)) + len(reply) * (len(self._eom) + overhead)
