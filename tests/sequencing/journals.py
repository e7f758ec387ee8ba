"""Journals in memory, and messages to put into them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any
from uuid import UUID

from etlstage.sequencing import (
    NO_UUID,
    ByteWriter,
    Envelope,
    JournalSpec,
    Opaque,
    build_uuid,
    encode_json,
    parse_uuid,
)

A, B, C = bytes.fromhex("01aaaaaaaa01"), bytes.fromhex("03bbbbbbbb02"), b"\5ccccc"


class Str:
    """A message of a UUID and a text, like the one in the real package's tests."""

    def __init__(self, text: str = "") -> None:
        self.uuid = NO_UUID
        self.text = text
        self.error: Exception | None = None

    def set_uuid(self, uuid: UUID) -> None:
        """Set the UUID."""
        self.uuid = uuid

    def acknowledgement(self, journal: str) -> Str:
        """Return a message without text."""
        return Str()

    def validate(self) -> None:
        """Raise :attr:`error`, if there is one."""
        assert not self.uuid.int
        if self.error is not None:
            raise self.error

    def marshal_json_to(self, writer: ByteWriter) -> None:
        """Write UUID and text."""
        value = {"UUID": str(self.uuid)} | ({"Str": self.text} if self.text else {})
        writer.write(encode_json(value, sort_keys=False) + b"\n")

    def to_json(self) -> object:
        """Return the value."""
        raise NotImplementedError

    def from_json(self, value: dict[str, str]) -> None:
        """Replace UUID and text."""
        self.uuid = parse_uuid(value["UUID"])
        self.text = value.get("Str", "")


class Done:
    """An append that is already done."""

    done = True

    def __init__(self, journal: str) -> None:
        self.journal = journal

    def wait(self) -> None:
        """Return at once."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


class MemorySection:
    def __init__(self, journals: Memory, journal: str) -> None:
        self._journals = journals
        self._journal = journal

    def release(self, *data: bytes) -> Done:
        """Append the data, or raise the journals' error."""
        journals, journal = self._journals, self._journal
        journals.sections.remove(journal)
        if journals.error is not None:
            raise journals.error
        journals.data[journal] = journals.data.get(journal, b"") + b"".join(data)
        return Done(journal)

    def abandon(self) -> None:
        """Append nothing."""
        self._journals.sections.remove(self._journal)


class Memory:
    """Journals whose appends are done at once."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.sections: list[str] = []
        self.error: Exception | None = None

    def start_append(self, journal: str) -> MemorySection:
        """Start a section, of which a journal has only one at a time."""
        assert journal not in self.sections
        self.sections.append(journal)
        return MemorySection(self, journal)

    def partitions(self) -> Sequence[JournalSpec]:
        """Return journal a."""
        return [spec()]

    def pending_except(self, journal: str) -> Sequence[Done]:
        """Return nothing, as all appends are done."""
        return ()


def to_json(message: Str) -> tuple[str, str]:
    """Map everything to journal a, as lines of JSON."""
    return "a", "application/x-ndjson"


def spec(content_type: str = "application/x-ndjson") -> JournalSpec:
    """Return the spec of journal a."""
    return JournalSpec("a", content_type)


def envelope(
    producer: bytes, clock: int, flags: int, at: int, *, journal: str = "j"
) -> Envelope:
    """Return the message of 100 bytes at index ``at``; 2 dead bytes follow each."""
    message = Opaque()
    message.set_uuid(build_uuid(producer, clock, flags))
    return Envelope(journal, 102 * at, 102 * at + 100, message)
