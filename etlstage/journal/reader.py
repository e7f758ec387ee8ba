"""
Reading the committed messages of a set of journals.

A named reader stores its position beside the journals: how far it has read, the states
of the producers, and the first offset that it may need again. The latter is smaller if
spans are open, as these begin before what was read last. Bytes before it may be
dropped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

import anyio
import anyio.to_thread

from etlstage.errors import ConfigError, guess
from etlstage.journal.errors import (
    AT_EDGE,
    JournalDamaged,
    JournalError,
    ReaderBusy,
    flaw_of,
    typed,
)
from etlstage.journal.log import ByteLog
from etlstage.journal.messages import LogReader, OnError, SoundMessages
from etlstage.journal.run import RunFraming
from etlstage.journal.storage import Storage
from etlstage.sequencing import (
    Checkpoint,
    Envelope,
    Flags,
    FrameError,
    MustStartReplay,
    NewMessage,
    ProducerState,
    ReadUncommitted,
    Sequencer,
    clock_at,
)
from etlstage.settings.units import READER_NAME, is_reader_name

if TYPE_CHECKING:
    from etlstage.journal.journals import Journals

__all__ = (
    "CommittedReader",
    "Registered",
    "Start",
    "begun_in",
    "checkpoint_of",
    "plain_checkpoint",
    "registered",
)

_RUNS: Final = 16

Start = Literal["beginning", "end"] | float | Mapping[str, int]
"""Where a reader without a position begins. A number is a time, in seconds since 1970;
a mapping has offsets by journal. Of a transaction that is open there, the messages after
that place are delivered when it is committed."""

Begun = Mapping[tuple[str, int], int]
"""By journal and offset of a frame, how many of its messages were read, but not all."""
_NONE_BEGUN: Final[Begun] = MappingProxyType({})


class Registered(NamedTuple):
    """The stored state of a named reader."""

    name: str
    checkpoint: Checkpoint
    needs: dict[str, int]
    """By journal, the first offset that the reader may need again."""
    updated: float
    """When the state was stored, in seconds since 1970."""
    load: str = ""
    """For a pipeline's reader: identifies the load."""
    begun: Begun = _NONE_BEGUN
    """For a pipeline's reader: what is read of the frames that limits have divided."""


def registered(storage: Storage, where: str) -> list[Registered]:
    """Return all named readers of the set at ``where``."""
    names = sorted(n for n in storage.names("readers") if n.endswith(".json"))
    found = []
    for name in names:
        if name.startswith("."):
            continue
        if data := storage.load(f"readers/{name}"):
            found.append(_parsed(name[:-5], data, where))
    return found


def _parsed(name: str, data: bytes, where: str) -> Registered:
    try:
        value = json.loads(data)
        checkpoint = checkpoint_of(value)
        needs, updated = _offsets(value["needs"]), typed(value["updated"], int, float)
        load = typed(value.get("load", ""), str)
        return Registered(name, checkpoint, needs, updated, load, begun_in(value))
    except (ValueError, LookupError, TypeError) as error:
        raise JournalError(
            f"{where}/readers/{name}.json is not a position: {flaw_of(error)}; restore"
            " it, or remove it: the reader then resumes where its state directory has"
            " recorded, or begins anew"
        ) from None


def plain_checkpoint(
    checkpoint: Checkpoint, begun: Begun = _NONE_BEGUN
) -> dict[str, Any]:
    """Return a checkpoint, and how much of divided frames was read, as plain JSON."""
    states = [[j, p.hex(), last, begin] for j, p, last, begin in checkpoint.states]
    value: dict[str, Any] = {"offsets": checkpoint.offsets, "states": states}
    if begun:
        value["begun"] = [[*place, done] for place, done in begun.items()]
    return value


def checkpoint_of(value: Any) -> Checkpoint:  # noqa: ANN401 - whatever JSON has
    """
    Return the checkpoint for the JSON that :func:`plain_checkpoint` has returned.

    Raises:
        ValueError, LookupError, TypeError: If the value is not such a checkpoint.

    """
    states = [
        ProducerState(
            typed(journal, str),
            bytes.fromhex(producer),
            typed(last, int),
            typed(begin, int),
        )
        for journal, producer, last, begin in value["states"]
    ]
    return Checkpoint(_offsets(value["offsets"]), states)


def _offsets(value: object) -> dict[str, int]:
    return {name: typed(at, int) for name, at in typed(value, dict).items()}


def begun_in(position: Any) -> dict[tuple[str, int], int]:  # noqa: ANN401 - JSON
    """Return how many messages of divided frames were read, by journal and offset."""
    return {
        (typed(journal, str), typed(at, int)): typed(done, int)
        for journal, at, done in position.get("begun", ())
    }


def _stored(checkpoint: Checkpoint, begun: Begun, now: float, load: str) -> bytes:
    needs = dict(checkpoint.offsets)
    for journal, _, _, begin in checkpoint.states:
        if begin >= 0:
            needs[journal] = min(needs.get(journal, begin), begin)
    value = {**plain_checkpoint(checkpoint, begun), "needs": needs, "updated": now}
    return json.dumps({**value, "load": load} if load else value).encode()


def _checked(start: Start, names: Sequence[str]) -> Start:
    """Return where a reader begins, if it is a place in these journals."""
    if isinstance(start, Mapping):
        for name in start:
            if name not in names:
                raise ConfigError(
                    f"start: there is no journal {name!r}{guess(name, names)}"
                )
    elif start not in ("beginning", "end") and not _is_time(start):
        raise ConfigError(
            f"start is {start!r}, expected 'beginning', 'end', a time in seconds since"
            " 1970, or offsets by journal"
        )
    return start


def _is_time(start: object) -> bool:
    """Return whether it is a number whose nanoseconds are finite."""
    try:
        return isinstance(start, int | float) and isfinite(start * 1e9)
    except OverflowError:
        return False


def _check(ring: object, seconds: object, position: object) -> None:
    """Check the other arguments of a reader; None stands for the default of each."""
    valid = ring is None or (isinstance(ring, int) and ring >= 0)
    if isinstance(ring, bool) or not valid:
        raise ConfigError(f"ring is {ring!r}, expected a number of messages")
    valid = seconds is None or (isinstance(seconds, int | float) and seconds >= 0)
    if isinstance(seconds, bool) or not valid:
        raise ConfigError(f"commit_every is {seconds!r}, expected 0 or more seconds")
    if not (position is None or isinstance(position, Checkpoint)):
        raise ConfigError(f"position is {position!r}, expected a Checkpoint")


class CommittedReader:
    """
    Iterates over the committed messages of a set, each once, without acknowledgements.

    A named reader resumes from its stored position, which is stored while it reads, on
    close, and by :meth:`commit`. A message counts as done when the next is requested.
    After a crash the messages since the last stored position are delivered again.

    Args:
        journals: The set.
        name: Name of the reader; without it no position is stored.
        follow: Whether to wait for more at the end.
        start: Where to begin without a position.
        new_message: Creates the messages (default: by content type).
        ring: Number of messages to hold for open spans; those that are not held are
            read again when they are committed (default: 8192, but 16 runs of messages,
            as each of these may be large).
        horizon: Seconds after which a silent producer is forgotten.
        commit_every: Seconds between two automatic commits of the position; None: no
            automatic commit, nor one on close.
        position: Where to begin, instead of the position stored under the name.
        poll: Seconds between two looks for more, while following.
        on_error: Called with the error for each damaged range or invalid frame that is
            skipped; without it the error is raised, and the next call resumes after the
            invalid frame.
        load: For a pipeline, identifies the load. The name is taken from another run of
            the same load, as that run has lost its state to this one. A position that
            another load has stored under the name is not used.

    Attributes:
        begun: As it was stored with the position under the name, if it is used.
        frames: Number of frames read, including those that are not committed.

    Raises:
        ConfigError: If ``start`` is no place where a reader can begin, or another
            argument is invalid.
        ReaderBusy: If another reader is using the name.

    """

    def __init__(
        self,
        journals: Journals,
        *,
        name: str | None = None,
        follow: bool = False,
        start: Start = "beginning",
        new_message: NewMessage | None = None,
        ring: int | None = None,
        horizon: float = 86400,
        commit_every: float | None = 1.0,
        position: Checkpoint | None = None,
        poll: float = 0.01,
        on_error: OnError | None = None,
        load: str = "",
    ) -> None:
        _check(ring, commit_every, position)
        self.name = name
        self.begun: Begun = _NONE_BEGUN
        self.frames: int = 0
        self._load = load
        self._process = os.getpid()
        self._holder = f"{self._process} {load}".encode()
        self._journals = journals
        self._storage = journals.storage
        self._follow = follow
        self._start = _checked(start, [spec.name for spec in journals.select()])
        self._new_message = new_message or journals.new_message
        self._horizon = horizon
        self._commit_every = commit_every
        self._poll_every = poll
        self._on_error = on_error
        if ring is None:
            ring = _RUNS if journals.content_type == RunFraming.content_type else 8192
        # By journal, the end of the last range that was skipped.
        self._passed: dict[str, int] = {}
        self._iterators: dict[str, ReadUncommitted] = {}
        self._readers: dict[str, LogReader] = {}
        self._turn: list[str] = []
        self._specs: object = None
        self._due = 0.0
        self._refresh_at = 0.0
        self._held = self._hold() if name is not None else None
        try:
            if position is None and name is not None:
                known = {one.name: one for one in journals.readers()}
                one = known.get(name)
                if one is not None and one.load == (load or one.load):
                    position, self.begun = one.checkpoint, one.begun
            begins = position is None and name is not None
            position = position or Checkpoint({}, [])
            self._sequencer = Sequencer(*position, ring=ring)
            self._offsets: dict[str, int] = dict(position.offsets)
            # By journal, the offset up to which bytes would outlive a machine crash.
            self._secured: dict[str, int] = dict(position.offsets)
            if begins and journals.drops:
                self._have_all_kept()
            self._look()
            if name is not None:
                self.commit(begun=self.begun)
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Envelope:
        while (found := self.poll()) is None:
            if not self._follow:
                self.close()
                raise StopIteration
            time.sleep(self._poll_every)
        return found

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Envelope:
        while (found := await self._polled()) is None:
            if not self._follow:
                self.close()
                raise StopAsyncIteration
            await anyio.sleep(self._poll_every)
        return found

    async def _polled(self) -> Envelope | None:
        if self._journals.broker is None:
            return self.poll()
        return await anyio.to_thread.run_sync(self.poll)

    def position(self, *, secured: bool = True, finished: bool = True) -> Checkpoint:
        """
        Return the position to resume from, counting the last returned message as done.

        Args:
            finished: Whether it is done; otherwise the position is before it.
            secured: Whether to force the bytes before the position to the disk.
                Otherwise :meth:`secure` has to do so before the position is stored.

        Raises:
            OSError: If the bytes can't be forced to the disk.

        """
        if finished:
            self._sequencer.finish_message()
        found = self._position()
        if secured:
            self.secure(found)
        return found

    def secure(self, position: Checkpoint) -> None:
        """Force the bytes before a position to the disk; raises OSError."""
        for journal, offset in position.offsets.items():
            if offset > self._secured.get(journal, 0):
                self._journals.byte_log(journal).secure(offset)
                self._secured[journal] = offset

    def commit(
        self, position: Checkpoint | None = None, begun: Begun = _NONE_BEGUN
    ) -> None:
        """
        Store a position.

        Args:
            position: Default: the position before the message that was returned last,
                which is not done yet.
            begun: How many messages of divided frames are done.

        """
        self._due = time.monotonic() + (self._commit_every or 0)
        position = position or self._position()
        self.secure(position)
        data = _stored(position, begun, time.time(), self._load)
        self._storage.replace(f"readers/{self.name}.json", data)

    def unread(self) -> tuple[int, float]:
        """Return the number of unread bytes, and the age of the oldest in seconds."""
        size, seconds = 0, 0.0
        for name, reader in list(self._readers.items()):
            log, at = self._journals.byte_log(name), reader.at
            size += (left := max(0, log.reach() - at))
            oldest = next(log.groups(at, skip=True, heads=True), None) if left else None
            if oldest is not None and oldest.time:  # a broker gives no times
                seconds = max(seconds, time.time() - oldest.time / 1e9)
        return size, seconds

    def close(self) -> None:
        """
        Store the position and release the name; a second call does nothing.

        Neither is done in a process that was forked off since the reader was made. At
        the end of the input, and when the set is closed, this is done by itself.
        """
        if self._held is not None:
            try:
                if self._commit_every is not None and self._is_own():
                    self.commit()
            finally:
                self._release()

    def _position(self) -> Checkpoint:
        now = clock_at(time.time_ns())
        checkpoint = self._sequencer.checkpoint(self._horizon, now)
        # Include the start offsets of journals of which nothing was read yet.
        offsets = {**self._offsets, **checkpoint.offsets}
        for journal, end in self._passed.items():
            offsets[journal] = max(offsets[journal], end)
        return checkpoint._replace(offsets=offsets)

    def _is_own(self) -> bool:
        """Return whether this process made the reader, and not one it is forked off."""
        return self._process == os.getpid()

    def _release(self) -> None:
        held, self._held = self._held, None
        self._journals.named.discard(self)
        if held is not None:
            path = f"readers/{self.name}.pid"
            with suppress(OSError, JournalError):
                # The file is not ours if another run has taken the name.
                if self._is_own() and self._storage.load(path) == self._holder:
                    self._storage.remove(path)
            self._storage.let_go(held)

    def _hold(self) -> int:
        name = str(self.name)
        if not is_reader_name(name):
            raise JournalError(f"reader's name is {name!r}, expected {READER_NAME}")
        if self._journals.broker is not None:
            raise JournalError(
                f"reader {name!r}: a broker keeps no readers; store position(), and pass it"
                " back as position="
            )
        held = self._storage.hold(f"readers/{name}.lock")
        if held is None:
            pid, _, load = self._storage.load(f"readers/{name}.pid").partition(b" ")
            if load and load.decode() == self._load:
                held = self._storage.hold(f"readers/{name}.lock", take=True)
        if held is None:
            raise ReaderBusy(
                f"reader {name!r} of {self._journals.name} is in use"
                f"{f' by process {pid.decode()}' if pid else ''}; a second one needs another name"
            )
        try:
            self._storage.replace(f"readers/{name}.pid", self._holder)
        except BaseException:
            self._storage.let_go(held)
            raise
        self._journals.named.add(self)
        return held

    def _have_all_kept(self) -> None:
        """Keep any process from dropping segments until a position is stored."""
        self.commit(Checkpoint({}, []))
        for spec in self._journals.select():
            # A process that is dropping segments now may have missed this reader. It
            # holds the lock.
            with self._storage.locked(self._journals.byte_log(spec.name).lock):
                pass

    def _look(self) -> None:
        """Begin to read journals that are new."""
        specs = self._journals.select()
        if specs is self._specs:
            return
        first = self._specs is None and not self._offsets
        for spec in specs:
            if spec.name in self._iterators:
                continue
            log = self._journals.byte_log(spec.name)
            if spec.name not in self._offsets:
                # A journal that was added since is read from its beginning.
                self._offsets[spec.name] = self._begin(log) if first else log.first()
            elif (offset := self._offsets[spec.name]) > (reach := log.reach()):
                raise JournalError(
                    f"{spec.name}: the position is offset {offset}, but the journal ends"
                    f" at {reach}: it is not the journal that was read; use another reader;"
                    f" {AT_EDGE}"
                )
            on_error = None if self._on_error is None else self._pass_over
            reader = LogReader(
                log,
                spec,
                self._offsets[spec.name],
                on_error=on_error,
                follow=self._follow,
            )
            self._readers[spec.name] = reader
            messages = SoundMessages(reader, self._new_message, on_error)
            self._iterators[spec.name] = messages
            self._turn.append(spec.name)
        self._specs = specs

    def _begin(self, log: ByteLog) -> int:
        start = self._start
        if isinstance(start, Mapping):
            return start.get(log.name, log.first())
        if start == "beginning":
            return log.first()
        if start == "end":
            return log.end()
        return log.at_time(int(float(start) * 1e9))

    def poll(self) -> Envelope | None:
        """Return the next message, or None if there is none yet."""
        stores = self._held is not None and self._commit_every is not None
        if stores and time.monotonic() >= self._due:
            self.commit()
        while True:
            try:
                found = self._sequencer.deque_committed()
            except MustStartReplay:
                self._sequencer.start_replay(self._replay())
                continue
            if found is not None:
                if (found.message.uuid.int >> 48) & 0x3FF != Flags.ACK_TXN:
                    return found
                continue
            found = self._read()
            if found is None:
                return None
            self._sequencer.queue_uncommitted(found)

    def _read(self) -> Envelope | None:
        """Return the next message of any journal; read each to its end in turn."""
        for _ in range(len(self._turn)):
            if (found := self._iterators[self._turn[0]].poll()) is not None:
                self.frames += 1
                return found
            self._turn.append(self._turn.pop(0))
        now = time.monotonic()
        if self._follow and now >= self._refresh_at:
            self._refresh_at = now + 1
            self._journals.refresh()
            self._look()
        return None

    def _pass_over(self, error: FrameError | JournalDamaged) -> None:
        assert self._on_error is not None
        if error.journal is not None and error.end is not None:
            self._passed[error.journal] = error.end
        self._on_error(error)

    def _replay(self) -> ReadUncommitted:
        journal, begin, end = self._sequencer.replay_range()
        spec = self._readers[journal].spec
        # Invalid frames were reported when they were read for the first time.
        on_error = None if self._on_error is None else lambda _: None
        log = self._journals.byte_log(journal)
        reader = LogReader(log, spec, begin, end=end, on_error=on_error)
        return SoundMessages(reader, self._new_message, on_error)
