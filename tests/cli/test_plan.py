from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from etlstage.cli.plan import main
from etlstage.telemetry.terminal import harmless
from tests.cli.conftest import Etlstage
from tests.cli.test_screen import Terminal


def test_plan(etlstage: Etlstage, pipeline: Path) -> None:
    """It shows the stages and how they are run, and starts nothing."""
    result = etlstage("plan", "pipeline.yaml", "--set", "transform[0].workers=2")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "letters on engine local"
    heads = [line for line in lines if line and not line.startswith(" ")]
    assert heads == [
        "letters on engine local",
        r"extract: printf 'a\nb\nc\n'",
        "transform upper: python upper.py",
        "load: python keep.py",
        "edges",
        "delivery",
        "state",
        "memory",
    ]
    assert "  workers    2; order total" in lines
    edge = "  upper -> load: in memory, one run of messages (about 1 MiB) or one reply"
    assert edge in lines
    assert {path.name for path in pipeline.parent.iterdir()} == {
        "pipeline.yaml",
        "upper.py",
        "keep.py",
    }


SCREEN = """\
  mode       error
  columns    id long, title string, year int, month int, day int, hour int,
             minute int
  folders by year
  epoch      1,000,000 messages or 128MiB
  errors     dead-lettered; budget 1%

edges
  extract -> upper: in memory, one run of messages (about 1 MiB) or one reply
  upper -> load: in memory, one run of messages (about 1 MiB) or one reply

Spark
"""
SINK = """\
load:
  spark:
    path: out
    partition_by: [year]
    schema: id long, title string, year int, month int, day int, hour int, minute int
"""


@pytest.mark.parametrize("columns", [80, 200])
def test_plan_on_a_terminal(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Lines are wrapped to its width, and their continuations are aligned."""
    text = pipeline.read_text()
    pipeline.write_text(text[: text.index("load:")] + SINK)
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(pipeline.parent)
    assert main(Path("pipeline.yaml")) == 0
    expected = SCREEN
    if columns == 200:
        expected = expected.replace("\n             minute", " minute")
    assert expected in harmless(terminal.getvalue(), lines=True)


def test_plan_of_what_cant_be_run(etlstage: Etlstage, pipeline: Path) -> None:
    """The error is that of a run."""
    (pipeline.parent / "upper.py").unlink()
    result = etlstage("plan", "pipeline.yaml")
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        "pipeline.yaml:5:32: transform[0].worker.command[1]: there is" in result.stderr
    )


MERMAID = """\
flowchart LR
  s0["extract<br/>printf #39;a#92;nb#92;nc#92;n#39;"]
  s1["upper x 2<br/>python upper.py"]
  s2["load<br/>python keep.py"]
  s0 --> s1
  s1 --> s2
  dead[(dead letters)]
  s1 -.-> dead
  s2 -.-> dead
"""
DOT = r"""digraph "letters" {
  rankdir=LR; node [shape=box];
  "extract" [label="extract\nprintf 'a\\nb\\nc\\n'"];
  "upper" [label="upper x 2\npython upper.py"];
  "load" [label="load\npython keep.py"];
  "extract" -> "upper";
  "upper" -> "load";
  "/dead" [label="dead letters", shape=cylinder];
  "upper" -> "/dead" [style=dashed];
  "load" -> "/dead" [style=dashed];
}
"""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((), MERMAID), (("--format", "dot"), DOT)],
    ids=["mermaid", "dot"],
)
def test_graph(
    etlstage: Etlstage, pipeline: Path, arguments: tuple[str, ...], text: str
) -> None:
    """It is printed as text, and the programs need not exist."""
    (pipeline.parent / "upper.py").unlink()
    more = ("--set", "transform[0].workers=2")
    result = etlstage("graph", "pipeline.yaml", *more, *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == text


def test_picture(etlstage: Etlstage, pipeline: Path) -> None:
    """Each stage has a box with its command, cut if it is long."""
    text = pipeline.read_text().replace("upper.py", f"'<{'x' * 50}>'")
    pipeline.write_text(text.replace("load: {", "load: {on_error: {then: fail}, "))
    result = etlstage("graph", "pipeline.yaml", "--format", "svg")
    assert (result.returncode, result.stderr) == (0, "")
    root = ET.fromstring(result.stdout)  # noqa: S314 - our own
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == [
        "extract",
        r"printf 'a\nb\nc\n'",
        "upper",
        f"python '<{'x' * 28}...",
        "dead letters",
        "load",
        "python keep.py",
    ]
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert [line.get("stroke-dasharray") for line in lines] == ["4", None, None]


def test_picture_of_many_stages(etlstage: Etlstage, pipeline: Path) -> None:
    """Boxes are in rows within the picture, and long names are cut (issue 11)."""
    more = (
        f"  - {{name: {'n' * 40}{i}, worker: {{command: [cat]}}}}" for i in range(5)
    )
    head, end = pipeline.read_text().split("load:")
    pipeline.write_text("\n".join((head.rstrip(), *more, f"load:{end}")))
    result = etlstage("graph", "pipeline.yaml", "--format", "svg")
    root = ET.fromstring(result.stdout)  # noqa: S314 - our own
    boxes = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    places = [(int(box.get("x", "")), int(box.get("y", ""))) for box in boxes]
    assert len(set(places)) == 8
    assert [y for _, y in places] == [places[0][1]] * 4 + [places[4][1]] * 4
    assert int(root.get("width", "")) == places[3][0] + 300 + places[0][0]
    assert int(root.get("height", "")) > places[4][1] + 60
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count(f"{'n' * 27}...") == 5


def test_format_that_is_none(etlstage: Etlstage, pipeline: Path) -> None:
    """The error names the one that was meant."""
    result = etlstage("graph", "pipeline.yaml", "--format", "dott")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "etlstage: error: --format: unknown format 'dott' (did you mean 'dot'?)\n"
    )
