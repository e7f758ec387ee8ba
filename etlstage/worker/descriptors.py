"""
The two descriptors of a worker, kept out of reach of all other code.

``print()``, C libraries and child processes all write to descriptor 1. So the protocol
moves to descriptors that no other code knows and no program inherits, and descriptors 0
and 1 become harmless. Reads and writes block; the flags of the open files are never
changed, since our parent may share them.
"""

from __future__ import annotations

import os
import sys
from errno import EBADF
from typing import NoReturn

__all__ = ("complain", "read", "take_over", "write")

# The capacity of a pipe unless it is enlarged. Measured: 256 KiB and 1 MiB cost a fifth
# more time per message, most of it for fresh memory.
_READ = 64 * 1024


def take_over() -> tuple[int, int]:
    """
    Return private duplicates of stdin and stdout, and redirect the originals.

    Raises:
        OSError: If stdin or stdout is closed.

    """
    null = os.open(os.devnull, os.O_RDWR)
    if null < 2:
        raise OSError(EBADF, os.strerror(EBADF))
    if null == 2:  # stderr is closed
        os.set_inheritable(null, True)
        null = os.open(os.devnull, os.O_RDWR)
    source, target = os.dup(0), os.dup(1)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        # This also flushes: what was printed before now goes to stderr.
        sys.stdout.reconfigure(line_buffering=True)
    return source, target


def read(source: int) -> bytes:
    """Wait for input and return it; return nothing at the end of input."""
    while True:
        try:
            return os.read(source, _READ)
        except BlockingIOError:
            _wait(source, writing=False)
        except ConnectionError:
            _give_up()


def write(target: int, data: bytes) -> None:
    """Write all of ``data``; exit if the reader is gone."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(target, rest) :]
        except BlockingIOError:
            _wait(target, writing=True)
        except ConnectionError:
            _give_up()


def complain(text: str) -> None:
    """Write a line to stderr, if it is open."""
    try:
        os.write(2, f"etlstage.worker: {text}\n".encode(errors="backslashreplace"))
    except OSError:
        return


def _wait(descriptor: int, *, writing: bool) -> None:
    """Wait on a descriptor that another process has made non-blocking."""
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLOUT if writing else select.POLLIN)
    poll.poll()


def _give_up() -> NoReturn:
    """Exit without a message: the supervisor, which would read it, is gone."""
    raise SystemExit(1) from None
