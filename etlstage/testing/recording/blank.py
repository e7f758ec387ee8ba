"""
A conversation without what its messages say, while it is noted.

Lengths, bounds, cuts and times stay, so that what was slow, stuck or miscounted can be
shown to others. What is asked of an extract worker stays, too: offsets, no payload.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from etlstage.messages import StageKind
from etlstage.protocol.base import Dialect, Side
from etlstage.testing.dialect import kit_of
from etlstage.testing.transcript import Channel, Entry

if TYPE_CHECKING:
    from etlstage.testing.recording.recorder import Notes

__all__ = ("Blank",)

_SIDES: Final = {Channel.STDIN: Side.SUPERVISOR, Channel.STDOUT: Side.WORKER}


class Blank:
    """
    Notes elsewhere what it is given, without the content of messages.

    Where a marker may have begun at the end of a read, all that comes waits until it is
    known whether it was one: notes stay in order.

    Args:
        notes: Where to.
        dialect: What is spoken.
        kind: Of the stage.

    """

    def __init__(self, notes: Notes, dialect: Dialect, kind: StageKind) -> None:
        self._notes = notes
        self._kit = kit_of(dialect)
        self._asks = kind is StageKind.EXTRACT
        self._waiting: deque[Entry] = deque()
        self._unknown: dict[Channel, bytes] = defaultdict(bytes)
        self._known: dict[Channel, bytes] = defaultdict(bytes)

    def add(self, entry: Entry, /) -> None:
        """Note what one read or write has moved."""
        self._waiting.append(entry)
        self._unknown[entry.channel] += entry.data
        self._decide(entry.channel, last=not entry.data)
        self._pass_on()

    def end(self, exit_: int | None, /, *, stopped: bool) -> None:
        """Note how the worker ended."""
        for channel in Channel:
            self._decide(channel, last=True)
        self._pass_on()
        self._notes.end(exit_, stopped=stopped)

    def _decide(self, channel: Channel, *, last: bool) -> None:
        data = self._unknown[channel]
        side = _SIDES.get(channel)
        if side is Side.SUPERVISOR and self._asks:
            blank = data
        elif side is None:
            blank = re.sub(rb"[^\n]", b"x", data)
        else:
            blank = self._kit.blank(side, data, last=last)
        self._known[channel] += blank
        self._unknown[channel] = data[len(blank) :]

    def _pass_on(self) -> None:
        used: Counter[Channel] = Counter()
        while self._waiting:
            entry = self._waiting[0]
            begin, size = used[entry.channel], len(entry.data)
            data = self._known[entry.channel][begin : begin + size]
            if len(data) < size:
                break
            used[entry.channel] += size
            self._notes.add(replace(entry, data=data))
            self._waiting.popleft()
        for channel, size in used.items():
            self._known[channel] = self._known[channel][size:]
