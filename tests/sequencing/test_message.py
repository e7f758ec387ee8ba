"""The message types that come with the package."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from etlstage.sequencing import (
    NO_UUID,
    CsvRecord,
    JsonMessage,
    Message,
    Opaque,
    ProtoMessage,
    as_message,
)

U = UUID("83fc2f81-cc5f-11e9-8400-01aaaaaaaa01")


def test_json_message_has_its_uuid_at_a_pointer() -> None:
    """Missing objects on the way to the pointer are created."""
    message = JsonMessage({"a": 1})
    assert message.uuid == NO_UUID
    message.set_uuid(U)
    assert message.uuid == U
    assert message.to_json() == {"a": 1, "_meta": {"uuid": str(U)}}
    assert message["a"] == 1
    assert repr(message) == f"<JsonMessage {U}>"
    other = JsonMessage({"x/y": {"~": 1}}, pointer="/x~1y/~0z")
    other.set_uuid(U)
    assert other.value == {"x/y": {"~": 1, "~z": str(U)}}
    assert other.acknowledgement("j").value == {}
    assert other.acknowledgement("j").pointer == "/x~1y/~0z"
    read = JsonMessage()
    read.from_json(message.value)
    assert read.uuid == U


def test_json_message_without_a_place_for_its_uuid() -> None:
    """Setting the UUID fails if something else is there."""
    message = JsonMessage({"_meta": 7})
    assert message.uuid == NO_UUID
    with pytest.raises(
        TypeError, match="no object at '_meta' of pointer '/_meta/uuid'"
    ):
        message.set_uuid(U)
    with pytest.raises(ValueError, match="begins with '/', got 'uuid'"):
        JsonMessage(pointer="uuid")


def test_csv_record_has_its_uuid_in_field_0() -> None:
    """Its acknowledgement has as many fields."""
    record = CsvRecord(["", "a", "b"])
    assert record.uuid == NO_UUID
    record.set_uuid(U)
    assert record.marshal_csv() == [str(U), "a", "b"]
    assert record.uuid == U
    assert repr(record) == f"<CsvRecord {U} fields=3>"
    assert record.acknowledgement("j").fields == ["", "", ""]
    fields = [str(U), "x"]
    record.unmarshal_csv(fields)
    fields[1] = "changed"
    assert (record.uuid, record.fields) == (U, [str(U), "x"])
    assert CsvRecord([str(U)]).uuid == U


def test_csv_record_needs_a_field() -> None:
    """A record that is read must have a first field, with a UUID in it."""
    with pytest.raises(ValueError, match=r"^fields are empty$"):
        CsvRecord().unmarshal_csv([])
    with pytest.raises(ValueError, match="invalid UUID length: 1"):
        CsvRecord().unmarshal_csv(["x"])
    empty = CsvRecord([])
    assert empty.uuid == NO_UUID
    with pytest.raises(ValueError, match="fields are empty, expected one"):
        empty.set_uuid(U)


class Proto:
    """A stand-in for a generated protobuf class, with the methods that are used."""

    uuid = b""
    data = b""

    def ByteSize(self) -> int:  # noqa: N802
        """Return the number of bytes."""
        return len(self.uuid + self.data)

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Return the bytes."""
        return self.uuid + self.data

    def ParseFromString(self, data: bytes) -> None:  # noqa: N802
        """Replace the contents."""
        if data == b"bad":
            raise RuntimeError("wire type 7")
        self.uuid, self.data = data[:16], data[16:]


def test_proto_message_has_its_uuid_in_a_field() -> None:
    """The field has the type bytes."""
    message = ProtoMessage(Proto())
    assert message.uuid == NO_UUID
    message.set_uuid(U)
    message.message.data = b"abc"
    buffer = bytearray(20)
    assert message.size() == message.marshal_to(memoryview(buffer)) == 19
    assert buffer == U.bytes + b"abc\0"
    other = message.acknowledgement("j")
    assert isinstance(other.message, Proto)
    assert other.uuid == NO_UUID
    other.unmarshal(bytes(buffer[:19]))
    assert (other.uuid, other.message.data) == (U, b"abc")


def test_proto_message_that_does_not_parse() -> None:
    """Any error of protobuf becomes a ValueError; a UUID must have 16 bytes."""
    with pytest.raises(ValueError, match="protobuf: wire type 7"):
        ProtoMessage(Proto()).unmarshal(b"bad")
    with pytest.raises(ValueError, match="16-char"):
        ProtoMessage(Proto()).unmarshal(b"short")


def test_opaque_bytes_follow_their_uuid() -> None:
    """The bytes themselves are not interpreted."""
    message = Opaque(b"abc")
    message.set_uuid(U)
    buffer = bytearray(message.size() + 1)
    assert message.marshal_to(memoryview(buffer)) == 19
    assert buffer == U.bytes + b"abc\0"
    other = message.acknowledgement("j")
    assert (other.uuid, other.data) == (NO_UUID, b"")
    other.unmarshal(bytes(buffer[:19]))
    assert (other.uuid, other.data) == (U, b"abc")
    assert repr(other) == f"<Opaque {U} bytes=3>"
    other.unmarshal(U.bytes)
    assert other.data == b""
    with pytest.raises(ValueError, match="expected a UUID of 16 bytes, got 15"):
        other.unmarshal(U.bytes[:15])


def test_values_become_messages() -> None:
    """Objects, bytes and fields are converted; a message is returned as it is."""
    made: Any = as_message({"a": 1})
    assert (type(made), made.value) == (JsonMessage, {"a": 1})
    made = as_message(b"x")
    assert (type(made), made.data) == (Opaque, b"x")
    for fields in (["a", "b"], ("a", "b")):
        made = as_message(fields)
        assert (type(made), made.fields) == (CsvRecord, ["", "a", "b"])
    assert as_message(made) is made
    assert isinstance(made, Message)
    with pytest.raises(TypeError, match="list of fields, got int"):
        as_message(7)
