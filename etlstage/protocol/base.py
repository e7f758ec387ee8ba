"""
The seam of a dialect: what every protocol object offers.

The caller moves bytes and time; the dialect turns them into events and back.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple, Protocol

from etlstage.protocol.events import Event

__all__ = ("SEND_EOF", "Dialect", "Limits", "Side")

SEND_EOF: Final = b""
"""In what ``data_to_send()`` returns: close the sending direction here."""


class Side(Enum):
    """Which end of the conversation we are."""

    SUPERVISOR = "supervisor"
    WORKER = "worker"


class Limits(NamedTuple):
    """How much a peer may make us hold, in bytes."""

    max_message_bytes: int = 64 * 1024 * 1024
    """One message. Precedents: h11 16 KiB for a header, websockets 1 MiB for a
    message, Meltano 50 MiB for a record; a message here is a document."""
    max_reply_bytes: int = 256 * 1024 * 1024
    """All messages of one reply, with their markers."""


class Dialect(Protocol):
    """
    One session of a dialect, seen from one side.

    Receiving never raises for what the peer did: it gives a
    :class:`~etlstage.protocol.events.ProtocolFailed`, after which the session is dead.
    """

    def receive_data(self, data: bytes) -> None:
        """Take bytes that the peer sent; they may be cut anywhere."""
        ...

    def receive_eof(self) -> None:
        """Take note that the peer will send no more."""
        ...

    def events_received(self) -> list[Event]:
        """Return, once, what has been received since the last call."""
        ...

    def send(self, event: Event) -> None:
        """
        Queue an event for the peer.

        Raises:
            LocalProtocolError: If the event may not be sent now, or not at all.

        """
        ...

    def data_to_send(self) -> list[bytes]:
        """Return, once, the bytes to write; ``SEND_EOF`` among them is a half-close."""
        ...

    def get_timer(self) -> float | None:
        """Return when :meth:`handle_timer` wants to be called, in seconds, or None."""
        ...

    def handle_timer(self, now: float) -> None:
        """Take note of the time, in seconds on the caller's clock."""
        ...
