"""
What a worker has started, where it has left its process group, and what it takes.

Only what can be told from a glance at the process table, and only on Linux: members
of the session that the worker leads, also when the worker is dead; and its children
and theirs, as long as the line of parents is unbroken. A daemon, which has made a
session of its own and whose parent has ended, is neither: it is known only by what
it has inherited in its environment.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

__all__ = (
    "descendants",
    "heirs",
    "lives",
    "resident_bytes",
    "session_members",
    "started_at",
    "waits_for_stdin",
)


# The number of read(2), and stdin as its first argument.
_READING: Final = {"x86_64": b"0 0x0 ", "aarch64": b"63 0x0 "}.get(platform.machine())


def session_members(leader: int) -> list[int]:
    """Return the processes of the session that ``leader``, not reaped yet, leads."""
    # No file is opened: a tenth of a millisecond for a hundred processes.
    members = []
    for name in _listing("/proc"):
        if name.isdigit() and int(name) != leader:
            try:
                if os.getsid(int(name)) == leader:
                    members.append(int(name))
            except OSError:
                continue
    return members


def descendants(pid: int) -> list[int]:
    """Return the children of ``pid`` and theirs, the eldest first."""
    found = [pid]
    for parent in found:
        # A list for each thread that has forked: proc_tid_children(5). It may miss one
        # while others exit, so this is a help and not a proof; the mark is.
        for task in _listing(f"/proc/{parent}/task"):
            try:
                children = Path(f"/proc/{parent}/task/{task}/children").read_text()
            except OSError:
                continue
            found += [
                child for child in map(int, children.split()) if child not in found
            ]
    return found[1:]


def lives(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # Behind the name, which may hold anything: proc_pid_stat(5).
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def resident_bytes(pid: int) -> int | None:
    """Return what a process has in memory, None if it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def started_at(pid: int) -> int | None:
    """Return when a process was started, in ticks since the boot; None: not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[19])


def waits_for_stdin(pid: int) -> bool:
    """
    Return whether a process does nothing but read its stdin, if that can be told.

    It has one thread then, and no child: when nothing is there to be read, nothing
    will come from it.
    """
    if _READING is None or len(_listing(f"/proc/{pid}/task")) != 1:
        return False
    try:
        reads = Path(f"/proc/{pid}/syscall").read_bytes().startswith(_READING)
    except OSError:
        return False
    return reads and not descendants(pid)


def heirs(entry: bytes) -> list[int]:
    """Return the processes whose environment has ``entry``, such as ``NAME=value``."""
    # A file for each process: milliseconds. It is asked for only when there is one.
    found = []
    for name in _listing("/proc"):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue  # not a process, or not ours
        if entry in environment.split(b"\0"):
            found.append(int(name))
    return found


def _listing(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
