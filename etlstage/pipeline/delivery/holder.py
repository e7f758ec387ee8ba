"""
Who holds the lock of a state directory, or of an output, and whether its process is at work.

An output has a lock of its own, for two runs that have different state directories, or
none: Spark clears away, at the end of one write, what another has not finished there.
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
    """A process, as it wrote about itself into the file that it locked."""

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
        """Return who wrote last, as far as that can be read."""
        with suppress(OSError, ValueError, RecursionError):
            match json.loads(file.read(_LENGTH)):
                case {"pid": int(pid), "host": str(host), "since": str(since)}:
                    return cls(pid, host, since)
        return None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, since {self.since}"

    @property
    def state(self) -> str:
        """What the process does, if it is one of this machine."""
        if self.host != socket.gethostname():
            return "on another host"
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return "not to be seen from here"
        # The name, in parentheses, may hold anything.
        letter = stat.rpartition(")")[2].split()[0]
        return {"T": "stopped by a signal", "t": "stopped by a debugger"}.get(
            letter, "alive"
        )


def holder_of(folder: Path) -> tuple[bool, Holder | None]:
    """
    Return whether the lock of a state directory is held, and who wrote that he has it.

    A run that begins in the same moment may find it held by us.

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
    Yield whether no run has a state directory; while that is so, none begins.

    One that wants to waits for that, for half a second: it is for what takes less.

    Raises:
        OSError: If the file of the lock can't be made, or read.

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
    An output that is one run's, on this machine and among the runs of one user.

    The lock is the kernel's, and goes with the process. It is in the system's temporary
    directory: beside an output not everybody may write.

    Args:
        path: The output.

    """

    def __init__(self, path: Path) -> None:
        folder = Path(tempfile.gettempdir(), f"etlstage-outputs-{os.geteuid()}")
        self._path = folder / sha256(str(path.resolve()).encode()).hexdigest()[:32]
        self._stack = ExitStack()

    def take(self) -> Holder | None:
        """
        Take it; return who has it if another run does.

        Raises:
            OSError: If there can be no lock.

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
                # A process that was forked off meanwhile shares it with us.
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
        """Let others have it; safe to call twice."""
        self._stack.close()


def _same(file: BinaryIO, path: Path) -> bool:
    """Return whether a name stands for a file that is open."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
