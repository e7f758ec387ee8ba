"""
``${NAME}``, ``${NAME:-default}`` and ``${file:path}`` in the values of a file.

``$$`` stands for ``$``. A ``$`` before anything but ``{`` or ``$`` is left alone, so
that JSON paths and awk programs need no escape. Inserted text is not expanded again.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from etlstage.errors import ConfigError, os_reason

__all__ = ("Expanded", "Interpolator", "read_file")

MAX_SECRET_BYTES: Final = 64 * 1024

TOKEN: Final = re.compile(r"\$\$|\$\{(?P<body>[^}]*)(?P<end>\}?)")
NAME: Final = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<dash>:-(?P<default>.*))?", re.DOTALL
)


class Expanded(NamedTuple):
    """A value after interpolation."""

    text: str
    found: Mapping[str, str] = {}
    """Inserted texts, with the references to them; if there are any, ``text`` must not
    be printed."""


def read_file(path: Path, most: int) -> bytes:
    """
    Return the contents of a file, up to ``most`` bytes and one.

    Unnamed pipes are read, too: a shell makes them, as for ``<(...)``, and they end.

    Raises:
        OSError: If it can't be read, or is a named pipe or a device.

    """
    with open(path, "rb", opener=_without_waiting) as file:
        fd = file.fileno()
        if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
            os.set_blocking(fd, True)
        elif not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return file.read(most + 1)


def _without_waiting(path: str, flags: int) -> int:
    # Opening a named pipe would block until its other end is opened.
    return os.open(path, flags | os.O_NONBLOCK)


class Interpolator:
    """
    Inserts environment variables and the contents of files into text.

    Args:
        folder: What the paths of ``${file:path}`` are relative to.
        environ: Where names are looked up; default: the process's environment.

    """

    def __init__(self, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._folder = folder
        self._environ = environ

    def expand(self, text: str) -> Expanded:
        """
        Return ``text`` with its references replaced.

        Raises:
            ConfigError: If a variable is not set, a file can't be read, or a
                reference is none of the three forms.

        """
        found: dict[str, str] = {}

        def replace(match: re.Match[str]) -> str:
            if match["body"] is None:
                return "$"
            if not match["end"]:
                raise ConfigError("'${' has no '}'; write '$${' for '${' itself")
            value = self._look_up(match["body"])
            found[value] = match[0]
            return value

        return Expanded(TOKEN.sub(replace, text), found)

    def _look_up(self, body: str) -> str:
        if "${" in body:
            raise ConfigError(
                "'${' within a reference: set the variable, or default, to plain text"
            )
        if body.startswith("file:"):
            return self._file(body.removeprefix("file:"))
        match = NAME.fullmatch(body)
        if match is None:
            raise ConfigError(
                "expected ${NAME}, ${NAME:-default} or ${file:path};"
                " write '$${' for '${' itself"
            )
        name = match["name"]
        value = self._environ.get(name)
        if match["dash"] is not None:
            return value or match["default"]
        if value is None:
            raise ConfigError(
                f"environment variable {name} is not set;"
                f" set it or write ${{{name}:-default}}"
            )
        return value

    def _file(self, name: str) -> str:
        """Return the text of a file, without the newline that ends it."""
        path = self._folder / name
        try:
            raw = read_file(path, MAX_SECRET_BYTES)
            text = raw.decode("utf-8")
        except OSError as error:
            why = os_reason(error)
            raise ConfigError(f"file {name} can't be read: {why}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"file {name} is not UTF-8 text at byte {error.start}"
            ) from None
        if len(raw) > MAX_SECRET_BYTES:
            raise ConfigError(
                f"file {name} is too big, expected no more than"
                f" {MAX_SECRET_BYTES} bytes"
            )
        return text.removesuffix("\n").removesuffix("\r")
