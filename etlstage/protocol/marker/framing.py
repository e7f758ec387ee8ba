"""
Boundaries in bulk.

Nothing here knows what may follow what; see ``state.py``.
Each function looks at a whole run of messages at once: a loop over single messages
appears only where the replies are not one to one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from etlstage.errors import MessageRefused, RemoteProtocolError
from etlstage.messages import OVERHEAD, Groups, Run
from etlstage.protocol.marker.markers import Markers, escape

__all__ = (
    "LISTS",
    "Framing",
    "Unterminated",
    "encode_groups",
    "encode_refusal",
    "encode_run",
    "split_groups",
    "split_run",
)


class Unterminated(RemoteProtocolError):
    """
    Raised when an EOP follows a message that has no EOM.

    Attributes:
        groups: The sound replies before it.

    """

    def __init__(self, groups: list[tuple[bytes, ...]]) -> None:
        super().__init__("message without EOM before EOP")
        self.groups = groups


def encode_run(messages: Run, markers: Markers, *, limit: int) -> bytes:
    """
    Return the messages, each with its EOM.

    Raises:
        MessageRefused: If a message contains a marker, or is longer than ``limit``
            bytes; the text says which marker and where.

    """
    # One search in all of it, and not one for each message. That finds no more: as no
    # marker overlaps another, none can begin in one message and end in the next.
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


def encode_refusal(reason: bytes, markers: Markers, *, limit: int) -> bytes:
    """
    Return a refusal with its ERR; raises as :func:`encode_run`.

    No EOM ends the reason: in an extraction that would be a message to pass on.
    """
    assert markers.err is not None, "unreachable: who has no ERR can't refuse"
    encode_run([reason], markers, limit=limit)
    wire = reason + markers.err
    if wire.find(markers.err) < len(reason):
        raise MessageRefused("reason ends as marker err begins", index=0)
    return wire


def split_run(data: bytes, eom: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete messages in ``data`` and what follows the last of them."""
    *messages, rest = data.split(eom)
    return messages, rest


def split_groups(
    data: bytes, markers: Markers
) -> tuple[list[tuple[bytes, ...]], bytes, int]:
    """
    Return the complete replies in ``data``, what follows them, and their messages.

    These are a number: to count them afterwards would cost more.

    Raises:
        Unterminated: If an EOP follows a message that has no EOM.

    """
    eom, eop = markers.eom, markers.eop
    if eop == eom:
        *messages, rest = data.split(eom)
        return list(zip(messages, strict=False)), rest, len(messages)
    *parts, rest = data.split(eop)
    count = data.count(eom)
    if count == len(parts) and not rest:
        # As many EOM as EOP: one to one, if each EOP stands right behind an EOM.
        *messages, end = data.split(eom + eop)
        if len(messages) == len(parts) and not end:
            return list(zip(messages, strict=False)), rest, count
    width = len(eom)
    groups: list[tuple[bytes, ...]] = []
    for part in parts:
        if part and not part.endswith(eom):
            raise Unterminated(groups)
        groups.append(tuple(part[:-width].split(eom)) if part else ())
    return groups, rest, count - rest.count(eom)


class Framing(NamedTuple):
    """
    How messages are held in memory.

    By that a supervisor finds the boundaries of single messages and their replies.
    """

    encode_run: Callable[..., bytes]
    """As :func:`encode_run`."""
    split_groups: Callable[[bytes, Markers], tuple[Groups, bytes, int]]
    """As :func:`split_groups`."""
    overhead: int
    """Bytes of memory that a message takes beside its own."""


LISTS: Final = Framing(encode_run, split_groups, OVERHEAD)
"""Messages are lists of bytes. For those that are Arrow see ``columnar.py``."""


def _clean(wire: bytes, messages: Run, markers: Markers) -> bool:
    eom = markers.eom
    if len(eom) == 1:
        sound = wire.count(eom) == len(messages)
    else:
        # A message that ends as EOM begins moves the boundary without adding one.
        sound = wire.split(eom) == [*messages, b""]
    return (
        sound
        and (markers.eop == eom or markers.eop not in wire)
        and markers.eob not in wire
        and markers.bnc not in wire
        and (markers.err is None or markers.err not in wire)
    )


def _complain(messages: Run, markers: Markers, limit: int) -> None:
    for index, message in enumerate(messages):
        if len(message) > limit:
            raise MessageRefused(
                f"message is {len(message)} bytes long, expected no more than"
                f" {limit} bytes; see max_message",
                index=index,
            )
        framed = message + markers.eom
        for name, marker in markers.named.items():
            at = framed.find(marker)
            if 0 <= at < len(message):
                raise MessageRefused(
                    f"message contains marker {name} '{escape(marker)}' at offset {at};"
                    " choose other markers, or encode the message",
                    index=index,
                )
    raise AssertionError("unreachable: markers do not overlap, see Markers")
