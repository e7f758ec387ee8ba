"""
The two descriptors of a worker, kept out of all other code's reach.

Whatever prints writes to descriptor 1: ``print()``, C libraries, child processes. So
the protocol moves to descriptors that no code knows and no program inherits, and what
is left on 0 and 1 is harmless. Reads and writes block; the flags of the open file
are never touched, since our parent may share it.
"""

from __future__ import annotations

import os
import sys
from errno import EBADF
from typing import NoReturn

__all__ = ("complain", "read", "take_over", "write")

# What a pipe holds unless it's enlarged. Tried: 256 KiB and 1 MiB cost a fifth more
# time per message, most of it for fresh memory.
_READ = 64 * 1024


def take_over() -> tuple[int, int]:
    """
    Return private duplicates of stdin and stdout, and point these elsewhere.

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
        # Flushes, too: what was printed before goes to stderr now.
        sys.stdout.reconfigure(line_buffering=True)
    return source, target


def read(source: int) -> bytes:
    """Return what there is to read, waiting for it; nothing at the end of input."""
    while True:
        try:
            return os.read(source, _READ)
        except BlockingIOError:
            _wait(source, writing=False)
        except ConnectionError:
            _give_up()


def write(target: int, data: bytes) -> None:
    """Write all of ``data``; exit if its reader is gone."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(target, rest) :]
        except BlockingIOError:
            _wait(target, writing=True)
        except ConnectionError:
            _give_up()


def complain(text: str) -> None:
    """Write a line to stderr, if there is one."""
    try:
        os.write(2, f"etlstage.worker: {text}\n".encode(errors="backslashreplace"))
    except OSError:
        return


def _wait(descriptor: int, *, writing: bool) -> None:
    """Wait on a descriptor that somebody else has made non-blocking."""
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLOUT if writing else select.POLLIN)
    poll.poll()


def _give_up() -> NoReturn:
    """Exit without a word: the supervisor is gone, and with it who would read it."""
    raise SystemExit(1) from None
