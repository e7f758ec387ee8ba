"""
A host to be killed, and the worker that it must not leave behind.

The host prints a line of pids for each thing that it has started, and waits for a line
on stdin before the next one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

# Ignores SIGTERM, and keeps the pipes open.
_CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"


def worker() -> None:
    """Answer with the pids of this process and two children; ignore EOF and SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pids = [os.getpid()]
    for own_session in (False, True):
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", f"{_CHILD} time.sleep(3600)"],
            start_new_session=own_session,
        )
        pids.append(child.pid)
    while data := os.read(0, 65536):
        os.write(1, (" ".join(map(str, pids)).encode() + b"\n\0") * data.count(b"\n"))
    while True:
        time.sleep(3600)


def supervise(*, rounds: int = 1) -> None:
    """Run a supervisor in this thread; print the pids of its worker and children."""
    import anyio

    from etlstage.stage import Stage
    from etlstage.supervisor import AsyncSupervisor

    async def main() -> None:
        for _ in range(rounds):
            stage = Stage(name="t", worker=(sys.executable, "-S", __file__, "worker"))
            supervisor = await AsyncSupervisor(stage).__aenter__()
            ((reply,),) = [r.outputs for r in await supervisor.submit([b""])]
            tell(reply.decode())
            await anyio.to_thread.run_sync(sys.stdin.readline)
            kept.append(supervisor)
        await anyio.sleep_forever()

    kept: list[object] = []
    anyio.run(main)


def tell(pids: object) -> None:
    """Print this process's pid and others."""
    os.write(1, f"{os.getpid()} {pids}\n".encode())


def host(place: str, launcher: str) -> None:
    """Supervise in the given place, starting workers with the given launcher."""
    if launcher == "shim":
        from etlstage.transport import launcher as module

        module._setpriv = lambda: None  # type: ignore[assignment]
    if place == "main":
        supervise(rounds=2)
    elif place == "thread":
        threading.Thread(target=supervise, daemon=True).start()
        time.sleep(3600)
    elif place == "fork":
        _fork(supervise)
    elif place == "fork to no end":
        _fork(lambda: tell(""))
    elif place == "once":
        _start_and_end()


def _fork(call: Callable[[], None]) -> None:
    # This process has a worker, and therefore a watchdog, of its own.
    from etlstage.transport import LaunchRequest, launch_over_pipes

    command = (sys.executable, "-S", __file__, "worker")
    env = {"PATH": os.environ["PATH"]}
    wire, _ = launch_over_pipes(LaunchRequest(command, env))
    wire.write(b"\n")
    while not (reply := wire.read(100)):
        time.sleep(0.001)
    tell(reply.decode().partition("\n")[0])
    sys.stdin.readline()
    if os.fork() == 0:
        call()
    time.sleep(3600)


def _start_and_end() -> None:
    from etlstage.transport import LaunchRequest, launch_over_pipes

    env = {"PATH": os.environ["PATH"]}
    _, child = launch_over_pipes(LaunchRequest(("sleep", "3600"), env))
    tell(child.pid)
    sys.stdin.readline()


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker()
    else:
        host(*sys.argv[1:])
