"""
The hostile worker as a process.

Right replies are kept until the input runs dry; before anything else happens all of them
are written, so that it is known who holds what.

Usage: ``python -I -S hostile DRIVER SIZE TRANSFORM [PLAN]``. DRIVER is ``single``,
``worker`` or ``supervisor``, or for extraction ``plain`` or ``cyclic``; SIZE counts
the messages of a batch, if the worker drives, or those that there are to extract;
TRANSFORM is ``identity``, ``upper``, ``count`` or ``nothing``. Without PLAN it is in
``ETLSTAGE_FAULTS``.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

from .kinds import Act, DueFaults, Exit, FaultKind, as_bytes
from .marked import MarkerBytes
from .worker import HostileWorker

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

    from .kinds import Step

__all__ = ("HostileProcess", "main")

_CHUNK: Final = 1024 * 1024  # bytes
_IDLE: Final = 0.05  # seconds without input
_FOR_EVER: Final = 3600.0  # seconds; nothing here outlives a test for longer


class HostileProcess:
    """
    One process: reads, answers, and does what the plan has.

    Args:
        worker: What is done when.
        extracts: Whether it reads nothing.

    """

    def __init__(self, worker: HostileWorker, *, extracts: bool) -> None:
        self._worker = worker
        self._extracts = extracts
        self._unsent: list[bytes] = []
        self._kept = 0  # bytes of that
        self._deaf = self._mute = False  # stdin or stdout is closed
        self._ballast: list[bytes] = []
        self._status = -1
        self._every = 0.0  # seconds between two signs of life
        path = os.environ.get("ETLSTAGE_STATUS")
        if path:
            self._status = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            # One may be late of three that are given in the time that is allowed.
            self._every = float(os.environ.get("ETLSTAGE_HEARTBEAT") or 0) / 3

    def run(self) -> None:
        """Work until the end of the input."""
        self._do(self._worker.moment("start"))
        self._show_life()
        if self._extracts:
            self._do(self._worker.give())
        else:
            while data := self._read():
                self._do(self._worker.feed(data))
        self._do(self._worker.moment("end"))
        if self._deaf or self._mute:
            _wait()

    def _read(self) -> bytes:
        """Wait for input; meanwhile show life, and do what is done when idle."""
        if self._deaf:
            _wait()
        if self._worker.waits or self._every:
            import select

            poll = select.poll()
            poll.register(0, select.POLLIN)
            waits = self._worker.waits
            while not poll.poll(1000 * (_IDLE if waits else self._every)):
                self._show_life()
                if waits:
                    self._do(self._worker.moment("idle"))
                    if self._deaf:
                        _wait()
        return os.read(0, _CHUNK)

    def _show_life(self) -> None:
        if self._status != -1:
            # A supervisor that does not listen gets nothing.
            try:
                os.write(self._status, b"\n")
            except OSError:
                self._status = -1

    def _do(self, steps: Iterable[Step]) -> None:
        for step in steps:
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
                case Exit(status):
                    _exit(status)
                case Act():
                    self._act(step)
        self._flush()

    def _flush(self) -> None:
        """Write what was kept, all of it; who does not listen ends us."""
        rest = memoryview(b"".join(self._unsent))
        self._unsent.clear()
        self._kept = 0
        try:
            while rest and not self._mute:
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
            case FaultKind.NEVER_READY:
                self._status = -1
            case FaultKind.STDERR:
                data = as_bytes(fault.get("data"))
                line = (b"." * 99 if data is None else data) + b"\n"
                rest = fault["size"]
                while rest > 0:
                    rest -= os.write(2, (line * 100)[:rest])
            case FaultKind.CLOSE_STDOUT if not self._mute:
                os.close(1)
                self._mute = True
            case FaultKind.CLOSE_STDIN if not self._deaf:
                os.close(0)
                self._deaf = True
            case FaultKind.IGNORE_SIGTERM:
                _ignore_sigterm()
            case FaultKind.LEAK:
                self._ballast.append(b"x" * fault["size"])
            case FaultKind.GRANDCHILD if os.fork() == 0:
                if fault.get("own_session"):
                    os.setsid()
                _ignore_sigterm()
                _wait()


def _sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


def _wait() -> NoReturn:
    """Do nothing until somebody ends us."""
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
    """Be the worker that the command line describes."""
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
        MarkerBytes(os.environ),
        work,
        driver=driver,
        size=int(size),
    )
    HostileProcess(worker, extracts=driver == "plain").run()
