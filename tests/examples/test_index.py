from __future__ import annotations

import re

import pytest

from tests.examples.languages import DEMO, JOIN, PACKAGE, WORKERS

SUFFIXES = {".py", ".sh", ".mjs"}


def test_index_lists_each_worker() -> None:
    """No worker is forgotten in the index, and none is listed that is not there."""
    listed = re.findall(r"`(\w+/\w+\.\w+)`", (WORKERS / "README.md").read_text())
    there = {
        path.relative_to(WORKERS).as_posix()
        for path in WORKERS.glob("*/*")
        if path.suffix in SUFFIXES and path.name != "__init__.py"
    }

    assert set(listed) == there
    assert len(listed) == len(there)


def test_sdk_mirrors_plain_python() -> None:
    """Each scenario exists both ways, so that the two can be compared."""
    plain = {path.name for path in (WORKERS / "plain_python").glob("*.py")}

    assert {path.name for path in (WORKERS / "sdk").glob("*.py")} == plain


@pytest.mark.parametrize("folder", ["plain_python", "shell", "node"])
def test_worker_without_the_sdk_imports_nothing_of_ours(folder: str) -> None:
    """They show that a worker needs no library of any kind."""
    for path in (WORKERS / folder).glob("*.*"):
        assert "import etlstage" not in path.read_text()
        assert "from etlstage" not in path.read_text()


def test_examples_are_short() -> None:
    """An example is read before it is copied."""
    sources = [*WORKERS.glob("*/*.*"), *DEMO.glob("*.*"), *JOIN.glob("*.*")]
    lengths = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in sources
        if path.suffix in SUFFIXES
    }

    assert {name: n for name, n in lengths.items() if n > 120} == {}
