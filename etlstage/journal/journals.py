"""
A set of journals in a folder: its spec, appends, readers and retention.

The spec is a file that describes the set and is replaced atomically. Each journal is a
folder beside the spec. Any number of processes may have the set open; they share only
the files, and a lock per journal that is held for the time of one append.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Self

import anyio
import anyio.lowlevel
import anyio.to_thread

from etlstage.errors import ConfigError, guess
from etlstage.journal.broker import Broker, BrokerLog
from etlstage.journal.errors import JournalError, LimitReached, flaw_of, typed
from etlstage.journal.log import ByteLog, JournalLog
from etlstage.journal.messages import LogReader, OnError, SoundMessages
from etlstage.journal.reader import CommittedReader, Registered, Start, registered
from etlstage.journal.retention import Keep, Retention, limit_of, sync_of
from etlstage.journal.run import RunFraming, RunMessage
from etlstage.journal.storage import FolderStorage, MemoryStorage, Storage
from etlstage.messages import counted
from etlstage.sequencing import (
    Checkpoint,
    CsvFraming,
    CsvRecord,
    Fnv1a,
    JournalSpec,
    JsonFraming,
    JsonMessage,
    Message,
    NewMessage,
    Opaque,
    ReadUncommitted,
    Unbound,
    encode_json,
    framing_by_content_type,
)
from etlstage.sequencing import modulo as modulo_by
from etlstage.sequencing import rendezvous as rendezvous_by

__all__ = ("Journals", "modulo", "rendezvous")

_LOG: Final = logging.getLogger("etlstage.journal")

LAYOUT: Final = 1
"""Version of the folder's layout; a newer one is refused."""

_SPEC: Final = "spec.json"


class _Appended:
    """An append that readers can see and that survives the end of this process."""

    def __init__(
        self,
        journals: Journals,
        journal: str,
        begin: int,
        end: int,
        error: OSError | None = None,
    ) -> None:
        self.journal = journal
        self.begin = begin
        self.end = end
        # Why the bytes could not be forced to the disk, if that was attempted.
        self.error = error
        self._journals = journals

    @property
    def done(self) -> bool:
        """Whether the append is as durable as the ``sync`` setting demands."""
        return self.error is None

    def wait(self) -> None:
        """Raise the disk's error, if there was one."""
        if self.error is not None:
            raise self.error

    def __await__(self) -> Generator[Any, None, None]:
        yield from anyio.lowlevel.checkpoint().__await__()
        self.wait()


class _Barrier(_Appended):
    """An earlier append that still has to be synced."""

    @property
    def done(self) -> bool:
        """Always False: the sync is done by :meth:`wait`."""
        return False

    def wait(self) -> None:
        """Sync the journal."""
        self._journals.sync(self.journal)

    def __await__(self) -> Generator[Any, None, None]:
        yield from anyio.to_thread.run_sync(self.wait).__await__()


class _LockedSection:
    """Holds the lock of a journal until one of its methods is called."""

    def __init__(self, journals: Journals, journal: str) -> None:
        self._journals = journals
        self._journal = journal
        self._lock = journals.storage.locked(journals.byte_log(journal).lock)
        self._lock.__enter__()

    def release(self, *data: bytes) -> _Appended:
        """Append the data, and release the lock."""
        try:
            return self._journals._append(self._journal, *data)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the lock without appending."""
        self._lock.__exit__(None, None, None)


class Journals:
    """
    A set of journals, which is created or opened.

    Args:
        path: The set's folder, or a broker or its address, such as
            ``http://broker:8080/orders/``; omitted for a set in ``storage``.
        partitions: Number of journals of a new set (default 1). For an existing set
            it has to match the actual number. A broker's number is not verified.
        name: Name of a new set (default: the folder's name).
        content_type: Content type of a new set's messages.
        labels: Labels of a new set's journals.
        sync: When appended bytes are forced to the disk: ``commit`` by :meth:`sync`
            and on close, ``append`` with each append, or, with a time such as ``1s``,
            with the first append after that time.
        keep: What a new set keeps; see :data:`~etlstage.journal.retention.Keep`.
        limit: Bytes of a new set's journal that a reader may have unread before
            appends are refused, such as ``20GiB``.
        segment: Bytes after which a journal of a new set begins another file.
        create: Whether to create a set that does not exist.
        storage: Where the files are; default: the folder ``path``, or else memory.
        now: Returns the time in nanoseconds since 1970.

    Raises:
        JournalError: If the folder is not a set of journals, or has another number of
            partitions.
        ConfigError: If an argument is invalid.

    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Broker | None = None,
        *,
        partitions: int | None = None,
        name: str | None = None,
        content_type: str = JsonFraming.content_type,
        labels: Mapping[str, str] | None = None,
        sync: str = "commit",
        keep: Keep = None,
        limit: str | None = None,
        segment: int = 64 << 20,
        create: bool = True,
        storage: Storage | None = None,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        if isinstance(path, str) and path.startswith(("http://", "https://")):
            path = Broker(path)
        self.broker: Broker | None = None
        if isinstance(path, Broker):
            self.broker = broker = path
            for setting, given in (("keep", keep), ("limit", limit)):
                if given is not None:
                    raise ConfigError(f"{setting} applies to a folder, not to a broker")
            path, name = broker.url, broker.name
            storage = MemoryStorage()
        if storage is None:
            storage = MemoryStorage() if path is None else FolderStorage(path)
        self.storage: Storage = storage
        self._now = now
        self._sync_every = sync_of(sync)
        self._closed = False
        self._dirty: dict[str, int] = {}
        self._logs: dict[str, ByteLog] = {}
        # By journal, the offset up to which appends need no new look at the readers.
        self._room: dict[str, int] = {}
        self._raw = b""
        self.named: set[CommittedReader] = set()
        """The readers of this object that hold a name; closed with it."""
        Retention.of(keep)
        limit_of(limit)
        for setting, text in (("name", name or ""), ("content_type", content_type)):
            if not isinstance(text, str):
                raise ConfigError(f"{setting} is {text!r}, expected text")
        if not callable(now):
            raise ConfigError(f"now is {now!r}, expected a function")
        framing_by_content_type(content_type)
        where = str(path) if path is not None else "memory"
        self._where = where
        wanted = {
            "layout": LAYOUT,
            "name": name or os.path.basename(os.path.abspath(where)),
            "content_type": content_type,
            "labels": _labels({} if labels is None else labels),
            "partitions": 1 if partitions is None else partitions,
            "keep": keep,
            "limit": limit,
            "segment": segment,
        }
        if self.broker is None:
            wanted["id"] = secrets.token_hex(8)
        _checked(1 if partitions is None else partitions)
        if isinstance(segment, bool) or not isinstance(segment, int) or segment < 1:
            raise ConfigError(f"segment is {segment!r}, expected 1 or more bytes")
        if self.broker is not None and self.broker.single and wanted["partitions"] != 1:
            raise ConfigError(
                f"partitions is {partitions}, but {where} is one journal; end the address"
                " with a slash to open its partitions"
            )
        if storage.size(_SPEC) is None:
            self._make(wanted, create or self.broker is not None)
        self.refresh()
        there = len(self.select())
        if partitions is not None and partitions != there:
            raise JournalError(
                f"{where}: it has {counted(there, 'partition')}, not {partitions};"
                " add_partitions() adds some, none can be removed"
            )

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | Broker | None = None,
        **settings: Any,  # noqa: ANN401 - those of the class
    ) -> Self:
        """Return the set for use without ``async``; close it, or use ``with``."""
        return cls(path, **settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await anyio.to_thread.run_sync(self.close)

    def close(self) -> None:
        """
        Force appended bytes to the disk, and close all files and readers.

        Nothing can be appended after that.
        """
        self._closed = True
        with ExitStack() as closed:
            for log in self._logs.values():
                if isinstance(log, BrokerLog):
                    closed.callback(log.close)
            closed.callback(self.storage.close)
            closed.callback(self.sync)
            for reader in self.named:
                closed.callback(reader.close)

    def refresh(self) -> None:
        """Load the spec again if it has changed."""
        raw = self.storage.load(_SPEC)
        if raw and raw == self._raw:
            return
        try:
            spec = json.loads(raw)
            layout = typed(spec["layout"], int)
            if layout > LAYOUT:
                raise JournalError(
                    f"{self._where}: its layout is {layout}, expected no more than"
                    f" {LAYOUT}: it was made by a newer etlstage"
                )
            self.name: str = typed(spec["name"], str)
            self.id: str = str(spec.get("id", ""))
            """Tells the set from others, wherever it is; empty: it has no id."""
            self.content_type: str = typed(spec["content_type"], str)
            self._keep = Retention.of(spec["keep"])
            self._limit = limit_of(spec["limit"])
            self._segment: int = typed(spec["segment"], int)
            labels = typed(spec["labels"], dict)
            for text in labels.values():
                typed(text, str)
            single = self.broker is not None and self.broker.single
            specs = tuple(
                JournalSpec(
                    self.name if single else f"{self.name}/part-{n:03}",
                    self.content_type,
                    {**labels, "partition": f"{n:03}"},
                )
                for n in range(spec["partitions"])
            )
        except (ValueError, LookupError, TypeError) as error:
            raise JournalError(
                f"{self._where}: {_SPEC} does not describe a set of journals:"
                f" {flaw_of(error)}; restore the file, or copy that of a new set with the"
                " same name and settings, without its id"
            ) from None
        self._raw = raw
        self._specs = specs
        self._names = {spec.name: spec for spec in specs}
        self._room.clear()

    def select(self, labels: Mapping[str, str] | None = None) -> Sequence[JournalSpec]:
        """Return the journals that have all given labels."""
        if not labels:
            return self._specs
        return [s for s in self._specs if labels.items() <= s.labels.items()]

    def partitions(self) -> Sequence[JournalSpec]:
        """Return all journals."""
        return self._specs

    async def watch(
        self, labels: Mapping[str, str] | None = None, *, every: float = 1.0
    ) -> AsyncIterator[Sequence[JournalSpec]]:
        """Yield the journals that have these labels, now and after each change."""
        last: object = None
        while True:
            self.refresh()
            if self._specs is not last:
                last = self._specs
                yield self.select(labels)
            await anyio.sleep(every)

    def add_partitions(
        self, count: int, *, labels: Mapping[str, str] | None = None
    ) -> None:
        """
        Add journals; other processes see them at their next :meth:`refresh`.

        Args:
            count: Number of journals to add.
            labels: Replaces the labels of all journals of the set.

        Raises:
            ConfigError: If the count is negative, the set would have too many, or an
                argument is invalid.
            JournalError: If the journals are a broker's.

        """
        wrong = isinstance(count, bool) or not isinstance(count, int | float)
        if wrong or count < 0:
            raise ConfigError(f"count is {count!r}, expected 0 or more to add")
        if self.broker is not None:
            raise JournalError(
                f"{self.name}: a broker's journals are created at the broker; open them"
                " with their number as partitions"
            )
        labelled = None if labels is None else _labels(labels)
        with self._changing() as spec:
            spec["partitions"] = _checked(spec["partitions"] + count)
            if labelled is not None:
                spec["labels"] = labelled

    def set_retention(self, *, keep: Keep, limit: str | None) -> None:
        """
        Change what a set in a folder keeps, and what readers may have unread.

        Other processes follow when they next look at the set.

        Args:
            keep: See :class:`Journals`.
            limit: Likewise.

        Raises:
            ConfigError: If one is invalid.
            JournalError: If the journals are a broker's.

        """
        Retention.of(keep)
        limit_of(limit)
        if self.broker is not None:
            raise JournalError(f"{self.name}: a broker decides what its journals keep")
        with self._changing() as spec:
            spec |= {"keep": keep, "limit": limit}

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """Lock the set while entered, and store the changes of its spec."""
        with self.storage.locked("lock"):
            self.refresh()
            spec = json.loads(self._raw)
            yield spec
            if (raw := json.dumps(spec).encode()) != self._raw:
                self.storage.replace(_SPEC, raw)
                self.refresh()

    def log(self, journal: str) -> JournalLog:
        """Return the log of a journal in a folder; refuse a broker's."""
        log = self.byte_log(journal)
        if not isinstance(log, JournalLog):
            raise JournalError(f"{journal}: a broker does not show its segments")
        return log

    def byte_log(self, journal: str) -> ByteLog:
        """
        Return the log of a journal, in a folder or of a broker.

        Raises:
            JournalError: If the set has no journal of that name.

        """
        log = self._logs.get(journal)
        if log is None:
            if journal not in self._names:
                raise JournalError(
                    f"fetching journal spec: named journal does not exist ({journal})"
                    f"{guess(journal, self._names)}"
                )
            if self.broker is not None:
                log = BrokerLog(self.broker, journal)
            else:
                folder = journal.rpartition("/")[2]
                log = JournalLog(self.storage, folder, journal, segment=self._segment)
            self._logs[journal] = log
        return log

    # --- appending ------------------------------------------------------------------

    def start_append(self, journal: str, *, limited: bool = True) -> _LockedSection:
        """
        Lock a journal for one append.

        Args:
            journal: Name of the journal.
            limited: Whether to refuse if a reader has too many bytes unread.

        Raises:
            JournalError: If the set is closed.
            LimitReached: If ``limited``, and a reader has reached the limit.

        """
        self._check_open()
        if limited and self._limit is not None:
            self._check_room(journal)
        return _LockedSection(self, journal)

    def append(self, journal: str, data: bytes) -> _Appended:
        """Append frames regardless of the limit, such as those of a recorded intent."""
        return self.start_append(journal, limited=False).release(data)

    def pending_except(self, journal: str) -> Sequence[_Appended]:
        """Return the appends to other journals that a crash could still undo."""
        return [
            _Barrier(self, name, end, end)
            for name, end in self._dirty.items()
            if name != journal
        ]

    def sync(self, journal: str | None = None) -> None:
        """
        Force appended bytes to the disk, so that they outlive a machine crash.

        If an append was to do that and the disk failed, only the append's ``wait()``
        raises the error.
        """
        for name in [journal] if journal is not None else list(self._dirty):
            log = self.byte_log(name)
            with self.storage.locked(log.lock):
                log.sync()
                self._dirty.pop(name, None)

    async def room(self, journal: str | None = None, *, poll: float = 0.05) -> None:
        """Wait until readers have read enough for more to be appended."""
        # The readers may be in other processes, which can't set an event here.
        while not self.has_room(journal):  # noqa: ASYNC110
            await anyio.sleep(poll)

    def has_room(self, journal: str | None = None) -> bool:
        """Return whether more may be appended to a journal, or to all."""
        try:
            for name in [journal] if journal is not None else list(self._names):
                self._check_room(name)
        except LimitReached:
            return False
        return True

    def _check_open(self) -> None:
        if self._closed:
            # No close would force the bytes to the disk.
            raise JournalError(
                f"{self.name}: the set is closed; open it again to append"
            )

    def _append(self, journal: str, *data: bytes) -> _Appended:
        log = self.byte_log(journal)
        now = self._now()
        # Before the check: a close that comes after it waits for the lock, and syncs.
        since = self._dirty.setdefault(journal, now)
        self._check_open()
        begin, end = log.append(now, *data)
        error = None
        if now - since >= self._sync_every:
            try:
                log.sync()
                self._dirty.pop(journal)
            except OSError as why:
                # Readers may have read the bytes already, so they can't be taken back.
                error = why
        if log.rolled:
            assert isinstance(log, JournalLog)
            try:
                if self.drops:
                    self._trim(log, self.readers())
            except (OSError, JournalError) as why:
                # The bytes can be read, so an error would have them appended again.
                _LOG.warning("%s: can't drop what is no longer kept: %s", journal, why)
        return _Appended(self, journal, begin, end, error)

    def _check_room(self, journal: str) -> None:
        if self._limit is None:
            return
        log = self.byte_log(journal)
        end = log.appended()
        if end < self._room.get(journal, -1):
            return
        # Another process may have changed the limit.
        self.refresh()
        limit = self._limit
        if limit is None:
            return
        # The limit is about what was read. What a reader may need again is no measure:
        # messages that were read may wait for their commit. A reader without any
        # offset is just starting.
        read = [
            (one.checkpoint.offsets.get(journal, 0), one.name)
            for one in self.readers()
            if one.checkpoint.offsets
        ]
        if not read:
            self._room[journal] = end + 1
            return
        offset, reader = min(read)
        self._room[journal] = offset + limit
        if end >= offset + limit:
            raise LimitReached(journal, reader, end - offset, limit)

    # --- reading --------------------------------------------------------------------

    def new_message(self, spec: JournalSpec) -> Message:
        """Return an empty message of the type for a journal's content type."""
        kinds: dict[str, Callable[[], Message]] = {
            JsonFraming.content_type: JsonMessage,
            CsvFraming.content_type: CsvRecord,
            RunFraming.content_type: RunMessage,
        }
        return kinds.get(spec.content_type, Opaque)()

    def read_committed(
        self,
        name: str | None = None,
        *,
        follow: bool = False,
        start: Start = "beginning",
        new_message: NewMessage | None = None,
        ring: int | None = None,
        on_error: OnError | None = None,
        commit_every: float | None = 1.0,
        position: Checkpoint | None = None,
        load: str = "",
    ) -> CommittedReader:
        """Return a reader of the committed messages; see :class:`CommittedReader`."""
        return CommittedReader(
            self,
            name=name,
            follow=follow,
            start=start,
            new_message=new_message,
            ring=ring,
            on_error=on_error,
            commit_every=commit_every,
            position=position,
            load=load,
        )

    def read_uncommitted(
        self,
        journal: str,
        begin: int | None = None,
        end: int | None = None,
        *,
        new_message: NewMessage | None = None,
        on_error: OnError | None = None,
    ) -> ReadUncommitted:
        """
        Return an iterator over all messages of one journal, up to its end now.

        Args:
            journal: Name of the journal.
            begin: Offset of the first message (default: of the first that is kept).
            end: Offset of the end of the last message (default: the journal's end).
            new_message: Creates the messages (default: by content type).
            on_error: Called with the error for each damaged range or invalid frame
                that is skipped; without it the error is raised.

        """
        log = self.byte_log(journal)
        reader = LogReader(
            log,
            self._names[journal],
            log.first() if begin is None else begin,
            end=log.end() if end is None else end,
            on_error=on_error,
        )
        return SoundMessages(reader, new_message or self.new_message, on_error)

    def readers(self) -> list[Registered]:
        """Return all named readers."""
        return registered(self.storage, self._where)

    def forget(self, reader: str) -> None:
        """Drop a reader's position, so that nothing is kept for it any longer."""
        known = [one.name for one in self.readers()]
        if reader not in known:
            raise JournalError(f"no reader {reader!r}{guess(reader, known)}")
        self.storage.remove(f"readers/{reader}.json")

    # --- retention ------------------------------------------------------------------

    @property
    def drops(self) -> bool:
        """Whether the set has a retention, so that segments are dropped at all."""
        # Another process may have changed it.
        self.refresh()
        return self._keep is not None

    def trim(self) -> dict[str, int]:
        """Drop the whole segments that ``keep`` allows; return how many, by journal."""
        if not self.drops:
            return {}
        dropped = {}
        for name in self._names:
            log = self.log(name)
            with self.storage.locked(log.lock):
                # Readers are listed under the lock: a new reader takes it once after
                # it has registered, to be sure that it was not missed.
                if gone := self._trim(log, self.readers()):
                    dropped[name] = gone
        return dropped

    def _trim(self, log: JournalLog, readers: list[Registered]) -> int:
        assert self._keep is not None
        need = min((one.needs.get(log.name, 0) for one in readers), default=None)
        return len(log.drop(self._keep.droppable(log, need, self._now())))

    def _make(self, spec: dict[str, Any], create: bool) -> None:
        if not create:
            raise JournalError(f"{self._where}: there is no set of journals")
        # A process killed while creating the set leaves the lock and a temporary spec.
        others = [name for name in self.storage.names("") if name != "lock"]
        # After the names, which may be those of a set that another process has created.
        if self.storage.size(_SPEC) is not None:
            return
        if not all(name.startswith(f".{_SPEC}.") for name in others):
            raise JournalError(
                f"{self._where}: it is not a set of journals, and not empty: a new set needs"
                " a folder of its own"
            )
        with self.storage.locked("lock"):
            if self.storage.size(_SPEC) is None:
                self.storage.replace(_SPEC, json.dumps(spec).encode())


def _checked(partitions: int) -> int:
    """Return a number of partitions that a set can have."""
    whole = isinstance(partitions, int) and not isinstance(partitions, bool)
    if not whole or not 1 <= partitions <= 10_000:
        raise ConfigError(f"partitions is {partitions!r}, expected 1 to 10000")
    return partitions


def _labels(labels: object) -> dict[str, str]:
    """Return the labels of a set's journals."""
    if isinstance(labels, Mapping):
        texts = [*labels.keys(), *labels.values()]
        if all(isinstance(text, str) for text in texts):
            return dict(labels)
    raise ConfigError(f"labels is {labels!r}, expected texts by name")


def modulo(key: Callable[[Any], object]) -> Unbound:
    """Map messages by the hash of a key, modulo the number of journals."""
    return Unbound(modulo_by, _writing(key))


def rendezvous(key: Callable[[Any], object]) -> Unbound:
    """Map messages by the hash of a key; a new journal moves only few of them."""
    return Unbound(rendezvous_by, _writing(key))


def _writing(key: Callable[[Any], object]) -> Callable[[Any, Fnv1a], None]:
    def write(message: object, hasher: Fnv1a) -> None:
        value = key(message)
        hasher.write(value if isinstance(value, bytes) else encode_json(value))

    return write
