"""From a stage to a running process: its command, its environment, its errors."""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import Final

from etlstage.errors import WorkerStartFailed
from etlstage.protocol.marker import MARKER_NAMES, Markers, escape
from etlstage.supervisor.stage import Stage
from etlstage.transport import Process

__all__ = ("command_line", "launch")

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


def launch(stage: Stage, worker: str, *, stdin: bool = True) -> Process:
    """
    Start a worker of ``stage``.

    Raises:
        WorkerStartFailed: If the program can't be run; the text says why and the
            remedy.

    """
    command = _substitute(stage.command, stage.markers)
    try:
        return Process(command, env=_environment(stage), cwd=stage.cwd, stdin=stdin)
    except (OSError, ValueError) as error:
        reason = _reason(stage, command[0], error)
        raise WorkerStartFailed(
            f"stage {stage.name}: can't start worker {worker}: {reason};"
            f" command: {command_line(stage)}",
            stage=stage.name,
        ) from error


def command_line(stage: Stage) -> str:
    """Return the command as the user wrote it, quoted for a shell."""
    return shlex.join(stage.command)


def _substitute(command: tuple[str, ...], markers: Markers) -> list[str]:
    texts = {
        f"{{{name}}}": escape(value)
        for name, value in zip(MARKER_NAMES, markers, strict=True)
    }
    # All at once: the text of a marker may look like a placeholder.
    any_of_them = re.compile("|".join(map(re.escape, texts)))
    return [any_of_them.sub(lambda found: texts[found[0]], a) for a in command]


def _environment(stage: Stage) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    # Python workers that never flush, as those of the original system, would keep
    # their first reply until stdin is closed, and wait for ever.
    return (
        inherited
        | {"PYTHONUNBUFFERED": "1"}
        | stage.markers.environment()
        | dict(stage.env)
    )


def _reason(stage: Stage, program: str, error: OSError | ValueError) -> str:
    if isinstance(error, ValueError):
        return f"{error} in the command or in env"
    if stage.cwd is not None and not stage.cwd.is_dir():
        return f"working directory {stage.cwd} does not exist; check cwd"
    if isinstance(error, FileNotFoundError):
        if os.sep not in program:
            return f"there is no program {program!r} on PATH; check the command"
        if os.path.exists(os.path.join(stage.cwd or "", program)):
            return f"the interpreter in the first line of {program} does not exist"
        return f"there is no file {program}; check the command"
    if os.path.isdir(os.path.join(stage.cwd or "", program)):
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
