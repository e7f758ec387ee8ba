"""
Plans which frames of journals each task of a read gets; only their heads are read.

A lane is one journal. Its committed frames have the same order for all readers, so a
place in a lane is the number of frames before it. With an offset, and the states of
producers there, the place can be found without reading what comes before. The frames of
a batch follow from where it starts, so it has the same frames when it is planned again.
A transaction that is open at the end of a batch is in the state of its producer, and
belongs to the batch that sees its acknowledgement.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple, cast

from etlstage.journal import Journals
from etlstage.journal.errors import JournalError
from etlstage.journal.heads import FrameHead, heads_of
from etlstage.journal.reader import CommittedReader
from etlstage.pipeline.journal_settings import start_of
from etlstage.sequencing import (
    Checkpoint,
    Envelope,
    Flags,
    JournalSpec,
    MustStartReplay,
    ProducerState,
    Sequencer,
    clock_at,
    flags_of,
)
from etlstage.spark.journal.options import JournalReading

__all__ = ("Batch", "FrameRange", "Planner")

_HORIZON: Final = 86400
"""Seconds after which a silent producer is forgotten."""

_SET: Final = "set"

Offset = Mapping[str, str]
"""The offset of a stream, as Spark keeps it: for each journal, a lane's place, and under
``set`` the id of the set; older ones have no id. The name of a journal has a slash."""


class FrameRange(NamedTuple):
    """Consecutive frames of a journal, with acknowledgements between them."""

    journal: str
    begin: int
    end: int
    frames: int
    """Number of frames, without the acknowledgements."""


class Batch(NamedTuple):
    """What is read at a time."""

    tasks: list[list[FrameRange]]
    end: Offset


class _LanePlace(NamedTuple):
    """How far a journal was read."""

    offset: int
    frames: int = 0
    """How many frames have been read since the query began."""
    states: Sequence[ProducerState] = ()
    begin: int | None = None
    """Where it was first read, if it was added since the query began."""

    def text(self) -> str:
        """Return the place as text, for a checkpoint."""
        states = sorted([p.hex(), last, begin] for _, p, last, begin in self.states)
        begin = [] if self.begin is None else [self.begin]
        return json.dumps([self.offset, self.frames, states, *begin])

    @classmethod
    def of(cls, journal: str, text: str) -> _LanePlace:
        """Return a place from the text of :meth:`text`."""
        offset, frames, states, *begin = json.loads(text)
        return cls(
            offset,
            frames,
            [ProducerState(journal, bytes.fromhex(p), *rest) for p, *rest in states],
            *begin,
        )


class _Lane:
    """
    The frames of one journal, from a place on.

    Attributes:
        bound: Offset before which frames must begin to be read.
        frames: How many were taken, in earlier batches as well.
        ranges: The frames that were taken.

    """

    def __init__(
        self,
        journals: Journals,
        spec: JournalSpec,
        place: _LanePlace,
        reading: JournalReading,
    ) -> None:
        self.bound: float = inf
        self.frames: int = place.frames
        self.ranges: list[FrameRange] = []
        self._journals = journals
        self._spec = spec
        self._offset = place.offset
        self._begin = place.begin
        self._sequencer = (
            None
            if reading.read_uncommitted
            else Sequencer({spec.name: place.offset}, place.states)
        )
        self._on_error = reading.on_error
        self._heads = heads_of(journals, spec, place.offset, on_error=reading.on_error)
        # A frame beyond the bound; and the frame returned last, not yet taken.
        self._held: Envelope | None = None
        self._last: Envelope | None = None
        # The end of the frames taken, and of the acknowledgements that follow.
        self._behind = -1

    def poll(self) -> FrameHead | None:
        """Return the head of the next frame, or None if there is none yet."""
        while (found := self._next()) is not None:
            head = cast("FrameHead", found.message)
            if flags_of(head.uuid) != Flags.ACK_TXN:
                self._last = found
                return head
            if head.before == self._behind:
                self._behind = found.end
        return None

    def size(self) -> int:
        """Return the size in bytes of the frame that was returned last."""
        assert self._last is not None
        return self._last.end - self._last.begin

    def take(self, most: int) -> None:
        """Take the frame returned last, in a range of at most ``most`` bytes."""
        found = self._last
        assert found is not None
        if self._sequencer is not None:
            self._sequencer.finish_message()
        self._offset = found.end
        self.frames += 1
        last = self.ranges[-1] if self.ranges else None
        head = cast("FrameHead", found.message)
        if last and head.before == self._behind and found.end - last.begin <= most:
            self.ranges[-1] = last._replace(end=found.end, frames=last.frames + 1)
        else:
            self.ranges.append(FrameRange(self._spec.name, found.begin, found.end, 1))
        self._behind = found.end

    def place(self) -> _LanePlace:
        """Return the place after the frames taken."""
        if self._sequencer is None:
            return _LanePlace(self._offset, self.frames, begin=self._begin)
        now = clock_at(time.time_ns())
        offsets, states = self._sequencer.checkpoint(_HORIZON, now)
        return _LanePlace(offsets[self._spec.name], self.frames, states, self._begin)

    def _next(self) -> Envelope | None:
        sequencer = self._sequencer
        if sequencer is None:
            return self._read()
        while True:
            try:
                if (found := sequencer.deque_committed()) is not None:
                    return found
            except MustStartReplay:
                _, begin, end = sequencer.replay_range()
                replay = heads_of(
                    self._journals, self._spec, begin, end, self._on_error
                )
                sequencer.start_replay(replay)
                continue
            if (found := self._read()) is None:
                return None
            sequencer.queue_uncommitted(found)

    def _read(self) -> Envelope | None:
        found = self._held or self._heads.poll()
        self._held = None
        if found is not None and found.begin >= self.bound:
            self._held, found = found, None
        return found


class Planner:
    """
    Plans batches of a set of journals.

    Args:
        reading: What to read.

    """

    def __init__(self, reading: JournalReading) -> None:
        self._journals = Journals.open(reading.path, create=False)
        self._reading = reading
        self._reader: CommittedReader | None = None
        # The offsets where a query ends that :meth:`freeze` was called for.
        self._target: dict[str, int] | None = None
        # Lanes that have found nothing after this offset, and the last batch planned.
        self._idle: tuple[Offset, dict[str, _Lane]] | None = None
        self._planned: tuple[Offset, Batch] | None = None

    def close(self) -> None:
        """Release the reader's name and the files."""
        if self._reader is not None:
            self._reader.close()
        self._journals.close()

    def initial(self) -> Offset:
        """Return where a query begins: at its reader's position, or by its options."""
        known = {one.name: one.checkpoint for one in self._journals.readers()}
        name = self._reading.reader
        offsets, states = known.get(name, Checkpoint({}, [])) if name else ({}, [])
        found = {_SET: self._journals.id}
        for spec in self._journals.select():
            own = [state for state in states if state.journal == spec.name]
            offset = offsets.get(spec.name)
            place = _LanePlace(self._begin(spec) if offset is None else offset, 0, own)
            found[spec.name] = place.text()
        return found

    def freeze(self) -> None:
        """Let the query end at what is the end of the journals now."""
        self._journals.refresh()
        self._target = self._ends()

    def next(self, start: Offset) -> Batch:
        """
        Return the next batch; one without tasks ends where it starts.

        Raises:
            JournalError: If ``start`` is an offset in another set.

        """
        reading = self._reading
        self._resume(start)
        lanes = self._lanes(start)
        ends = self._ends() if self._target is None else self._target
        for journal, lane in lanes.items():
            lane.bound = ends.get(journal, 0)
        taken = messages = size = 0
        left = list(lanes.values())
        while left:
            for lane in list(left):
                if (head := lane.poll()) is None:
                    left.remove(lane)
                    continue
                messages, size = messages + head.messages, size + lane.size()
                over = messages > (reading.max_messages or inf)
                if taken and (over or size > (reading.max_bytes or inf)):
                    left = []
                    break
                lane.take(reading.partition_bytes)
                taken += 1
        batch = self._batch(lanes, start)
        if not batch.tasks:
            self._idle = start, lanes
        # An offset in Spark's checkpoint must not outlive the data before it.
        for journal, place in _places(batch.end).items() if batch.tasks else ():
            self._journals.byte_log(journal).secure(place.offset)
        self._planned = start, batch
        return batch

    def between(self, start: Offset, end: Offset) -> list[list[FrameRange]]:
        """
        Return the tasks of a batch that was planned, here or in another process.

        Raises:
            JournalError: If its frames are not there, or not any more, or an offset is
                in another set.

        """
        if self._planned is not None and (start, end) == (
            self._planned[0],
            self._planned[1].end,
        ):
            return self._planned[1].tasks
        self._resume(start, end)
        lanes = self._lanes(start, end)
        for journal, place in _places(end).items():
            if (lane := lanes.get(journal)) is None:
                raise JournalError(
                    f"{journal}: it is in the checkpoint, but does not exist"
                )
            while lane.frames < place.frames:
                if lane.poll() is None:
                    raise JournalError(
                        f"{journal}: the checkpoint has {place.frames} frames, but the"
                        f" journal has only {lane.frames}: it is not the journal that was"
                        " read"
                    )
                lane.take(self._reading.partition_bytes)
        return self._batch(lanes, start).tasks

    def commit(self, end: Offset) -> None:
        """Record that the reader no longer needs the data before an offset."""
        if self._reader is not None:
            self._reader.commit(_checkpoint(end))

    def _resume(self, start: Offset, *ends: Offset) -> None:
        """Look at the set, assert that the offsets are in it, and register the reader."""
        journals = self._journals
        journals.refresh()
        for offset in start, *ends:
            there = offset.get(_SET)
            # Journals have the same names in a set that was made anew.
            if there and journals.id and there != journals.id:
                raise JournalError(
                    f"{journals.name}: the checkpoint is of the set with id {there}, but"
                    f" this set has id {journals.id}: it is not the set that was read; set"
                    " the path of that one, or another checkpointLocation to start anew"
                )
        if self._reading.reader and self._reader is None:
            self._reader = self._journals.read_committed(
                self._reading.reader, commit_every=None, position=_checkpoint(start)
            )

    def _begin(self, spec: JournalSpec) -> int:
        log, start = self._journals.log(spec.name), start_of(self._reading.from_)
        if start == "beginning":
            return log.first()
        if start == "end":
            return log.end()
        return log.at_time(int(float(start) * 1e9))

    def _ends(self) -> dict[str, int]:
        return {
            spec.name: self._journals.log(spec.name).reach()
            for spec in self._journals.select()
        }

    def _lanes(self, start: Offset, end: Offset | None = None) -> dict[str, _Lane]:
        idle, self._idle = self._idle, None
        known = idle[1] if idle is not None and idle[0] == start else {}
        for spec in self._journals.select():
            if spec.name in known:
                continue
            place = self._place(spec, start, end or {})
            known[spec.name] = _Lane(self._journals, spec, place, self._reading)
        return known

    def _place(self, spec: JournalSpec, start: Offset, end: Offset) -> _LanePlace:
        """Return where a batch begins to read a journal."""
        name = spec.name
        if name in start:
            return _LanePlace.of(name, start[name])
        # It was added since and is read from its beginning: for a batch that is planned
        # again, from what was its beginning then.
        begin = _LanePlace.of(name, end[name]).begin if name in end else None
        if begin is None:
            begin = self._journals.log(name).first()
        return _LanePlace(begin, begin=begin)

    def _batch(self, lanes: Mapping[str, _Lane], start: Offset) -> Batch:
        tasks: list[list[FrameRange]] = []
        room = 0
        for found in (one for lane in lanes.values() for one in lane.ranges):
            size = found.end - found.begin
            if size > room:
                tasks.append([])
                room = self._reading.partition_bytes
            tasks[-1].append(found)
            room -= size
        if not tasks:
            return Batch([], start)
        end = {name: lane.place().text() for name, lane in lanes.items()}
        return Batch(tasks, {_SET: self._journals.id, **end})


def _places(offset: Offset) -> dict[str, _LanePlace]:
    return {
        name: _LanePlace.of(name, text) for name, text in offset.items() if name != _SET
    }


def _checkpoint(offset: Offset) -> Checkpoint:
    places = _places(offset)
    states: Iterable[ProducerState] = (
        state for place in places.values() for state in place.states
    )
    return Checkpoint({name: p.offset for name, p in places.items()}, list(states))
