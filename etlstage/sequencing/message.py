"""
Messages: the protocol that publishers and sequencers require, and types that have it.

A message contains its UUID, as a journal contains nothing but messages. What a framing
requires in addition is a protocol of that framing; see
:mod:`etlstage.sequencing.framing`.
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
    """The description of a journal."""

    name: str
    content_type: str
    """Determines the framing of the journal's messages."""
    labels: Mapping[str, str] = {}


@runtime_checkable
class Message(Protocol):
    """
    A message that can be published and sequenced.

    A type that can't hold a UUID opts out of exactly-once delivery: its ``uuid`` is
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
    """A message that can be validated before it is published."""

    def validate(self) -> None:
        """Raise an error if the message is invalid; it has no UUID of its own yet."""


NewMessage: TypeAlias = Callable[[JournalSpec], Message]
"""Creates a message of the type that is read from a journal."""


class Envelope(NamedTuple):
    """A message, and its place in a journal."""

    journal: str
    begin: int
    """Offset of its first byte in the journal."""
    end: int
    """Offset after its last byte."""
    message: Message


class JournalProducer(NamedTuple):
    """A producer in a journal."""

    journal: str
    producer: bytes
    """The producer's id, 6 bytes."""


class AckIntent(NamedTuple):
    """The acknowledgement of messages published to a journal, not yet appended."""

    journal: str
    intent: bytes
    """A framed message."""


class JsonMessage:
    """
    A JSON object, with its UUID at a pointer.

    Args:
        value: The object.
        pointer: Where the UUID is: a JSON pointer (RFC 6901), each part of which names
            a member of an object.

    """

    __slots__ = ("_uuid", "line", "pointer", "value")

    def __init__(
        self, value: dict[str, Any] | None = None, *, pointer: str = "/_meta/uuid"
    ) -> None:
        if not pointer.startswith("/"):
            raise ValueError(f"a JSON pointer begins with '/', got {pointer!r}")
        self.value: dict[str, Any] = {} if value is None else value
        self.pointer: str = pointer
        self.line: bytes = b""
        """The line that it was read from, without the newline; else empty."""
        self._uuid: UUID | None = None

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - whatever JSON has
        return self.value[key]

    def __repr__(self) -> str:
        return f"<JsonMessage {self.uuid}>"

    @property
    def uuid(self) -> UUID:
        """The UUID; ``NO_UUID`` if there is none at the pointer."""
        if self._uuid is None:
            at: Any = self.value
            for name in self._path():
                at = at.get(name) if isinstance(at, dict) else None
            self._uuid = NO_UUID if at is None else parse_uuid(str(at))
        return self._uuid

    def set_uuid(self, uuid: UUID) -> None:
        """Set the UUID, creating objects on the pointer's path."""
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
        Replace the object.

        Raises:
            ValueError: If the value is not an object, or its UUID can't be parsed.

        """
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, got {type(value).__name__}")  # noqa: TRY004
        self.value, self._uuid = value, None
        _ = self.uuid

    def _path(self) -> list[str]:
        parts = self.pointer[1:].split("/")
        return [part.replace("~1", "/").replace("~0", "~") for part in parts]


class CsvRecord:
    """A CSV record whose field 0 is reserved for the UUID."""

    __slots__ = ("_uuid", "fields")

    def __init__(self, fields: Sequence[str] = ("",)) -> None:
        self.fields: list[str] = list(fields)
        self._uuid: UUID | None = None

    def __repr__(self) -> str:
        return f"<CsvRecord {self.uuid} fields={len(self.fields)}>"

    @property
    def uuid(self) -> UUID:
        """The UUID; ``NO_UUID`` if the field is empty."""
        if self._uuid is None:
            first = self.fields[0] if self.fields else ""
            self._uuid = parse_uuid(first) if first else NO_UUID
        return self._uuid

    def set_uuid(self, uuid: UUID) -> None:
        """Set field 0 to the UUID."""
        if not self.fields:
            raise ValueError("fields are empty, expected one for the UUID")
        self.fields[0] = str(uuid)
        self._uuid = uuid

    def acknowledgement(self, journal: str) -> CsvRecord:
        """Return an empty record of as many fields, as readers refuse others."""
        return CsvRecord([""] * len(self.fields))

    def marshal_csv(self) -> list[str]:
        """Return the fields."""
        return self.fields

    def unmarshal_csv(self, fields: list[str]) -> None:
        """
        Replace the fields.

        Raises:
            ValueError: If there are none, or the first is not a UUID.

        """
        if not fields:
            raise ValueError("fields are empty")
        self._uuid = parse_uuid(fields[0])
        self.fields = list(fields)


class ProtoMessage:
    """
    A message of a class that was generated by protobuf's compiler.

    Args:
        message: The message.
        field: Name of its field of type ``bytes`` that holds the UUID.

    """

    __slots__ = ("field", "message")

    def __init__(self, message: Any, *, field: str = "uuid") -> None:  # noqa: ANN401
        self.message: Any = message
        self.field: str = field

    @property
    def uuid(self) -> UUID:
        """The UUID; ``NO_UUID`` if the field is empty."""
        held = getattr(self.message, self.field)
        return UUID(bytes=bytes(held)) if held else NO_UUID

    def set_uuid(self, uuid: UUID) -> None:
        """Set the field to the UUID."""
        setattr(self.message, self.field, uuid.bytes)

    def acknowledgement(self, journal: str) -> ProtoMessage:
        """Return an empty message of the same class."""
        return ProtoMessage(type(self.message)(), field=self.field)

    def size(self) -> int:
        """Return the serialized size in bytes."""
        return int(self.message.ByteSize())

    def marshal_to(self, buffer: memoryview) -> int:
        """Serialize to the beginning of ``buffer``; return the number of bytes."""
        data: bytes = self.message.SerializeToString()
        buffer[: len(data)] = data
        return len(data)

    def unmarshal(self, data: bytes) -> None:
        """
        Parse the message.

        Raises:
            ValueError: If protobuf can't parse it, or its UUID does not have 16 bytes.

        """
        try:
            self.message.ParseFromString(data)
        except Exception as error:  # protobuf's own class, which can't be named here
            raise ValueError(f"protobuf: {error}") from error
        _ = self.uuid


class Opaque:
    """Uninterpreted bytes; in a fixed frame they are preceded by the UUID."""

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
        """Return the size in bytes, including the UUID."""
        return 16 + len(self.data)

    def marshal_to(self, buffer: memoryview) -> int:
        """Write UUID and bytes to the beginning of ``buffer``."""
        buffer[:16] = self._uuid.bytes
        buffer[16 : self.size()] = self.data
        return self.size()

    def unmarshal(self, data: bytes) -> None:
        """
        Replace UUID and bytes; ``data`` begins with the UUID.

        Raises:
            ValueError: If there are too few bytes for a UUID.

        """
        if len(data) < 16:
            raise ValueError(f"expected a UUID of 16 bytes, got {len(data)}")
        self._uuid = UUID(bytes=data[:16])
        self.data = data[16:]


def as_message(value: object) -> Message:
    """
    Return a value as a message; it may be a message, a dict, bytes or a list of fields.

    Raises:
        TypeError: If the value is none of these.

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
