"""
The interface of a dialect: its settings for a stage, and one session for each worker.

A :class:`Dialect` has everything that other code must know about it. It opens a
:class:`DialectSession` for each worker: the caller supplies bytes and the time, the
session turns them into events and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import (
    TYPE_CHECKING,
    ClassVar,
    Final,
    NamedTuple,
    Protocol,
    Self,
    runtime_checkable,
)

from etlstage.messages import StageKind
from etlstage.protocol.events import Assignment, Event

if TYPE_CHECKING:
    from etlstage.settings.definition import Section

__all__ = (
    "SEND_EOF",
    "Connector",
    "Dialect",
    "DialectSession",
    "IdentityEnum",
    "Limits",
    "Paired",
    "Services",
    "Shape",
    "Side",
)

SEND_EOF: Final = b""
"""Marks in the list from ``data_to_send()`` where to close the sending direction."""


class IdentityEnum(Enum):
    """An enumeration whose members are hashed as objects, and not by their names."""

    # A transition looks up members, and Enum's own hash is Python code.
    if not TYPE_CHECKING:
        __hash__ = object.__hash__


class Side(Enum):
    """Which end of a session this is."""

    SUPERVISOR = "supervisor"
    WORKER = "worker"


class Limits(NamedTuple):
    """How much a peer may make us hold, in bytes."""

    max_message_bytes: int = 64 * 1024 * 1024
    """One message. Precedents: h11 16 KiB for a header, websockets 1 MiB for a
    message, Meltano 50 MiB for a record; a message here is a document."""
    max_reply_bytes: int = 256 * 1024 * 1024
    """All messages of one reply, with their markers, in memory. Each message counts
    :data:`~etlstage.messages.OVERHEAD` bytes more; otherwise a reply of nothing but EOM
    could take fifty times the limit."""


class DialectSession(Protocol):
    """
    One side of a conversation in a dialect.

    Receiving never raises for a fault of the peer: it yields a
    :class:`~etlstage.protocol.events.Failed`, after which the session is dead.
    """

    @property
    def in_order(self) -> bool:
        """
        Whether exchanges end in the order in which they were opened.

        If so, the time of each begins with its turn, and none can be cancelled alone.
        """

    @property
    def unprompted(self) -> bool:
        """
        Whether it has timers, or bytes to write that :meth:`send` did not cause.

        Otherwise :meth:`data_to_send` need only be called after :meth:`send`, and there
        is no timer.
        """

    @property
    def sends_farewell(self) -> bool:
        """Whether a worker is asked to end before its input ends."""

    @property
    def defers_farewell(self) -> bool:
        """Whether a farewell would only be sent after what the worker works on."""

    @property
    def owed(self) -> int:
        """
        How many exchanges the worker has not answered.

        An answered exchange may still be open, until it is proven or committed.
        """

    @property
    def room(self) -> float:
        """How many exchanges may be opened now; messages, if a worker asks for them."""

    def receive_data(self, data: bytes, now: float, /) -> None:
        """
        Take bytes that the peer sent; they may be split anywhere.

        None at all: the peer is read again, see :meth:`reading_paused`.
        """

    def reading_paused(self, now: float, /) -> None:
        """Expect no sign of life before :meth:`receive_data`: the peer is not read."""

    def receive_eof(self, now: float, /) -> None:
        """Take the end of the peer's output."""

    def peer_exited(self, clean: bool, now: float) -> None:
        """
        End the exchanges that the exit of a worker shows to be answered.

        Args:
            clean: Whether it exited as it should.
            now: The time, in seconds.

        """

    def events_received(self) -> list[Event]:
        """Return, once, the events since the last call."""

    def send(self, event: Event, now: float, /) -> None:
        """
        Queue an event for the peer.

        Raises:
            LocalProtocolError: If the event may not be sent now, or not at all.
            InvalidMessage: If a message can't be sent; nothing of the event has been
                queued then, and no number has been used.

        """

    def data_to_send(self) -> list[bytes]:
        """
        Return, once, the bytes to write; ``SEND_EOF`` among them is a half-close.

        It is called after anything was received or sent, or a timer was handled, and
        again as soon as its bytes are written, until it returns nothing. So it may
        return a part, and let control frames overtake the rest.
        """

    def get_timer(self) -> float | None:
        """Return when :meth:`handle_timer` is to be called, in seconds, or None."""

    def handle_timer(self, now: float) -> None:
        """Do what is due by now, in seconds on the caller's clock."""


@runtime_checkable
class Paired(DialectSession, Protocol):
    """
    A session that pairs replies with exchanges by their order alone.

    It ends exchanges once it is proven that replies and exchanges add up. The proof is
    how the worker drains its input: while ``wants_unread``, report how much is left.
    """

    def go_in_step(self, step: bool, /) -> None:
        """Have one exchange at a time, and prove each of them; False: stop doing so."""

    def bound_replies(self, size: float, /) -> None:
        """Let at most ``size`` bytes of replies wait until they are proven."""

    @property
    def wants_unread(self) -> bool:
        """Whether the session needs :meth:`input_unread` now."""

    @property
    def ahead(self) -> bool:
        """Whether the worker lacks a part of what it was given last."""

    @property
    def unproven(self) -> int:
        """Number of released messages whose replies are not yet proven to be theirs."""

    def input_unread(self, left: int, now: float) -> bool:
        """
        Take the number of bytes written to the peer that it has not read.

        Returns:
            Whether to receive all that it has written now, whatever comes; then call
            :meth:`output_dry`.

        """

    def output_dry(self, now: float) -> None:
        """Judge the held replies, as everything the peer had written was received."""

    def give_whole(self) -> None:
        """Queue the rest of a message sent in part: the worker gets nothing more."""


class Services(Protocol):
    """Answers one connection of a worker that asks for services; without I/O."""

    def receive_data(self, data: bytes, /) -> bytes:
        """
        Take the worker's bytes, and return the answer.

        Raises:
            ProtocolError: If the connection is to be closed.

        """

    def lines(self) -> bytes:
        """Return, once, the lines for the log."""


class Connector(Protocol):
    """How a worker connects that uses a socket instead of pipes; without I/O."""

    def arguments(
        self, *, app: str, identity: str, endpoint: str, locator: str
    ) -> tuple[str, ...]:
        """
        Return the arguments to append to a worker's command.

        They are the name of the stage, the identity that the worker must send when it
        connects, where it connects to, and where it asks for services.
        """

    def identity(self, data: bytes, /) -> str | None:
        """
        Return the identity in everything a worker has written; None: not yet there.

        Raises:
            RemoteProtocolError: If it wrote something else.

        """

    def services(self, host: str, port: int) -> Services | None:
        """Return what answers a connection to the locator there, or None."""


class Shape(Enum):
    """How exchanges are made from messages."""

    STREAM = "stream"
    """There are no requests: the worker writes until it exits."""
    MESSAGE = "message"
    """One message is one exchange."""
    BATCH = "batch"
    """Several messages are one exchange, and the supervisor ends the batch."""
    ASKED_BATCH = "asked batch"
    """Several messages are one exchange, and the worker asks for each of them."""
    COMMITTED = "committed"
    """One message is one exchange, open until a stored position covers it."""

    @property
    def batches(self) -> bool:
        """Whether messages are answered a batch at a time."""
        return self in (Shape.BATCH, Shape.ASKED_BATCH)

    @property
    def gathers(self) -> bool:
        """Whether several messages are sent at a time, according to ``batch``."""
        return self.batches or self is Shape.COMMITTED


class Dialect(ABC):
    """
    The protocol between a stage and its workers, with its settings; immutable.

    ``registry.py`` finds the class of a dialect by its name.
    """

    name: ClassVar[str]
    """The value of the key ``dialect``."""

    @property
    def holds(self) -> int:
        """
        How many bytes of messages of a share may be uncommitted.

        If it is not 0, a worker has a share, and must commit its end, too.
        """
        return 0

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """How exchanges are made from messages."""

    @abstractmethod
    def open(
        self,
        side: Side,
        limits: Limits,
        *,
        batch: int = 1,
        kind: StageKind = StageKind.TRANSFORM,
        assignment: Assignment | None = None,
        window: int | None = None,
        life: float | None = None,
        answer: float | None = None,
    ) -> DialectSession:
        """
        Return a fresh session.

        Args:
            side: Which end of it.
            limits: How much the peer may make us hold.
            batch: Messages that fill a batch.
            kind: The kind of the stage, which decides what is invoked by default.
            assignment: The share of the input that this worker has; None: no share.
            window: Exchanges that may be given ahead of their replies; None: not set.
            life: Number of messages after which earlier workers were lost, on the
                supervisor's side; None: replies are released as they come.
            answer: Seconds for the answer to a request without a message, for which no
                caller waits; None: there is no limit.

        """

    @abstractmethod
    def silence(self, received: int, *, ready: bool = True) -> str:
        """
        Return what a worker did instead of answering in time, as a sentence with "it".

        Args:
            received: Bytes that it wrote since its last complete reply.
            ready: Whether it has announced itself; if not, that is what is missing.

        """

    @abstractmethod
    def plain(self) -> dict[str, object]:
        """Return the settings as plain JSON; :meth:`from_plain` reads them again."""

    @classmethod
    def from_plain(cls, settings: Mapping[str, object]) -> Self:
        """Return the dialect with settings from :meth:`plain`."""
        return cls(**{key: item for key, item in settings.items() if key != "name"})

    @classmethod
    @abstractmethod
    def section(cls, kind: StageKind) -> Section:
        """
        Return the section that reads the settings written for a stage.

        Args:
            kind: The kind of the stage; its settings may depend on it.

        """

    def fitted(self, *, batches: bool, heartbeat: float | None) -> Self:
        """
        Return the settings for a stage with batches, or with one message at a time.

        Args:
            batches: Whether it has batches.
            heartbeat: How long its workers may be silent, in seconds; None: unchanged.

        """
        return self

    def variables(self) -> Mapping[str, str | None]:
        """
        Return the variables that pass settings to a worker, by name.

        ``ETLSTAGE_NAME`` in its environment, ``{name}`` in its command. None: the
        variable is not set, and the placeholder is replaced by nothing.
        """
        return {}

    def problem(self, kind: StageKind) -> str | None:
        """Return why the settings don't fit a stage of that kind, or None."""
        return None

    @property
    def connection(self) -> Connector | None:
        """How a worker connects to our socket; None: it has pipes."""
        return None

    @property
    def announces(self) -> bool:
        """Whether a worker reports in the dialect, by itself, that it is ready."""
        return False

    def failed(
        self, status: int, *, stopped: bool, held: int, unproven: int = 0
    ) -> bool:
        """
        Return whether an exit is a failure of the worker.

        Args:
            status: Its exit status, negative for a signal.
            stopped: Whether it was stopped, through no fault of its own.
            held: Number of messages that it held.
            unproven: Number of messages that it has answered, and that only a clean
                exit shows to be loaded.

        """
        if stopped:
            return unproven > 0 and status != 0
        return status != 0 or held > 0
