"""Who holds the lock of a state directory, and whether he is at work."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Self

from etlstage.pipeline.delivery.folder import opened

__all__ = ("LOCK", "Holder", "holder_of")

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
        """Return what is to be said of this process."""
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
