"""
What a worker says now, compared with what was recorded: reply by reply.

And the smallest part of a recording to which it says something else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise, zip_longest
from typing import Final, NamedTuple

from etlstage.errors import LocalProtocolError
from etlstage.protocol.base import Dialect, Limits, Shape, Side
from etlstage.protocol.events import Added, Opened
from etlstage.stage import Stage
from etlstage.testing.dialect import kit_of
from etlstage.testing.fewest import Search
from etlstage.testing.recording.recording import Recording
from etlstage.testing.recording.replay import play
from etlstage.testing.transcript import Channel, Entry
from etlstage.transport import Launch, launch_worker
from etlstage.transport.base import describe_status

__all__ = ("Difference", "differences", "other_end", "shrink")

_PLAYS: Final = 200
"""A worker is started as often, at most, to make a recording small."""


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
    """What is said now; empty: nothing."""


def differences(recorded: Recording, played: Recording) -> Iterator[Difference]:
    """
    Yield the replies that are not what they were, in order.

    Of a recording that is blank only those are that are missing, or too many.
    """
    requests = _exchanged(recorded, Side.SUPERVISOR)
    was, now = _exchanged(recorded, Side.WORKER), _exchanged(played, Side.WORKER)
    if recorded.cut:
        # What came behind that is unknown.
        was = was[:-1]
        now = now[: len(was)]
    pairs = zip_longest(was, now, fillvalue=b"")
    for number, (one, other) in enumerate(pairs, 1):
        if one != other and not (recorded.blank and one and other):
            request = requests[number - 1] if number <= len(requests) else b""
            yield Difference(number, request, one, other)


def other_end(recorded: Recording, played: Recording) -> str:
    """Say how the worker ended if it has not ended as it was recorded, else nothing."""
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


async def shrink(
    recording: Recording,
    stage: Stage,
    *,
    grace: float = 10.0,
    launch: Launch = launch_worker,
) -> Recording:
    """
    Return as small a part of a recording as can be found that still plays otherwise.

    Exchanges are left out with their replies: to each of the others the right reply is
    taken to be the one that was recorded.

    Args:
        recording: What does not play equal to ``stage``; if it does it is returned.
        stage: Whom to play it to.
        grace: As for :func:`~etlstage.testing.recording.replay.play`.
        launch: What starts the worker.

    """

    async def differs(exchanges: Sequence[Collection[int]]) -> bool:
        part = _part(recording, exchanges)
        played = await play(part, stage, grace=grace, launch=launch)
        return any(differences(part, played)) or bool(other_end(part, played))

    search = Search(_exchanges(recording))
    if not await differs(search.left):
        return recording
    for fewer in islice(search, _PLAYS):
        if fewer and await differs(fewer):
            search.left = fewer
    return _part(recording, search.left)


def _exchanged(recording: Recording, side: Side) -> list[bytes]:
    """Return requests, or replies, as they can be compared."""
    channel = _CHANNELS[side]
    return kit_of(recording.dialect).exchanges(side, recording.written(channel))


def _pieces(recording: Recording, side: Side) -> list[bytes]:
    """Return requests, or replies; what is not complete is one, too."""
    channel = _CHANNELS[side]
    *pieces, rest = kit_of(recording.dialect).cut(side, recording.written(channel))
    return [*pieces, rest] if rest else pieces


def _exchanges(recording: Recording) -> list[range]:
    """Return the numbers of the requests, and so of replies, that are one exchange."""
    dialect, count = recording.dialect, len(_pieces(recording, Side.SUPERVISOR))
    if dialect.shape is not Shape.ASKED_BATCH:
        return [range(n, n + 1) for n in range(count)]
    if getattr(dialect, "bnc_after_last", False):
        return [range(count)]  # replies are more than requests
    ends = [n + 1 for n in _ends(dialect, _pieces(recording, Side.WORKER)) if n < count]
    bounds = [0, *ends, *([count] if count not in ends else [])]
    return [range(a, b) for a, b in pairwise(bounds)]


def _ends(dialect: Dialect, replies: Sequence[bytes]) -> Iterator[int]:
    """Yield which of the replies are not a wish for one more message."""
    session = dialect.open(Side.SUPERVISOR, Limits())
    last, more = 0, False
    for number, reply in enumerate(replies):
        last += not more
        try:
            session.send(
                Added(last, [b""])
                if more
                else Opened(last, [b""], each=False, ended=False),
                0.0,
            )
        except LocalProtocolError:
            return  # the protocol was broken: what follows belongs together
        session.receive_data(reply, 0.0)
        more = session.owed > 0 and session.room > 0
        if not more:
            yield number


def _part(recording: Recording, exchanges: Sequence[Collection[int]]) -> Recording:
    """Return a recording of some of its exchanges, cut as they were."""
    kept = {number for exchange in exchanges for number in exchange}
    sides = {Channel.STDIN: Side.SUPERVISOR, Channel.STDOUT: Side.WORKER}
    scissors = {
        channel: _Scissors(_pieces(recording, side), kept)
        for channel, side in sides.items()
    }
    entries: list[Entry] = []
    for entry in recording.entries:
        if entry.channel in scissors:
            data = scissors[entry.channel].take(len(entry.data))
            if data or not entry.data:
                entries.append(replace(entry, data=data))
    return replace(
        recording, entries=tuple(entries), exit=0 if recording.exit == 0 else None
    )


class _Scissors:
    """Cuts some pieces out of a stream."""

    def __init__(self, pieces: Sequence[bytes], kept: Collection[int]) -> None:
        self._pieces = pieces
        self._kept = kept
        self._number = 0
        self._at = 0  # in that piece

    def take(self, size: int) -> bytes:
        """Return what is kept of the next so many bytes."""
        found = b""
        while size:
            piece = self._pieces[self._number]
            part = piece[self._at : self._at + size]
            size -= len(part)
            self._at += len(part)
            if self._number in self._kept:
                found += part
            if self._at == len(piece):
                self._number += 1
                self._at = 0
        return found
