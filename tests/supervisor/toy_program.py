"""
A process that speaks the toy dialect, on its pipes or where it is asked to connect.

It answers with capitals; ``no`` it refuses, ``die`` kills it, and to ``how`` it replies
whether it has a socket or pipes.
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
        write: How bytes are written.
        how: Over what.

    """

    def __init__(self, write: Callable[[bytes], object], how: bytes) -> None:
        self._session = ToySession(Side.WORKER)
        self._how = how
        self._write = write

    def say(self, event: Event) -> None:
        """Write an event at once."""
        self._session.send(event)
        self._write(b"".join(self._session.data_to_send()))

    def hear(self, data: bytes) -> bool:
        """Answer what came; return whether it goes on."""
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
    """Work until there is no more: ``how`` is loud or mute."""
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
