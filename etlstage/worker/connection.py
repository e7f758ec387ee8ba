"""
A worker's connection, which decides when replies are written.

Replies are collected, as a write per message would cost more than most messages. They
are written in three cases:

* the input runs dry: all messages of one read are answered before the next read, so a
  supervisor that waits for a reply before it writes again never waits in vain;
* they grow: past ``BLOCK`` bytes they are written, so memory is bounded;
* they grow old: while the function works on other messages of the same read, a thread
  writes replies older than ``MAX_AGE``. A look at the clock between two messages would
  not suffice: the function may be stuck in the next one for hours, or kill the process,
  and messages answered before would be taken for lost.

How the two threads keep out of each other's way: only the main thread appends to
``pending``, and does so without a lock; to write, a thread holds the lock, takes a copy
of the list, and removes that many items from its front. The protocol object is used
under the lock, or while nothing is pending and the other thread has nothing to do.

The thread is started the first time that more than one exchange is open: with a
supervisor in lock-step there is none.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable, Iterator
from time import sleep
from typing import Any, Final

from etlstage.errors import InvalidMessage
from etlstage.messages import counted
from etlstage.protocol.base import SEND_EOF
from etlstage.protocol.events import (
    Added,
    Ended,
    Event,
    Failed,
    Farewell,
    Noise,
    Refusal,
)
from etlstage.protocol.marker import MarkerProtocol
from etlstage.worker.descriptors import complain, read, write
from etlstage.worker.status import open_status

__all__ = ("BLOCK", "Connection")

BLOCK: Final = 128 * 1024
"""Size of collected output, in bytes, at which it is written without waiting."""
MAX_AGE: Final = 0.05
"""How long a reply waits for other messages, in seconds, at most; approximate."""


class Connection:
    """
    Moves bytes between a protocol and the supervisor.

    Args:
        protocol: The session, worker's side.
        descriptors: Where to read and where to write.
        refused: Called with the error for the first item in ``pending`` if the protocol
            refuses to send it; raises, or returns the reason to refuse the message, or
            None to answer it with an empty reply.
        groups: Whether pending items are replies; otherwise they are parts of one.

    Attributes:
        pending: Items to be sent next; append to it, from one thread. A refusal
            among replies is appended by :meth:`refuse`.
        sent: Number of items that have been sent.
        skipped: Number of skipped messages that have not been reported yet.

    """

    def __init__(
        self,
        protocol: MarkerProtocol,
        descriptors: tuple[int, int],
        refused: Callable[[InvalidMessage], str | None],
        *,
        groups: bool = False,
    ) -> None:
        self.pending: list[Any] = []
        self.sent: int = 0
        self.skipped: int = 0
        self._protocol = protocol
        self._source, self._target = descriptors
        self._groups = groups
        self._next = 1  # the next exchange to end
        self._refused = refused
        # Pending refusals: how many items came before each, and the reason.
        self._refusals: list[tuple[int, str]] = []
        self._lock = allocate_lock()
        self._parked = allocate_lock()
        self._started = self._awake = self._working = False
        self._failure: BaseException | None = None
        self._status = open_status()
        os.register_at_fork(after_in_child=self._abandon)

    def events(self) -> Iterator[Event]:
        """
        Yield the supervisor's events until the end of input, waiting for them.

        Before each wait, everything pending is sent; during it, heartbeats are sent.
        """
        while True:
            self.flush()
            self._working = False
            if self._status is not None:
                self._status.wait(self._source)
            data = read(self._source)
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            events = self._protocol.events_received()
            for event in events:
                if isinstance(event, Noise):
                    complain(
                        f"dropped the last {counted(len(event.data), 'byte')} of the"
                        " input: no EOM follows"
                    )
                if isinstance(event, Failed):
                    # The session is dead: no event of this read can be answered.
                    complain(f"stdin: {event.error}")
                    raise SystemExit(1)
            if len(events) - (not data) > 1:  # batches, without the end of input
                self.watch()
            yield from (e for e in events if not isinstance(e, Noise))
            if not data:
                return

    def announce(self) -> None:
        """Report that we are ready, for a worker that reads nothing."""
        if self._status is not None:
            self._status.announce()

    def close_batch(self) -> None:
        """Close a batch that the supervisor left open, at the end of input."""
        # The protocol does not define this; PanDAWMS/dkb processes such a batch, too.
        self._protocol.receive_data(self._protocol.markers.eob)
        self._protocol.events_received()

    def watch(self) -> None:
        """Have pending items written when they are old, until the next read."""
        with self._lock:
            self._working = True
            if not self._started:
                self._started = self._awake = True
                self._parked.acquire()
                start_new_thread(self._flush_when_old, ())
            elif not self._awake:
                self._awake = True
                self._parked.release()

    def flush(self) -> None:
        """Send everything pending; exit if the reader is gone."""
        refusal: InvalidMessage | None = None
        while True:
            reason = self._refused(refusal) if refusal else None
            # Also with nothing pending: the other thread may still be writing.
            with self._lock:
                if self._failure:
                    raise self._failure
                if refusal:
                    self.pending[0] = ()
                if reason is not None:
                    self._refusals.insert(0, (self.sent, reason))
                refusal = self._send_pending() if self.pending else None
            if not refusal:
                break
        if self.skipped and self._status is not None:
            self.skipped -= self._status.count("skipped", self.skipped)

    def refuse(self, reason: str) -> None:
        """Append a refusal to the pending replies."""
        with self._lock:
            self._refusals.append((self.sent + len(self.pending), reason))
            self.pending.append(())

    def send(self, event: Event) -> None:
        """
        Send ``event`` after everything pending.

        Raises:
            InvalidMessage: If it holds a message that can't be sent.

        """
        self.flush()
        with self._lock:
            self._protocol.send(event)
            self._write()

    def pass_on(self, messages: list[bytes]) -> None:
        """Send a part of a reply after everything pending; raises as :meth:`send`."""
        self.flush()
        self.send(Added(self._next, messages))

    def end_round(self, refusal: str | None = None) -> None:
        """End a reply whose messages have been passed on, or refuse its message."""
        self.flush()
        refusals = () if refusal is None else [Refusal(0, 0, 0, refusal)]
        self.send(Ended(self._next, [()], refusals))
        self._next += 1

    def close(self) -> None:
        """Send the end of output after everything pending."""
        self._working = False
        self.flush()
        if self.skipped and self._status is not None:
            self._status.wait_for_room()
        self.send(Farewell())

    def _send_pending(self) -> InvalidMessage | None:
        """Send the items before the first invalid one; return the error of that one."""
        pending = self.pending[:]
        refusal = None
        try:
            self._protocol.send(self._event(pending))
        except InvalidMessage as error:
            refusal = error
            del pending[self._holder(pending, error.index) :]
            self._protocol.send(self._event(pending))
        del self.pending[: len(pending)]
        self.sent += len(pending)
        self._next += len(pending) * self._groups
        if self._refusals:
            self._refusals = [no for no in self._refusals if no[0] >= self.sent]
        self._write()
        return refusal

    def _event(self, pending: list[Any]) -> Event:
        if not self._groups:
            return Added(self._next, pending)
        if not self._refusals:
            return Ended(self._next, pending)
        end = self.sent + len(pending)
        refusals = [
            Refusal(at - self.sent, 0, 0, why) for at, why in self._refusals if at < end
        ]
        return Ended(self._next, pending, refusals)

    def _holder(self, sound: list[Any], index: int) -> int:
        """Return in which of the pending replies message number ``index`` is."""
        if not self._groups:
            return index
        place = 0
        while index >= len(sound[place]):
            index -= len(sound[place])
            place += 1
        return place

    def _write(self) -> None:
        chunks = self._protocol.data_to_send()
        write(self._target, b"".join(chunks))
        if SEND_EOF in chunks:
            os.close(self._source)
            os.close(self._target)
            self._source = self._target = -1
            if self._status is not None:
                self._status.close()

    # Threads that threading does not know are not seen by coverage.
    def _flush_when_old(self) -> None:  # pragma: no cover
        """
        Write old items; the function of the other thread.

        It imports nothing and prints nothing, so that it holds no other lock when the
        interpreter shuts down. An exception here is raised in the main thread; an item
        that can't be sent is found again, and handled, by the main thread.
        """
        while True:
            sleep(MAX_AGE)
            with self._lock:
                if self.pending and not self._failure:
                    try:
                        self._send_pending()
                    except BaseException as error:
                        self._failure = error
                awake = self._awake = self._working
            if not awake:
                self._parked.acquire()

    def _abandon(self) -> None:
        """Close everything in a forked child: the supervisor waits for our EOF."""
        for descriptor in {self._source, self._target} - {-1}:
            os.close(descriptor)
        self._source = self._target = -1
        if self._status is not None:
            self._status.close()
        self._lock = allocate_lock()
        self.pending.clear()
