"""
Reports from a worker to its supervisor, in addition to its replies.

``ETLSTAGE_STATUS`` names a file in which any byte means "ready, alive". If a supervisor
wants heartbeats, ``ETLSTAGE_HEARTBEAT`` is after how many seconds without one an idle
worker counts as dead. We write a byte when we are about to read the first message and
then, while there is nothing to read, three in that time. A line of JSON reports more:
metrics and progress.
"""

from __future__ import annotations

import os

from etlstage.worker.descriptors import complain

__all__ = ("BEATS", "Status", "count", "open_status", "progress")

BEATS = 3
"""Heartbeats in the time that is allowed: one may be late."""
_NAME = 64  # characters of a metric's name
_GRACE = 1.0  # seconds that a supervisor may take to read reports


_opened: list[Status] = []  # at most one: a worker has one supervisor


class Status:
    """
    Reports to the supervisor: ready, alive, progress and metrics.

    Args:
        descriptor: Where to write, without blocking.
        heartbeat: Seconds within which it wants a heartbeat; None: only the first.

    """

    def __init__(self, descriptor: int, heartbeat: float | None = None) -> None:
        self._descriptor = descriptor
        self._heartbeat = heartbeat
        self._announced = False

    def wait(self, source: int) -> None:
        """Report that we are ready, then send heartbeats until there is input."""
        self.announce()
        if self._heartbeat is None:
            return
        import select

        poll = select.poll()
        poll.register(source, select.POLLIN)
        while not poll.poll(self._heartbeat / BEATS * 1000):
            self._tell()

    def announce(self) -> None:
        """Report that we are ready, once."""
        if not self._announced:
            self._announced = True
            self._tell()

    def count(self, name: str, add: int) -> int:
        """Add to a metric; return ``add``, or 0 if the pipe has no room now."""
        line = b'{"metric": "%s", "add": %d}\n' % (name.encode(), add)
        return add if self._tell(line) else 0

    def progress(self, share: float) -> None:
        """Report how much is done, from 0 to 1."""
        self._tell(b'{"progress": %.6f}\n' % share)

    def wait_for_room(self) -> None:
        """Wait a short time until more can be sent."""
        import select

        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        poll.poll(_GRACE * 1000)

    def close(self) -> None:
        """Stop reporting; safe to call twice."""
        if self._descriptor != -1:
            os.close(self._descriptor)
            self._descriptor = -1

    def _tell(self, line: bytes = b"\n") -> bool:
        try:
            os.write(self._descriptor, line)
        except BlockingIOError:
            return False  # the pipe has no room for the whole line
        except OSError:
            pass  # the supervisor does not listen
        return True


def open_status() -> Status | None:
    """
    Return the status channel; None if the supervisor wants none.

    The variables are removed from the environment: in a program that we start, the
    descriptor of that name would be another file.
    """
    path = os.environ.pop("ETLSTAGE_STATUS", "")
    heartbeat = os.environ.pop("ETLSTAGE_HEARTBEAT", "")
    if not path:
        return None
    try:
        # A new open file: the flags of the inherited one are shared by all its users.
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        status = Status(os.open(path, flags), float(heartbeat) if heartbeat else None)
    except (OSError, ValueError) as error:
        complain(f"can't use ETLSTAGE_STATUS and ETLSTAGE_HEARTBEAT: {error}")
        return None
    folder, _, number = path.rpartition("/")
    if folder == "/dev/fd" and number.isdigit() and int(number) > 2:
        os.close(int(number))
    _opened.append(status)
    return status


def count(name: str, add: int = 1) -> None:
    """
    Have the supervisor add to a metric of this worker.

    Nothing is counted without a supervisor, or if it can't read reports fast enough.

    Args:
        name: The metric's name: letters, digits and underscores, at most 64.
        add: How much to add, a whole number of at least 1.

    Raises:
        ValueError: If they are anything else, or the name is ``skipped``, which is used
            by the SDK itself.

    """
    sound = name.isidentifier() and name.isascii() and len(name) <= _NAME
    # A number of NumPy is not an int.
    whole = hasattr(add, "__index__") and add >= 1
    if not sound or name == "skipped" or not whole:
        raise ValueError(f"can't count {add!r} of {name!r}; see etlstage.worker.count")
    for status in _opened:
        status.count(name, add)


def progress(share: float) -> None:
    """
    Report to the supervisor how much of the current message or batch is done.

    Its deadline, ``timeout.message``, begins anew.

    Args:
        share: How much is done, from 0 to 1.

    Raises:
        ValueError: If it is not in that range.

    """
    if not 0 <= share <= 1:
        raise ValueError(f"progress is from 0 to 1, got {share!r}")
    for status in _opened:
        status.progress(share)
