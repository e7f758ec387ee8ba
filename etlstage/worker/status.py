"""
What a worker reports to its supervisor beside its replies.

``ETLSTAGE_STATUS`` names a file in which any byte means "ready, alive", and
``ETLSTAGE_HEARTBEAT``, where a supervisor asks for heartbeats, after how many seconds
without one a worker that has nothing to do counts as dead. We write a byte when we are
about to read the first message, and then, while there is nothing to read, three in
that time. A line of JSON has more: what we have counted, and how far we are.
"""

from __future__ import annotations

import os

from etlstage.worker.descriptors import complain

__all__ = ("Status", "count", "open_status", "progress")

_BEATS = 3  # in the time that is allowed: one may be late
_NAME = 64  # characters of a metric's name
_GRACE = 1.0  # seconds that a supervisor may take to read what was sent


_opened: list[Status] = []  # one, or none: a worker has one supervisor


class Status:
    """
    Reports to the supervisor that we live.

    Args:
        descriptor: Where to write, without blocking.
        heartbeat: How often it wants to hear of us, in seconds; None is once.

    """

    def __init__(self, descriptor: int, heartbeat: float | None = None) -> None:
        self._descriptor = descriptor
        self._heartbeat = heartbeat
        self._announced = False

    def wait(self, source: int) -> None:
        """Report that we are ready, if this is new, and alive, until there is input."""
        self.announce()
        if self._heartbeat is None:
            return
        import select

        poll = select.poll()
        poll.register(source, select.POLLIN)
        while not poll.poll(self._heartbeat / _BEATS * 1000):
            self._tell()

    def announce(self) -> None:
        """Report that we are ready, once."""
        if not self._announced:
            self._announced = True
            self._tell()

    def count(self, name: str, add: int) -> int:
        """Have so many more counted; return how many, 0 if there is no room now."""
        line = b'{"metric": "%s", "add": %d}\n' % (name.encode(), add)
        return add if self._tell(line) else 0

    def progress(self, share: float) -> None:
        """Report how much is done, from 0 to 1."""
        self._tell(b'{"progress": %.6f}\n' % share)

    def wait_for_room(self) -> None:
        """Wait, not for long, until more can be sent."""
        import select

        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        poll.poll(_GRACE * 1000)

    def close(self) -> None:
        """Report no more; safe to call twice."""
        if self._descriptor != -1:
            os.close(self._descriptor)
            self._descriptor = -1

    def _tell(self, line: bytes = b"\n") -> bool:
        try:
            os.write(self._descriptor, line)
        except BlockingIOError:
            return False  # it is full, or has no room for all of it
        except OSError:
            pass  # a supervisor that does not listen gets nothing
        return True


def open_status() -> Status | None:
    """
    Return the channel for statuses, None if the supervisor wants none.

    The variables are taken out of the environment: in a program that we start, the
    descriptor of that name is another file.
    """
    path = os.environ.pop("ETLSTAGE_STATUS", "")
    heartbeat = os.environ.pop("ETLSTAGE_HEARTBEAT", "")
    if not path:
        return None
    try:
        # A descriptor of our own: a flag on theirs would be everybody's.
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        status = Status(os.open(path, flags), float(heartbeat) if heartbeat else None)
    except (OSError, ValueError) as error:
        complain(f"ETLSTAGE_STATUS and ETLSTAGE_HEARTBEAT: {error}")
        return None
    folder, _, number = path.rpartition("/")
    if folder == "/dev/fd" and number.isdigit() and int(number) > 2:
        os.close(int(number))
    _opened.append(status)
    return status


def count(name: str, add: int = 1) -> None:
    """
    Have the supervisor add to a metric of this worker.

    Nothing is counted without a supervisor, or if more is sent than it can read.

    Args:
        name: Of the metric: letters, digits and underscores, 64 at most.
        add: How much, at least 1.

    Raises:
        ValueError: If they are something else; ``skipped`` is what we count ourselves.

    """
    sound = name.isidentifier() and name.isascii() and len(name) <= _NAME
    if not sound or name == "skipped" or add < 1:
        raise ValueError(f"can't count {add!r} of {name!r}; see etlstage.worker.count")
    for status in _opened:
        status.count(name, add)


def progress(share: float) -> None:
    """
    Report to the supervisor how far this worker is with what it does now.

    Its deadline for that, ``timeout.message``, begins anew.

    Args:
        share: How much is done, from 0 to 1.

    Raises:
        ValueError: If it is something else.

    """
    if not 0 <= share <= 1:
        raise ValueError(f"progress is from 0 to 1, got {share!r}")
    for status in _opened:
        status.progress(share)
