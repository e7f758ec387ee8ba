"""
A process that speaks the toy dialect, on its pipes or over the socket it is given.

It answers in capitals; ``no`` is refused, ``die`` kills it, and ``how`` is answered
with whether it has a socket or pipes.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable

from etlstage.protocol.base import Side
from etlstage.protocol.events import Ended, Event, Farewell, Opened, Ready
from tests.supervisor.toy import ToySession


class Worker:
    """
    One process.

    Args:
        write: Writes bytes.
        how: What they are written to: socket or pipes.

    """

    def __init__(self, write: Callable[[bytes], object], how: bytes) -> None:
        self._session = ToySession(Side.WORKER)
        self._how = how
        self._write = write

    def say(self, event: Event) -> None:
        """Send an event at once."""
        self._session.send(event)
        self._write(b"".join(self._session.data_to_send()))

    def hear(self, data: bytes) -> bool:
        """Answer received frames; return whether to go on."""
        self._session.receive_data(data, 0.0)
        for event in self._session.events_received():
            match event:
                case Opened(number, (b"no",)):
                    self.say(Ended.refused(number, 1, "not that"))
                case Opened(_, (b"die",)):
                    os.kill(os.getpid(), signal.SIGKILL)
                case Opened(number, (b"how",)):
                    self.say(Ended(number, [(self._how,)]))
                case Opened(number, (message,)):
                    self.say(Ended(number, [(message.upper(),)]))
                case Farewell():
                    return False
        return True


def main(how: str, endpoint: str = "", identity: str = "") -> None:
    """Work until the input ends; ``how`` is loud or mute."""
    read: Callable[[int], bytes] = lambda size: os.read(0, size)  # noqa: E731
    write: Callable[[bytes], object] = lambda data: os.write(1, data)  # noqa: E731
    if endpoint:
        wire = socket.socket(socket.AF_UNIX)
        wire.connect(endpoint)
        read, write = wire.recv, wire.sendall
    worker = Worker(write, b"socket" if endpoint else b"pipes")
    if how == "loud":
        worker.say(Ready(identity))
    while (data := read(65536)) and worker.hear(data):
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
