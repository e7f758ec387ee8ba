"""
The holder of the lock of a state directory or output, and whether its process is alive.

An output has a lock of its own, for two runs with different state directories, or with
none: at the end of one write, Spark removes what another write has not finished there.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Self

from etlstage.pipeline.delivery.folder import make_ours, opened

__all__ = ("LOCK", "Claim", "Holder", "holder_of", "unheld")

LOCK: Final = "lock"
"""The file that is locked, in the state directory."""
_LENGTH: Final = 4096


class Holder(NamedTuple):
    """A process, as it described itself in the file that it locked."""

    pid: int
    host: str
    since: str
    """ISO 8601, UTC."""

    @classmethod
    def here(cls) -> Self:
        """Return the entry of this process."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(os.getpid(), socket.gethostname(), since)

    @classmethod
    def read(cls, file: BinaryIO) -> Self | None:
        """Return the process that wrote last, or None if that can't be read."""
        with suppress(OSError, ValueError, RecursionError):
            match json.loads(file.read(_LENGTH)):
                case {"pid": int(pid), "host": str(host), "since": str(since)}:
                    return cls(pid, host, since)
        return None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, since {self.since}"

    @property
    def state(self) -> str:
        """The state of the process, if it is on this machine."""
        if self.host != socket.gethostname():
            return "on another host"
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return "not visible from here"
        # The name, in parentheses, may hold anything.
        letter = stat.rpartition(")")[2].split()[0]
        return {"T": "stopped by a signal", "t": "stopped by a debugger"}.get(
            letter, "alive"
        )


def holder_of(folder: Path) -> tuple[bool, Holder | None]:
    """
    Return whether a state directory's lock is held, and the last holder on file.

    A run that begins at the same moment may find the lock held by us.

    Raises:
        OSError: If the file can't be read.

    """
    try:
        with opened(folder / LOCK, os.O_RDONLY) as file:
            holder = Holder.read(file)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True, holder
            return False, holder
    except FileNotFoundError:
        return False, None


@contextmanager
def unheld(folder: Path) -> Iterator[bool]:
    """
    Yield whether no run holds a state directory; if so, none can begin meanwhile.

    A run that is about to begin waits for half a second, so the block must take less.

    Raises:
        OSError: If the lock file can't be created, or read.

    """
    with opened(folder / LOCK, os.O_RDWR | os.O_CREAT) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


class Claim:
    """
    Exclusive use of an output, among the runs of one user on this machine.

    The lock is the kernel's, and is released when the process ends. Its file is in the
    system's temporary directory, as not every user may write beside an output.

    Args:
        path: The output.

    """

    def __init__(self, path: Path) -> None:
        folder = Path(tempfile.gettempdir(), f"etlstage-outputs-{os.geteuid()}")
        self._path = folder / sha256(os.fsencode(path.resolve())).hexdigest()[:32]
        self._stack = ExitStack()

    def take(self) -> Holder | None:
        """
        Claim the output; return the holder if another run has it.

        Raises:
            OSError: If the file can't be locked.

        """
        make_ours(self._path.parent)
        flags = os.O_RDWR | os.O_CREAT
        while True:
            with ExitStack() as stack:
                file = stack.enter_context(opened(self._path, flags))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return Holder.read(file) or Holder(0, "?", "?")
                # Unlock explicitly, as a process forked meanwhile shares the lock.
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
                if not _same(file, self._path):
                    continue  # its holder has just removed it
                file.truncate()
                file.write(json.dumps(Holder.here()._asdict()).encode())
                file.flush()
                stack.callback(self._path.unlink, missing_ok=True)
                self._stack = stack.pop_all()
                return None

    def release(self) -> None:
        """Release the output; safe to call twice."""
        self._stack.close()


def _same(file: BinaryIO, path: Path) -> bool:
    """Return whether a path still names an open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
