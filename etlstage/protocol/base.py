"""
The seam of a dialect: what a stage carries, and what one conversation offers.

A :class:`Dialect` answers for all that others must know of it. It opens a
:class:`DialectSession` for each worker: the caller moves bytes and time, the session turns
them into events and back.
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
    "Limits",
    "Paired",
    "Services",
    "Shape",
    "Side",
)

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
    """All messages of one reply, with their markers, in memory: each costs
    :data:`~etlstage.messages.OVERHEAD` more, or else a reply that is all EOM would take
    fifty times what it may."""


class DialectSession(Protocol):
    """
    One conversation in a dialect, seen from one side.

    Receiving never raises for what the peer did: it gives a
    :class:`~etlstage.protocol.events.Failed`, after which the session is dead.
    """

    @property
    def in_order(self) -> bool:
        """
        Whether exchanges end in the order in which they were opened.

        The time of each begins with its turn then, and none can be cancelled alone.
        """

    @property
    def unprompted(self) -> bool:
        """
        Whether it has bytes to write, or waits for a time, beside what is sent.

        Else :meth:`data_to_send` need only be asked behind :meth:`send`, and there is
        no timer.
        """

    @property
    def sends_farewell(self) -> bool:
        """Whether a worker is asked to end before its input ends."""

    @property
    def owed(self) -> int:
        """
        How many exchanges the worker has not answered.

        What it has answered may be open all the same, until it is proven or committed.
        """

    @property
    def room(self) -> float:
        """How many exchanges may be opened now; where the worker asks, messages."""

    def receive_data(self, data: bytes, now: float, /) -> None:
        """Take bytes that the peer sent; they may be cut anywhere."""

    def reading_paused(self, now: float, /) -> None:
        """Expect no sign of the peer before the next bytes: it is not read."""

    def receive_eof(self, now: float, /) -> None:
        """Take the end of what the peer sends."""

    def peer_exited(self, clean: bool, now: float) -> None:
        """
        End what a worker that is gone has answered, where its exit shows that.

        Args:
            clean: Whether it exited as it should.
            now: The time, in seconds.

        """

    def events_received(self) -> list[Event]:
        """Return, once, what has been received since the last call."""

    def send(self, event: Event, now: float, /) -> None:
        """
        Queue an event for the peer.

        Raises:
            LocalProtocolError: If the event may not be sent now, or not at all.
            InvalidMessage: If a message can't be sent: nothing of the event has been
                queued then, and no number was used.

        """

    def data_to_send(self) -> list[bytes]:
        """
        Return, once, the bytes to write; ``SEND_EOF`` among them is a half-close.

        It is asked after everything that was received, sent, or came with time, and
        again as soon as what it returned is written, until there is nothing: so it may
        return a part, and control come before the rest.
        """

    def get_timer(self) -> float | None:
        """Return when :meth:`handle_timer` wants to be called, in seconds, or None."""

    def handle_timer(self, now: float) -> None:
        """Do what is due by now, in seconds on the caller's clock."""


@runtime_checkable
class Paired(DialectSession, Protocol):
    """
    A session in which nothing but their order decides which exchange a reply is for.

    It ends exchanges when it is shown that they add up. How the input of the worker
    drains shows it: as long as ``wants_unread``, report how much is left.
    """

    def go_in_step(self, step: bool, /) -> None:
        """Have one exchange at a time, each shown to add up, or no longer."""

    def bound_replies(self, size: float, /) -> None:
        """Let so many bytes of replies wait until they are shown to add up."""

    @property
    def wants_unread(self) -> bool:
        """Whether :meth:`input_unread` is of use now."""

    @property
    def ahead(self) -> bool:
        """Whether the worker lacks a part of what it was given last."""

    @property
    def unproven(self) -> int:
        """Messages that were released, and may yet turn out to have others' replies."""

    def input_unread(self, left: int, now: float) -> bool:
        """
        Take how many bytes the peer has not read of what was written to it.

        Returns:
            Whether to receive all that it has written now, whatever comes; then call
            :meth:`output_dry`.

        """

    def output_dry(self, now: float) -> None:
        """Judge what is held back: all that the peer had written was received."""

    def give_whole(self) -> None:
        """Queue the rest of what the worker has a part of: it gets nothing more."""


class Services(Protocol):
    """What one connection of a worker finds beside its work; without I/O."""

    def receive_data(self, data: bytes, /) -> bytes:
        """
        Take what the worker wrote, and return the answer.

        Raises:
            ProtocolError: If the connection is to be closed.

        """

    def lines(self) -> bytes:
        """Return, once, the lines that are for the log."""


class Connector(Protocol):
    """How a worker connects that has a socket in place of pipes; without I/O."""

    def arguments(
        self, *, app: str, identity: str, endpoint: str, locator: str
    ) -> tuple[str, ...]:
        """
        Return the words behind a worker's command.

        They name the stage, what the worker has to call itself when it connects, where
        it connects to, and where it asks for services.
        """

    def identity(self, data: bytes, /) -> str | None:
        """
        Return what a worker calls itself in all that it has written; None: not yet.

        Raises:
            RemoteProtocolError: If it wrote something else.

        """

    def services(self, host: str, port: int) -> Services | None:
        """Return what answers a connection to the locator there; None: there is none."""


class Shape(Enum):
    """How exchanges are made from messages."""

    STREAM = "stream"
    """Nothing is asked: the worker writes until it exits."""
    MESSAGE = "message"
    """One message is one exchange."""
    BATCH = "batch"
    """Several messages are one exchange, and we end the batch."""
    ASKED_BATCH = "asked batch"
    """Several messages are one exchange, and the worker asks for each of them."""
    COMMITTED = "committed"
    """One message is one exchange, open until a position is stored that covers it."""

    @property
    def batches(self) -> bool:
        """Whether messages are answered a batch at a time."""
        return self in (Shape.BATCH, Shape.ASKED_BATCH)

    @property
    def gathers(self) -> bool:
        """Whether several messages are sent at a time, as ``batch`` has it."""
        return self.batches or self is Shape.COMMITTED


class Dialect(ABC):
    """
    What a stage and its workers speak, with its settings; immutable.

    ``registry.py`` finds the class of a dialect by its name.
    """

    name: ClassVar[str]
    """As the key ``dialect`` calls it."""

    @property
    def holds(self) -> int:
        """
        Bytes of messages of a share that may be answered and not committed.

        A worker has to commit the end of its share, too; 0: it has no such share.
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
            kind: Of the stage: what is asked for where nothing else is.
            assignment: The share of the input that this worker has; None for all that
                comes.
            window: Exchanges that may be given ahead of their replies, if that is set.
            life: Messages behind which workers before this one were lost, at the
                supervisor of a stage; None: replies are released as they come.
            answer: Seconds for the answer to what has no message in it, for which no
                caller waits; None: there is no limit.

        """

    @abstractmethod
    def silence(self, received: int, *, ready: bool = True) -> str:
        """
        Return what a worker did that did not answer in time, as a sentence from "it" on.

        Args:
            received: Bytes that it wrote since its last complete reply.
            ready: Whether it has announced itself; else that is what it did not do.

        """

    @abstractmethod
    def plain(self) -> dict[str, object]:
        """Return the settings as plain JSON; :meth:`from_plain` reads them again."""

    @classmethod
    def from_plain(cls, settings: Mapping[str, object]) -> Self:
        """Return the dialect with settings that :meth:`plain` has made."""
        return cls(**{key: item for key, item in settings.items() if key != "name"})

    @classmethod
    @abstractmethod
    def section(cls, kind: StageKind) -> Section:
        """
        Return what reads the settings as they are written for a stage.

        Args:
            kind: Of the stage; another kind may have other settings.

        """

    def fitted(self, *, batches: bool, heartbeat: float | None) -> Self:
        """
        Return the settings for a stage with batches, or with one message at a time.

        Args:
            batches: Whether it has batches.
            heartbeat: How long a worker of it may be silent, in seconds; None: as it is.

        """
        return self

    def variables(self) -> Mapping[str, str | None]:
        """
        Return by name what a worker can read of the settings.

        ``ETLSTAGE_NAME`` in its environment, ``{name}`` in its command; None is nothing.
        """
        return {}

    def problem(self, kind: StageKind) -> str | None:
        """Return why the settings don't fit a stage of that kind, or None."""
        return None

    @property
    def connection(self) -> Connector | None:
        """How a worker connects to a socket of ours; None: it has pipes."""
        return None

    @property
    def announces(self) -> bool:
        """Whether a worker reports by itself, in the dialect, that it is ready."""
        return False

    def failed(
        self, status: int, *, stopped: bool, held: int, unproven: int = 0
    ) -> bool:
        """
        Return whether an exit is a failure of the worker.

        Args:
            status: Its exit status, negative for a signal.
            stopped: Whether it was stopped, without any fault of its own.
            held: Messages that it held.
            unproven: Messages that it has answered, and only its end can show to be
                loaded.

        """
        if stopped:
            return unproven > 0 and status != 0
        return status != 0 or held > 0
