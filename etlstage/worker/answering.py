"""
The loops of a worker that answer messages or batches.

``connection.py`` decides when answers are written; this file makes them, and handles a
function that fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from etlstage.errors import InvalidMessage
from etlstage.messages import counted
from etlstage.protocol.events import Added, Opened, Wanted
from etlstage.protocol.marker import MarkerProtocol, Mode
from etlstage.worker.connection import BLOCK, Connection
from etlstage.worker.function import ITERABLE, Function
from etlstage.worker.refusal import Refuse, Traces, reason_of

__all__ = ("Answering",)

_CAN_NOT: Final = (
    "this worker exits: it can't refuse, as its supervisor gave it no marker err"
    " (ETLSTAGE_ERR)"
)


class Answering:
    """
    Answers messages, or batches, oldest first.

    Args:
        function: The user's function.
        protocol: The session, worker's side.
        descriptors: Where to read and where to write.
        on_error: What happens to a message for which the function raises: it is
            refused, answered without messages, or the exception is raised again.

    """

    def __init__(
        self,
        function: Function,
        protocol: MarkerProtocol,
        descriptors: tuple[int, int],
        *,
        on_error: str = "exit",
    ) -> None:
        self._function = function
        self._markers = protocol.markers
        self._on_error = on_error
        self._can_refuse = protocol.markers.err is not None
        self._traces = Traces()
        self._weight = 1  # messages that one reply answers
        self._fills = protocol.mode is Mode.BATCH_WORKER
        self._unit = "batch" if protocol.mode.batches else "message"
        self._one_to_one = protocol.markers.eop == protocol.markers.eom
        self._connection = Connection(protocol, descriptors, self._refused, groups=True)
        self._size = 0  # bytes pending, at most
        self._over = False

    def answer_messages(self, call: Callable[[bytes], Iterable[bytes]]) -> None:
        """Answer each message with the result of ``call``, until the end of input."""
        connection = self._connection
        for event in connection.events():
            if isinstance(event, Opened):
                if len(event.messages) > 1:
                    connection.watch()
                self._answer(call, event.messages)
        connection.close()

    def answer_batches(
        self, call: Callable[[list[bytes]], Iterable[bytes]], size: int
    ) -> None:
        """
        Answer each batch with the result of ``call``, until the end of input.

        ``call`` does not get an empty batch, unless its reply must be one message.

        Args:
            call: Gets the messages of a batch.
            size: In a worker-driven batch, the number of messages to ask for.

        """
        spared: Callable[[list[bytes]], Iterable[bytes]] = lambda batch: ()  # noqa: E731
        for batch in self._batches(size):
            self._weight = len(batch)
            self._answer(call if batch or self._one_to_one else spared, [batch])
            if self._on_error == "skip":
                # Find a reply that can't be sent while its number of messages is known.
                self._connection.flush()
        self._connection.close()

    def _batches(self, size: int) -> Iterator[list[bytes]]:
        connection = self._connection
        batch: list[bytes] = []
        for event in connection.events():
            if isinstance(event, Opened | Added):
                batch += event.messages
                if not (event.ended or self._fills):
                    continue
                if not event.ended and len(batch) < size:
                    connection.send(Wanted())
                    continue
            else:  # the end of input
                if not batch:
                    return
                connection.close_batch()
            yield batch
            batch = []

    def _answer(
        self, call: Callable[[Any], Iterable[bytes]], run: Sequence[Any]
    ) -> None:
        """Append a reply for each item of ``run``; send them if they grow too large."""
        connection = self._connection
        append = connection.pending.append
        collect = self._collect
        size = self._size
        for asked in run:
            try:
                reply = call(asked)
                # Nearly all replies are of this kind, so they are handled inline.
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
                if self._over or not self._went_on(error, asked):
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
                    self._connection.pass_on(group)
                    group, size = [], 0
                elif len(group) > 1:
                    break  # it may never end
        if self._one_to_one:
            self._function.check_only(group)
        return tuple(group), size

    # --- what goes wrong ----------------------------------------------------

    def _went_on(self, error: BaseException, asked: bytes | list[bytes]) -> bool:
        """Answer although the function has raised, or return False to raise again."""
        refuses = isinstance(error, Exception) and (
            isinstance(error, Refuse) or self._on_error == "refuse"
        )
        if refuses and self._can_refuse:
            if not isinstance(error, Refuse) and self._traces.new(error):
                self._explain(error, asked)
                sys.excepthook(type(error), error, error.__traceback__)
            self._connection.refuse(reason_of(error, self._markers))
            return True
        self._explain(error, asked)
        if refuses:
            error.add_note(_CAN_NOT)
        elif self._on_error == "skip" and isinstance(error, Exception):
            sys.excepthook(type(error), error, error.__traceback__)
            self._connection.pending.append(())
            self._connection.skipped += self._weight
            return True
        return False

    def _explain(self, error: BaseException, asked: bytes | list[bytes]) -> None:
        """Send all earlier answers, and add the place of the error as a note."""
        self._connection.flush()
        self._size = 0
        if isinstance(error, Exception):
            unit = "byte" if isinstance(asked, bytes) else "message"
            error.add_note(f"{self._place()}, {counted(len(asked), unit)} long")

    def _refused(self, refusal: InvalidMessage) -> str | None:
        """Treat a reply that can't be sent as if its function had raised."""
        refusal.add_note(self._place())
        refuses = self._on_error == "refuse"
        if refuses and self._can_refuse:
            if self._traces.new(refusal):
                sys.excepthook(type(refusal), refusal, refusal.__traceback__)
            return reason_of(refusal, self._markers)
        if self._on_error == "skip":
            sys.excepthook(type(refusal), refusal, refusal.__traceback__)
            self._connection.skipped += self._weight
            return None
        if refuses:
            refusal.add_note(_CAN_NOT)
        self._over = True
        raise refusal

    def _place(self) -> str:
        number = self._connection.sent + 1
        return f"in {self._function.name}, {self._unit} {number} of this worker"
