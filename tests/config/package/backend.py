"""A build backend for this folder's wheel: without a network there is no other."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path
from typing import Any

INFO = "etlstage_lines-1.0.dist-info"


def build_wheel(folder: str, *_: Any) -> str:  # noqa: ANN401 - see PEP 517
    """Write the wheel; return its name."""
    here = Path(__file__).parent
    points = tomllib.loads((here / "pyproject.toml").read_text())["project"]
    lines = []
    for group, entries in points["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {at}" for name, at in entries.items())]
    files = {
        "etlstage_lines.py": (here / "etlstage_lines.py").read_text(),
        f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: etlstage-lines\nVersion: 1.0\n",
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{INFO}/entry_points.txt": "\n".join([*lines, ""]),
    }
    files[f"{INFO}/RECORD"] = "".join(f"{n},,\n" for n in (*files, f"{INFO}/RECORD"))
    name = "etlstage_lines-1.0-py3-none-any.whl"
    with zipfile.ZipFile(Path(folder) / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
