"""Workers that write their pids to files, and checks on their processes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

TELL = """
import os, signal, subprocess, sys, time

def tell_and_hang(place):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    own = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"
    child = subprocess.Popen([sys.executable, "-S", "-c", own], start_new_session=True)
    name = f"{place}/{os.getpid()}"
    with open(name + ".part", "w") as file:
        print(os.getppid(), os.getpid(), child.pid, file=file)
    os.rename(name + ".part", name + ".pids")
    time.sleep(3600)
"""
"""A function for a worker that never replies and has a child in its own session."""

HANGING = f"{TELL}\ntell_and_hang(sys.argv[1])\n"
"""The program of such a worker; its argument is a folder."""


def wait_for_pids(place: Path, count: int = 1) -> list[int]:
    """Return the pids that ``count`` workers wrote: host, own and child of each."""
    deadline = time.monotonic() + 120
    while len(found := list(place.glob("*.pids"))) < count:
        assert time.monotonic() < deadline, "no worker was started"
        threading.Event().wait(0.05)
    return [int(pid) for path in found for pid in path.read_text().split()]


def are_gone(pids: list[int], seconds: float = 60) -> bool:
    """Return whether all processes end in time."""
    deadline = time.monotonic() + seconds
    while any(map(runs, pids)):
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.05)
    return True


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"


def parent(pid: int) -> int:
    """Return the parent of a process."""
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
