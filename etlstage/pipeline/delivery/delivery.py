"""
Who may read on from what is stored: one run at a time.

Two runs of one pipeline would begin at the same position, load everything twice, and
store their positions over each other's.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final, Self

from etlstage.errors import StateUnusable
from etlstage.pipeline.delivery.folder import make_ours, opened, reason

__all__ = ("LOCK", "Delivery", "unusable")

LOCK: Final = "lock"
"""The file that is locked, in the state directory."""
_LENGTH: Final = 4096


class Delivery:
    """
    Owns a state directory, while it is entered.

    The lock is the kernel's, and goes with our process, however that ends; no worker
    inherits it. What stands in the file is only for who finds it locked.

    Args:
        folder: The state directory; made, for us alone, if it is not there.

    Raises:
        StateUnusable: On entering, if another run has it, or it can't be ours.

    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Take the state directory."""
        with ExitStack() as stack:
            try:
                make_ours(self.folder)
                flags = os.O_RDWR | os.O_CREAT
                file = stack.enter_context(opened(self.folder / LOCK, flags))
                self._lock(file)
                # A process that was forked off meanwhile shares it with us.
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
            except OSError as error:
                raise unusable(self.folder, error) from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Let others have it."""
        self._stack.close()

    def _lock(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateUnusable(
                f"another run uses the state directory {self.folder}{_holder(file)}:"
                " wait until it has ended, or set another state"
            ) from None
        about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        file.truncate()
        file.write(json.dumps(about).encode())
        file.flush()


def unusable(folder: Path, error: OSError) -> StateUnusable:
    """Return the error of a state directory that can't be ours."""
    return StateUnusable(
        f"can't use the state directory {folder}: {reason(error)}; set another state"
    )


def _holder(file: BinaryIO) -> str:
    """Return who wrote that he holds the lock, as far as it can be read."""
    with suppress(OSError, ValueError, RecursionError):
        match json.loads(file.read(_LENGTH)):
            case {"pid": int(pid), "host": str(host), "since": str(since)}:
                return f" (pid {pid} on {host}, since {since})"
    return ""
