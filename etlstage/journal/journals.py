"""
A set of journals in a folder: its spec, what appends to it, and what is kept.

The spec describes the set, and is a file that is replaced at once. Each journal is a
folder beside it. Any number of processes may have the set open; what they share is the
files, and a lock for each journal that is held for one append.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import anyio
import anyio.lowlevel
import anyio.to_thread

from etlstage.errors import ConfigError, guess
from etlstage.journal.broker import Broker, BrokerLog
from etlstage.journal.errors import JournalError, LimitReached
from etlstage.journal.log import ByteLog, JournalLog
from etlstage.journal.reader import (
    CommittedReader,
    LogReader,
    OnError,
    Registered,
    SoundMessages,
    Start,
    registered,
)
from etlstage.journal.run import RunFraming, RunMessage
from etlstage.journal.storage import FolderStorage, MemoryStorage, Storage
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

__all__ = (
    "Journals",
    "Keep",
    "amount_of",
    "bytes_of",
    "modulo",
    "rendezvous",
    "sync_of",
)

LAYOUT: Final = 1
"""Of the folder; a newer one is not read."""

Keep: TypeAlias = str | None
"""What is kept besides what readers have not read: ``7d``, ``100GiB``, ``read`` for
nothing, None for all."""

_SPEC: Final = "spec.json"
_AMOUNT: Final = re.compile(r"(\d+)\s*([a-zA-Z]+)")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class _Appended:
    """Bytes that are in their journal: readers see them, they outlive this process."""

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
        # Why they could not be forced to the disk, where that was to be done.
        self.error = error
        self._journals = journals

    @property
    def done(self) -> bool:
        """Whether all has been done that ``sync`` asks for."""
        return self.error is None

    def wait(self) -> None:
        """Raise the error of the disk, if there was one."""
        if self.error is not None:
            raise self.error

    def __await__(self) -> Generator[Any, None, None]:
        yield from anyio.lowlevel.checkpoint().__await__()
        self.wait()


class _Barrier(_Appended):
    """What is to be synced."""

    @property
    def done(self) -> bool:
        """Not before it is waited for."""
        return False

    def wait(self) -> None:
        """Sync it."""
        self._journals.sync(self.journal)

    def __await__(self) -> Generator[Any, None, None]:
        yield from anyio.to_thread.run_sync(self.wait).__await__()


class _LockedSection:
    """Holds the lock of a journal until its method is called."""

    def __init__(self, journals: Journals, journal: str) -> None:
        self._journals = journals
        self._journal = journal
        self._lock = journals.storage.locked(journals.byte_log(journal).lock)
        self._lock.__enter__()

    def release(self, *data: bytes) -> _Appended:
        """Append."""
        try:
            return self._journals._append(self._journal, *data)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let the lock go."""
        self._lock.__exit__(None, None, None)


class Journals:
    """
    A set of journals, which is made or opened.

    Args:
        path: Its folder, or a broker or its address, ``http://broker:8080/orders/``;
            ``storage`` is in its place for a set in memory.
        partitions: How many journals a new set has (default 1); of one that is there
            it has to be the number. A broker is not asked for it.
        name: Of a new set; default: that of the folder.
        content_type: Of a new set's messages.
        labels: Of a new set.
        sync: When appended bytes are forced to the disk: ``commit`` by :meth:`sync`
            and at the end, ``append`` each time, or at most every so many seconds,
            ``1s``.
        keep: Of a new set; see :data:`Keep`.
        limit: Of a new set: bytes of a journal that a reader may have unread before
            more is appended, ``20GiB``.
        segment: Of a new set: bytes after which a journal begins another file.
        create: Whether a set that is not there is made.
        storage: Where the files are.
        now: Returns the time in nanoseconds since 1970.

    Raises:
        JournalError: If the folder is no set, or not one as it is described here.
        ConfigError: If an argument is wrong.

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
                    raise ConfigError(f"{setting} is of a folder, not of a broker")
            path, name = broker.url, broker.name
            storage = MemoryStorage()
        if storage is None:
            storage = MemoryStorage() if path is None else FolderStorage(path)
        self.storage: Storage = storage
        self._now = now
        self._sync_every = sync_of(sync)
        self._dirty: dict[str, int] = {}
        self._logs: dict[str, ByteLog] = {}
        # By journal, up to where may be appended without asking for readers again.
        self._room: dict[str, int] = {}
        self._raw = b""
        amount_of(keep)
        bytes_of(limit)
        framing_by_content_type(content_type)
        where = str(path) if path is not None else "memory"
        self._where = where
        wanted = {
            "layout": LAYOUT,
            "name": name or os.path.basename(os.path.abspath(where)),
            "content_type": content_type,
            "labels": dict(labels or {}),
            "partitions": 1 if partitions is None else partitions,
            "keep": keep,
            "limit": limit,
            "segment": segment,
        }
        if not 1 <= wanted["partitions"] <= 10_000:  # type: ignore[operator]
            raise ConfigError(f"partitions is {partitions}, expected 1 to 10000")
        if self.broker is not None and self.broker.single and wanted["partitions"] != 1:
            raise ConfigError(
                f"partitions is {partitions}, and {where} is one journal; end it with a"
                " slash for its partitions"
            )
        if storage.size(_SPEC) is None:
            self._make(wanted, create or self.broker is not None)
        self.refresh()
        there = len(self.select())
        if partitions is not None and partitions != there:
            raise JournalError(
                f"{where}: it has {there} partitions, not {partitions};"
                " add_partitions() adds some"
            )

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | Broker | None = None,
        **settings: Any,  # noqa: ANN401 - those of the class
    ) -> Self:
        """Return the set for use without ``async``; to be closed, or in a ``with``."""
        return cls(path, **settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await anyio.to_thread.run_sync(self.close)

    def close(self) -> None:
        """Force what was appended to the disk, and close all files."""
        try:
            self.sync()
        finally:
            self.storage.close()
            for log in self._logs.values():
                if isinstance(log, BrokerLog):
                    log.close()

    def refresh(self) -> None:
        """Look whether the set has changed."""
        raw = self.storage.load(_SPEC)
        if raw == self._raw:
            return
        try:
            spec = json.loads(raw)
            layout = spec["layout"]
            if layout > LAYOUT:
                raise JournalError(
                    f"{self._where}: its layout is {layout}, expected no more than"
                    f" {LAYOUT}: it was made by a newer etlstage"
                )
            self.name: str = spec["name"]
            self.content_type: str = spec["content_type"]
            self._keep = amount_of(spec["keep"])
            self._limit = bytes_of(spec["limit"])
            self._segment: int = spec["segment"]
            single = self.broker is not None and self.broker.single
            specs = tuple(
                JournalSpec(
                    self.name if single else f"{self.name}/part-{n:03}",
                    self.content_type,
                    {**spec["labels"], "partition": f"{n:03}"},
                )
                for n in range(spec["partitions"])
            )
        except (ValueError, LookupError, TypeError) as error:
            raise JournalError(
                f"{self._where}: {_SPEC} does not describe a set of journals: {error!r}"
            ) from None
        self._raw = raw
        self._specs = specs
        self._names = {spec.name: spec for spec in specs}

    def select(self, labels: Mapping[str, str] | None = None) -> Sequence[JournalSpec]:
        """Return the journals that have all these labels."""
        if not labels:
            return self._specs
        return [s for s in self._specs if labels.items() <= s.labels.items()]

    def partitions(self) -> Sequence[JournalSpec]:
        """Return all journals."""
        return self._specs

    async def watch(
        self, labels: Mapping[str, str] | None = None, *, every: float = 1.0
    ) -> AsyncIterator[Sequence[JournalSpec]]:
        """Yield the journals that have these labels, now and whenever they change."""
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
        Add journals; who has the set open sees them at its next refresh.

        Args:
            count: How many.
            labels: In place of those that all have.

        Raises:
            JournalError: If they are a broker's.

        """
        if self.broker is not None:
            raise JournalError(
                f"{self.name}: journals of a broker are made there; open them with their"
                " number as partitions"
            )
        with self.storage.locked("lock"):
            self.refresh()
            spec = json.loads(self._raw)
            spec["partitions"] += count
            if labels is not None:
                spec["labels"] = dict(labels)
            self.storage.replace(_SPEC, json.dumps(spec).encode())
            self.refresh()

    def log(self, journal: str) -> JournalLog:
        """Return the segments of a journal; as :meth:`byte_log`, and not a broker's."""
        log = self.byte_log(journal)
        if not isinstance(log, JournalLog):
            raise JournalError(f"{journal}: a broker does not show its segments")
        return log

    def byte_log(self, journal: str) -> ByteLog:
        """
        Return the log of a journal, wherever it is.

        Raises:
            JournalError: If the set has none of that name.

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
        Return the right to append to a journal.

        Args:
            journal: Its name.
            limited: Whether it is to be refused where a reader has too much to read.

        Raises:
            LimitReached: If that is so.

        """
        if limited and self._limit is not None:
            self._check_room(journal)
        return _LockedSection(self, journal)

    def append(self, journal: str, data: bytes) -> _Appended:
        """Append frames, such as those of a recorded intent, which no limit holds up."""
        return self.start_append(journal, limited=False).release(data)

    def pending_except(self, journal: str) -> Sequence[_Appended]:
        """Return what a crash of the machine could still undo, in other journals."""
        return [
            _Barrier(self, name, end, end)
            for name, end in self._dirty.items()
            if name != journal
        ]

    def sync(self, journal: str | None = None) -> None:
        """Return when what was appended would outlive a crash of the machine."""
        for name in [journal] if journal is not None else list(self._dirty):
            log = self.byte_log(name)
            with self.storage.locked(log.lock):
                log.sync()
                self._dirty.pop(name, None)

    async def room(self, journal: str | None = None, *, poll: float = 0.05) -> None:
        """Return when readers have read so much that more may be appended."""
        # Other processes are waited for, and they set no event.
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

    def _append(self, journal: str, *data: bytes) -> _Appended:
        log = self.byte_log(journal)
        now = self._now()
        begin, end = log.append(now, *data)
        since = self._dirty.setdefault(journal, now)
        error = None
        if now - since >= self._sync_every:
            try:
                log.sync()
                self._dirty.pop(journal)
            except OSError as why:
                # Readers may have the bytes already, so they are not taken back.
                error = why
        if self._keep is not None and log.rolled:
            assert isinstance(log, JournalLog)
            self._trim(log, self.readers())
        return _Appended(self, journal, begin, end, error)

    def _check_room(self, journal: str) -> None:
        if self._limit is None:
            return
        log = self.byte_log(journal)
        end = log.appended()
        if end < self._room.get(journal, -1):
            return
        # Not what is needed, too: of what was read a part may wait for its commit.
        read = [
            (one.checkpoint.offsets.get(journal, 0), one.name) for one in self.readers()
        ]
        if not read:
            self._room[journal] = end + 1
            return
        offset, reader = min(read)
        self._room[journal] = offset + self._limit
        if end >= offset + self._limit:
            raise LimitReached(journal, reader, end - offset, self._limit)

    # --- reading --------------------------------------------------------------------

    def new_message(self, spec: JournalSpec) -> Message:
        """Return a message of the type that a journal's content type has."""
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
            journal: Its name.
            begin: Offset of the first message; by default all are read.
            end: Offset behind the last.
            new_message: Makes the messages; by content type if it is not given.
            on_error: Is given what is passed over, damage and frames that are none;
                without it that is raised.

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
        """Return all readers that have names."""
        return registered(self.storage)

    def forget(self, reader: str) -> None:
        """Drop the position of a reader: nothing is kept for it any more."""
        if self.storage.size(f"readers/{reader}.json") is None:
            known = [one.name for one in self.readers()]
            raise JournalError(f"no reader {reader!r}{guess(reader, known)}")
        self.storage.remove(f"readers/{reader}.json")

    # --- retention ------------------------------------------------------------------

    def trim(self) -> dict[str, int]:
        """Drop the whole segments that ``keep`` allows; return how many, by journal."""
        if self._keep is None:
            return {}
        readers = self.readers()
        dropped = {}
        for name in self._names:
            log = self.log(name)
            with self.storage.locked(log.lock):
                if gone := self._trim(log, readers):
                    dropped[name] = gone
        return dropped

    def _trim(self, log: JournalLog, readers: list[Registered]) -> int:
        need = min((one.needs.get(log.name, 0) for one in readers), default=None)
        return len(log.drop(self._droppable(log, need)))

    def _droppable(self, log: JournalLog, need: int | None) -> int:
        """Return up to where segments may be dropped."""
        assert self._keep is not None
        unit, amount = self._keep
        segments = log.segments()
        if unit == "read":
            return need or 0
        before = 0
        if unit == "bytes":
            left = log.size()
            for one, following in pairwise(segments):
                if left <= amount:
                    break
                left -= following - one
                before = following
        else:
            oldest = self._now() - amount * 10**9
            for following in segments[1:]:
                # All of a segment is older than what the next begins with.
                began = log.age_of(following)
                if began is None or began > oldest:
                    break
                before = following
        return before if need is None else min(before, need)

    def _make(self, spec: dict[str, Any], create: bool) -> None:
        if not create:
            raise JournalError(f"{self._where}: no set of journals is there")
        # One that was killed in making it leaves these; a spec is there at once.
        others = (name for name in self.storage.names("") if name != "lock")
        if not all(name.startswith(f".{_SPEC}.") for name in others):
            raise JournalError(
                f"{self._where}: it is no set of journals, and not empty: a new set needs"
                " a folder of its own"
            )
        with self.storage.locked("lock"):
            if self.storage.size(_SPEC) is None:
                self.storage.replace(_SPEC, json.dumps(spec).encode())


def modulo(key: Callable[[Any], object]) -> Unbound:
    """Map messages by the hash of a key, modulo the number of journals."""
    return Unbound(modulo_by, _writing(key))


def rendezvous(key: Callable[[Any], object]) -> Unbound:
    """Map messages by the hash of a key, so that hardly one moves with a new journal."""
    return Unbound(rendezvous_by, _writing(key))


def _writing(key: Callable[[Any], object]) -> Callable[[Any, Fnv1a], None]:
    def write(message: object, hasher: Fnv1a) -> None:
        value = key(message)
        hasher.write(value if isinstance(value, bytes) else encode_json(value))

    return write


def sync_of(text: str) -> int:
    """Return the nanoseconds between two syncs, from ``sync``."""
    if text == "append":
        return 0
    if text == "commit":
        return 1 << 63
    found = _AMOUNT.fullmatch(text)
    if found is None or found[2] not in _SECONDS:
        raise ConfigError(
            f"sync is {text!r}, expected 'commit', 'append' or a time such as '1s'"
        )
    return int(found[1]) * _SECONDS[found[2]] * 10**9


def amount_of(keep: Keep) -> tuple[str, int] | None:
    """Return what ``keep`` bounds: seconds, bytes or read, and how many."""
    if keep is None or keep == "read":
        return None if keep is None else ("read", 0)
    found = _AMOUNT.fullmatch(keep)
    if found and found[2] in _SECONDS:
        return "seconds", int(found[1]) * _SECONDS[found[2]]
    if found and found[2] in _BYTES:
        return "bytes", int(found[1]) * _BYTES[found[2]]
    raise ConfigError(
        f"keep is {keep!r}, expected 'read', a time such as '7d' or a size such as '1GiB'"
    )


def bytes_of(limit: str | None) -> int | None:
    """Return the bytes of ``limit``."""
    if limit is None:
        return None
    found = _AMOUNT.fullmatch(limit)
    if not found or found[2] not in _BYTES:
        raise ConfigError(f"limit is {limit!r}, expected a size such as '20GiB'")
    return int(found[1]) * _BYTES[found[2]]
