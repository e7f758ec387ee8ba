"""
Journals at the ends of a pipeline: what one pipeline appends, others read.

**Exactly once**, an epoch is a transaction of the journals: its runs are appended as
they come, uncommitted, and forced to the disk; what acknowledges them is kept in the
epoch's record, and appended behind it. A start begins by appending what the record has,
verbatim, which does no harm where it stands already, and goes on under another
producer: what a start that was interrupted has left is never acknowledged. So nothing but the
record decides. **At least once**, each run is committed by itself.

**A position** of the source is how far each journal was read, and what is known of its
producers: it may lie within a transaction, which is no unit of memory. The reader's name
keeps what was not loaded; with a state directory the record says where to go on, without
one the name does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import anyio
import anyio.to_thread

from etlstage.columns import Column
from etlstage.errors import (
    EtlstageError,
    InputDamaged,
    SinkFailed,
    SourceFailed,
    StageError,
)
from etlstage.journal import CommittedReader, Journals, Publisher, RunMessage
from etlstage.journal.errors import JournalDamaged, JournalError
from etlstage.journal.reader import Start, checkpoint_of, plain_checkpoint
from etlstage.journal.run import RunFraming
from etlstage.messages import Position, Run, cost_of, counted, plain, size_of
from etlstage.pipeline.interfaces import Epochs, Output, Sink, Source
from etlstage.sequencing import (
    MAX_FRAME,
    AckIntent,
    Checkpoint,
    CsvRecord,
    Fnv1a,
    FrameError,
    JournalSpec,
    JsonMessage,
    Opaque,
    encode_csv,
    encode_json,
    modulo,
    rendezvous,
)
from etlstage.sequencing.publisher import Append, OrderedSection
from etlstage.supervisor.exchange.keyed import key_text, point
from etlstage.telemetry.log import Log
from etlstage.telemetry.meter import GaugeLevel, Meter

__all__ = ("CUT", "JournalSink", "JournalSource", "append_intents", "messages_of")

_log = Log()

_MESSAGES: Final = 8192
"""Of a run, at most."""
_BYTES: Final = 1 << 20
"""Of a run; one message may be larger."""
CUT: Final = 1 << 16, 8 << 20
"""Messages and bytes between two positions; a frame is not cut."""
_POLL: Final = 0.01
"""Seconds between two looks for more."""
_KEPT: Final = 1 << 20
"""Of the bytes of damage, in a dead letter."""
_MARGIN: Final = 1 << 12
"""Bytes of a frame that are none of its message, at most."""


class JournalSink(Sink):
    """
    Appends runs to the journals of a set.

    Args:
        path: The folder of the set; a new one is made.
        name: As reports and errors call it.
        key: A JSON pointer: messages that have the same there are in one journal, in
            order; those that have nothing there, too. Without it runs go to the
            journals in turn.
        mapping: How the journal of a key is found: ``rendezvous`` moves few keys when
            journals are added.
        partitions: How many journals a new set has; of one that is there the number.
        keep: Of a new set, see :class:`~etlstage.journal.Journals`.
        limit: Of a new set: before an epoch is begun it is waited for readers that are
            farther behind.
        sync: When appended bytes are forced to the disk, besides at the end of an epoch.
        most: Of the journals that there are, to how many is appended; None: to all.

    """

    def __init__(
        self,
        path: Path,
        *,
        name: str = "load",
        key: str | None = None,
        mapping: Literal["modulo", "rendezvous"] = "modulo",
        partitions: int | None = None,
        keep: str | None = None,
        limit: str | None = None,
        sync: str = "commit",
        most: int | None = None,
    ) -> None:
        super().__init__(name)
        self._path = path
        self._most = most
        # Of a durable edge: behind it somebody goes on with the load.
        self.settles: bool = most is None
        self._tokens = None if key is None else point(key)
        self._mapping = mapping
        self._settings = {
            "partitions": partitions,
            "keep": keep,
            "limit": limit,
            "sync": sync,
        }
        self._once = False
        self._intents: list[list[str]] = []
        self.rollbacks: list[list[str]] = []
        """What drops the epoch that was flushed last, in place of its intents."""
        self._open = False
        self._finished = False
        # What was taken and not appended yet, how much of it, and how many messages
        # have come since the last flush.
        self._held: list[Run] = []
        self._size = 0
        self._taken = 0
        self._turn = 0
        self._shutting_down = anyio.Event()
        self._journals: Journals
        self._publisher: Publisher
        self._map: Callable[[object], tuple[str, str]]

    def begin(self, epochs: Epochs) -> None:
        """Take what was recorded with the last epoch."""
        self._once = epochs.once
        if epochs.once:
            self._intents = [list(one) for one in _intents_of(self.name, epochs)]

    async def __aenter__(self) -> Self:
        """
        Open or make the set, and acknowledge the epoch that is recorded.

        Raises:
            SinkFailed: If it can't be opened, or is no set of runs.

        """
        try:
            await anyio.to_thread.run_sync(self._enter)
        except BaseException:
            # The block of what was not entered is not left either: close it here.
            await self.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """Let the files go, also of a run that is cancelled."""
        if hasattr(self, "_journals"):
            with self._failing("sync"), anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._journals.close)

    async def write(self, run: Run) -> None:
        """
        Append a run; one of an epoch, which waits for its end, with those that follow.

        Raises:
            SinkFailed: If it can't be appended, or has a message that is too large.

        """
        self.account.received += len(run)
        if not self._open:
            await self._room()
            self._open = True
        self._held.append(run)
        self._size += cost_of(run)
        self._taken += len(run)
        if not self._once or self._size >= _BYTES:
            await anyio.to_thread.run_sync(self._write)

    async def flush(self) -> None:
        """Force what was appended to the disk; as an epoch it is not committed yet."""
        await anyio.to_thread.run_sync(self._flush)
        self.account.done += self._taken
        self._taken, self._open = 0, False

    async def finish(self) -> None:
        """Flush, and mark the output as complete."""
        await self.flush()
        self._finished = True

    @property
    def performs(self) -> bool:
        """Whether there are acknowledgements."""
        return self._once

    @property
    def intents(self) -> list[list[str]]:
        """What acknowledges the epoch, by journal, framed."""
        return self._intents

    async def perform(self) -> None:
        """Commit what was flushed; raises as :meth:`write`."""
        await anyio.to_thread.run_sync(self._acknowledge)

    async def roll_back(self) -> None:
        """Drop what was written since the last flush: readers need not keep it."""
        await anyio.to_thread.run_sync(self._roll_back)

    def drain(self) -> None:
        """Wait no more for readers: what was read is to be appended."""
        self._shutting_down.set()

    def landed(self) -> str:
        """Return how many messages were appended."""
        complete = "complete" if self._finished else "incomplete"
        done = counted(self.account.done, "message")
        return f"{done} appended to journals in {self._path}; output {complete}"

    def output(self) -> Output:
        """Return the folder."""
        return Output("journals", str(self._path))

    def _enter(self) -> None:
        with self._failing("open"):
            self._journals = Journals.open(
                self._path, content_type=RunFraming.content_type, **self._settings
            )
            if self._journals.content_type != RunFraming.content_type:
                raise JournalError(
                    f"its content type is {self._journals.content_type}, and a pipeline"
                    f" appends {RunFraming.content_type}: use another path"
                )
        self._acknowledge()
        self._publisher = Publisher(_Unlimited(self._journals), mapping=self._target)
        if self._tokens is not None:
            make = modulo if self._mapping == "modulo" else rendezvous
            self._map = make(self._write_key, self._targets)

    def _acknowledge(self) -> None:
        with self._failing("append to"):
            append_intents(self._journals, self._intents, stage=self.name)

    async def _room(self) -> None:
        """Wait for readers, within the limit; a set may have got other journals."""
        with self._failing("read"):
            await anyio.to_thread.run_sync(self._journals.refresh)
            while not await anyio.to_thread.run_sync(self._journals.has_room):
                self.activity: str = f"waiting for readers of {self._path} (limit)"
                with anyio.move_on_after(5 * _POLL):
                    await self._shutting_down.wait()
                    break
            self.activity = ""

    def _write(self) -> None:
        publisher = self._publisher
        publish = (
            publisher.publish_uncommitted if self._once else publisher.publish_committed
        )
        held, self._held, self._size = self._held, [], 0
        with self._failing("append to"):
            for run in _merged(map(plain, held)):
                for place, part in self._parts(run):
                    publish(_Placed(part, place))

    def _roll_back(self) -> None:
        with self._failing("append to"):
            dropped = _plain(self._publisher.rollback_intents())
            append_intents(self._journals, dropped, stage=self.name)

    def _flush(self) -> None:
        self._write()
        self.rollbacks = _plain(self._publisher.rollback_intents())
        self._intents = _plain(self._publisher.build_ack_intents())
        with self._failing("sync"):
            self._journals.sync()

    def _parts(self, run: Run) -> Iterator[tuple[str, Run]]:
        """Yield what goes to a journal as one frame."""
        for piece in _pieces(run, self._too_large):
            if self._tokens is None:
                specs = self._targets()
                yield specs[self._turn % len(specs)].name, piece
                self._turn += 1
                continue
            parts: dict[str, list[bytes]] = {}
            for message in piece:
                parts.setdefault(self._map(message)[0], []).append(message)
            yield from parts.items()

    def _targets(self) -> Sequence[JournalSpec]:
        specs = self._journals.partitions()
        return specs if self._most in (None, len(specs)) else specs[: self._most]

    def _write_key(self, message: bytes, hasher: Fnv1a) -> None:
        assert self._tokens is not None
        hasher.write((key_text(message, self._tokens) or "").encode())

    def _target(self, message: _Placed) -> tuple[str, str]:
        return message.journal, RunFraming.content_type

    def _too_large(self, size: int) -> StageError:
        return SinkFailed(
            f"stage {self.name}: a message of {size} bytes, expected no more than"
            f" {MAX_FRAME - _MARGIN} bytes in a journal",
            stage=self.name,
        )

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Turn errors of journals and of the disk into the sink's."""
        try:
            yield
        except (OSError, JournalError) as error:
            raise SinkFailed(
                f"stage {self.name}: can't {what} the journals in {self._path}: {error}",
                stage=self.name,
            ) from error


def _plain(intents: Iterable[AckIntent]) -> list[list[str]]:
    """Return intents as plain JSON."""
    return [[journal, intent.hex()] for journal, intent in intents]


class _Placed(RunMessage):
    """A run whose journal is known."""

    __slots__ = ("journal",)

    def __init__(self, run: Run, journal: str) -> None:
        super().__init__(run)
        self.journal = journal


class _Unlimited(NamedTuple):
    """Appends whatever readers have to read: an epoch that is begun has to end."""

    journals: Journals

    def start_append(self, journal: str) -> OrderedSection:
        """Return the right to append."""
        return self.journals.start_append(journal, limited=False)

    def partitions(self) -> Sequence[JournalSpec]:
        """Return the journals."""
        return self.journals.partitions()

    def pending_except(self, journal: str) -> Sequence[Append]:
        """Return what is not done yet."""
        return self.journals.pending_except(journal)


class JournalSource(Source):
    """
    Reads the committed messages of a set of journals, each once.

    Args:
        path: The folder of the set.
        name: As reports and errors call it.
        reader: What it is called there: what it has not loaded is kept. None: it is not
            known there, and begins anew each time.
        start: Where to begin without a position, see
            :data:`~etlstage.journal.reader.Start`.
        follow: Whether to wait for more at the end.
        skips: Whether damage is passed over, and is among what is yielded.
        cut: Messages and bytes between two positions.
        meter: What counts the bytes that it has not read.

    """

    goes_on = True

    def __init__(
        self,
        path: Path,
        *,
        name: str = "extract",
        reader: str | None,
        start: Start = "beginning",
        follow: bool = False,
        skips: bool = False,
        cut: tuple[int, int] = CUT,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(name)
        self._path = path
        self._called = reader
        self._start = start
        self._follow = follow
        self._skips = skips
        self._most = min(cut[0], CUT[0]), min(cut[1], CUT[1])
        self._meter = meter
        self._unread: GaugeLevel | None = None
        self._recorded = False
        self._position: Checkpoint | None = None
        self._draining = anyio.Event()
        self._journals: Journals | None = None
        self._reader: CommittedReader | None = None
        # Runs that are read and were not passed on, and what came since a position.
        self._ready: deque[Run | InputDamaged] = deque()
        self._since = [0, 0]

    @property
    def input(self) -> str:
        """The set."""
        return f"journals {self._path}"

    @property
    def activity(self) -> str:
        """What it waits for."""
        return f"reading the journals in {self._path}"

    def begin(self, epochs: Epochs) -> None:
        """Go on from the record, whatever is known under the name."""
        self._recorded = True

    def resume(self, position: object) -> None:
        """Begin behind a position that was recorded."""
        self._position = self._checkpoint(position)

    async def runs(self) -> AsyncGenerator[Run | Position | InputDamaged, None]:
        """
        Yield the messages, and positions now and then.

        Raises:
            SourceFailed: If a journal can't be read, is damaged, or was cut.

        """
        reader = await self._in_thread(self._open)
        # What comes is behind this, also if nothing comes now.
        yield Position(plain_checkpoint(reader.position()))
        read = False  # since the last position, or the last end
        while True:
            follow = self._follow  # what is appended before that changes is read
            ended = await self._in_thread(self._read)
            read = read or bool(self._ready)
            while self._ready:
                yield self._ready.popleft()
            draining = self._draining.is_set()
            # At the end it is behind the transaction, too, not only its messages.
            if (read and (ended or draining)) or self._over:
                self._since, read = [0, 0], not ended
                yield Position(plain_checkpoint(reader.position()))
            if draining or (ended and not follow):
                return
            if ended:
                with anyio.move_on_after(_POLL):
                    await self._draining.wait()

    async def observe(self) -> None:
        """Count the bytes that wait for this reader."""
        if self._meter is not None and self._reader is not None:
            self._show(await self._in_thread(self._reader.unread))

    def _show(self, unread: int) -> None:
        # A host's meter may fail: that is no reason to read no more.
        with suppress(Exception):
            if self._unread is None:
                assert self._meter is not None
                labels = {"stage": self.name, "reader": self._called or ""}
                what = "Bytes of the journals that the reader has not read."
                name = "etlstage_journal_unread_bytes"
                self._unread = GaugeLevel(self._meter.gauge(name, what, labels))
            self._unread.set(unread)

    def complete(self) -> None:
        """End where there is no more."""
        self._follow = False

    def drain(self) -> bool:
        """End behind what is read, with a position."""
        self._draining.set()
        return True

    async def acknowledge(self, position: Position) -> None:
        """Let what is before a position be dropped."""
        if self._reader is not None and self._called is not None:
            checkpoint = self._checkpoint(position.value)
            await self._in_thread(self._reader.commit, checkpoint)

    async def aclose(self) -> None:
        """Let the name and the files go."""
        if self._unread is not None:
            self._show(0)
        if self._reader is not None:
            await anyio.to_thread.run_sync(self._reader.close)
        if self._journals is not None:
            await anyio.to_thread.run_sync(self._journals.close)

    def _open(self) -> CommittedReader:
        self._journals = Journals.open(self._path, create=False)
        position = self._position
        if self._recorded and position is None:
            # The record says that it begins; what is under the name says otherwise.
            position = Checkpoint({}, [])
        self._reader = self._journals.read_committed(
            self._called,
            follow=self._follow,
            start=self._start,
            position=position,
            commit_every=None,
            on_error=_raise if self._skips else None,
        )
        return self._reader

    def _read(self) -> bool:
        """Have some runs ready; return whether there is no more now."""
        assert self._reader is not None
        count = size = 0
        held: list[bytes] = []
        while count < _MESSAGES and size < _BYTES and not self._over:
            try:
                envelope = self._reader.poll()
            except (FrameError, JournalDamaged) as error:
                if not self._skips:
                    raise
                self._ready += [held] if held else []
                held = []
                damage = self._damage(error)
                self._ready.append(damage)
                more = 1, len(damage.data)
            else:
                if envelope is None:
                    self._ready += [held] if held else []
                    return True
                run = messages_of(envelope.message)
                if len(run) == 1:
                    held += run
                else:
                    self._ready += [held] if held else []
                    held = []
                    self._ready += _pieces(run)
                more = len(run), size_of(run)
            count, size = count + more[0], size + more[1]
            self._since = [self._since[0] + more[0], self._since[1] + more[1]]
        self._ready += [held] if held else []
        return False

    @property
    def _over(self) -> bool:
        return any(n >= most for n, most in zip(self._since, self._most, strict=True))

    def _checkpoint(self, value: Any) -> Checkpoint:  # noqa: ANN401 - any JSON
        try:
            return checkpoint_of(value)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SourceFailed(
                f"stage {self.name}: the recorded position is none of journals"
                f" ({error!r}); 'etlstage state reset' starts from the beginning",
                stage=self.name,
            ) from error

    async def _in_thread(self, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - as it returns
        try:
            return await anyio.to_thread.run_sync(call, *arguments)
        except (OSError, EtlstageError) as error:
            raise SourceFailed(
                f"stage {self.name}: can't read the journals in {self._path}: {error}",
                stage=self.name,
            ) from error

    def _damage(self, error: FrameError | JournalDamaged) -> InputDamaged:
        assert self._journals is not None
        assert error.journal is not None
        assert error.offset is not None
        size = _KEPT if error.end is None else min(_KEPT, error.end - error.offset)
        data = self._journals.log(error.journal).peek(error.offset, size)
        text = str(error)
        if isinstance(error, FrameError):
            text = (
                f"{error.journal}: no {error.framing} at offset {error.offset}:"
                f" {error.reason}"
            )
        return InputDamaged(text, stage=self.name, data=data)


def _raise(error: FrameError | JournalDamaged) -> None:
    """Have the reader raise what it passes over."""
    raise error


def append_intents(
    journals: Journals, intents: Iterable[Sequence[str]], *, stage: str
) -> None:
    """
    Append what acknowledges transactions, and force it to the disk.

    Args:
        journals: The set.
        intents: By journal, framed, in hexadecimal.
        stage: Name for the log.

    """
    known = {spec.name for spec in journals.partitions()}
    for journal, intent in intents:
        if journal in known:
            journals.append(journal, bytes.fromhex(intent))
        else:
            _log.warning(
                "acknowledgement dropped: its journal is gone",
                stage=stage,
                journal=journal,
            )
    journals.sync()


def _intents_of(name: str, epochs: Epochs) -> Iterable[tuple[str, str]]:
    try:
        found = [(str(j), str(intent)) for j, intent in epochs.intents or ()]  # type: ignore[attr-defined]
        for _, intent in found:
            bytes.fromhex(intent)
    except (TypeError, ValueError) as error:
        raise SinkFailed(
            f"stage {name}: the record has no acknowledgements of journals ({error});"
            " 'etlstage state reset' starts from the beginning",
            stage=name,
        ) from error
    return found


def _pieces(
    run: Run, too_large: Callable[[int], Exception] | None = None
) -> Iterator[Run]:
    """Cut a run that is too large; raise for a message that is too large for a frame."""
    if len(run) <= _MESSAGES and size_of(run) <= 4 * _BYTES:
        yield run
    elif len(run) > 1:
        half = min(len(run) // 2, _MESSAGES)
        yield from _pieces(run[:half], too_large)
        yield from _pieces(run[half:], too_large)
    elif too_large is not None and size_of(run) > MAX_FRAME - _MARGIN:
        raise too_large(size_of(run))
    else:
        yield run


def _merged(runs: Iterable[Run]) -> Iterator[Run]:
    """Yield the runs with small ones as one: a reader holds few frames, of any size."""
    group: list[Run] = []
    count = size = 0
    for run in runs:
        count, size = count + len(run), size + size_of(run)
        if group and (count > _MESSAGES or size > _BYTES):
            yield _joined(group)
            group, count, size = [], len(run), size_of(run)
        group.append(run)
    if group:
        yield _joined(group)


def _joined(group: list[Run]) -> Run:
    if len(group) == 1:
        return group[0]
    columns = [run for run in group if isinstance(run, Column)]
    if len(columns) == len(group):
        return Column.joined(columns)
    return list(chain.from_iterable(group))


def messages_of(message: object) -> Run:
    """Return what a message of a journal is to a pipeline."""
    if isinstance(message, RunMessage):
        return message.run
    if isinstance(message, JsonMessage):
        return [encode_json(message.value)]
    if isinstance(message, Opaque):
        return [message.data]
    assert isinstance(message, CsvRecord)
    return [encode_csv(message.fields[1:])[:-1]]
