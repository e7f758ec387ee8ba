"""The tests are in line with what ``pyproject.toml`` has for the core."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
SETTINGS: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())[
    "tool"
]
CONTRACTS: Final = {c["name"]: c for c in SETTINGS["importlinter"]["contracts"]}
CORE: Final = [
    Path(name.replace(".", "/"))
    for name in CONTRACTS["The core does no I/O and knows no clock"]["source_modules"]
]
"""Its folders and modules, these without the suffix."""


def modules() -> list[Path]:
    """Return the files of the core."""
    found: list[Path] = []
    for path in CORE:
        whole = (ROOT / path).is_dir()
        found += (ROOT / path).rglob("*.py") if whole else [ROOT / f"{path}.py"]
    return [path.relative_to(ROOT) for path in found if path.name != "__init__.py"]


def decides(path: Path) -> bool:
    """Return whether a module has functions: what only declares can't be wrong."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return any(isinstance(node, ast.FunctionDef) for node in nodes)


def test_each_module_of_the_core_has_its_test_file() -> None:
    """The file has the module's name, in the folder of the module's folder."""
    tests = {path: Path("tests", *path.parts[1:-1]) for path in modules()}
    missing = [
        str(path)
        for path, folder in tests.items()
        if decides(path) and not (ROOT / folder / f"test_{path.name}").exists()
    ]
    assert missing == []


def test_coverage_is_measured_of_the_core() -> None:
    """The contract and the coverage name the same modules."""
    assert SETTINGS["coverage"]["run"]["include"] == [
        f"{path}/*" if (ROOT / path).is_dir() else f"{path}.py" for path in CORE
    ]


# --- a class name stands once in the package ------------------------------------------


def test_a_class_name_stands_once() -> None:
    """So a class name is never ambiguous."""
    found: Counter[str] = Counter()
    for path in (ROOT / "etlstage").rglob("*.py"):
        nodes = ast.parse(path.read_text()).body
        found.update(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in found.items() if count > 1] == []
