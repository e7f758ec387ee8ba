"""
What messages are: what a publisher and a sequencer ask of them, and types that have it.

A message holds its UUID, for a journal holds nothing but messages. What a framing asks
of one besides is a protocol of that framing, see :mod:`etlstage.sequencing.framing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable
from uuid import UUID

from etlstage.sequencing.clock import NO_UUID, parse_uuid

__all__ = (
    "AckIntent",
    "CsvRecord",
    "Envelope",
    "JournalProducer",
    "JournalSpec",
    "JsonMessage",
    "Message",
    "NewMessage",
    "Opaque",
    "ProtoMessage",
    "Validator",
    "as_message",
)


class JournalSpec(NamedTuple):
    """What is known of a journal."""

    name: str
    content_type: str
    """Names the framing of its messages."""
    labels: Mapping[str, str] = {}


@runtime_checkable
class Message(Protocol):
    """
    What can be published and sequenced.

    A type that can't hold a UUID opts out of being counted once: its ``uuid`` is
    :data:`~etlstage.sequencing.clock.NO_UUID`, and ``set_uuid`` does nothing.
    """

    @property
    def uuid(self) -> UUID:
        """The UUID that was set last."""

    def set_uuid(self, uuid: UUID) -> None:
        """Set the UUID."""

    def acknowledgement(self, journal: str) -> Message:
        """Return a new message of this type, without content, for that journal."""


@runtime_checkable
class Validator(Protocol):
    """A message that knows whether it is fit to be published."""

    def validate(self) -> None:
        """Raise an error if it is not; it has no UUID of its own yet."""


NewMessage: TypeAlias = Callable[[JournalSpec], Message]
"""Makes a message of the type that is read from a journal."""


class Envelope(NamedTuple):
    """A message, and where it stands."""

    journal: str
    begin: int
    """Offset of its first byte in the journal."""
    end: int
    """Offset behind its last."""
    message: Message


class JournalProducer(NamedTuple):
    """One producer's messages in one journal."""

    journal: str
    producer: bytes
    """Its id, 6 bytes."""


class AckIntent(NamedTuple):
    """The acknowledgement of what was published to a journal, not yet appended."""

    journal: str
    intent: bytes
    """A framed message."""


class JsonMessage:
    """
    A JSON object, with its UUID at a pointer.

    Args:
        value: The object.
        pointer: Where the UUID stands: a JSON pointer (RFC 6901) of which each part
            names an object's member.

    """

    __slots__ = ("_uuid", "pointer", "value")

    def __init__(
        self, value: dict[str, Any] | None = None, *, pointer: str = "/_meta/uuid"
    ) -> None:
        if not pointer.startswith("/"):
            raise ValueError(f"a JSON pointer begins with '/', got {pointer!r}")
        self.value: dict[str, Any] = {} if value is None else value
        self.pointer: str = pointer
        self._uuid: UUID | None = None

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - whatever JSON has
        return self.value[key]

    def __repr__(self) -> str:
        return f"<JsonMessage {self.uuid}>"

    @property
    def uuid(self) -> UUID:
        """The UUID; none stands there, none it is."""
        if self._uuid is None:
            at: Any = self.value
            for name in self._path():
                at = at.get(name) if isinstance(at, dict) else None
            self._uuid = NO_UUID if at is None else parse_uuid(str(at))
        return self._uuid

    def set_uuid(self, uuid: UUID) -> None:
        """Set the UUID; objects on the way to it are made."""
        *path, last = self._path()
        at = self.value
        for name in path:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise TypeError(f"no object at {name!r} of pointer {self.pointer!r}")
        at[last] = str(uuid)
        self._uuid = uuid

    def acknowledgement(self, journal: str) -> JsonMessage:
        """Return an object that will have a UUID and nothing else."""
        return JsonMessage(pointer=self.pointer)

    def to_json(self) -> dict[str, Any]:
        """Return the object."""
        return self.value

    def from_json(self, value: object) -> None:
        """
        Take another object.

        Raises:
            ValueError: If it is none, or its UUID does not parse.

        """
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, got {type(value).__name__}")  # noqa: TRY004
        self.value, self._uuid = value, None
        _ = self.uuid

    def _path(self) -> list[str]:
        parts = self.pointer[1:].split("/")
        return [part.replace("~1", "/").replace("~0", "~") for part in parts]


class CsvRecord:
    """A record whose field 0 is the UUID; that is for the UUID alone."""

    __slots__ = ("_uuid", "fields")

    def __init__(self, fields: Sequence[str] = ("",)) -> None:
        self.fields: list[str] = list(fields)
        self._uuid: UUID | None = None

    def __repr__(self) -> str:
        return f"<CsvRecord {self.uuid} fields={len(self.fields)}>"

    @property
    def uuid(self) -> UUID:
        """The UUID; an empty field is none."""
        if self._uuid is None:
            first = self.fields[0] if self.fields else ""
            self._uuid = parse_uuid(first) if first else NO_UUID
        return self._uuid

    def set_uuid(self, uuid: UUID) -> None:
        """Set field 0."""
        if not self.fields:
            raise ValueError("fields are empty, expected one for the UUID")
        self.fields[0] = str(uuid)
        self._uuid = uuid

    def acknowledgement(self, journal: str) -> CsvRecord:
        """Return a record as wide: a reader takes no other."""
        return CsvRecord([""] * len(self.fields))

    def marshal_csv(self) -> list[str]:
        """Return the fields."""
        return self.fields

    def unmarshal_csv(self, fields: list[str]) -> None:
        """
        Take other fields.

        Raises:
            ValueError: If the first is no UUID.

        """
        if not fields:
            raise ValueError("fields are empty")
        self._uuid = parse_uuid(fields[0])
        self.fields = list(fields)


class ProtoMessage:
    """
    A message of a class that protobuf's compiler made.

    Args:
        message: The message.
        field: Its field of type bytes that holds the UUID.

    """

    __slots__ = ("field", "message")

    def __init__(self, message: Any, *, field: str = "uuid") -> None:  # noqa: ANN401
        self.message: Any = message
        self.field: str = field

    @property
    def uuid(self) -> UUID:
        """The UUID; an empty field is none."""
        held = getattr(self.message, self.field)
        return UUID(bytes=bytes(held)) if held else NO_UUID

    def set_uuid(self, uuid: UUID) -> None:
        """Set the field."""
        setattr(self.message, self.field, uuid.bytes)

    def acknowledgement(self, journal: str) -> ProtoMessage:
        """Return an empty message of the same class."""
        return ProtoMessage(type(self.message)(), field=self.field)

    def size(self) -> int:
        """Return how many bytes it has, serialized."""
        return int(self.message.ByteSize())

    def marshal_to(self, buffer: memoryview) -> int:
        """Serialize it to the beginning of ``buffer`` and return how long it is."""
        data: bytes = self.message.SerializeToString()
        buffer[: len(data)] = data
        return len(data)

    def unmarshal(self, data: bytes) -> None:
        """
        Parse it.

        Raises:
            ValueError: If protobuf can't, or the UUID has not 16 bytes.

        """
        try:
            self.message.ParseFromString(data)
        except Exception as error:  # protobuf's own class, which can't be named here
            raise ValueError(f"protobuf: {error}") from error
        _ = self.uuid


class Opaque:
    """Bytes that are not looked at; in a fixed frame the UUID stands before them."""

    __slots__ = ("_uuid", "data")

    def __init__(self, data: bytes = b"") -> None:
        self.data: bytes = data
        self._uuid = NO_UUID

    def __repr__(self) -> str:
        return f"<Opaque {self._uuid} bytes={len(self.data)}>"

    @property
    def uuid(self) -> UUID:
        """The UUID."""
        return self._uuid

    def set_uuid(self, uuid: UUID) -> None:
        """Set the UUID."""
        self._uuid = uuid

    def acknowledgement(self, journal: str) -> Opaque:
        """Return a message without bytes."""
        return Opaque()

    def size(self) -> int:
        """Return how many bytes it has with its UUID."""
        return 16 + len(self.data)

    def marshal_to(self, buffer: memoryview) -> int:
        """Write UUID and bytes to the beginning of ``buffer``."""
        buffer[:16] = self._uuid.bytes
        buffer[16 : self.size()] = self.data
        return self.size()

    def unmarshal(self, data: bytes) -> None:
        """
        Take other bytes, UUID first.

        Raises:
            ValueError: If they are too few for a UUID.

        """
        if len(data) < 16:
            raise ValueError(f"expected a UUID of 16 bytes, got {len(data)}")
        self._uuid = UUID(bytes=data[:16])
        self.data = data[16:]


def as_message(value: object) -> Message:
    """
    Return a message of what is none yet: an object, fields, or bytes.

    Raises:
        TypeError: If it is none of these.

    """
    if isinstance(value, dict):
        return JsonMessage(value)
    if isinstance(value, bytes):
        return Opaque(value)
    if hasattr(value, "set_uuid"):
        message: Message = value  # type: ignore[assignment]
        return message
    if isinstance(value, (list, tuple)):
        return CsvRecord(["", *value])
    raise TypeError(
        f"expected a message, a dict, bytes or a list of fields,"
        f" got {type(value).__name__}"
    )
