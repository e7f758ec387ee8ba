"""
Writes and finds the boundaries of messages and replies, in bulk.

Nothing here knows what may follow what; see ``state.py``. Each function handles a whole
run of messages at once: it loops over single messages only where replies are not one
message each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

from etlstage import speedups
from etlstage.errors import InvalidMessage, RemoteProtocolError
from etlstage.messages import OVERHEAD, Groups, Run, Singles
from etlstage.protocol.events import Refusal
from etlstage.protocol.marker.markers import Markers, escape

__all__ = (
    "LISTS",
    "ByteFraming",
    "Split",
    "Unterminated",
    "encode_groups",
    "encode_refusal",
    "encode_replies",
    "encode_run",
    "end_of",
    "has_only_eom",
    "split_groups",
    "split_replies",
    "split_run",
)

_FEW: Final = 8  # replies


class Unterminated(RemoteProtocolError):
    """Raised if an EOP follows a message without EOM; ``groups`` are those before."""

    def __init__(self, groups: list[tuple[bytes, ...]]) -> None:
        super().__init__("message without EOM before EOP")
        self.groups = groups


def encode_run(messages: Run, markers: Markers, *, limit: int) -> bytes:
    """
    Return the messages, each with its EOM.

    Raises:
        InvalidMessage: If a message contains a marker, or is longer than ``limit``
            bytes; the text names which marker and where.

    """
    if speedups.compiled and type(messages) is list:
        wire = speedups.compiled.join_list(messages, markers, limit)
        if wire is not None:
            return wire
    # One search for all messages, not one for each. It finds nothing else: as no marker
    # overlaps another, none can begin in one message and end in the next.
    wire = markers.eom.join((*messages, b""))
    if not _clean(wire, messages, markers) or (
        len(wire) > limit and max(map(len, messages)) > limit
    ):
        _complain(messages, markers, limit)
    return wire


def encode_groups(groups: Groups, markers: Markers, *, limit: int) -> bytes:
    """
    Return the replies, each with its EOP; raises as :func:`encode_run`.

    With ``eop == eom`` a reply ends with the EOM of its only message.
    """
    eom, eop = markers.eom, markers.eop
    messages = [message for group in groups for message in group]
    body = encode_run(messages, markers, limit=limit)
    if eop == eom:
        return body
    if len(messages) == len(groups) and all(groups):
        return (eom + eop).join((*messages, b""))
    return eop.join([*(eom.join((*g, b"")) if g else b"" for g in groups), b""])


def encode_replies(
    groups: Groups, refusals: Sequence[Refusal], markers: Markers, *, limit: int
) -> bytes:
    """Return replies with refusals among them; raises as :func:`encode_run`."""
    if not refusals:
        return encode_groups(groups, markers, limit=limit)
    wire: list[bytes] = []
    at = 0
    try:
        for place, _, _, reason in refusals:
            wire.append(encode_groups(groups[at:place], markers, limit=limit))
            at = place
            text = reason.encode(errors="replace")
            wire.append(encode_refusal(text, markers, limit=limit))
            at += 1
        wire.append(encode_groups(groups[at:], markers, limit=limit))
    except InvalidMessage as error:
        error.index += sum(map(len, groups[:at]))
        raise
    return b"".join(wire)


@lru_cache(128)  # often every message is refused for the same reason
def encode_refusal(reason: bytes, markers: Markers, *, limit: int) -> bytes:
    """
    Return a refusal with its ERR; raises as :func:`encode_run`.

    The reason has no EOM: in an extraction that would make it a message to pass on.
    """
    assert markers.err is not None, "unreachable: no refusal without ERR"
    encode_run([reason], markers, limit=limit)
    wire = reason + markers.err
    if wire.find(markers.err) < len(reason):
        raise InvalidMessage("reason ends as marker err begins", index=0)
    return wire


def split_run(data: bytes, eom: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete messages in ``data`` and what follows the last of them."""
    *messages, rest = data.split(eom)
    return messages, rest


def split_groups(data: bytes, markers: Markers) -> tuple[Groups, bytes, int]:
    """
    Return the complete replies in ``data``, what follows them, and a message count.

    Counting the messages of the replies afterwards would cost more.

    Raises:
        Unterminated: If an EOP follows a message that has no EOM.

    """
    eom, eop = markers.eom, markers.eop
    if speedups.compiled and (found := speedups.compiled.split(data, eom, eop, False)):
        messages, _, several, end = found
        replies = Singles(messages) if several is None else several
        return replies, data[end:], len(messages)
    if eop == eom:
        *messages, rest = data.split(eom)
        return Singles(messages), rest, len(messages)
    if len(eop) == 1:
        # The replies are one message each if removing EOPs, splitting and joining again
        # restores the bytes. A search for one byte is several times as fast as for two.
        end = data.rfind(eop) + 1
        whole = data[:end]
        messages = whole.replace(eop, b"").split(eom)
        if (eom + eop).join(messages) == whole:
            messages.pop()
            return Singles(messages), data[end:], len(messages)
    *parts, rest = data.split(eop)
    count = data.count(eom) - rest.count(eom)
    width = len(eom)
    groups: list[tuple[bytes, ...]] = []
    for part in parts:
        if part and not part.endswith(eom):
            raise Unterminated(groups)
        groups.append(tuple(part[:-width].split(eom)) if part else ())
    return groups, rest, count


class Split(NamedTuple):
    """The replies that some bytes begin with."""

    groups: Groups
    """The messages of each reply; a refusal has none."""
    rest: bytes
    """The bytes after the replies."""
    total: int
    """Number of messages in all replies."""
    reasons: list[tuple[int, bytes]]
    """The place of each refusal, and everything in it before ERR."""
    broken: Unterminated | None
    """The fault of the reply after them; None if there is none."""


def split_replies(data: bytes, markers: Markers) -> Split:
    """Return the complete replies in ``data``, with the refusals among them."""
    runs: list[Groups] = []  # between the refusals
    reasons: list[tuple[int, bytes]] = []
    total, place, rest, err = 0, 0, b"", markers.err
    try:
        if err is None or err not in data:
            found, rest, total = split_groups(data, markers)
            # For a few replies, as in lock-step, a list is faster to work with.
            found = list(found) if total <= _FEW else found
            return Split(found, rest, total, reasons, None)
        for number, piece in enumerate(data.split(err)):
            if number:
                reasons.append((place, rest))
                place += 1
            found, rest, count = split_groups(piece, markers)
            runs.append(found)
            place += len(found)
            total += count
    except Unterminated as error:
        groups = _with_gaps([*runs, error.groups], reasons)
        return Split(groups, b"", data.count(markers.eom), reasons, error)
    return Split(_with_gaps(runs, reasons), rest, total, reasons, None)


def _with_gaps(runs: list[Groups], reasons: list[tuple[int, bytes]]) -> Groups:
    """Return runs of replies as one, with an empty reply between every two."""
    singles = [run.messages for run in runs if isinstance(run, Singles)]
    if len(singles) == len(runs):
        gaps = [place for place, _ in reasons]
        return Singles(list(chain.from_iterable(singles)), gaps)
    first, *others = runs
    return [*first, *(group for run in others for group in ((), *run))]


def end_of(data: bytes, markers: Markers, count: int) -> int:
    """Return where the first ``count`` replies in ``data`` end, refusals included."""
    eop, err = markers.eop, markers.err or b""
    eop_at, err_at, end = data.find(eop), data.find(err) if err else -1, 0
    for _ in range(count):
        if 0 <= err_at < eop_at or eop_at < 0:
            end = err_at + len(err)
            err_at = data.find(err, end)
        else:
            end = eop_at + len(eop)
            eop_at = data.find(eop, end)
    return end


class ByteFraming(NamedTuple):
    """
    Functions for messages in one memory representation.

    With them a supervisor writes messages and finds the boundaries of their replies.
    """

    encode_run: Callable[..., bytes]
    """Like :func:`encode_run`."""
    split_replies: Callable[[bytes, Markers], Split]
    """Like :func:`split_replies`."""
    overhead: int
    """Bytes of memory that a message takes in addition to its own bytes."""


LISTS: Final = ByteFraming(encode_run, split_replies, OVERHEAD)
"""For messages in lists of bytes. For messages in Arrow see ``columnar.py``."""


def _clean(wire: bytes, messages: Run, markers: Markers) -> bool:
    eom = markers.eom
    if len(eom) == 1:
        # Joining them again and finding nothing is faster than counting.
        sound = eom not in b"".join(messages)
    else:
        # A message that ends like EOM begins moves a boundary without adding one.
        sound = wire.split(eom) == [*messages, b""]
    return sound and has_only_eom(wire, markers)


def has_only_eom(wire: bytes, markers: Markers) -> bool:
    """Return whether the bytes to send contain no marker but EOM."""
    return (
        (markers.eop == markers.eom or markers.eop not in wire)
        and markers.eob not in wire
        and markers.bnc not in wire
        and (markers.err is None or markers.err not in wire)
    )


def _complain(messages: Run, markers: Markers, limit: int) -> None:
    for index, message in enumerate(messages):
        if len(message) > limit:
            raise InvalidMessage(
                f"message is {len(message)} bytes long, expected no more than"
                f" {limit} bytes; see max_message",
                index=index,
            )
        framed = message + markers.eom
        for name, marker in markers.named.items():
            at = framed.find(marker)
            if 0 <= at < len(message):
                raise InvalidMessage(
                    f"message contains marker {name} '{escape(marker)}' at offset {at};"
                    " choose other markers, or encode the message",
                    index=index,
                )
    raise AssertionError("unreachable: markers do not overlap, see Markers")
