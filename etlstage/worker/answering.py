"""
Answers: the loops of a worker, one for each way of being asked.

``connection.py`` says when answers are written; here is what they are, and what
becomes of a function that fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from etlstage.errors import MessageRefused
from etlstage.protocol.events import (
    MessagesPassed,
    MoreRequested,
    OutputPassed,
    RepliesCompleted,
    StreamEnded,
)
from etlstage.protocol.marker import MarkerProtocol, Mode
from etlstage.worker.connection import BLOCK, Connection
from etlstage.worker.function import ITERABLE, Function

__all__ = ("Answering",)


class Answering:
    """
    Answers messages, or batches, oldest first.

    Args:
        function: The user's function.
        protocol: The session, worker's side.
        descriptors: Where to read and where to write.
        skip: Whether a failure is answered without messages, and not raised.

    """

    def __init__(
        self,
        function: Function,
        protocol: MarkerProtocol,
        descriptors: tuple[int, int],
        *,
        skip: bool = False,
    ) -> None:
        self._function = function
        self._skip = skip
        self._fills = protocol.mode is Mode.BATCH_WORKER
        self._unit = "batch" if protocol.mode.batches else "message"
        self._one_to_one = protocol.markers.eop == protocol.markers.eom
        self._connection = Connection(
            protocol, descriptors, RepliesCompleted, self._refused
        )
        self._size = 0  # of what is pending, at most
        self._over = False

    def answer_messages(self, call: Callable[[bytes], Iterable[bytes]]) -> None:
        """Answer each message with what ``call`` gives, to the end of input."""
        connection = self._connection
        for event in connection.events():
            if isinstance(event, MessagesPassed):
                if len(event.messages) > 1:
                    connection.watch()
                self._answer(call, event.messages)
        connection.close()

    def answer_batches(
        self, call: Callable[[list[bytes]], Iterable[bytes]], size: int
    ) -> None:
        """
        Answer each batch with what ``call`` gives, to the end of input.

        ``call`` is spared an empty batch, except where it must make the one message
        that is due.

        Args:
            call: Gets the messages of a batch.
            size: In a worker-driven batch, messages to ask for.

        """
        spared: Callable[[list[bytes]], Iterable[bytes]] = lambda batch: ()  # noqa: E731
        for batch in self._batches(size):
            self._answer(call if batch or self._one_to_one else spared, [batch])
        self._connection.close()

    def _batches(self, size: int) -> Iterator[list[bytes]]:
        connection = self._connection
        batch: list[bytes] = []
        for event in connection.events():
            if isinstance(event, MessagesPassed):
                batch += event.messages
                if not self._fills:
                    continue
                if len(batch) < size:
                    connection.send(MoreRequested())
                    continue
            elif isinstance(event, StreamEnded):
                if not batch:
                    return
                connection.close_batch()
            yield batch
            batch = []

    def _answer(
        self, call: Callable[[Any], Iterable[bytes]], run: Sequence[Any]
    ) -> None:
        """Append the reply to each of ``run``; written is what gets too much."""
        connection = self._connection
        append = connection.pending.append
        collect = self._collect
        size = self._size
        for asked in run:
            try:
                reply = call(asked)
                # Nearly all replies are of this kind, so no call is spent on them.
                if (
                    type(reply) is list
                    and len(reply) == 1
                    and type(message := reply[0]) is bytes
                ):
                    append((message,))
                    size += len(message)
                else:
                    group, count = collect(reply)
                    append(group)
                    size += count
            except BaseException as error:
                if not self._skipped(error, asked):
                    raise
            if size > BLOCK:
                connection.flush()
                size = 0
        self._size = size

    def _collect(self, reply: Iterable[bytes]) -> tuple[tuple[bytes, ...], int]:
        """Return the checked messages of a reply, or its last part, and their size."""
        if type(reply) not in ITERABLE:
            self._function.check(reply)
        group: list[bytes] = []
        size = 0
        for message in reply:
            if not isinstance(message, bytes):
                self._function.refuse(message)
            group.append(message)
            size += len(message) + 1
            if size > BLOCK:
                if not self._one_to_one:
                    self._connection.send(OutputPassed(group))
                    group, size = [], 0
                elif len(group) > 1:
                    break  # it may never end
        if self._one_to_one and len(group) != 1:
            raise ValueError(
                f"{self._function.name} gave {'many' if group else 'no'} messages,"
                " expected exactly one: eop is eom"
            )
        return tuple(group), size

    # --- what goes wrong ----------------------------------------------------

    def _skipped(self, error: BaseException, asked: bytes | list[bytes]) -> bool:
        """Return whether, after ``error``, the answer is none and work goes on."""
        if self._over:
            return False
        # What was answered before is not to be lost with this one.
        self._connection.flush()
        self._size = 0
        if not isinstance(error, Exception):
            return False
        unit = "bytes" if isinstance(asked, bytes) else "messages"
        error.add_note(f"{self._place()}, {len(asked)} {unit} long")
        if self._skip:
            sys.excepthook(type(error), error, error.__traceback__)
            self._connection.pending.append(())
        return self._skip

    def _refused(self, refusal: MessageRefused) -> None:
        """Treat a reply that can't be sent as if its function had raised."""
        refusal.add_note(self._place())
        if not self._skip:
            self._over = True
            raise refusal
        sys.excepthook(type(refusal), refusal, refusal.__traceback__)

    def _place(self) -> str:
        number = self._connection.sent + 1
        return f"in {self._function.name}, {self._unit} {number} of this worker"
