"""What a worker sends now, compared with what was recorded: reply by reply."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Final, NamedTuple

from etlstage.protocol.base import Side
from etlstage.testing.dialect import kit_of
from etlstage.testing.recording.recording import Recording
from etlstage.testing.transcript import Channel
from etlstage.transport.base import describe_status

__all__ = ("Difference", "differences", "other_end")

_CHANNELS: Final = {Side.SUPERVISOR: Channel.STDIN, Side.WORKER: Channel.STDOUT}


class Difference(NamedTuple):
    """A reply that is not what it was."""

    number: int
    """Of the request, counted from 1."""
    request: bytes
    """What the worker read; empty if it was asked nothing."""
    was: bytes
    """What was recorded; empty: nothing."""
    now: bytes
    """What is sent now; empty: nothing."""


def differences(recorded: Recording, played: Recording) -> Iterator[Difference]:
    """Yield the replies that are not what they were, in order."""
    requests = _exchanged(recorded, Side.SUPERVISOR)
    was, now = _exchanged(recorded, Side.WORKER), _exchanged(played, Side.WORKER)
    if recorded.cut:
        # What came behind that is unknown.
        was = was[:-1]
        now = now[: len(was)]
    pairs = zip_longest(was, now, fillvalue=b"")
    for number, (one, other) in enumerate(pairs, 1):
        if one != other:
            request = requests[number - 1] if number <= len(requests) else b""
            yield Difference(number, request, one, other)


def other_end(recorded: Recording, played: Recording) -> str:
    """Return how the worker ended if it has not ended as it was recorded, else nothing."""
    if played.cut:
        return played.cut
    if recorded.cut or recorded.stopped or None in (recorded.exit, played.exit):
        return ""
    if recorded.exit == played.exit:
        return ""
    assert recorded.exit is not None
    assert played.exit is not None
    was, now = describe_status(recorded.exit), describe_status(played.exit)
    return f"the worker {now}; the recorded one {was}"


def _exchanged(recording: Recording, side: Side) -> list[bytes]:
    """Return requests, or replies, as they can be compared."""
    channel = _CHANNELS[side]
    return kit_of(recording.dialect).exchanges(side, recording.written(channel))
