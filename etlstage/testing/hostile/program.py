"""
The hostile worker as a process.

Right replies are buffered until more input has to be read. All of them are written
before anything else happens, so that it is known which messages are answered.

Usage: ``python -I -S hostile DRIVER SIZE TRANSFORM [PLAN]``. DRIVER is ``single``,
``worker`` or ``supervisor``, or for extraction ``plain`` or ``cyclic``; SIZE is the
number of messages in a batch, if the worker closes it, or of those to extract;
TRANSFORM is ``identity``, ``upper``, ``count`` or ``nothing``. Without PLAN, the plan
is read from ``ETLSTAGE_FAULTS``.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

from .kinds import Act, DueFaults, Exit, FaultKind, ReadInput, ShowLife, as_bytes
from .worker import HostileWorker

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from typing import NoReturn

    from .kinds import Step

__all__ = ("HostileProcess", "main")

_CHUNK: Final = 1024 * 1024  # bytes
_FOR_EVER: Final = 3600.0  # seconds; nothing here outlives a test for longer


class HostileProcess:
    """
    One process: reads, answers, and carries out the plan.

    Args:
        worker: Decides what is done next.

    """

    def __init__(self, worker: HostileWorker) -> None:
        self._worker = worker
        self._unsent: list[bytes] = []
        self._kept = 0  # bytes in ``_unsent``
        self._ballast: list[bytes] = []
        self._status = -1
        path = os.environ.get("ETLSTAGE_STATUS")
        if path:
            self._status = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Work until the end of the input."""
        life, came = self._worker.life(), None
        while (step := _next(life, came)) is not None:
            came = None
            if isinstance(step, bytes):
                self._unsent.append(step)
                self._kept += len(step)
                if self._kept >= _CHUNK:
                    self._flush()
                continue
            if isinstance(step, str) or step == 0.0:
                continue
            self._flush()
            match step:
                case float():
                    _sleep(step)
                case ReadInput(seconds):
                    came = _read(seconds)
                case ShowLife():
                    self._show_life()
                case Exit(status):
                    _exit(status)
                case Act():
                    self._act(step)
        self._flush()

    def _show_life(self) -> None:
        if self._status != -1:
            # A supervisor that does not listen gets no more.
            try:
                os.write(self._status, b"\n")
            except OSError:
                self._status = -1

    def _flush(self) -> None:
        """Write all that was buffered; exit if stdout has no reader."""
        rest = memoryview(b"".join(self._unsent))
        self._unsent.clear()
        self._kept = 0
        try:
            while rest and not self._worker.mute:
                rest = rest[os.write(1, rest) :]
        except BrokenPipeError:
            os._exit(1)

    def _act(self, act: Act) -> None:
        fault = act.fault
        match act.kind:
            case FaultKind.STALL:
                _wait()
            case FaultKind.SPIN:
                import time

                until = time.monotonic() + _FOR_EVER
                while time.monotonic() < until:
                    pass
            case FaultKind.STOP:
                _kill("SIGSTOP")
            case FaultKind.STDERR:
                data = as_bytes(fault.get("data"))
                line = (b"." * 99 if data is None else data) + b"\n"
                rest = fault["size"]
                while rest > 0:
                    rest -= os.write(2, (line * 100)[:rest])
            case FaultKind.CLOSE_STDOUT:
                os.close(1)
            case FaultKind.CLOSE_STDIN:
                os.close(0)
            case FaultKind.IGNORE_SIGTERM:
                _ignore_sigterm()
            case FaultKind.LEAK:
                self._ballast.append(b"x" * fault["size"])
            case FaultKind.GRANDCHILD if os.fork() == 0:
                if fault.get("own_session"):
                    os.setsid()
                _ignore_sigterm()
                _wait()


def _next(life: Generator[Step, bytes | None, None], came: bytes | None) -> Step | None:
    """Return what is done next; None: nothing more."""
    try:
        return life.send(came)
    except StopIteration:
        return None


def _read(seconds: float) -> bytes | None:
    """Return some input; None: none came within ``seconds``, where 0 is no limit."""
    if seconds:
        import select

        poll = select.poll()
        poll.register(0, select.POLLIN)
        if not poll.poll(1000 * seconds):
            return None
    return os.read(0, _CHUNK)


def _sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


def _wait() -> NoReturn:
    """Do nothing until the process is ended."""
    _sleep(_FOR_EVER)
    os._exit(70)


def _exit(status: int) -> None:
    if status >= 0:
        os._exit(status)
    import resource
    import signal

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file is left behind
    if status == -signal.SIGABRT:
        os.abort()
    os.kill(os.getpid(), -status)


def _kill(name: str) -> None:
    import signal

    os.kill(os.getpid(), getattr(signal, name))


def _ignore_sigterm() -> None:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main(arguments: list[str]) -> None:
    """Run the worker that the command line describes."""
    driver, size, transform, *rest = arguments
    plan = json.loads(rest[0] if rest else os.environ.get("ETLSTAGE_FAULTS", "{}"))

    def work(message: bytes) -> Iterable[bytes]:
        if transform == "nothing":
            return ()
        if transform == "count":
            return (b"%d" % worker.number,)
        return (message.upper() if transform == "upper" else message,)

    worker = HostileWorker(
        DueFaults(plan.get("faults", []), plan.get("seed", 0), os.environ),
        os.environ,
        work,
        driver=driver,
        size=int(size),
    )
    HostileProcess(worker).run()
