from __future__ import annotations

import re
from pathlib import Path

import pytest

from etlstage.cli.help import GROUPS, list_topics, show_topic, topics
from etlstage.errors import ConfigError
from tests.cli.conftest import Etlstage
from tests.cli.forked import Forks, environment
from tests.cli.terminal import on_terminal
from tests.manual.fences import DOCS, PAGES


def test_topics_are_listed_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    """Each page is listed once, below its group's heading (issue 27)."""
    assert list_topics() == 0
    lines = capsys.readouterr().out.splitlines()
    groups = [line for line in lines if not line.startswith("  ")]
    assert groups == [*GROUPS.values(), "to show one: etlstage help TOPIC"]
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    pages = [path for path in PAGES if DOCS in path.parents and path.parent != DOCS]
    assert sorted(listed) == sorted(path.stem for path in pages)
    assert {path.parent.name for path in pages} == GROUPS.keys()
    assert len(set(listed)) == len(listed)


def test_pages_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal nothing is laid out, whatever the width (issue 27)."""
    assert show_topic("Dead letters") == 0
    assert capsys.readouterr().out == topics("how-to")["dead-letters"]
    for group in GROUPS:
        for topic, page in topics(group).items():
            assert show_topic(topic) == 0
            assert capsys.readouterr().out == page


def test_unknown_topic() -> None:
    """The error names a similar topic, or how to list all (issue 27)."""
    with pytest.raises(
        ConfigError, match=r"^unknown topic 'dead-leters' \(did you mean 'dead-letters'"
    ):
        show_topic("dead-leters")
    with pytest.raises(ConfigError, match=r"^unknown topic 'x'; 'etlstage help' lists"):
        show_topic("x")


@pytest.mark.process
def test_command(etlstage: Etlstage) -> None:
    """An unknown topic is exit code 2 (issue 27)."""
    assert "How-to guides\n" in etlstage("help").stdout
    result = etlstage("help", "x")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("etlstage: error: unknown topic 'x'")


@pytest.mark.process
def test_page_on_a_terminal(tmp_path: Path, forks: Forks) -> None:
    """Headings are laid out, and no link is shown as Markdown (issue 27)."""
    shown = on_terminal(
        [forks.program, "help", "dead-letters"],
        width=100,
        folder=tmp_path,
        env=environment(PAGER="cat"),
    ).text
    assert re.search(r"^[┃ ]*Handle dead letters[┃ ]*$", shown, re.MULTILINE)
    assert "](" not in shown
