"""
Wraps a command so that it runs on our terms and dies with us.

There are two wrappers. Both become the command itself, with the same pid:

* programs of util-linux, ``setpriv`` for the parent-death signal and ``prlimit`` for
  limits, at a millisecond each. They are quick, but they report errors to stderr, and
  run a script without a ``#!`` line by a shell; so they are used only for a command
  that will surely start;
* ``shim.py``, a Python program, at some ten milliseconds. It can do all the rest, and
  reports the system's own error: it is used for every command that may not start.

To choose between the two, the head of the program's file is read. It is worth it:
measured in processor time, a Python worker that costs 40 ms to start costs 41 ms with
``setpriv`` and 58 ms with the shim, and a stage with a crash per 1,000 messages takes
1.3 times as long.

The parent-death signal is that of the *thread* that starts the worker: a worker dies
with that thread, even if the process lives on.
"""

from __future__ import annotations

import grp
import os
import pwd
import resource
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from etlstage.errors import guess
from etlstage.transport.watchdog import program, python

__all__ = (
    "Identity",
    "LaunchTerms",
    "Launcher",
    "TermsRefused",
    "UnknownIdentity",
    "look_up",
)

_FOLDERS: Final = (
    "/usr/bin",
    "/bin",
    "/usr/sbin",
    "/sbin",
    "/run/current-system/sw/bin",
)
"""Folders to which only root can write. PATH is the user's, and the worker's."""
_HEAD: Final = 4096  # bytes of a program that are read
_TIGHT: Final = 64 * 1024 * 1024  # bytes; with a lower memory limit an exec may fail


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchTerms:
    """The terms on which a program runs; None, or no entry: as this process."""

    limits: Mapping[int, int] | None = None
    """Resource limits, by ``resource.RLIMIT_...``."""
    nice: int | None = None
    """Added to our own."""
    user: int | None = None
    group: int | None = None
    groups: Sequence[int] | None = None
    """Supplementary groups."""
    umask: int | None = None


class TermsRefused(OSError):
    """The system refuses one of the terms of a program, named by ``filename``."""


class Launcher:
    """
    Wraps one command; close it once the command was started, or could not be.

    Attributes:
        words: The command to run instead.
        descriptors: File descriptors that it has to inherit.

    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        terms: LaunchTerms | None = None,
    ) -> None:
        self._report: int | None = None
        self._status: int | None = None
        terms = terms or LaunchTerms()
        words = _quick(command, env, cwd, terms)
        if words is None:
            try:
                words = self._thorough(env, terms)
            except OSError:
                # Better to run it without a parent-death signal than not at all.
                if _needs_shim(terms):
                    raise
                words = []
        self.words: list[str] = [*words, *command]
        self.descriptors: tuple[int, ...] = (
            () if self._status is None else (self._status,)
        )

    def check(self) -> None:
        """
        Wait until the command runs, if it is started by the shim.

        Raises:
            OSError: If the command can't be run; as :class:`subprocess.Popen`.
            TermsRefused: If one of the terms is refused.

        """
        if self._status is not None and self._report is not None:
            os.close(self._status)
            self._status = None
            with open(self._report, "rb", closefd=False) as report:
                number, _, what = report.read().decode().partition(" ")
            if what == "exec":
                raise OSError(int(number), os.strerror(int(number)))
            if number:
                raise TermsRefused(int(number), os.strerror(int(number)), what)

    def close(self) -> None:
        """Close the descriptors that are still open."""
        for descriptor in (self._report, self._status):
            if descriptor is not None:
                os.close(descriptor)
        self._report = self._status = None

    def _thorough(self, env: Mapping[str, str], terms: LaunchTerms) -> list[str]:
        words = [*python(), *program("shim")]
        settings = ["deathsig"]
        for number, (soft, hard) in _pairs(terms).items():
            settings.append(f"limit={number},{soft},{hard}")
        if terms.nice is not None:
            settings.append(f"nice={terms.nice}")
        if terms.groups is not None:
            settings.append(f"groups={','.join(map(str, terms.groups))}")
        if terms.group is not None:
            settings.append(f"group={terms.group}")
        if terms.user is not None:
            settings += [f"user={terms.user}", "nonewprivs"]
        # Python changes LC_CTYPE at its start if the locale is C.
        settings.append(f"locale={env.get('LC_CTYPE', '')}")
        self._report, self._status = os.pipe()
        return [*words, str(self._status), str(os.getpid()), *settings, "--"]


def _needs_shim(terms: LaunchTerms) -> bool:
    wanted = (terms.nice, terms.user, terms.group, terms.limits or None)
    return any(value is not None for value in wanted)


def _quick(
    command: Sequence[str], env: Mapping[str, str], cwd: Path | None, terms: LaunchTerms
) -> list[str] | None:
    """Return the words to put before a command; None if it may not start."""
    if terms.nice is not None or terms.user is not None or terms.group is not None:
        return None
    setpriv = _setpriv()
    if setpriv is None or not _starts(command[0], env, cwd):
        return None
    words = [setpriv, "--pdeathsig", "KILL", "--"]
    if terms.limits:
        limiting = _prlimit_words(terms)
        if limiting is None:
            return None
        words += limiting
    return words


def _prlimit_words(terms: LaunchTerms) -> list[str] | None:
    """Return the words that set the limits; None if these may be refused."""
    path = _find("prlimit")
    pairs = _pairs(terms)
    tight = pairs.get(resource.RLIMIT_AS, (_TIGHT, 0))[0] < _TIGHT
    if path is None or tight or any(_raises(*item) for item in pairs.items()):
        return None
    options = [
        f"--{_PRLIMIT[number]}={soft}:{hard}" for number, (soft, hard) in pairs.items()
    ]
    return [path, *options, "--"]


_PRLIMIT: Final = {
    resource.RLIMIT_AS: "as",
    resource.RLIMIT_CPU: "cpu",
    resource.RLIMIT_NOFILE: "nofile",
    resource.RLIMIT_CORE: "core",
}


def _raises(number: int, pair: tuple[int, int]) -> bool:
    hard = resource.getrlimit(number)[1]
    return hard != resource.RLIM_INFINITY and pair[1] > hard


def _pairs(terms: LaunchTerms) -> dict[int, tuple[int, int]]:
    """Return the soft and the hard limit for each resource."""
    pairs = {number: (value, value) for number, value in (terms.limits or {}).items()}
    cpu = resource.RLIMIT_CPU
    if cpu in pairs:
        # The soft limit sends SIGXCPU, which shows the cause; the hard one sends
        # SIGKILL.
        value = pairs[cpu][0]
        if not _raises(cpu, (value, value + 1)):
            pairs[cpu] = (value, value + 1)
    return pairs


# --- which programs will surely start -------------------------------------------------


def _starts(name: str, env: Mapping[str, str], cwd: Path | None) -> bool:
    """Return whether the system will surely run this program."""
    if os.sep in name:
        return _is_program(os.path.join(cwd or "", name))
    for folder in env["PATH"].split(os.pathsep) if "PATH" in env else ():
        path = os.path.join(cwd or "", folder, name)
        if os.path.lexists(path):
            return _is_program(path)
    return False


def _is_program(path: str, *, nested: bool = False) -> bool:
    try:
        if not os.path.isfile(path) or not os.access(path, os.X_OK):
            return False
        with open(path, "rb", buffering=0) as file:
            head = file.read(_HEAD)
    except (OSError, ValueError):
        return False
    if head.startswith(b"#!"):
        # Older kernels read no more than 128 bytes.
        line, end, _ = head[2:128].partition(b"\n")
        interpreter = os.fsdecode(line.strip(b" \t").partition(b" ")[0])
        # An interpreter that is a script itself is not worth the effort.
        if nested or not end or not os.path.isabs(interpreter):
            return False
        return _is_program(interpreter, nested=True)
    return _is_binary(head)


def _is_binary(head: bytes) -> bool:
    """Return whether this is the head of a 64-bit ELF program for this machine."""
    # execve(2) refuses any other with ENOEXEC, and setpriv, which uses execvp(3), would
    # then run the file by a shell. It fails with ENOENT if the program's loader is
    # missing.
    ours = _own_head()
    if len(head) < 64 or head[:6] != ours[:6] or head[18:20] != ours[18:20]:
        return False
    order = "<" if head[5] == 1 else ">"
    (kind,) = struct.unpack_from(f"{order}H", head, 16)
    if head[:5] != b"\x7fELF\x02" or kind not in (2, 3):  # ET_EXEC, ET_DYN
        return False
    (start,) = struct.unpack_from(f"{order}Q", head, 32)
    size, count = struct.unpack_from(f"{order}HH", head, 54)
    for at in range(start, start + size * count, size or 1):
        if at + 56 > len(head):
            return False
        if struct.unpack_from(f"{order}I", head, at)[0] == 3:  # PT_INTERP
            (place,) = struct.unpack_from(f"{order}Q", head, at + 8)
            (length,) = struct.unpack_from(f"{order}Q", head, at + 32)
            loader = head[place : place + length].rstrip(b"\0")
            return place + length <= len(head) and os.access(loader, os.X_OK)
    return True


@cache
def _own_head() -> bytes:
    try:
        with open("/proc/self/exe", "rb") as file:
            return file.read(64)
    except OSError:
        return b""


# --- programs of the system -----------------------------------------------------------


def _find(name: str) -> str | None:
    paths = (os.path.join(folder, name) for folder in _FOLDERS)
    return next((path for path in paths if os.access(path, os.X_OK)), None)


@cache
def _setpriv() -> str | None:
    """Return a ``setpriv`` that can set the signal; that of busybox can't."""
    path = _find("setpriv") if sys.platform == "linux" else None
    if path is None:
        return None
    tried = subprocess.run(
        [path, "--pdeathsig", "KILL", "--", path, "--version"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return path if tried.returncode == 0 else None


_MAX_NUMBER: Final = 2**32 - 2
"""The last uid and gid of Linux; the next number means "leave it"."""


class Identity(NamedTuple):
    """The identity that a program runs as; None: as this process."""

    user: int | None = None
    group: int | None = None
    groups: tuple[int, ...] | None = None
    name: str | None = None
    home: str | None = None


class UnknownIdentity(LookupError):
    """Raised if there is no such user or group."""


def look_up(user: str | None, group: str | None) -> Identity:
    """
    Return the identity of a user and a group, given by names or numbers.

    A user has their own group, unless another one is given, and their own supplementary
    groups. A group alone has no supplementary groups, as our own may be root's.

    Raises:
        UnknownIdentity: If there is no such user or group.

    """
    gid = None if group is None else _group(group)
    if user is None:
        return Identity(None, gid, None if gid is None else ())
    entry = _user(user)
    if entry is None and gid is None:
        # Our own group would be kept, which may be root's.
        raise UnknownIdentity(
            f"user {user} has no passwd entry and so no group; name a group, too"
        )
    if entry is None:
        return Identity(_number(user, "user"), gid, ())
    if gid is None:
        gid = entry.pw_gid
    groups = tuple(os.getgrouplist(entry.pw_name, gid))
    return Identity(entry.pw_uid, gid, groups, entry.pw_name, entry.pw_dir)


def _user(name: str) -> pwd.struct_passwd | None:
    try:
        if name.isdecimal():
            return pwd.getpwuid(_number(name, "user"))
        return pwd.getpwnam(name)
    except KeyError:
        if name.isdecimal():
            return None
        close = guess(name, (entry.pw_name for entry in pwd.getpwall()))
        raise UnknownIdentity(f"there is no user {name!r}{close}") from None


def _group(name: str) -> int:
    if name.isdecimal():
        return _number(name, "group")
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        close = guess(name, (entry.gr_name for entry in grp.getgrall()))
        raise UnknownIdentity(f"there is no group {name!r}{close}") from None


def _number(digits: str, what: str) -> int:
    # int() refuses a number with thousands of digits.
    if len(digits) > len(str(_MAX_NUMBER)) or int(digits) > _MAX_NUMBER:
        shown = digits if len(digits) <= 20 else f"{digits[:20]}..."
        raise UnknownIdentity(
            f"{what} {shown} is above the highest number, {_MAX_NUMBER}"
        )
    return int(digits)
