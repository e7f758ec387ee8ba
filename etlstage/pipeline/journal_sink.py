"""
A sink that appends messages to journals, for others to read.

**Exactly once**, an epoch is a transaction of the journals: its runs are appended as
they come, uncommitted, and forced to the disk. The frames that acknowledge them are
stored in the epoch's record, and appended after it. Each start begins by appending the
acknowledgements of the record again, verbatim, which does no harm if they were appended
already. It then continues under another producer, so that what an interrupted start
left is never acknowledged. So the record alone decides. **At least once**, each run is
committed by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

import anyio
import anyio.to_thread

from etlstage.columns import Column
from etlstage.errors import SinkFailed, StageError
from etlstage.journal import Journals, Publisher, RunMessage
from etlstage.journal.errors import JournalError
from etlstage.journal.run import RunFraming, uuid_of
from etlstage.messages import Run, cost_of, counted, plain, size_of
from etlstage.pipeline.interfaces import Epochs, Output, Sink, unfenced
from etlstage.sequencing import (
    MAX_FRAME,
    AckIntent,
    Fnv1a,
    JournalSpec,
    modulo,
    producer_of,
    rendezvous,
)
from etlstage.sequencing.publisher import Append, OrderedSection
from etlstage.supervisor.exchange.keyed import key_text, point
from etlstage.telemetry.log import Log

__all__ = (
    "RUN_BYTES",
    "RUN_MESSAGES",
    "JournalSink",
    "append_intents",
    "note_of",
    "noted",
    "pieces",
)

_log = Log()

RUN_MESSAGES: Final = 8192
"""Maximum number of messages in a run."""
RUN_BYTES: Final = 1 << 20
"""Bytes up to which runs are joined; a run is split only above four times that."""
_POLL: Final = 0.01
"""Seconds: a fifth of the time between two checks for room."""
_OPEN: Final = "open"
"""Subfolder of a set: by load and epoch, the frames that roll back an open epoch."""
_NOTES: Final = "notes"
"""Subfolder of a set: by load, the number, note and intents of the last epoch."""
_MARGIN: Final = 1 << 12
"""Maximum number of bytes that a frame adds to its message."""


class JournalSink(Sink):
    """
    Appends runs to the journals of a set.

    Args:
        path: The folder of the set; created if it does not exist.
        name: Name of the stage in reports and errors.
        key: A JSON pointer: messages with the same value there go to the same journal,
            in order; so do all messages without a value. Without a pointer, runs go to
            the journals in turn.
        mapping: How the journal of a key is found: ``rendezvous`` moves few keys when
            journals are added.
        partitions: Number of journals of a new set; an existing set must have as many.
        keep: For a new set, see :class:`~etlstage.journal.Journals`.
        limit: For a new set: an epoch is begun only once no reader lags behind by more.
        sync: When appended bytes are forced to the disk, besides the end of an epoch.
        most: To how many of the set's journals messages are appended; None: to all.
        opening: As in :class:`~etlstage.sequencing.Publisher`.
        notes: Whether the set stores the note of each epoch, for a load that keeps no
            record of its own.

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
        opening: Callable[[AckIntent], None] | None = None,
        notes: bool = False,
    ) -> None:
        super().__init__(name)
        self._path = path
        self._most = most
        self._opening = opening
        self._notes = notes
        # At a durable edge the load is not over: the next part continues it.
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
        self._check: Callable[[], None] = unfenced
        self._load, self._epoch = "", 0  # the load, and its epoch in progress
        self._intents: list[list[str]] = []
        self._open = False
        self._finished = False
        # Runs not appended yet, their size, and the number of messages since the last
        # flush.
        self._held: list[Run] = []
        self._size = 0
        self._taken = 0
        self._turn = 0
        self._shutting_down = anyio.Event()
        self._journals: Journals
        self._publisher: Publisher
        self._map: Callable[[object], tuple[str, str]]

    def begin(self, epochs: Epochs) -> None:
        """Take over the acknowledgements recorded with the last epoch."""
        self._once, self._check = epochs.once, epochs.check
        self._load, self._epoch = epochs.load, epochs.done + 1
        if epochs.once:
            self._intents = [list(one) for one in _intents_of(self.name, epochs)]

    async def __aenter__(self) -> Self:
        """
        Open or create the set, and acknowledge the recorded epoch.

        Raises:
            SinkFailed: If the set can't be opened, or does not hold runs.

        """
        try:
            await anyio.to_thread.run_sync(self._enter)
        except BaseException:
            # ``__aexit__`` is not called if entering fails: close the set here.
            await self.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """Close the files, even if the run is cancelled."""
        if hasattr(self, "_journals"):
            with self._failing("sync"), anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._journals.close)
            if not self._once:  # appended for good, whatever became of the run
                self.account.done += self._taken
                self._taken = 0

    async def write(self, run: Run) -> None:
        """
        Append a run; exactly once, small runs are collected and appended together.

        Raises:
            SinkFailed: If it can't be appended, or has a message that is too large.

        """
        self.account.received += len(run)
        if not self._open:
            await self._room()
            self._open = True
        self._held.append(run)
        self._size += cost_of(run)
        if not self._once or self._size >= RUN_BYTES:
            await anyio.to_thread.run_sync(self._write)
        self._taken += len(run)

    async def flush(self) -> None:
        """Force appended bytes to the disk; an epoch is not committed by that."""
        await anyio.to_thread.run_sync(self._flush)
        self.account.done += self._taken
        self._taken, self._open = 0, False

    async def finish(self) -> None:
        """Flush, and mark the output as complete."""
        await self.flush()
        self._finished = True

    @property
    def performs(self) -> bool:
        """Whether :meth:`perform` appends acknowledgements."""
        return self._once

    @property
    def intents(self) -> list[list[str]]:
        """Pairs of journal and hexadecimal frame that acknowledge the epoch."""
        return self._intents

    async def noted(self) -> str | None:
        """
        Return the note of the epoch in progress, if it was stored; commit that epoch.

        Raises:
            SinkFailed: If the note can't be read, or the epoch not committed.

        """
        if not self._notes:
            return None
        return await anyio.to_thread.run_sync(self._noted)

    async def commit(self, note: str) -> None:
        """Store the note, if the set is to have it; raises like :meth:`write`."""
        if self._notes and self._once:
            await anyio.to_thread.run_sync(self._store_note, note)

    async def perform(self) -> None:
        """Commit what was flushed; raises like :meth:`write`."""
        await anyio.to_thread.run_sync(self._perform)

    def drain(self) -> None:
        """Stop waiting for readers, so that what was read is appended."""
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
                    f"their content type is {self._journals.content_type}, but a"
                    f" pipeline appends {RunFraming.content_type}: use another path"
                )
        self._acknowledge()
        opening = self._opening
        if self._once and opening is None:
            opening = self._note
            self._roll_back()
        self._publisher = Publisher(
            _Unlimited(self._journals), mapping=self._target, opening=opening
        )
        if self._tokens is not None:
            make = modulo if self._mapping == "modulo" else rendezvous
            self._map = make(self._write_key, self._targets)

    def _store_note(self, note: str) -> None:
        self._check()
        data = json.dumps([self._epoch, note, self._intents]).encode()
        with self._failing("append to"):
            self._journals.storage.replace(f"{_NOTES}/{self._load}", data)

    def _noted(self) -> str | None:
        if not (self._path / "spec.json").exists():
            return None
        path = f"{_NOTES}/{self._load}"
        with self._failing("read"), Journals.open(self._path, create=False) as found:
            if found.storage.size(path) is None:
                return None
            try:
                epoch, note, intents = json.loads(found.storage.load(path))
            except (ValueError, TypeError) as error:
                raise JournalError(f"{path} is damaged: {error}") from error
            if epoch != self._epoch:
                return None
            self._journals, self._intents = found, intents
            self._perform()
            return str(note)

    def _acknowledge(self) -> None:
        self._check()
        with self._failing("append to"):
            append_intents(self._journals, self._intents, stage=self.name)

    def _perform(self) -> None:
        self._acknowledge()
        with self._failing("append to"):
            self._journals.storage.remove(f"{_OPEN}/{self._load}-{self._epoch}")
        self._epoch += 1

    def _note(self, opened: AckIntent) -> None:
        """Store the frame that rolls back the epoch in a journal; needs no sync."""
        path = f"{_OPEN}/{self._load}-{self._epoch}"
        self._journals.storage.append(path, note_of(opened))

    def _roll_back(self) -> None:
        """
        Roll back what killed starts have appended but not recorded.

        Readers drop it anyway. But while it might still be committed, they need it, and
        everything after it is kept.
        """
        storage = self._journals.storage
        with self._failing("append to"):
            for name in storage.names(_OPEN):
                load, _, epoch = name.rpartition("-")
                if load != self._load:
                    continue
                if int(epoch) >= self._epoch:
                    # Appending the recorded acknowledgements again has already rolled
                    # back what their producer appended after them.
                    back = {_span(*intent) for intent in self._intents}
                    found = noted(storage.load(f"{_OPEN}/{name}"))
                    intents = [one for one in found if _span(*one) not in back]
                    append_intents(self._journals, intents, stage=self.name)
                storage.remove(f"{_OPEN}/{name}")

    async def _room(self) -> None:
        """Wait until readers are within the limit; refresh the set's journals first."""
        with self._failing("read"):
            await anyio.to_thread.run_sync(self._journals.refresh)
            while not await anyio.to_thread.run_sync(self._journals.has_room):
                self.activity: str = f"waiting for readers of {self._path} (limit)"
                with anyio.move_on_after(5 * _POLL):
                    await self._shutting_down.wait()
                    break
            self.activity = ""

    def _write(self) -> None:
        self._check()
        publisher = self._publisher
        publish = (
            publisher.publish_uncommitted if self._once else publisher.publish_committed
        )
        held, self._held, self._size = self._held, [], 0
        with self._failing("append to"):
            for run in _merged(map(plain, held)):
                for place, part in self._parts(run):
                    # A later sync would succeed, though these bytes are lost.
                    publish(_Placed(part, place)).wait()

    def _flush(self) -> None:
        self._write()
        self._intents = [
            [journal, intent.hex()]
            for journal, intent in self._publisher.build_ack_intents()
        ]
        with self._failing("sync"):
            self._journals.sync()

    def _parts(self, run: Run) -> Iterator[tuple[str, Run]]:
        """Yield the parts of a run that are each one frame, with their journals."""
        for piece in pieces(run, self._too_large):
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
            f"stage {self.name}: a message has {size} bytes, expected no more than"
            f" {MAX_FRAME - _MARGIN} bytes in a journal",
            stage=self.name,
        )

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Raise errors of journals and of the disk as SinkFailed."""
        try:
            yield
        except (OSError, JournalError) as error:
            raise SinkFailed(
                f"stage {self.name}: can't {what} the journals in {self._path}: {error}",
                stage=self.name,
            ) from error


class _Placed(RunMessage):
    """A run whose journal is known."""

    __slots__ = ("journal",)

    def __init__(self, run: Run, journal: str) -> None:
        super().__init__(run)
        self.journal = journal


class _Unlimited(NamedTuple):
    """Appends regardless of the limit, so that an epoch in progress can end."""

    journals: Journals

    def start_append(self, journal: str) -> OrderedSection:
        """Return the right to append."""
        return self.journals.start_append(journal, limited=False)

    def partitions(self) -> Sequence[JournalSpec]:
        """Return the journals."""
        return self.journals.partitions()

    def pending_except(self, journal: str) -> Sequence[Append]:
        """Return the appends to other journals that are not done yet."""
        return self.journals.pending_except(journal)


def append_intents(
    journals: Journals, intents: Iterable[Sequence[str]], *, stage: str
) -> None:
    """
    Append acknowledgements of transactions, and force them to the disk.

    Args:
        journals: The set.
        intents: Pairs of a journal and a frame in hexadecimal.
        stage: Name of the stage for the log.

    """
    known = {spec.name for spec in journals.partitions()}
    for journal, intent in intents:
        if journal in known:
            journals.append(journal, bytes.fromhex(intent)).wait()
        else:
            _log.warning(
                "acknowledgement dropped: its journal is gone",
                stage=stage,
                journal=journal,
            )
    journals.sync()


def noted(data: bytes) -> list[list[str]]:
    """Parse lines made by :func:`note_of`; skip a line that a crash left incomplete."""
    found: list[list[str]] = []
    for line in data.splitlines():
        with suppress(ValueError, TypeError):
            journal, intent = json.loads(line)
            found.append([journal, intent])
    return found


def _span(journal: str, intent: str) -> tuple[str, bytes]:
    return journal, producer_of(uuid_of(bytes.fromhex(intent)))


def note_of(opened: AckIntent) -> bytes:
    """Return the line that stores a rollback frame, see :func:`noted`."""
    return json.dumps([opened.journal, opened.intent.hex()]).encode() + b"\n"


def _intents_of(name: str, epochs: Epochs) -> Iterable[tuple[str, str]]:
    try:
        found = [(str(j), str(intent)) for j, intent in epochs.intents or ()]  # type: ignore[attr-defined]
        for one in found:
            _span(*one)
    except (TypeError, ValueError) as error:
        raise SinkFailed(
            f"stage {name}: the record has no valid acknowledgements ({error});"
            " 'etlstage state reset' starts from the beginning",
            stage=name,
        ) from error
    return found


def pieces(
    run: Run, too_large: Callable[[int], Exception] | None = None
) -> Iterator[Run]:
    """Split a run that is too large; raise for a message too large for a frame."""
    if len(run) <= RUN_MESSAGES and size_of(run) <= 4 * RUN_BYTES:
        yield run
    elif len(run) > 1:
        half = min(len(run) // 2, RUN_MESSAGES)
        yield from pieces(run[:half], too_large)
        yield from pieces(run[half:], too_large)
    elif too_large is not None and size_of(run) > MAX_FRAME - _MARGIN:
        raise too_large(size_of(run))
    else:
        yield run


def _merged(runs: Iterable[Run]) -> Iterator[Run]:
    """Yield the runs, small ones joined: a reader holds few frames, of any size."""
    group: list[Run] = []
    count = size = 0
    for run in runs:
        count, size = count + len(run), size + size_of(run)
        if group and (count > RUN_MESSAGES or size > RUN_BYTES):
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
