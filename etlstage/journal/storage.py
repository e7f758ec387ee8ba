"""
Where journals are: a folder, or memory with faults on demand.

Both have the same few operations, and what is above them does not know which it is. A
path is relative, its parts separated by ``/``.
"""

from __future__ import annotations

import fcntl
import os
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from threading import Lock, RLock
from typing import Protocol

from etlstage.disk import make, sync

__all__ = ("FolderStorage", "MemoryStorage", "Storage")

_OPEN = 64
"""Descriptors that are kept for the next operation."""


class Storage(Protocol):
    """Files that can be appended to."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; none if there is no such folder."""

    def size(self, path: str) -> int | None:
        """Return how many bytes a file has, or None if there is no such file."""

    def load(self, path: str) -> bytes:
        """Return all of a file that is replaced as a whole; none if there is none."""

    def read(self, path: str, at: int, size: int) -> bytes:
        """Return bytes of a file, fewer at its end; none if there is no such file."""

    def append(self, path: str, *data: bytes) -> None:
        """Append to a file, which is made; after an error it may have some of it."""

    def truncate(self, path: str, size: int) -> None:
        """Cut a file."""

    def sync(self, path: str) -> None:
        """Return when a file, if it is there, and its name would outlive a crash."""

    def replace(self, path: str, data: bytes) -> None:
        """Give a file this content in one step."""

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""

    def locked(self, path: str) -> AbstractContextManager[None]:
        """Wait for a lock, which no other thread or process has meanwhile."""

    def hold(self, path: str, *, take: bool = False) -> int | None:
        """
        Take a lock for long, and return what releases it; None: another has it.

        Args:
            path: Its file.
            take: Whether it is taken from who has it, too.

        """

    def let_go(self, held: int) -> None:
        """Release it."""

    def close(self) -> None:
        """Let all go."""


class FolderStorage:
    """
    Files in a folder.

    Args:
        root: The folder; it is made when something is written.

    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root: Path = Path(root)
        self._prefix = f"{os.fspath(root)}/"
        self._open: OrderedDict[str, int] = OrderedDict()
        # Files whose name would outlive a crash.
        self._named: set[str] = set()
        self._locks: dict[str, tuple[Lock, int]] = {}
        self._guard = RLock()
        # The file that was read last, and its descriptor.
        self._reading = "", -1
        self._reading_guard = Lock()

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        try:
            return os.listdir(self.root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int | None:
        """Return how many bytes a file has."""
        try:
            return os.stat(f"{self._prefix}{path}").st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def load(self, path: str) -> bytes:
        """Return all of a file."""
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return b""

    def read(self, path: str, at: int, size: int) -> bytes:
        """Return bytes of a file; the last that was read stays open for the next."""
        with self._reading_guard:
            if self._reading[0] != path:
                try:
                    fd = os.open(f"{self._prefix}{path}", os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    return b""
                self._end_reading()
                self._reading = path, fd
            return os.pread(self._reading[1], size, at)

    def append(self, path: str, *data: bytes) -> None:
        """Append to a file."""
        with self._guard:
            fd = self._descriptor(path)
            left = memoryview(b"")
            if (written := os.writev(fd, data)) < sum(map(len, data)):
                left = memoryview(b"".join(data))[written:]
            while left:
                left = left[os.write(fd, left) :]

    def truncate(self, path: str, size: int) -> None:
        """Cut a file."""
        os.truncate(self.root / path, size)

    def sync(self, path: str) -> None:
        """Have a file, and its name, outlive a crash."""
        with self._guard, ExitStack() as opened:
            if (fd := self._open.get(path)) is None:
                # Of another's that is only read, and may be gone by now.
                try:
                    fd = os.open(f"{self._prefix}{path}", os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    return
                opened.callback(os.close, fd)
            os.fsync(fd)
        if path not in self._named:
            sync((self.root / path).parent)
            self._named.add(path)

    def replace(self, path: str, data: bytes) -> None:
        """Write aside, and rename."""
        target = self.root / path
        make(target.parent)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
        sync(target.parent)

    def remove(self, path: str) -> None:
        """Remove a file."""
        with self._guard:
            if (fd := self._open.pop(path, None)) is not None:
                os.close(fd)
            self._named.discard(path)
        (self.root / path).unlink(missing_ok=True)

    @contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Lock a file: against threads by a lock of theirs, which flock is not."""
        with self._guard:
            if path not in self._locks:
                self._locks[path] = Lock(), self._new(path)
            lock, fd = self._locks[path]
        with lock:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)

    def hold(self, path: str, *, take: bool = False) -> int | None:
        """Lock a file, unless it is locked; one who loses it has that of no name."""
        if take:
            self.remove(path)
        fd = self._new(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def let_go(self, held: int) -> None:
        """Unlock it."""
        os.close(held)

    def close(self) -> None:
        """Close all descriptors."""
        with self._guard:
            for fd in (*self._open.values(), *(fd for _, fd in self._locks.values())):
                os.close(fd)
            self._open.clear()
            self._locks.clear()
        with self._reading_guard:
            self._end_reading()

    def _end_reading(self) -> None:
        if self._reading[0]:
            os.close(self._reading[1])
            self._reading = "", -1

    def _descriptor(self, path: str) -> int:
        if (fd := self._open.get(path)) is None:
            fd = self._open[path] = self._new(path)
            if len(self._open) > _OPEN:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(path)
        return fd

    def _new(self, path: str) -> int:
        target = self.root / path
        make(target.parent)
        return os.open(
            target, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
        )


class MemoryStorage:
    """
    Files in memory, for tests.

    Attributes:
        files: The content of each.
        faults: Errors to come: the name of an operation, the error, and for an append
            how many bytes are written before it. Each happens once, in order.

    """

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.faults: deque[tuple[str, OSError, int]] = deque()
        self.synced: dict[str, int] = {}
        self._locks: dict[str, Lock] = {}
        self._held: dict[str, int] = {}
        self._numbers = count()

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        start = f"{folder}/" if folder else ""
        inside = [path[len(start) :] for path in self.files if path.startswith(start)]
        return sorted({name.partition("/")[0] for name in inside})

    def size(self, path: str) -> int | None:
        """Return how many bytes a file has."""
        return len(self.files[path]) if path in self.files else None

    def load(self, path: str) -> bytes:
        """Return all of a file."""
        return bytes(self.files.get(path, b""))

    def read(self, path: str, at: int, size: int) -> bytes:
        """Return bytes of a file."""
        self._fail("read")
        return bytes(self.files.get(path, b"")[at : at + size])

    def append(self, path: str, *parts: bytes) -> None:
        """Append to a file."""
        data = b"".join(parts)
        file = self.files.setdefault(path, bytearray())
        if self.faults and self.faults[0][0] == "append":
            file += data[: self.faults[0][2]]
        self._fail("append")
        file += data

    def truncate(self, path: str, size: int) -> None:
        """Cut a file."""
        self._fail("truncate")
        del self.files[path][size:]

    def sync(self, path: str) -> None:
        """Keep in mind how long the file is."""
        self._fail("sync")
        if path in self.files:
            self.synced[path] = len(self.files[path])

    def replace(self, path: str, data: bytes) -> None:
        """Set the content of a file."""
        self._fail("replace")
        self.files[path] = bytearray(data)

    def remove(self, path: str) -> None:
        """Remove a file."""
        self.files.pop(path, None)

    @contextmanager
    def locked(self, path: str) -> Iterator[None]:
        """Lock out other threads."""
        with self._locks.setdefault(path, Lock()):
            yield

    def hold(self, path: str, *, take: bool = False) -> int | None:
        """Take a name, unless it is taken."""
        if path in self._held and not take:
            return None
        self._held[path] = next(self._numbers)
        return self._held[path]

    def let_go(self, held: int) -> None:
        """Give it back, if it was not taken."""
        for path in [path for path, number in self._held.items() if number == held]:
            del self._held[path]

    def close(self) -> None:
        """Keep all for the next."""

    def _fail(self, operation: str) -> None:
        if self.faults and self.faults[0][0] == operation:
            raise self.faults.popleft()[1]
