"""
Finds boundaries in bulk, in Arrow, without a Python object for each message.

Does what ``framing.py`` does, for messages that are an Arrow array. Where messages need
a closer look, because one contains a marker or a reply is broken, the functions of
``framing.py`` are called: what it documents about lists holds here, too.

No worker imports this module.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from etlstage import speedups
from etlstage.columns import (
    OVERHEAD,
    Column,
    Replies,
    array_of,
    content,
    extent,
    from_zero,
    one_of,
)
from etlstage.messages import Groups, Run
from etlstage.protocol.marker import framing
from etlstage.protocol.marker.markers import Markers

__all__ = ("COLUMNS", "encode_column", "framing_of", "split_column")


def encode_column(messages: Run, markers: Markers, *, limit: int) -> bytes:
    """Do as :func:`~etlstage.protocol.marker.framing.encode_run`, in Arrow."""
    if not isinstance(messages, Column):
        return framing.encode_run(messages, markers, limit=limit)
    array = messages.array
    if speedups.compiled and len(array):
        _, ends, data = array.buffers()
        wire = speedups.compiled.join_column(
            ends, data or b"", array.offset, len(array), markers, limit
        )
        if wire is not None:
            return wire
    wire = _joined_by(array, markers.eom)
    if not _clean(wire, messages, markers) or (
        len(wire) > limit and messages.longest > limit
    ):
        # It raises the exact error.
        return framing.encode_run(list(messages), markers, limit=limit)
    return wire


def split_column(data: bytes, markers: Markers) -> tuple[Groups, bytes, int]:
    """Do as :func:`~etlstage.protocol.marker.framing.split_groups`, in Arrow."""
    eom, eop = markers.eom, markers.eop
    if speedups.compiled and (found := speedups.compiled.split(data, eom, eop, True)):
        return _as_found(data, *found)
    end = _end_of_last(data, eop)
    if not end:
        return [], data, 0
    if eop == eom:
        replies = Replies(_split(data[:end], eom))
        return replies, data[end:], len(replies)
    values = _split(data[:end], eom + eop)
    body = content(values)
    # The replies are one message each if nothing else is in the bytes. A search that
    # finds nothing takes a fraction of the time of counting what is there.
    if (
        len(body) + len(values) * len(eom + eop) == end
        and eom not in body
        and eop not in body
    ):
        return Replies(values), data[end:], len(values)
    parts = _split(data[:end], eop)
    counts = pc.count_substring(parts, eom)
    body = content(parts)
    values = _split(body, eom)
    # Each part that is not empty must end with EOM, and no EOM may lie across two
    # parts, or be read in two ways.
    sound = (
        not _overlaps_itself(eom)
        and len(values) * len(eom) + extent(values) == len(body)
        and pc.all(
            pc.or_(
                pc.ends_with(parts, eom), pc.equal(pc.binary_length(parts), one_of(0))
            )
        ).as_py()
    )
    if not sound:
        return framing.split_groups(data, markers)
    ends = pc.cumulative_sum(counts.cast(pa.int32()))
    return Replies(values, from_zero(ends)), data[end:], len(values)


def _as_found(
    data: bytes, body: bytes, ends: bytes, several: bytes | None, end: int
) -> tuple[Groups, bytes, int]:
    """Return as Arrow arrays what the compiled function has found."""
    count = len(ends) // 4 - 1
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(body)]
    values = pa.Array.from_buffers(pa.binary(), count, buffers)
    if several is None:
        return Replies(values), data[end:], count
    buffers = [None, pa.py_buffer(several)]
    so_far = pa.Array.from_buffers(pa.int32(), len(several) // 4, buffers)
    return Replies(values, from_zero(so_far)), data[end:], count


def split_replies(data: bytes, markers: Markers) -> framing.Split:
    """Do as :func:`~etlstage.protocol.marker.framing.split_replies`, in Arrow."""
    reasons: list[tuple[int, bytes]] = []
    sound = data
    if markers.err is not None and markers.err in data:
        sound, reasons = _without_refusals(data, markers.err, markers)
    try:
        groups, rest, total = split_column(sound, markers)
    except framing.Unterminated:
        # It returns the replies before the fault, too.
        return framing.split_replies(data, markers)
    if reasons:
        groups = Replies.of(groups).emptied([place for place, _ in reasons])
    return framing.Split(groups, rest, total - len(reasons), reasons, None)


COLUMNS: Final = framing.ByteFraming(encode_column, split_replies, OVERHEAD)
"""For messages in a :class:`Column`; replies are :class:`Replies`, or lists where they
needed a closer look."""


def framing_of(messages: Run) -> framing.ByteFraming:
    """Return the framing for messages of this type."""
    return COLUMNS if isinstance(messages, Column) else framing.LISTS


def _clean(wire: bytes, messages: Column, markers: Markers) -> bool:
    eom = markers.eom
    if len(eom) == 1:
        sound = eom not in content(messages.array)
    else:
        # A message that ends like EOM begins moves a boundary without adding one.
        sound = not len(messages) or _split(wire, eom).equals(messages.array)
    return sound and framing.has_only_eom(wire, markers)


def _without_refusals(
    data: bytes, err: bytes, markers: Markers
) -> tuple[bytes, list[tuple[int, bytes]]]:
    """Return the replies with an empty message for each refusal, and the reasons."""
    eom, eop = markers.eom, markers.eop
    # Nearly always replies are one message each, and remain so with empty messages.
    empty = eom if eop == eom else eom + eop
    *pieces, rest = data.split(err)
    kept: list[bytes] = []
    reasons: list[tuple[int, bytes]] = []
    place = 0
    for piece in pieces:
        *before, reason = piece.split(eop)
        place += len(before)
        reasons.append((place, reason))
        place += 1
        kept += piece[: len(piece) - len(reason)], empty
    return b"".join((*kept, rest)), reasons


def _joined_by(array: pa.BinaryArray, marker: bytes) -> bytes:
    """Return the bytes of all elements, with ``marker`` after each."""
    if not len(array):
        return b""
    bounds = array_of([0, len(array)], pa.int32())
    joined = pc.binary_join(pa.ListArray.from_arrays(bounds, array), marker)
    return b"".join((joined[0].as_buffer(), marker))


def _split(data: bytes, marker: bytes) -> pa.BinaryArray:
    """Return the pieces that end with ``marker``, without what follows the last."""
    bounds = array_of([0, len(data)], pa.int32()).buffers()[1]
    whole = pa.Array.from_buffers(pa.binary(), 1, [None, bounds, pa.py_buffer(data)])
    pieces = pc.split_pattern(whole, pattern=marker).values
    return pieces.slice(0, len(pieces) - 1)


def _end_of_last(data: bytes, marker: bytes) -> int:
    """Return where the last ``marker`` ends, counted from the left, or 0."""
    end = data.rfind(marker) + len(marker)
    if end < len(marker):
        return 0
    if _overlaps_itself(marker):
        # From the left, the last one may begin earlier than from the right.
        *_, rest = data.split(marker)
        return len(data) - len(rest)
    return end


def _overlaps_itself(marker: bytes) -> bool:
    return any(marker.startswith(marker[n:]) for n in range(1, len(marker)))
