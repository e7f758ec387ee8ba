"""The test kit of dialect ``kcl``: actions and answers by name."""

from __future__ import annotations

from binascii import Error, a2b_base64
from collections.abc import Sequence
from typing import Any, Final

from etlstage.protocol.base import Limits, Side
from etlstage.protocol.events import Opened
from etlstage.protocol.kcl.lines import (
    Lines,
    read_object,
    read_reply,
    status_line,
    text_of,
)
from etlstage.protocol.kcl.session import KclSession
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.testing.dialect import DialectKit, shortened

__all__ = ("KclKit", "KclReader")

_LARGEST: Final = 2**31  # bytes; a side that sends more is stopped elsewhere
_SHOWN: Final = 6  # records shown at most, half of them the last ones


class KclKit(DialectKit[KclDialect]):
    """Cuts conversations at lines, and shows records decoded."""

    def reader(self) -> KclReader:
        """Return a reader that names actions, and shows their records decoded."""
        return KclReader()

    def cut(self, side: Side, data: bytes) -> list[bytes]:
        """
        Return what a side wrote, cut after each line that has a reply, or is one.

        The reply to an action, or to the answer to a checkpoint, is a checkpoint or a
        status. Anything else that a processor prints is part of the next piece.
        """
        understood = read_object if side is Side.SUPERVISOR else read_reply
        pieces, begun = [], b""
        for line in data.splitlines(keepends=True):
            begun += line
            if line[-1:] in b"\r\n" and understood(line) is not None:
                pieces.append(begun)
                begun = b""
        return [*pieces, begun]

    def raw(self, messages: Sequence[bytes]) -> bytes:
        """Return what a processor reads up to its first action, with the messages."""
        session = self._dialect.open(
            Side.SUPERVISOR, Limits(), batch=max(1, len(messages))
        )
        assert isinstance(session, KclSession)
        session.receive_data(status_line("initialize"), 0.0)
        session.send(Opened(1, messages), 0.0)
        return b"".join(session.data_to_send())


class KclReader:
    """Renders what a daemon and its processor send each other, in any version."""

    def __init__(self) -> None:
        self._lines = {side: Lines(_LARGEST) for side in Side}

    def read(self, side: Side, data: bytes) -> list[str]:
        """Return texts for what is complete now; noise is shown as it is."""
        lines = self._lines[side].feed(data)
        return [text for line in lines for text in _texts(side, line)]


def _texts(side: Side, line: bytes) -> list[str]:
    fields = read_object(line) or {}
    action = text_of(fields.get("action"))
    match action:
        case "initialize":
            return [f"initialize {fields.get('shardId')} from {_position(fields)}"]
        case "processRecords" if isinstance(fields.get("records"), list):
            return _records(fields["records"])
        case "checkpoint" if side is Side.WORKER:
            return [f"checkpoint {_position(fields)}"]
        case "checkpoint":
            return [
                f"checkpoint {_position(fields)}: {fields.get('error') or 'stored'}"
            ]
        case "status":
            return [f"status {text_of(fields.get('responseFor'))}"]
        case "shutdown":
            return [f"shutdown {text_of(fields.get('reason'))}"]
        case None:
            return [f"noise: {shortened(line)}"]
        case _ if side is Side.WORKER:
            return [f"noise: {shortened(line)}"]
        case _:
            return [action]


def _position(fields: dict[str, Any]) -> str:
    number = fields.get("sequenceNumber", fields.get("checkpoint"))
    if number is None:
        return "(all)" if fields.get("action") == "checkpoint" else "(not given)"
    sub = text_of(fields.get("subSequenceNumber"))
    return f"{number}.{sub}" if sub not in (None, "0") else str(number)


def _records(records: list[Any]) -> list[str]:
    shown = [_record(record) for record in records]
    if len(shown) > _SHOWN:
        half = _SHOWN // 2
        shown[half:-half] = [f"  ... {len(shown) - 2 * half:,} records ..."]
    count = f"{len(records):,} record" + "s" * (len(records) != 1)
    return [f"processRecords: {count}", *shown]


def _record(record: Any) -> str:  # noqa: ANN401 - whatever was written
    if not isinstance(record, dict):
        return f"  {record!r}"
    try:
        data = a2b_base64(record.get("data") or "")
    except (Error, ValueError):
        data = b""
    return f"  {_position(record)} {record.get('partitionKey')!r} {shortened(data)}"
