"""From a stage to a running process: its command, its environment, its errors."""

from __future__ import annotations

import os
import re
import resource
import shlex
import sys
from dataclasses import replace
from typing import Final

from etlstage.errors import WorkerStartFailed
from etlstage.stage.stage import Stage
from etlstage.telemetry.trace import current_trace
from etlstage.transport import (
    Child,
    Launch,
    LaunchRequest,
    Terms,
    TermsRefused,
    Wire,
)
from etlstage.transport.launcher import Identity, UnknownIdentity, look_up

__all__ = ("command_line", "spawn", "substituted", "traced")

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
    Start a worker of ``stage``.

    Args:
        stage: What to run.
        worker: Its name, such as ``clean-1``.
        launch: What starts it.
        stdin: Whether it is given any.
        start: How often a worker of this name has been started, with this time.

    Raises:
        WorkerStartFailed: If the program can't be run; the text says why and the
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
    """Return what starts workers and tells them to whose trace they belong."""
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
    placeholders = stage.dialect.placeholders()
    if not placeholders:
        return command
    # All at once: the text of a marker may look like a placeholder.
    any_of_them = re.compile("{(" + "|".join(map(re.escape, placeholders)) + ")}")
    return tuple(
        any_of_them.sub(lambda found: placeholders[found[1]], word) for word in command
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
        | stage.dialect.environment()
        | about
        | dict(stage.program.env)
    )


def _terms(stage: Stage, identity: Identity) -> Terms:
    limits = stage.program.limits
    values = {
        number: value
        for name, number in _LIMITS.items()
        if (value := getattr(limits, name)) is not None
    }
    return Terms(
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
        if os.sep not in program:
            return f"there is no program {program!r} on PATH; check the command"
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
