"""
Storage of journals: a folder, or memory with faults on demand.

Both have the same few operations, so their users need not know which one it is. A path
is relative, its parts separated by ``/``.
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
from etlstage.errors import os_reason
from etlstage.journal.errors import JournalError

__all__ = ("FolderStorage", "MemoryStorage", "Storage")

_OPEN = 64
"""Number of descriptors that are kept open for later appends."""


class Storage(Protocol):
    """Files that can be appended to; raises JournalError for one that can't be read."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; none if there is no such folder."""

    def size(self, path: str) -> int | None:
        """Return a file's size in bytes, or None if there is no such file."""

    def load(self, path: str) -> bytes:
        """Return all bytes of a file; empty if there is no such file."""

    def read(self, path: str, at: int, size: int) -> bytes:
        """Return bytes of a file, fewer at its end; empty if there is no such file."""

    def append(self, path: str, *data: bytes) -> None:
        """Append to a file, creating it; after an error some bytes may be written."""

    def truncate(self, path: str, size: int) -> None:
        """Truncate a file to ``size`` bytes."""

    def sync(self, path: str) -> None:
        """Make a file and its name durable, if the file exists."""

    def replace(self, path: str, data: bytes) -> None:
        """Set the content of a file atomically."""

    def remove(self, path: str) -> None:
        """Remove a file, if it exists."""

    def locked(self, path: str) -> AbstractContextManager[None]:
        """Hold an exclusive lock among all threads and processes; wait for it."""

    def hold(self, path: str, *, take: bool = False) -> int | None:
        """
        Take a long-lived lock, and return its handle; None if it is held already.

        Args:
            path: The lock's file.
            take: Whether to take the lock even from its holder.

        """

    def let_go(self, held: int) -> None:
        """Release a lock that :meth:`hold` has returned, in the process that took it."""

    def close(self) -> None:
        """Release all resources."""


class FolderStorage:
    """
    Files in a folder.

    Args:
        root: The folder; it is created when something is written.

    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root: Path = Path(root)
        self._prefix = f"{os.fspath(root)}/"
        self._open: OrderedDict[str, int] = OrderedDict()
        # Files whose name is durable.
        self._named: set[str] = set()
        self._locks: dict[str, tuple[RLock, int]] = {}
        # By handle of a lock that is held, the process that took it.
        self._held: dict[int, int] = {}
        self._guard = RLock()
        self._process = os.getpid()
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
        """Return a file's size in bytes, or None if there is no such file."""
        try:
            return os.stat(f"{self._prefix}{path}").st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unreadable(path, error) from error

    def load(self, path: str) -> bytes:
        """Return all of a file."""
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise self._unreadable(path, error) from error

    def read(self, path: str, at: int, size: int) -> bytes:
        """Return bytes of a file; the file stays open for the next read."""
        try:
            with self._reading_guard:
                if self._reading[0] != path:
                    fd = os.open(f"{self._prefix}{path}", os.O_RDONLY | os.O_CLOEXEC)
                    self._end_reading()
                    self._reading = path, fd
                return os.pread(self._reading[1], size, at)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise self._unreadable(path, error) from error

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
        """Truncate a file."""
        os.truncate(self.root / path, size)

    def sync(self, path: str) -> None:
        """Make a file and its name durable."""
        with self._guard, ExitStack() as opened:
            self._close_inherited()
            if (fd := self._open.get(path)) is None:
                # The file may be one that is only read here, and may be gone by now.
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
        """Write a temporary file, and rename it."""
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
        """Lock a file; ``flock`` does not exclude threads, so they have a lock, too."""
        # The thread's own: an interrupted append may hold it when the set is closed.
        with self._guard:
            self._close_inherited()
            if path not in self._locks:
                self._locks[path] = RLock(), self._new(path)
            lock, fd = self._locks[path]
        with lock:
            if self._locks.get(path) != (lock, fd):  # closed while we waited
                with self.locked(path):
                    yield
                return
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # A close meanwhile has released it.
                if self._locks.get(path) == (lock, fd):
                    fcntl.flock(fd, fcntl.LOCK_UN)

    def hold(self, path: str, *, take: bool = False) -> int | None:
        """Lock a file unless it is locked; a taken lock's old file is unlinked."""
        if take:
            self.remove(path)
        fd = self._new(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        self._held[fd] = os.getpid()
        return fd

    def let_go(self, held: int) -> None:
        """Unlock a file, of which a process that was forked off may have a copy."""
        if self._held.pop(held) == os.getpid():
            fcntl.flock(held, fcntl.LOCK_UN)
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

    def _unreadable(self, path: str, error: OSError) -> JournalError:
        return JournalError(f"{self.root / path}: can't be read: {os_reason(error)}")

    def _close_inherited(self) -> None:
        """
        Close the descriptors from before a fork: files get new ones when used again.

        ``flock`` does not exclude processes that share an open file, and only one of
        them gets an error of ``fsync``. The parent's copies keep its locks.
        """
        if self._process != (process := os.getpid()):
            self.close()
            self._process = process

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
        files: The content of each file.
        faults: Errors to raise, each once, in order: the name of the operation, the
            error, and for an append the number of bytes that are written before it.

    """

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.faults: deque[tuple[str, OSError, int]] = deque()
        self.synced: dict[str, int] = {}
        self._locks: dict[str, RLock] = {}
        self._held: dict[str, int] = {}
        self._numbers = count()

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        start = f"{folder}/" if folder else ""
        inside = [path[len(start) :] for path in self.files if path.startswith(start)]
        return sorted({name.partition("/")[0] for name in inside})

    def size(self, path: str) -> int | None:
        """Return a file's size in bytes, or None if there is no such file."""
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
        """Truncate a file."""
        self._fail("truncate")
        del self.files[path][size:]

    def sync(self, path: str) -> None:
        """Record the length of the file in ``synced``."""
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
        with self._locks.setdefault(path, RLock()):
            yield

    def hold(self, path: str, *, take: bool = False) -> int | None:
        """Take a name, unless it is taken."""
        if path in self._held and not take:
            return None
        self._held[path] = next(self._numbers)
        return self._held[path]

    def let_go(self, held: int) -> None:
        """Release a name, unless it was taken over."""
        for path in [path for path, number in self._held.items() if number == held]:
            del self._held[path]

    def close(self) -> None:
        """Do nothing: the files stay for the next set."""

    def _fail(self, operation: str) -> None:
        if self.faults and self.faults[0][0] == operation:
            raise self.faults.popleft()[1]
