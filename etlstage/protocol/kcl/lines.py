"""
The lines of both sides: what each version writes, and how lines are read.

Each line is a JSON object. We write what daemons write, byte for byte, except that
characters beyond ASCII are escaped: they crash a processor under an ASCII locale. We
understand what daemons understand, and more; a line without a meaning yields None.
"""

from __future__ import annotations

from binascii import b2a_base64, crc32
from collections.abc import Sequence
from enum import Enum
from json import JSONDecoder
from json.encoder import encode_basestring_ascii
from typing import Any, Final, NamedTuple

from etlstage.errors import PayloadTooBig
from etlstage.messages import AnnotatedRun, Run, plain
from etlstage.protocol.kcl.checkpoint import ShardPosition

__all__ = (
    "LEAST",
    "MOST",
    "ROWS",
    "Ask",
    "Lines",
    "RecordColumn",
    "Row",
    "StatusReply",
    "Version",
    "answer_line",
    "ask_line",
    "hashed_key",
    "initialize_line",
    "read_object",
    "read_reply",
    "records_line",
    "requested_line",
    "status_line",
    "text_of",
    "whole_of",
)

LEAST: Final = -(1 << 63)
MOST: Final = (1 << 63) - 1
"""Bounds of whole numbers, except sequence numbers: daemons hold them in 64 bits."""
_NUMBER: Final = "sequenceNumber"
_SUB: Final = "subSequenceNumber"
_OLD: Final = "checkpoint"


class Version(Enum):
    """A version of the lines that daemons write."""

    LEGACY = "2014"
    """Daemons before 1.7.2, and Sylvite: ``checkpoint``, ``shutdown``."""
    DOCUMENT = "document"
    """The current document, to the letter; no daemon has ever written this."""
    V1 = "v1"
    """Daemons from 1.7.2 to 1.15: ``sequenceNumber``, ``shutdown``."""
    V2 = "v2"
    """Daemons since 2.1: ``leaseLost``, ``shardEnded``."""


class Row(NamedTuple):
    """The peculiarities of a version."""

    position: str
    """The member that holds the sequence number of a checkpoint."""
    full: bool
    """``initialize`` names a position, and records have all members."""
    sub: bytes
    """Sub-sequence number of a record that was not aggregated with others."""
    requested: bytes | None
    """The request for a shutdown, up to its position if any; None: there is none."""
    lost: tuple[str, bytes]
    """Name and line of the action for a lease that is lost."""
    ended: tuple[str, bytes]
    """Name and line of the action for a shard that has ended."""
    checkpointer: bool = False
    """A processor that lost its lease has a checkpointer, which the store refuses."""


_ZOMBIE: Final = "shutdown", b'{"action":"shutdown","reason":"ZOMBIE"}\n'
_TERMINATE: Final = "shutdown", b'{"action":"shutdown","reason":"TERMINATE"}\n'
_LOST: Final = "leaseLost", b'{"action":"leaseLost"}\n'
_REQUESTED: Final = b'{"action":"shutdownRequested"}\n'

ROWS: Final = {
    Version.LEGACY: Row(
        position=_OLD,
        full=False,
        sub=b"",
        requested=None,
        lost=_ZOMBIE,
        ended=_TERMINATE,
        checkpointer=True,
    ),
    Version.DOCUMENT: Row(
        position=_OLD,
        full=False,
        sub=b"",
        requested=b'{"action":"shutdownRequested","checkpoint":',
        lost=_LOST,
        ended=("shardEnded", b'{"action":"shardEnded","checkpoint":"SHARD_END"}\n'),
    ),
    Version.V1: Row(
        position=_NUMBER,
        full=True,
        sub=b"null",
        requested=_REQUESTED,
        lost=_ZOMBIE,
        ended=_TERMINATE,
        checkpointer=True,
    ),
    Version.V2: Row(
        position=_NUMBER,
        full=True,
        sub=b"0",
        requested=_REQUESTED,
        lost=_LOST,
        ended=("shardEnded", b'{"action":"shardEnded"}\n'),
    ),
}


class RecordColumn:
    """Names of the columns beside messages, which sessions read and produce."""

    SEQUENCE: Final = "sequence"
    """Sequence numbers: decimal text, or whole numbers."""
    SUB: Final = "sub"
    """Sub-sequence numbers; None: the record was not aggregated with others."""
    PARTITION: Final = "partition"
    """Partition keys."""
    ARRIVAL: Final = "arrival"
    """When records arrived, in milliseconds since 1970; None: unknown."""
    BEHIND: Final = "behind"
    """How far the reader was behind the end of the shard, in milliseconds, or None."""


# --- what the supervisor writes ---------------------------------------------------


def _text(text: str | None) -> bytes:
    return b"null" if text is None else encode_basestring_ascii(text).encode()


def _whole(number: int | None) -> bytes:
    return b"null" if number is None else b"%d" % number


def initialize_line(row: Row, shard: str, position: ShardPosition) -> bytes:
    """Return the line that begins the life of a processor."""
    begin = b'{"action":"initialize","shardId":%b' % _text(shard)
    if not row.full:
        return begin + b"}\n"
    return begin + b',"sequenceNumber":%b,"subSequenceNumber":%d}\n' % (
        _text(position.sequence),
        position.sub,
    )


def records_line(
    row: Row, messages: Run, positions: Sequence[tuple[float, int]]
) -> bytes:
    """
    Return the line that gives records.

    Args:
        row: The version.
        messages: The data of the records, with columns named by :class:`RecordColumn`.
        positions: Their positions, used if there is no column of sequence numbers.

    """
    columns = messages.columns if isinstance(messages, AnnotatedRun) else {}
    sequences = columns.get(RecordColumn.SEQUENCE) or [
        number for number, _ in positions
    ]
    data = plain(messages)
    keys = columns.get(RecordColumn.PARTITION)
    texts = (
        [b'"%08x"' % crc32(message) for message in data]
        if keys is None
        else [encode_basestring_ascii(key).encode() for key in keys]
    )
    if row.full:
        # 0 without a column, since the current Python client crashes on null.
        arrivals = columns.get(RecordColumn.ARRIVAL) or [0] * len(messages)
        subs = columns.get(RecordColumn.SUB) or [None] * len(messages)
        records = [
            b'{"data":"%b","partitionKey":%b,"sequenceNumber":"%b",'
            b'"approximateArrivalTimestamp":%b,"subSequenceNumber":%b,'
            b'"action":"record"}'
            % (
                b2a_base64(message, newline=False),
                text,
                str(number).encode(),
                b"null" if arrival is None else b"%d" % arrival,
                row.sub if sub is None else b"%d" % sub,
            )
            for message, text, number, arrival, sub in zip(
                data, texts, sequences, arrivals, subs, strict=True
            )
        ]
        behind = (columns.get(RecordColumn.BEHIND) or [None])[-1]
        end = b'],"millisBehindLatest":%b}\n' % _whole(behind)
    else:
        records = [
            b'{"data":"%b","partitionKey":%b,"sequenceNumber":"%b"}'
            % (b2a_base64(message, newline=False), text, str(number).encode())
            for message, text, number in zip(data, texts, sequences, strict=True)
        ]
        end = b"]}\n"
    # Joined only once: a line of 10,000 records is 15 MB.
    if records:
        records[0] = b'{"action":"processRecords","records":[' + records[0]
        records[-1] += end
        return b",".join(records)
    return b'{"action":"processRecords","records":[' + end


def hashed_key(message: bytes) -> str:
    """Return a partition key for a record that came without one."""
    return f"{crc32(message):08x}"


def requested_line(row: Row, largest: ShardPosition) -> bytes | None:
    """Return the line that requests a shutdown; None: the version has none."""
    if row.requested is None or row.requested.endswith(b"\n"):
        return row.requested
    return b"%b%b}\n" % (row.requested, _text(largest.sequence))


def answer_line(ask: Ask, error: str | None) -> bytes:
    """Return the line that answers a checkpoint: its position, and the error."""
    tail = b'"error":%b}\n' % _text(error)
    member = _text(ask.sequence)
    if ask.member == _OLD:
        return b'{"action":"checkpoint","checkpoint":%b,%b' % (member, tail)
    return b'{"action":"checkpoint","sequenceNumber":%b,"subSequenceNumber":%b,%b' % (
        member,
        _whole(ask.sub),
        tail,
    )


# --- what the worker writes -------------------------------------------------------


def status_line(action: str) -> bytes:
    """Return the status that ends an action, on a line of its own as in all clients."""
    return b'\n{"action":"status","responseFor":%b}\n' % _text(action)


def ask_line(member: str, sequence: str | None, sub: int | None) -> bytes:
    """Return the line that asks for a checkpoint, with a version's member."""
    if member == _OLD:
        return b'\n{"action":"checkpoint","checkpoint":%b}\n' % _text(sequence)
    return b'\n{"action":"checkpoint","sequenceNumber":%b,"subSequenceNumber":%b}\n' % (
        _text(sequence),
        _whole(sub),
    )


# --- reading ----------------------------------------------------------------------


class StatusReply(NamedTuple):
    """A worker reports that it is done with an action."""

    action: str | None
    """The name of the action; None: it named none."""


class Ask(NamedTuple):
    """A worker asks for a checkpoint."""

    member: str
    """The member that held the sequence number; empty: it was missing."""
    sequence: str | None
    sub: int | None = None
    legal: bool = True
    """Both numbers have a valid type."""


def _constant(name: str) -> object:
    raise ValueError(name)


# Numbers are read as text: a sequence number has 56 digits and must be kept verbatim.
_DECODER: Final = JSONDecoder(parse_int=str, parse_constant=_constant, strict=False)


def read_object(line: bytes) -> dict[str, Any] | None:
    """
    Return the object at the beginning of a line, or None.

    Whole numbers become text. What follows the object is ignored, as by daemons.
    """
    line = line.strip()
    if not line.startswith(b"{"):
        return None
    try:
        found, _ = _DECODER.raw_decode(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def text_of(value: object) -> str | None:
    """Return a value that should be text as text; None for null."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


def whole_of(value: object) -> int | None:
    """
    Return a value that should be a whole number as one; None for null.

    Raises:
        ValueError: If it is not a number of at most 64 bits.
        OverflowError: If it is infinite.

    """
    if value is None:
        return None
    # A fraction is truncated, as by daemons; a long text would take long to convert.
    if isinstance(value, float) or (isinstance(value, str) and len(value) <= 20):
        whole = int(value)
        if LEAST <= whole <= MOST:
            return whole
    raise ValueError("not a whole number of at most 64 bits")


def read_reply(line: bytes) -> StatusReply | Ask | None:
    """Return what a worker has sent in a line; None: nothing known."""
    fields = read_object(line) or {}
    match fields.get("action"):
        case "status":
            return StatusReply(text_of(fields.get("responseFor")))
        case "checkpoint":
            return _ask(fields)
        case _:
            return None


def _ask(fields: dict[str, Any]) -> Ask:
    member = next(filter(fields.__contains__, (_NUMBER, _OLD)), "")
    sequence = fields.get(member)
    try:
        sub = whole_of(fields.get(_SUB))
    except (ValueError, OverflowError):
        return Ask(member, text_of(sequence), legal=False)
    legal = not isinstance(sequence, dict | list)
    return Ask(member, text_of(sequence) if legal else None, sub, legal)


class Lines:
    r"""
    Splits bytes into lines, which end with ``\n``, ``\r`` or ``\r\n``.

    Empty lines are left out: every client writes some, and ``\r\n`` may be split.

    Args:
        limit: Maximal length of a line, in bytes.

    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._begun: list[bytes] = []  # pieces of a line that has not ended
        self._size = 0  # of these pieces
        self.offset: int = 0
        """Offset in the stream of the line that has not ended, in bytes."""

    def feed(self, data: bytes) -> list[bytes]:
        """
        Return the lines that have ended, without their line ends.

        Raises:
            PayloadTooBig: If a line is longer than the limit, ended or not.

        """
        if b"\n" not in data and b"\r" not in data:
            if data:
                self._keep(data)
            return []
        if self._begun:
            data = b"".join((*self._begun, data))
            self._begun, self._size = [], 0
        lines = data.splitlines(keepends=True)
        rest = b"" if lines[-1][-1:] in b"\r\n" else lines.pop()
        for at, line in enumerate(lines):
            if len(line) > self._limit and len(line.rstrip(b"\r\n")) > self._limit:
                raise self._too_long(sum(map(len, lines[:at])))
        self.offset += len(data) - len(rest)
        if rest:
            self._keep(rest)
        return [line for raw in lines if (line := raw.rstrip(b"\r\n"))]

    def rest(self) -> list[bytes]:
        """Return, once, the line that the end of the stream ends, if there is one."""
        last = b"".join(self._begun)
        self._begun, self._size = [], 0
        return [last] if last else []

    def _keep(self, data: bytes) -> None:
        self._begun.append(data)
        self._size += len(data)
        if self._size > self._limit:
            raise self._too_long(0)

    def _too_long(self, place: int) -> PayloadTooBig:
        return PayloadTooBig(
            f"the line at offset {self.offset + place} is longer than {self._limit}"
            " bytes; see max_line"
        )
