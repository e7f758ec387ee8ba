"""
What is too big: messages and replies, against the limits of a session.

``reader.py`` asks; here is how sizes are counted, and what is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from etlstage.errors import PayloadTooBig
from etlstage.messages import Groups, Run
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

    def sound_replies(self, groups: Groups) -> int:
        """Return how many replies come before the first that is too big."""
        return next((n for n, g in enumerate(groups) if self._too_big(g)), len(groups))

    def check_messages(self, messages: Run) -> None:
        """Raise for the first message that is too long."""
        sound = self.sound(messages)
        if sound < len(messages):
            raise self.fault((messages[sound],))

    def check_reply(self, reply: Sequence[bytes]) -> None:
        """Raise if a reply is too big, or a message in it."""
        if self._too_big(reply):
            raise self.fault(reply)

    def fault(self, reply: Sequence[bytes]) -> PayloadTooBig:
        """Return the error of a reply that is too big."""
        longest = max(map(len, reply))
        if longest > self._message:
            return PayloadTooBig(
                f"message is {longest} bytes long, expected no more than"
                f" {self._message} bytes; see max_message"
            )
        return PayloadTooBig(
            f"reply is {self._on_wire(reply)} bytes long, expected no more than"
            f" {self._reply} bytes; see max_reply"
        )

    def check_rest(self, buffer: ReceiveBuffer) -> None:
        """Raise for what is still incomplete and too long already."""
        held, at = len(buffer), buffer.offset + len(buffer)
        most = self._message + self._slack
        if held > most and held - buffer.end_of_last(self._eom) > most:
            raise PayloadTooBig(
                f"message is more than {self._message} bytes long, with no EOM yet at"
                f" offset {at}; see max_message"
            )
        if self._holds_replies and held > self._reply + self._slack:
            raise PayloadTooBig(
                f"reply is more than {self._reply} bytes long, with no EOP yet at"
                f" offset {at}; see max_reply"
            )

    def _too_big(self, reply: Sequence[bytes]) -> bool:
        return (
            self._on_wire(reply) > self._reply
            or max(map(len, reply), default=0) > self._message
        )

    def _on_wire(self, reply: Sequence[bytes]) -> int:
        return sum(map(len, reply)) + len(reply) * len(self._eom)
