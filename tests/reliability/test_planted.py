"""Bugs can still be planted, are found, and are listed on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import etlstage
from tests.reliability.__main__ import PAGE, run
from tests.reliability.planted import Bug, bugs, find

PACKAGE = Path(etlstage.__file__).parent
BUGS = {bug.name: bug for bug in bugs()}


@pytest.mark.parametrize("name", BUGS)
def test_bug_can_be_planted(name: str, tmp_path: Path) -> None:
    """The text it replaces must occur once; if the code changed, so must the bug."""
    bug = BUGS[name]
    file = tmp_path / bug.file
    file.parent.mkdir(parents=True)
    file.write_text((PACKAGE / bug.file).read_text())
    bug.plant(tmp_path)
    compile(file.read_text(), bug.file, "exec")


def test_page_has_each_bug() -> None:
    """Each planted bug has a row in the page's table."""
    text = PAGE.read_text()
    assert [name for name in BUGS if f"| {name} |" not in text] == []


@pytest.mark.process
def test_search_finds_what_is_planted() -> None:
    """The search runs in a copy of the package, where the bug is planted."""
    found = find(BUGS["an epoch is recorded before it is durable"], 20)
    assert found.seed is not None
    assert "is lost" in found.why


@pytest.mark.process
def test_search_ends_where_nothing_is_found() -> None:
    """All seeds run, and the search ends without a result."""
    line = "from __future__ import annotations"
    found = find(Bug("none", "nothing", "errors.py", line, line), 3)
    assert (found.seed, found.why) == (None, "")


def test_seeds_go_on_behind_those_in_a_file(tmp_path: Path) -> None:
    """What the file has is not run again; a gap is refused (issue 26)."""
    file = tmp_path / "ran"
    failed, first = run(range(2), 1, file)
    assert failed == 0
    failed, both = run(range(3), 1, file)
    assert (failed, both > first) == (0, True)
    assert [json.loads(line)[:2] for line in file.read_text().splitlines()] == [
        [0, 2],
        [2, 3],
    ]
    assert run(range(3), 1, file) == (0, both)
    with pytest.raises(SystemExit, match="seeds 0 to 1: expected 1 next"):
        run(range(1, 3), 1, file)
