"""
From a stage to a running process: its command, its environment, its errors.

Whether the files that a command names exist is looked up beforehand, where its worker
would run, with a guess at what may have been meant. Why an existing file can't be run
is reported best by the system when it is started.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
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
    "interpreter_in",
    "missing",
    "on_path",
    "runs",
    "script",
    "search_path",
    "spawn",
    "substituted",
    "traced",
    "uninterpreted",
)

HEAD: Final = 4096  # bytes of a program that are looked at

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
"""Variables that a worker inherits; all others must be set by ``env:``. The environment
of a pipeline often holds secrets, and a worker may be any program."""


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
    """Return a launch that passes the current trace to the workers it starts."""
    trace = current_trace()

    def launch_traced(request: LaunchRequest) -> tuple[Wire, Child]:
        return launch(replace(request, env={**trace, **request.env}))

    return launch_traced if trace else launch


def command_line(stage: Stage) -> str:
    """Return the command as the user wrote it, quoted for a shell."""
    return shlex.join(stage.program.command)


def substituted(stage: Stage) -> tuple[str, ...]:
    """Return the command with names in braces replaced by the dialect's values."""
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
        # Our own are of no use to another user, who may not even read that folder.
        about |= {"USER": identity.name, "LOGNAME": identity.name}
        about |= {"HOME": identity.home}
    # Python workers that never flush, such as those of the original system, would
    # buffer their first reply until stdin is closed: a deadlock.
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
        path = os.path.join(cwd or "", program)
        if os.path.exists(path):
            with open(path, "rb") as file:
                return uninterpreted(program, interpreter_in(file.read(HEAD)))
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


def interpreter_in(head: bytes) -> str:
    """Return the interpreter that a program names, given its first bytes."""
    # As the system reads it: a carriage return is a part of the name.
    line = os.fsdecode(head.removeprefix(b"#!").partition(b"\n")[0]).strip(" \t")
    return re.split(r"[ \t]", line, maxsplit=1)[0]


def uninterpreted(program: str | Path, interpreter: str) -> str:
    """Return that the interpreter of a program does not exist."""
    remedy = "; save the file with Unix line ends" if interpreter[-1:] == "\r" else ""
    return (
        f"the interpreter in the first line of {program} does not exist:"
        f" {interpreter!r}{remedy}"
    )


def _refusal(stage: Stage, term: str, error: TermsRefused) -> str:
    """Return why a term was refused; ``term`` is in the form of the launcher."""
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
"""Programs whose first argument is a script, and flags that may precede it."""


def missing(stage: Stage) -> str | None:
    """Return what is missing of what the command names; None if nothing is."""
    worker = stage.program
    folder = Path(worker.cwd or "")
    if not os.path.isdir(folder):
        return absent("folder", folder)
    program = worker.command[0]
    if "{" in program:
        pass  # the dialect replaces a part of it
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
    """Return the index of the script that a command's program interprets, if any."""
    name = os.path.basename(command[0])
    flags = [f.split() for known, f in INTERPRETERS if known.fullmatch(name)]
    for place, word in enumerate(command) if flags else ():
        if place and word not in flags[0]:
            # Another flag may be followed by the program itself, as -c and -m are.
            return None if word.startswith("-") or "{" in word else place
    return None


def runs(path: Path) -> bool:
    """Return whether an interpreter finds a script there."""
    # A pipe may be one, too: `sh <(...)`.
    found = os.path.exists(path) and not os.path.isdir(path)
    return found or os.path.isfile(path / "__main__.py")


def names(folder: str | Path) -> list[str]:
    """Return the names in a folder; none if it can't be read."""
    # pathlib raises for a name that is too long, os.path does not.
    with suppress(OSError, ValueError):
        return os.listdir(folder)
    return []


def absent(
    what: str, place: Path, listed: Callable[[Path], Iterable[str]] = names
) -> str:
    """
    Return the text of an error: there is no such file, and what may be meant.

    ``listed`` returns the names in a folder.
    """
    close = guess(place.name, listed(place.parent))
    return f"there is no {what} {place.absolute()}{close}"


def search_path() -> str:
    """Return the PATH of a worker whose stage sets none."""
    return os.environ.get("PATH", os.defpath)


def on_path(program: str, folder: Path, path: str) -> str | None:
    """Return the program that a name on the PATH stands for, seen from ``folder``."""
    return shutil.which(program, path=os.pathsep.join(_folders(folder, path)))


def absent_from_path(
    program: str,
    folder: Path,
    path: str,
    known: Iterable[str] = (),
    listed: Callable[[Path], Iterable[str]] = names,
) -> str | None:
    """
    Return why a name on the PATH can't be run in ``folder``; None if it can.

    ``known`` are further names that may have been meant; ``listed`` returns the names
    in a folder.
    """
    if on_path(program, folder, path):
        return None
    folders = _folders(folder, path)
    if any(os.path.isfile(os.path.join(place, program)) for place in folders):
        return f"the program {program!r} on PATH is not executable"
    if os.path.isdir(folder / program):
        close = ", only a folder here"
    elif os.path.exists(folder / program):
        close = f" (did you mean {'./' + program!r}?)"
    else:
        there = {name for place in folders for name in listed(Path(place))}
        close = guess(program, there | set(known))
    return f"there is no program {program!r} on PATH{close}"


def _folders(folder: Path, path: str) -> list[str]:
    # A relative folder of the PATH is relative to where the worker runs.
    return [os.path.join(folder, name) for name in path.split(os.pathsep)]
