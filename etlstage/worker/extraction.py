"""
The loops of a worker that extracts: messages are sent as they come.

A reply may take hours and be larger than memory, so its messages are not collected;
only its end is marked. A failure is never skipped: the supervisor would take the range
for extracted and move its offset past it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from etlstage.errors import InvalidMessage
from etlstage.messages import counted
from etlstage.protocol.events import Opened
from etlstage.protocol.marker import MarkerProtocol
from etlstage.worker.connection import BLOCK, Connection
from etlstage.worker.function import Function
from etlstage.worker.refusal import Refuse, reason_of

__all__ = ("Extraction",)


class Extraction:
    """
    Passes on the messages that the function extracts.

    Args:
        function: The user's function.
        protocol: The session, worker's side.
        descriptors: Where to read and where to write.

    """

    def __init__(
        self,
        function: Function,
        protocol: MarkerProtocol,
        descriptors: tuple[int, int],
    ) -> None:
        self._function = function
        self._markers = protocol.markers
        self._over = False
        self._connection = Connection(protocol, descriptors, self._refused)

    def pass_all(self, call: Callable[[], Iterable[bytes]]) -> None:
        """Pass on the messages of ``call``."""
        self._connection.announce()
        self._pass(call)
        self._connection.close()

    def answer_requests(self, call: Callable[[bytes], Iterable[bytes]]) -> None:
        """Answer each request with the messages of ``call``, until the end of input."""
        connection = self._connection
        for event in connection.events():
            if isinstance(event, Opened):
                for request in event.messages:
                    try:
                        self._pass(partial(call, request))
                    except Refuse as error:
                        if self._markers.err is None:
                            raise
                        connection.end_round(reason_of(error, self._markers))
                    else:
                        connection.end_round()
        connection.close()

    def _pass(self, call: Callable[[], Iterable[bytes]]) -> None:
        connection, function = self._connection, self._function
        connection.watch()
        append = connection.pending.append
        size = 0
        try:
            reply = call()
            function.check(reply)
            for message in reply:
                if not isinstance(message, bytes):
                    function.refuse(message)
                append(message)
                size += len(message) + 1
                if size > BLOCK:
                    connection.flush()
                    size = 0
        except BaseException as error:
            if not self._over:
                connection.flush()
                error.add_note(self._place())
            raise

    def _refused(self, refusal: InvalidMessage) -> None:
        self._over = True
        refusal.add_note(self._place())
        raise refusal

    def _place(self) -> str:
        sent = counted(self._connection.sent, "message")
        return f"in {self._function.name}, after {sent}"
