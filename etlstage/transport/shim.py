"""
A program that changes settings of its own process, then execs another program.

``launcher.py`` starts it as a separate program, so it imports nothing of this package,
and no more of the standard library than necessary; coverage does not see it. Its
arguments are the descriptor on which to report, the pid of its parent, settings,
``--``, and the command. An error is reported as ``ERRNO WHAT``; a successful exec
closes the descriptor with nothing written to it.

The settings are applied in this order, whatever the order of the arguments:
``limit=NUMBER,SOFT,HARD``, ``nice=INCREMENT``, ``groups=GID,...``, ``group=GID``,
``user=UID``, ``nonewprivs``, ``deathsig``, ``locale=LC_CTYPE``.
"""

from __future__ import annotations

import os
import sys

# Not the module signal: importing it takes a third of the total time.
from _signal import (  # type: ignore[import-not-found]
    SIG_DFL,
    SIGKILL,
    SIGPIPE,
    SIGXFSZ,
    signal,
)
from errno import EINVAL, ENOENT, ENOSYS, EPERM
from resource import setrlimit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("main",)

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def main(arguments: list[str]) -> None:  # pragma: no cover
    """Exec the command; return only after a failure, which is reported."""
    report, parent = int(arguments[0]), int(arguments[1])
    os.set_inheritable(report, False)
    end = arguments.index("--")
    settings, command = arguments[2:end], arguments[end + 1 :]
    what = ""
    try:
        # First of all: the new user may not be allowed to read our library.
        prctl = _prctl()
        for what in sorted(settings, key=_order):
            _apply(*what.partition("=")[::2], prctl)
        # Our parent may have died before the signal was set.
        if "deathsig" in settings and os.getppid() != parent:
            os.kill(os.getpid(), SIGKILL)
        # Python ignores these, and an ignored signal stays ignored after an exec.
        signal(SIGPIPE, SIG_DFL)
        signal(SIGXFSZ, SIG_DFL)
        what = "exec"
        _become(command)
    except OSError as error:
        os.write(report, f"{error.errno} {what}".encode())
    except ValueError:  # setrlimit raises it in place of EPERM
        os.write(report, f"{EPERM} {what}".encode())
    except OverflowError:
        os.write(report, f"{EINVAL} {what}".encode())


def _become(command: list[str]) -> None:  # pragma: no cover
    """Do as :func:`os.execvpe`, which imports: the user may not read our library."""
    program = command[0]
    paths = [program]
    if "/" not in program:
        folders = os.environ.get("PATH", os.defpath).split(":")
        paths = [os.path.join(folder, program) for folder in folders]
    first: OSError | None = None
    last: OSError = FileNotFoundError(ENOENT, program)
    for path in paths:
        try:
            os.execve(path, command, os.environ)  # noqa: S606 - it's why we are here
        except (FileNotFoundError, NotADirectoryError) as error:
            last = error
        except OSError as error:
            first = first or error
    raise first or last


_ORDER = (
    "limit",
    "nice",
    "groups",
    "group",
    "user",
    "nonewprivs",
    "deathsig",
    "locale",
)


def _order(setting: str) -> int:  # pragma: no cover
    # Limits before the user: only root may raise them. The parent-death signal after
    # the user: a change of credentials clears it.
    return _ORDER.index(setting.partition("=")[0])


def _apply(
    name: str, value: str, prctl: Callable[..., int] | None
) -> None:  # pragma: no cover
    if name == "limit":
        number, soft, hard = map(int, value.split(","))
        setrlimit(number, (soft, hard))
    elif name == "nice":
        os.nice(int(value))
    elif name == "groups":
        os.setgroups([int(group) for group in value.split(",") if group])
    elif name == "group":
        os.setgid(int(value))
    elif name == "user":
        os.setuid(int(value))
    elif name == "nonewprivs":
        # Otherwise a set-user-ID program could undo all that. Only Linux has this.
        if prctl is None and sys.platform == "linux":
            raise OSError(ENOSYS, name)
        if prctl is not None and prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(EPERM, name)
    elif name == "deathsig" and prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(SIGKILL), 0, 0, 0)
    elif name == "locale":
        os.environ.pop("LC_CTYPE", None)
        if value:
            os.environ["LC_CTYPE"] = value


def _prctl() -> Callable[..., int] | None:  # pragma: no cover
    """Return prctl(2); None if the system has none."""
    try:
        from ctypes import CDLL

        prctl: Callable[..., int] = CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    return prctl


if __name__ == "__main__":  # pragma: no cover
    main(sys.argv[1:])
    os._exit(127)
