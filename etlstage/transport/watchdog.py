"""
The host's side of the watchdog, which kills the workers when we are killed.

The parent-death signal (see ``launcher.py``) reaches a worker, but not the processes
that it has started. So each process that starts workers has one small child, whose
program is ``guard.py``. It receives the process group of each worker over a socket
whose other end only we hold. When that socket ends, however we ended, it kills the
groups.

The watchdog is like the resource tracker of :mod:`multiprocessing`: it is started with
the first worker, shared by all supervisors of the process, and ends when the process
does. A forked child that does not exec gets its own watchdog. A watchdog that was
killed or stopped is replaced at the next start or end of a worker; while workers run,
it is also asked now and then whether it is alive.

It also ends the Java of a Spark session, and removes the scratch folders, which hold
messages while this process runs, however the process ends. If the watchdog itself ended
earlier, the next process that makes such a folder in the same place removes those of
dead processes. A folder is named after the process that made it: its pid, its start
time, and where the pid is valid, as ``/tmp`` may be shared with another container or
machine.
"""

from __future__ import annotations

import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOSYS
from functools import cache
from hashlib import sha256
from pathlib import Path
from signal import SIGKILL
from typing import Final

from etlstage.transport.guard import remove, stat_of

__all__ = (
    "VARIABLE",
    "WATCHDOG",
    "Watchdog",
    "discard_scratch",
    "make_scratch",
    "program",
    "python",
    "scratch",
    "started_at",
    "sweep_scratch",
)

VARIABLE: Final = "ETLSTAGE_SUPERVISOR"
"""Marks a worker, and all that inherits its environment, as started by us."""
_ASK_EVERY: Final = 1.0  # seconds
_OVERDUE: Final = 3.0  # seconds, for an answer
_NAME: Final = re.compile(r"etlstage-[a-z]+-(\d+)-(\d+)-([0-9a-f]{8})-\w+")
_NO_SIGNAL: Final = getattr(socket, "MSG_NOSIGNAL", 0)


class Watchdog:
    """
    Has process groups killed when this process is gone.

    Attributes:
        mark: Value of ``VARIABLE`` for processes that this process starts.
        pid: Pid of the watchdog; None before it is needed.

    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset everything: we are a forked child, and the state is our parent's."""
        # The copy of our parent's line is closed, or its watchdog could not see our
        # parent's end. The lock is replaced: a thread that we don't have may hold it.
        line: socket.socket | None = getattr(self, "_line", None)
        if line is not None:
            line.close()
        self.pid: int | None = None
        self.mark: str = f"{os.getpid()}.{os.urandom(8).hex()}"
        self._owner = os.getpid()
        self._line: socket.socket | None = None
        self._groups: set[int] = set()
        self._others: set[bytes] = set()  # lines about Java and folders
        self._asked: float | None = None  # since when an answer is due
        self._checked = -math.inf  # when
        self._starting = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the watchdog if it isn't running; don't wait for it."""
        self._check_owner()
        with self._lock:
            self._send(b"")

    def expect(self) -> None:
        """Announce a worker's start; :meth:`register` or :meth:`give_up` follows."""
        self._check_owner()
        # After the fork there is a worker whose pid is not known yet: if we die in
        # between, the watchdog finds it by the mark in its environment.
        with self._lock:
            self._starting += 1
            self._send(b"?\n")

    def give_up(self) -> None:
        """Report that the expected worker was not started."""
        with self._lock:
            self._starting -= 1
            self._send(b"!\n")

    def register(self, group: int) -> None:
        """Have the group that an expected worker leads killed at our end."""
        with self._lock:
            self._starting -= 1
            self._groups.add(group)
            self._send(b"+%d\n" % group)

    def unregister(self, group: int) -> None:
        """
        Report that a group is not to be killed any more; safe to call twice.

        Call this before the leader is reaped: after that the number may be reused.
        """
        if self._owner != os.getpid():
            return
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)
                self._send(b"-%d\n" % group)

    def add_folder(self, path: str) -> None:
        """Have a folder removed at our end; start the watchdog if it isn't running."""
        self._add(b">%s\n" % os.fsencode(path).hex().encode())

    def drop_folder(self, path: str) -> None:
        """Report that a folder is gone."""
        name = os.fsencode(path).hex().encode()
        with self._lock:
            if b">%s\n" % name in self._others:
                self._others.discard(b">%s\n" % name)
                self._send(b"<%s\n" % name)

    def add_java(self, pid: int) -> None:
        """Have a Java process ended if it does not end with us by itself."""
        start = started_at(pid)
        if start is not None:
            self._add(b"*%d %d\n" % (pid, start))

    def check(self, now: float) -> None:
        """Replace the watchdog if it is gone, or has not answered for a while."""
        if self._owner != os.getpid() or now < self._checked + _ASK_EVERY:
            return
        with self._lock:
            self._checked = now
            if self._line is None or not self._answers(self._line, now):
                self._replace()
            if self._asked is None and self._line is not None:
                self._asked = now
                self._send(b".\n")

    def _answers(self, line: socket.socket, now: float) -> bool:
        try:
            if not line.recv(4096, socket.MSG_DONTWAIT):
                return False
        except BlockingIOError:
            return self._asked is None or now < self._asked + _OVERDUE
        except OSError:
            return False
        self._asked = None
        return True

    def _add(self, line: bytes) -> None:
        self._check_owner()
        with self._lock:
            self._others.add(line)
            self._send(line)

    def _check_owner(self) -> None:
        # A fork that bypassed Python, so that its at-fork hooks did not run.
        if self._owner != os.getpid():
            self.forget()

    def _send(self, line: bytes) -> None:
        """Send a line; replace a watchdog that is dead or does not read."""
        if self._line is not None:
            with suppress(OSError):
                # Even an empty line is sent: only sending shows whether it is alive.
                flags = socket.MSG_DONTWAIT | _NO_SIGNAL
                if self._line.send(line or b"\n", flags) == len(line or b"\n"):
                    return
        self._replace()

    def _replace(self) -> None:
        if self._line is not None and self.pid is not None:
            # In this order: when its line is closed, it would kill all groups.
            _kill_child(self.pid)
            self._line.close()
            self._line = self.pid = None
        self._asked = None
        # If this fails, the parent-death signal remains.
        with suppress(OSError):
            ours, theirs = socket.socketpair()
            # A group that follows a start would be taken for what was started.
            known = [b"+%d\n" % group for group in self._groups]
            known += [*self._others, b"?\n" * self._starting]
            try:
                with theirs:
                    # Sent before it is started: we may be killed before it reads.
                    ours.send(b"".join(known), _NO_SIGNAL)
                    self.pid = _spawn(theirs, self.mark)
            except OSError:
                ours.close()
                raise
            self._line = ours


def started_at(pid: int) -> int | None:
    """Return when a process was started, in ticks since boot; None: unknown."""
    stat = stat_of(pid)
    return None if stat is None else stat[1]


def _kill_child(pid: int) -> None:
    # The host may reap any child, and then the pid may be another process's.
    with suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, SIGKILL)
            os.waitpid(pid, 0)


def _spawn(line: socket.socket, mark: str) -> int:
    # What the linker needs to find Python itself, and nothing else.
    kept = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
    child = subprocess.Popen(
        [*python(), *program("guard"), mark],
        stdin=line.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A signal to our process group, as by Ctrl-C, must not end it before us.
        start_new_session=True,
        cwd="/",
        env={name: os.environ[name] for name in kept if name in os.environ},
    )
    # It is never waited for: avoid the ResourceWarning of Popen.
    child.returncode = 0
    return child.pid


@cache
def python() -> tuple[str, ...]:
    """
    Return the words that start Python, isolated and fast.

    Raises:
        OSError: If there is no Python program, as when a program embeds it.

    """
    embedded = os.path.join(sys.exec_prefix, "bin", "python3")
    for path in (sys.executable, embedded):
        named = os.path.basename(path).startswith(("python", "pypy"))
        if named and os.access(path, os.X_OK):
            return (path, "-I", "-S", "-X", "utf8")
    raise OSError(
        ENOSYS, f"there is no Python: neither {sys.executable} nor {embedded} is one"
    )


@cache
def program(name: str) -> tuple[str, ...]:
    """Return the words by which Python runs a module of this package as a program."""
    path = os.path.join(os.path.dirname(__file__), f"{name}.py")
    if os.path.isfile(path):
        return (path,)
    # In a zip, as Spark ships packages to its executors.
    loader = __spec__.loader
    return ("-c", loader.get_data(path).decode())  # type: ignore[union-attr]


WATCHDOG: Final = Watchdog()
"""The watchdog of this process: a single one, as it waits for the process to end."""
os.register_at_fork(after_in_child=WATCHDOG.forget)


# --- scratch folders ------------------------------------------------------------------


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """Make a folder of that kind for the duration of a block."""
    path = make_scratch(kind)
    try:
        yield path
    finally:
        discard_scratch(path)


def make_scratch(kind: str, parent: Path | None = None) -> Path:
    """
    Make a private folder, and remove those that dead processes left in its parent.

    Args:
        kind: Its purpose, one word; the content of a ``warehouse`` is the user's.
        parent: Its parent folder; by default that of temporary files.

    """
    place = Path(tempfile.gettempdir() if parent is None else parent).absolute()
    sweep_scratch(place)
    pid = os.getpid()
    prefix = f"etlstage-{kind}-{pid}-{started_at(pid) or 0}-{_where()}-"
    path = tempfile.mkdtemp(prefix=prefix, dir=place)
    WATCHDOG.add_folder(path)
    return Path(path)


def discard_scratch(path: Path) -> None:
    """Remove a folder, as far as possible."""
    remove(os.fspath(path))
    if not path.exists():
        WATCHDOG.drop_folder(os.fspath(path))


def sweep_scratch(parent: Path) -> None:
    """Remove our user's scratch folders in ``parent`` whose processes are dead."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            named = _NAME.fullmatch(entry.name)
            if named is None or named[3] != _where():
                continue
            alive = started_at(int(named[1])) in (int(named[2]), None)
            if alive and os.path.exists(f"/proc/{named[1]}"):
                continue
            with suppress(OSError):
                ours = entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                if ours and entry.is_dir(follow_symlinks=False):
                    remove(entry.path)


def _where() -> str:
    """Return a word that identifies this boot of this machine, and our container."""
    values = []
    for name in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            values.append(os.readlink(name) if "/ns/" in name else _text(name))
    return sha256(" ".join(values).encode()).hexdigest()[:8]


def _text(name: str) -> str:
    return Path(name).read_text(encoding="ascii")
