"""
A TCP service on trio: each line that a client sends is answered by a worker.

::

    pip install etlstage trio
    python server.py 8000

    echo some words | nc -N localhost 8000

Each answer is a line: the worker's output, or ``error:`` and the reason why there is
none. If you kill a worker, no client notices. Ctrl-C ends the service.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import trio

from etlstage import AsyncSupervisor, EtlstageError, Overloaded, Stage, Timeouts

STAGE = Stage(
    name="answer",
    worker=(sys.executable, str(Path(__file__).with_name("worker.py"))),
    workers=2,
    timeout=Timeouts(message=10),
)
LONGEST = 65536  # bytes of a line


async def answer(supervisor: AsyncSupervisor, line: bytes) -> bytes:
    """Return the answer to a client."""
    try:
        outputs = await supervisor.ask(line, timeout=20)
    except Overloaded:
        return b"error: too many lines are waiting, try again later\n"
    except (EtlstageError, TimeoutError) as error:
        return b"error: %s\n" % str(error).replace("\n", " ").encode()
    return b" ".join(outputs) + b"\n"


async def serve(supervisor: AsyncSupervisor, client: trio.SocketStream) -> None:
    """Answer one client until it disconnects."""
    rest = b""
    try:
        async for data in client:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                await client.send_all(await answer(supervisor, line))
            if len(rest) > LONGEST:
                await client.send_all(b"error: the line is too long\n")
                return
    except trio.BrokenResourceError:
        pass  # the client did not wait


async def main(port: int) -> None:
    """Serve until cancelled."""
    async with (
        AsyncSupervisor(STAGE, max_pending=10_000) as supervisor,
        trio.open_nursery() as nursery,
    ):
        serves = partial(trio.serve_tcp, partial(serve, supervisor), port)
        (listener,) = await nursery.start(partial(serves, host="127.0.0.1"))
        print("listening on port", listener.socket.getsockname()[1], flush=True)  # noqa: T201


if __name__ == "__main__":
    try:
        trio.run(main, int(sys.argv[1]))
    except* KeyboardInterrupt:
        print("stopped")  # noqa: T201
