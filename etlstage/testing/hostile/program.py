"""
A worker of the stage protocol that misbehaves as its fault plan says.

It runs apart from etlstage, in a bare interpreter (``-I -S``), and imports what it
needs when it needs it: a restart should cost the supervisor's time and not ours. All
it writes are raw bytes. The words of the plan are defined in ``fault.py`` of the
package above; what is a message and what a batch, in the protocol.

Usage: ``python -I -S hostile DRIVER SIZE TRANSFORM [PLAN]``. DRIVER is ``single``,
``worker`` or ``supervisor``; SIZE counts the messages of a batch, if the worker
drives; TRANSFORM is ``identity``, ``upper`` or ``count``. Without PLAN it is in
``ETLSTAGE_FAULTS``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import Any, NoReturn, TypeAlias

    Fault: TypeAlias = dict[str, Any]
    Trigger: TypeAlias = Callable[[int, bytes], bool]

__all__ = ("Worker", "main")

_CHUNK: Final = 1024 * 1024  # bytes
_FOR_EVER: Final = 3600.0  # seconds; nothing here outlives a test for longer
_IDLE: Final = 0.05  # seconds without input
_BETWEEN: Final = 0.002  # seconds between two parts of a marker
_MASK: Final = 0xFFFFFFFFFFFFFFFF
_SHAPES: Final = frozenset(
    {"skip", "twice", "wrong_marker", "partial", "huge", "flood", "cut"}
)
"""Kinds that change the reply; the others are acts, done at once."""


class Worker:
    """
    One process: reads, answers, and does what the plan says.

    Args:
        faults: The plan, as JSON has it.
        seed: That of the plan.
        driver: Who closes a batch, or ``single``.
        size: Messages in a batch, if we close it.
        transform: What becomes of a message.

    """

    def __init__(
        self, faults: list[Fault], seed: int, driver: str, size: int, transform: str
    ) -> None:
        self._eom = _marker("EOM", r"\012")
        self._eop = _marker("EOP", r"\000")
        self._eob = _marker("EOB", r"\027")
        self._bnc = _marker("BNC", r"\005")
        self._driver = driver
        self._size = size
        self._transform = transform
        self._plan: dict[str, list[tuple[Trigger, Fault]]] = {}
        for index, fault in enumerate(faults):
            if _concerns_us(fault):
                entry = _trigger(fault, seed, index), fault
                self._plan.setdefault(fault["at"], []).append(entry)
        self._number = 0  # messages read
        self._batch: list[bytes] = []
        self._shapes: list[Fault] = []  # of the reply to come
        self._unsent: list[bytes] = []
        self._ballast: list[bytes] = []
        self._closed: set[int] = set()
        self._status, self._heartbeat = _open_status()

    def run(self) -> None:
        """Work until the end of the input."""
        self._misbehave("start")
        self._show_life()
        answer = self._answer if self._driver == "single" else self._collect
        for message in self._requests():
            answer(message)
        self._misbehave("end")
        if self._closed:
            _wait()

    # --- input --------------------------------------------------------------

    def _requests(self) -> Iterator[bytes | None]:
        """Yield each message, and None where the supervisor closes a batch."""
        eom, split = self._eom, self._driver == "single"
        buffer = bytearray()
        while True:
            self._flush()
            chunk = self._read(idle=not buffer and not self._batch)
            if not chunk:
                return
            buffer += chunk
            if not split:
                yield from self._take(buffer)
            elif buffer.find(eom, max(0, len(buffer) - len(chunk) - len(eom))) >= 0:
                *messages, rest = bytes(buffer).split(eom)
                buffer = bytearray(rest)
                yield from messages

    def _take(self, buffer: bytearray) -> Iterator[bytes | None]:
        """Remove and yield what is whole."""
        at = 0
        try:
            while True:
                # EOB stands where a message would begin, and no EOM follows it.
                if buffer.startswith(self._eob, at):
                    at += len(self._eob)
                    yield None
                elif (end := buffer.find(self._eom, at)) >= 0:
                    message = bytes(buffer[at:end])
                    at = end + len(self._eom)
                    yield message
                else:
                    break
        finally:
            del buffer[:at]

    def _read(self, *, idle: bool) -> bytes:
        if 0 in self._closed:
            _wait()
        misbehaves = idle and "idle" in self._plan
        if misbehaves or self._heartbeat:
            import select

            poll = select.poll()
            poll.register(0, select.POLLIN)
            while not poll.poll(1000 * (_IDLE if misbehaves else self._heartbeat)):
                self._show_life()
                if misbehaves:
                    self._misbehave("idle")
        return os.read(0, _CHUNK)

    def _show_life(self) -> None:
        if self._status != -1:
            # Who does not listen is not told.
            try:
                os.write(self._status, b"\n")
            except OSError:
                self._status = -1

    # --- answers ------------------------------------------------------------

    def _answer(self, message: bytes | None) -> None:
        assert message is not None
        self._number += 1
        if "message" in self._plan:
            self._misbehave("message", message)
        self._reply([self._transformed(message)])

    def _collect(self, message: bytes | None) -> None:
        if message is not None:
            self._number += 1
            self._misbehave("message", message)
            self._batch.append(self._transformed(message))
            if self._driver == "supervisor":
                return
            if len(self._batch) < self._size:
                self._write_marker(self._bnc)
                return
        batch, self._batch = self._batch, []
        self._reply(batch)

    def _transformed(self, message: bytes) -> bytes:
        if self._transform == "upper":
            return message.upper()
        return b"%d" % self._number if self._transform == "count" else message

    def _reply(self, outputs: list[bytes]) -> None:
        eom, eop = self._eom, self._eop
        if eop == eom:
            # Exactly one message, whatever we have.
            outputs, eop = [b"".join(outputs)], b""
        if not self._shapes:
            self._unsent.append(eom.join((*outputs, eop)))
            return
        self._flush()
        shapes, self._shapes = {s["kind"]: s for s in self._shapes}, []
        if "skip" in shapes:
            return
        if "huge" in shapes:
            self._write_much(b"x", shapes["huge"]["size"])
            outputs = [b""]
        if "flood" in shapes:
            self._write_much(b"x" + eom, shapes["flood"]["size"])
        if "wrong_marker" in shapes:
            eop = _bytes(shapes["wrong_marker"].get("data")) or self._bnc
        if "partial" in shapes:
            self._write(eom.join((*outputs, b"")))
            _kill("SIGKILL")
        if "cut" in shapes:
            for output in outputs:
                self._write(output)
                self._cut(eom)
            self._cut(eop)
        else:
            self._write(eom.join((*outputs, eop)) * (1 + ("twice" in shapes)))

    def _write_marker(self, marker: bytes) -> None:
        if any(shape["kind"] == "cut" for shape in self._shapes):
            self._flush()
            self._cut(marker)
        else:
            self._unsent.append(marker)

    def _cut(self, marker: bytes) -> None:
        for at in range(len(marker)):
            _sleep(_BETWEEN)
            self._write(marker[at : at + 1])

    def _write_much(self, unit: bytes, count: int) -> None:
        block = unit * min(count, _CHUNK)
        for _ in range(count * len(unit) // max(1, len(block))):
            self._write(block)
        self._write(unit * (count % max(1, min(count, _CHUNK))))

    def _flush(self) -> None:
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            self._write(data)

    def _write(self, data: bytes) -> None:
        if 1 in self._closed:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(1, rest) :]
        except BrokenPipeError:
            os._exit(1)

    # --- faults -------------------------------------------------------------

    def _misbehave(self, moment: str, message: bytes = b"") -> None:
        for hits, fault in self._plan.get(moment, ()):
            if not hits(self._number, message):
                continue
            if fault["kind"] in _SHAPES:
                self._shapes.append(fault)
            else:
                # What was answered before is out: who holds what is then known.
                self._flush()
                getattr(self, f"_do_{fault['kind']}")(fault)

    def _do_kill(self, fault: Fault) -> None:
        _kill("SIGKILL")

    def _do_segfault(self, fault: Fault) -> None:
        _no_core()
        _kill("SIGSEGV")

    def _do_abort(self, fault: Fault) -> None:
        _no_core()
        os.abort()

    def _do_exit(self, fault: Fault) -> None:
        os._exit(fault["status"])

    def _do_stall(self, fault: Fault) -> None:
        _wait()

    def _do_pause(self, fault: Fault) -> None:
        _sleep(fault["seconds"])

    def _do_spin(self, fault: Fault) -> None:
        import time

        until = time.monotonic() + _FOR_EVER
        while time.monotonic() < until:
            pass

    def _do_stop(self, fault: Fault) -> None:
        _kill("SIGSTOP")

    def _do_garbage(self, fault: Fault) -> None:
        self._write(_bytes(fault.get("data")) or b"stray print" + self._eom)

    def _do_extra_eop(self, fault: Fault) -> None:
        self._write(self._eop)

    def _do_stderr(self, fault: Fault) -> None:
        line = b"." * 99 + b"\n"
        rest = fault["size"]
        while rest > 0:
            rest -= os.write(2, (line * 100)[:rest])

    def _do_close_stdout(self, fault: Fault) -> None:
        self._close(1)

    def _do_close_stdin(self, fault: Fault) -> None:
        self._close(0)

    def _do_grandchild(self, fault: Fault) -> None:
        if os.fork():
            return
        if fault.get("own_session"):
            os.setsid()
        self._do_ignore_sigterm(fault)
        _wait()

    def _do_ignore_sigterm(self, fault: Fault) -> None:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _do_leak(self, fault: Fault) -> None:
        self._ballast.append(b"x" * fault["size"])

    def _do_never_ready(self, fault: Fault) -> None:
        self._status = -1

    def _close(self, fd: int) -> None:
        if fd not in self._closed:
            os.close(fd)
            self._closed.add(fd)


# --- when ---------------------------------------------------------------------------


def _concerns_us(fault: Fault) -> bool:
    start = int(os.environ.get("ETLSTAGE_START") or 1)
    name = os.environ.get("ETLSTAGE_WORKER", "")
    return (fault.get("start", start), fault.get("worker", name)) == (start, name)


def _trigger(fault: Fault, seed: int, index: int) -> Trigger:
    """Return what says whether a fault happens at a message, by number and content."""
    at: int | None = fault.get("message")
    equals, contains = _bytes(fault.get("equals")), _bytes(fault.get("contains"))
    chance: float | None = fault.get("probability")
    roll = _dice(seed, index)

    def hits(number: int, message: bytes) -> bool:
        if at is not None and number != at:
            return False
        if equals is not None and message != equals:
            return False
        if contains is not None and contains not in message:
            return False
        return chance is None or roll(number) < chance

    return hits


def _dice(seed: int, index: int) -> Callable[[int], float]:
    """Return dice that fall differently in each process, and alike in each run."""
    name = os.environ.get("ETLSTAGE_WORKER", "")
    start = os.environ.get("ETLSTAGE_START") or "1"
    base = 0xCBF29CE484222325  # FNV-1a
    for byte in f"{seed}/{name}/{start}/{index}".encode():
        base = ((base ^ byte) * 0x100000001B3) & _MASK

    def roll(number: int) -> float:
        # SplitMix64: neighbouring numbers give unrelated values.
        x = (base + number * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return (x ^ (x >> 31)) / (_MASK + 1)

    return roll


# --- the system ---------------------------------------------------------------------


def _marker(name: str, default: str) -> bytes:
    text = os.environ.get(f"ETLSTAGE_{name}", default)
    return text.encode().decode("unicode_escape").encode("latin-1")


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("latin-1")


def _open_status() -> tuple[int, float]:
    """Return where to give signs of life, -1 is nowhere, and how often, in seconds."""
    path = os.environ.get("ETLSTAGE_STATUS")
    if not path:
        return -1, 0.0
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
    # One may be late of three that are given in the time that is allowed.
    return os.open(path, flags), float(os.environ.get("ETLSTAGE_HEARTBEAT") or 0) / 3


def _sleep(seconds: float) -> None:
    import time

    time.sleep(seconds)


def _wait() -> NoReturn:
    _sleep(_FOR_EVER)
    os._exit(70)


def _kill(name: str) -> None:
    import signal

    os.kill(os.getpid(), getattr(signal, name))


def _no_core() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(arguments: list[str]) -> None:
    """Be the worker that the command line describes."""
    driver, size, transform, *rest = arguments
    plan = json.loads(rest[0] if rest else os.environ.get("ETLSTAGE_FAULTS", "{}"))
    faults, seed = plan.get("faults", []), plan.get("seed", 0)
    Worker(faults, seed, driver, int(size), transform).run()
