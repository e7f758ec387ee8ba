from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.cells import cell_len

from etlstage.cli.failure import show_error
from etlstage.cli.screen import Screen
from etlstage.errors import ConfigError, Excerpt
from tests.cli.conftest import Etlstage
from tests.cli.test_screen import Terminal


def test_valid_file(etlstage: Etlstage, pipeline: Path) -> None:
    """One line shows what it is; nothing is started."""
    result = etlstage("validate", "pipeline.yaml")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "pipeline.yaml: valid: letters on engine local: extract -> upper -> load\n"
    )
    assert not (pipeline.parent / "loaded.txt").exists()


@pytest.mark.parametrize("command", ["validate", "run", "diff"])
def test_what_is_missing(etlstage: Etlstage, pipeline: Path, command: str) -> None:
    """Missing files are reported with errors in the file, before anything starts."""
    text = pipeline.read_text().replace("upper.py", "uper.py")
    frame = "extract: {spark: {format: text, path: nowhere}}"
    lines = [frame if x.startswith("extract:") else x for x in text.splitlines()]
    pipeline.write_text("\n".join([*lines, "enigne: spark", ""]))
    result = etlstage(command, "pipeline.yaml")
    here = pipeline.parent
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        (
            "etlstage: error: pipeline.yaml:2:39: extract.spark.path: there is no file"
            f" or folder {here}/nowhere"
        ),
        (
            "etlstage: error: pipeline.yaml:5:32: transform[0].worker.command[1]: there"
            f" is no file {here}/uper.py (did you mean 'upper.py'?)"
        ),
        (
            "etlstage: error: pipeline.yaml:7:1: enigne: unknown key"
            " (did you mean 'engine'?)"
        ),
    ]


@pytest.mark.parametrize("command", ["validate", "run"])
def test_changes(etlstage: Etlstage, pipeline: Path, command: str) -> None:
    """Overlays and values change the pipeline; errors in them name their own place."""
    over = "--overlay", "prod.yaml", "--set", "transform[0].workers=0"
    (pipeline.parent / "prod.yaml").write_text("load:\n  window: 0\n")
    result = etlstage(command, "pipeline.yaml", *over)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        (
            "etlstage: error: prod.yaml:2:11: load.window: expected a whole number of"
            " messages from 1 up, or auto, got '0'"
        ),
        ("etlstage: error: --set transform[0].workers: expected 1 or more, got '0'"),
    ]
    right = (
        "--set",
        "load.window=1",
        "--set",
        "transform[0].workers=2",
        "--set",
        "name=x",
    )
    assert etlstage(command, "pipeline.yaml", *over, *right).returncode == 0


def shown(
    monkeypatch: pytest.MonkeyPatch, excerpt: Excerpt | None, columns: int = 80
) -> list[str]:
    """Return the lines below an error on a terminal."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    # A dumb terminal has 80 columns, whatever the environment has.
    monkeypatch.setattr(Screen, "width", columns, raising=False)
    show_error(ConfigError("a:1:2: x", [excerpt]), debug=False)
    first, *rest = terminal.getvalue().splitlines()
    assert first == "etlstage: error: a:1:2: x"
    return rest


@pytest.mark.parametrize(
    ("excerpt", "lines"),
    [
        (None, []),
        (Excerpt("wokers: 2", 12, 1), ["    12 | wokers: 2", "         ^"]),
        (Excerpt("a: b", 7, 4), ["     7 | a: b", "            ^"]),
        (
            Excerpt("\u65e5\u672c: b", 7, 5),
            ["     7 | \u65e5\u672c: b", "               ^"],
        ),
        (Excerpt("\x1b[2J: b", 7, 7), ["     7 | : b", "           ^"]),
    ],
)
def test_line_with_a_caret(
    monkeypatch: pytest.MonkeyPatch, excerpt: Excerpt | None, lines: list[str]
) -> None:
    """The caret is below the error, also after wide or removed characters."""
    assert shown(monkeypatch, excerpt) == lines


def test_long_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is cut to the terminal's width, with the error in sight."""
    line = "x" * 500 + "!" + "y" * 500
    line, caret = shown(monkeypatch, Excerpt(line, 1, 501))
    assert len(line) == 80
    assert line[caret.index("^")] == "!"


@pytest.mark.parametrize("count", [20, 50, 100])
def test_long_line_of_wide_characters(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """It is cut at the terminal's columns, of which each takes two (issue 26)."""
    line = "\u65e5" * count + "!" + "\u672c" * 100
    line, caret = shown(monkeypatch, Excerpt(line, 1, count + 1))
    assert 78 <= cell_len(line) <= 80
    assert cell_len(line[: line.index("!")]) == caret.index("^")


@pytest.mark.parametrize("wrong", ["!", "\u65e5"])
@pytest.mark.parametrize("columns", [49, 60, 70, 71])
def test_long_line_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, wrong: str
) -> None:
    """What the caret points at is in sight on it, too (issue 26)."""
    text = "x" * 500 + wrong + "y" * 500
    line, caret = shown(monkeypatch, Excerpt(text, 1, 501), columns)
    assert cell_len(line) == columns
    assert line[caret.index("^")] == wrong


def test_no_caret_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe each line is one problem."""
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    show_error(ConfigError("a", [Excerpt("line", 1, 1)]), debug=False)
    assert pipe.getvalue() == "etlstage: error: a\n"
