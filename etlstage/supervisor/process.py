"""
From a stage to a running process: its command, its environment, its errors.

Whether what a command names is there is looked up beforehand, where its worker would
run, with what may have been meant; why a file that is there can't be run is best left
to the system, when it is started.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from etlstage.errors import WorkerStartFailed, guess
from etlstage.stage.stage import Stage
from etlstage.telemetry.trace import current_trace
from etlstage.transport import (
    Child,
    Launch,
    LaunchRequest,
    LaunchTerms,
    TermsRefused,
    Wire,
)
from etlstage.transport.launcher import Identity, UnknownIdentity, look_up

__all__ = (
    "absent",
    "absent_from_path",
    "command_line",
    "missing",
    "on_path",
    "runs",
    "script",
    "search_path",
    "spawn",
    "substituted",
    "traced",
)

_INHERITED: Final = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "SYSTEMROOT",
    "LD_LIBRARY_PATH",
)
"""Variables that a worker gets from us; all others only by ``env:``. What starts a
pipeline often holds secrets, and a worker is any program."""


def spawn(
    stage: Stage, worker: str, launch: Launch, *, stdin: bool = True, start: int = 1
) -> tuple[Wire, Child]:
    """
    Start a worker of ``stage``, for the ``start``-th time.

    Raises:
        WorkerStartFailed: If the program can't be run; the text has the reason and the
            remedy.

    """
    command = substituted(stage)
    try:
        program = stage.program
        identity = look_up(program.user, program.group)
        request = LaunchRequest(
            command=command,
            env=_environment(stage, worker, start, identity),
            cwd=program.cwd,
            stdin=stdin,
            status=True,
            terms=_terms(stage, identity),
            stage=stage.name,
            kind=stage.kind,
            dialect=stage.dialect,
            worker=worker,
            start=start,
        )
        return launch(request)
    except (OSError, ValueError, UnknownIdentity) as error:
        reason = _reason(stage, command[0], error)
        raise WorkerStartFailed(
            f"stage {stage.name}: can't start worker {worker}: {reason};"
            f" command: {command_line(stage)}",
            stage=stage.name,
        ) from error


def traced(launch: Launch) -> Launch:
    """Return what starts workers with the trace that they belong to."""
    trace = current_trace()

    def launch_traced(request: LaunchRequest) -> tuple[Wire, Child]:
        return launch(replace(request, env={**trace, **request.env}))

    return launch_traced if trace else launch


def command_line(stage: Stage) -> str:
    """Return the command as the user wrote it, quoted for a shell."""
    return shlex.join(stage.program.command)


def substituted(stage: Stage) -> tuple[str, ...]:
    """Return the command with what the dialect has for names in braces."""
    command = tuple(stage.program.command)
    if not any("{" in word for word in command):
        return command
    variables = stage.dialect.variables()
    if not variables:
        return command
    # All at once: the text of a marker may look like a placeholder.
    any_of_them = re.compile("{(" + "|".join(map(re.escape, variables)) + ")}")
    return tuple(
        any_of_them.sub(lambda found: variables[found[1]] or "", word)
        for word in command
    )


def _environment(
    stage: Stage, worker: str, start: int, identity: Identity
) -> dict[str, str]:
    inherited = {
        name: value
        for name in _INHERITED
        if (value := os.environ.get(name)) is not None
    }
    about = {
        "ETLSTAGE_STAGE": stage.name,
        "ETLSTAGE_WORKER": worker,
        "ETLSTAGE_START": str(start),
    }
    if stage.timeout.heartbeat is not None:
        about["ETLSTAGE_HEARTBEAT"] = f"{stage.timeout.heartbeat:g}"
    if identity.name is not None and identity.home is not None:
        # Ours are of no use to another user: he may not even read that folder.
        about |= {"USER": identity.name, "LOGNAME": identity.name}
        about |= {"HOME": identity.home}
    # Python workers that never flush, as those of the original system, would keep
    # their first reply until stdin is closed, and wait forever.
    return (
        inherited
        | {"PYTHONUNBUFFERED": "1"}
        | {
            f"ETLSTAGE_{name.upper()}": text
            for name, text in stage.dialect.variables().items()
            if text is not None
        }
        | about
        | dict(stage.program.env)
    )


def _terms(stage: Stage, identity: Identity) -> LaunchTerms:
    limits = stage.program.limits
    values = {
        number: value
        for name, number in _LIMITS.items()
        if (value := getattr(limits, name)) is not None
    }
    return LaunchTerms(
        limits=values,
        nice=limits.nice,
        user=identity.user,
        group=identity.group,
        groups=identity.groups,
        umask=stage.program.umask,
    )


_LIMITS: Final = {
    "memory": resource.RLIMIT_AS,
    "cpu": resource.RLIMIT_CPU,
    "open_files": resource.RLIMIT_NOFILE,
    "core": resource.RLIMIT_CORE,
}


def _reason(stage: Stage, program: str, error: Exception) -> str:
    if isinstance(error, UnknownIdentity):
        return str(error)
    if not isinstance(error, OSError):
        return f"{error} in the command or in env"
    if isinstance(error, TermsRefused):
        return _refusal(stage, str(error.filename), error)
    cwd = stage.program.cwd
    if cwd is not None and not cwd.is_dir():
        problem = "is not a folder" if cwd.exists() else "does not exist"
        return f"working directory {cwd} {problem}; check cwd"
    if isinstance(error, FileNotFoundError):
        if (text := missing(stage)) is not None:
            return f"{text}; check the command"
        if os.path.exists(os.path.join(cwd or "", program)):
            return f"the interpreter in the first line of {program} does not exist"
        return f"there is no file {program}; check the command"
    if os.path.isdir(os.path.join(cwd or "", program)):
        return f"{program} is a folder, not a program; check the command"
    if isinstance(error, PermissionError):
        return f"{program} is not executable; run: chmod +x {shlex.quote(program)}"
    if error.errno == 8:  # ENOEXEC
        first = f"[{os.path.basename(sys.executable)}, {program}]"
        return (
            f"{program} has no #! line that names its interpreter; add one,"
            f" or name it in the command, as in {first}"
        )
    return error.strerror or str(error)


def _refusal(stage: Stage, term: str, error: TermsRefused) -> str:
    """Return why it may not be run on our terms; ``term`` is one of the launcher's."""
    kind, _, value = term.partition("=")
    program, why = stage.program, error.strerror
    if kind == "limit":
        number = int(value.partition(",")[0])
        name = next(name for name in _LIMITS if _LIMITS[name] == number)
        _, hard = resource.getrlimit(number)
        return (
            f"limits.{name} {getattr(program.limits, name)} is refused ({why}): only"
            f" root may exceed {hard}; lower it, or raise the limit of this process"
        )
    if kind == "nice":
        return f"limits.nice {program.limits.nice} is refused ({why}); it needs root"
    user, group = program.user, program.group
    who = f"user {user}" if user is not None else f"group {group}"
    return f"can't run it as {who} ({why}); run as root, or remove user and group"


INTERPRETERS: Final = (
    (re.compile(r"(python|pypy)[0-9.]*"), "-u -B -E -I -O -OO -s -S"),
    (re.compile(r"(ba|da|z|k|a)?sh"), "-e -u -x -eu -ex -ux -eux"),
    (re.compile(r"node|ruby|perl|Rscript|php|lua[0-9.]*"), ""),
)
"""Programs whose first argument is a script, and flags that may stand before it."""


def missing(stage: Stage) -> str | None:
    """Return what the stage's command names and is not there; None if all is."""
    worker = stage.program
    folder = Path(worker.cwd or "")
    if not os.path.isdir(folder):
        return absent("folder", folder)
    program = worker.command[0]
    if "{" in program:
        pass  # a part of it is the dialect's
    elif "/" in program:
        if not os.path.exists(folder / program):
            return absent("file", folder / program)
    else:
        path = worker.env.get("PATH", search_path())
        if (text := absent_from_path(program, folder, path)) is not None:
            return text
    place = script(worker.command)
    if place is not None and not runs(folder / worker.command[place]):
        return absent("file", folder / worker.command[place])
    return None


def script(command: Sequence[str]) -> int | None:
    """Return which word of a command is the script that its program interprets."""
    name = os.path.basename(command[0])
    flags = [f.split() for known, f in INTERPRETERS if known.fullmatch(name)]
    for place, word in enumerate(command) if flags else ():
        if place and word not in flags[0]:
            # What begins with a dash may have the program behind it, as -c and -m do.
            return None if word.startswith("-") or "{" in word else place
    return None


def runs(path: Path) -> bool:
    """Return whether an interpreter finds a script there."""
    # A pipe is one, too: `sh <(...)`.
    found = os.path.exists(path) and not os.path.isdir(path)
    return found or os.path.isfile(path / "__main__.py")


def absent(what: str, place: Path) -> str:
    """Return that there is no such file, and which one may have been meant."""
    close = guess(place.name, names(place.parent))
    return f"there is no {what} {place.absolute()}{close}"


def names(folder: str | Path) -> list[str]:
    """Return what is in a folder, if it can be read."""
    # pathlib raises for a name that is too long, os.path does not.
    with suppress(OSError, ValueError):
        return os.listdir(folder)
    return []


def search_path() -> str:
    """Return the PATH of a worker that is given no other."""
    return os.environ.get("PATH", os.defpath)


def on_path(program: str, folder: Path, path: str) -> str | None:
    """Return the program that a name on the PATH stands for, seen from ``folder``."""
    return shutil.which(program, path=os.pathsep.join(_folders(folder, path)))


def absent_from_path(
    program: str, folder: Path, path: str, known: Iterable[str] = ()
) -> str | None:
    """
    Return why a name on the PATH can't be run in ``folder``; None if it can.

    ``known`` are names that are understood besides.
    """
    if on_path(program, folder, path):
        return None
    folders = _folders(folder, path)
    if any(os.path.isfile(os.path.join(place, program)) for place in folders):
        return f"the program {program!r} on PATH is not executable"
    if os.path.exists(folder / program):
        close = f" (did you mean {'./' + program!r}?)"
    else:
        there = {name for place in folders for name in names(place)}
        close = guess(program, there | set(known))
    return f"there is no program {program!r} on PATH{close}"


def _folders(folder: Path, path: str) -> list[str]:
    # A relative folder of the PATH is seen from where the worker runs.
    return [os.path.join(folder, name) for name in path.split(os.pathsep)]
