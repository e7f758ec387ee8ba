"""The faults that are done at once, each a method of its name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .input import Input
from .markers import MarkerBytes
from .output import HostileOutput
from .plan import as_bytes
from .status import StatusPipe
from .system import FOR_EVER, kill, no_core, sleep, wait

if TYPE_CHECKING:
    from .plan import Fault

__all__ = ("Acts",)


class Acts:
    """What one process does to itself, and to the streams that it has."""

    def __init__(
        self,
        markers: MarkerBytes,
        source: Input,
        output: HostileOutput,
        status: StatusPipe,
    ) -> None:
        self._markers = markers
        self._input = source
        self._output = output
        self._status = status
        self._ballast: list[bytes] = []

    def do(self, fault: Fault) -> None:
        """Do what a fault says; few return."""
        # What was answered before is out: who holds what is then known.
        self._output.flush()
        getattr(self, f"_{fault['kind']}")(fault)

    # --- the end ------------------------------------------------------------

    def _kill(self, fault: Fault) -> None:
        kill("SIGKILL")

    def _segfault(self, fault: Fault) -> None:
        no_core()
        kill("SIGSEGV")

    def _abort(self, fault: Fault) -> None:
        no_core()
        os.abort()

    def _exit(self, fault: Fault) -> None:
        os._exit(fault["status"])

    # --- time ---------------------------------------------------------------

    def _stall(self, fault: Fault) -> None:
        wait()

    def _pause(self, fault: Fault) -> None:
        sleep(fault["seconds"])

    def _spin(self, fault: Fault) -> None:
        import time

        until = time.monotonic() + FOR_EVER
        while time.monotonic() < until:
            pass

    def _stop(self, fault: Fault) -> None:
        kill("SIGSTOP")

    def _never_ready(self, fault: Fault) -> None:
        self._status.fall_silent()

    # --- the streams --------------------------------------------------------

    def _garbage(self, fault: Fault) -> None:
        stray = as_bytes(fault.get("data"))
        self._output.write(stray or b"stray print" + self._markers.eom)

    def _extra_eop(self, fault: Fault) -> None:
        self._output.write(self._markers.eop)

    def _stderr(self, fault: Fault) -> None:
        data = as_bytes(fault.get("data"))
        line = (b"." * 99 if data is None else data) + b"\n"
        rest = fault["size"]
        while rest > 0:
            rest -= os.write(2, (line * 100)[:rest])

    def _close_stdout(self, fault: Fault) -> None:
        if not self._output.closed:
            os.close(1)
            self._output.closed = True

    def _close_stdin(self, fault: Fault) -> None:
        if not self._input.closed:
            os.close(0)
            self._input.closed = True

    # --- what stays ---------------------------------------------------------

    def _grandchild(self, fault: Fault) -> None:
        if os.fork():
            return
        if fault.get("own_session"):
            os.setsid()
        self._ignore_sigterm(fault)
        wait()

    def _ignore_sigterm(self, fault: Fault) -> None:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _leak(self, fault: Fault) -> None:
        self._ballast.append(b"x" * fault["size"])
