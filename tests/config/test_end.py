"""Ends and dialects from the registries, including those of other packages."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import anyio
import pytest

from etlstage.config import end
from etlstage.config.build import pipeline_from_here
from etlstage.config.build_retry import Retries
from etlstage.config.end import ends
from etlstage.config.loader import examine, load
from etlstage.config.plan import plan_of
from etlstage.config.schema import pipeline_schema
from etlstage.errors import ConfigError
from etlstage.protocol import registry
from etlstage.protocol.registry import dialect_class, dialect_names

PACKAGE = Path(__file__).parent / "package"
SOURCES = Path(end.__file__).parents[1]
FILE = """\
name: p
extract: {lines: {path: in.txt}}
transform: [{name: up, worker: {command: [python, up.py]}}]
load: {lines: {path: out.txt}}
"""
UP = "from etlstage import worker\n\n\ndef up(m):\n    if m == b'x':\n        raise worker.Refuse('no x')\n    return [m.upper()]\n\n\nworker.transform(up)\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the third-party package into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    options = "--no-deps --no-build-isolation --no-index --disable-pip-version-check"
    command = [sys.executable, "-m", "pip", "install", "-q", *options.split()]
    subprocess.run([*command, "--target", folder, PACKAGE], check=True, timeout=100)
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have that package installed; return a pipeline file that uses its ends."""
    monkeypatch.syspath_prepend(str(site))
    (tmp_path / "in.txt").write_text("a\nx\nb\n")
    (tmp_path / "up.py").write_text(UP)
    (tmp_path / "p.yaml").write_text(FILE)
    return tmp_path / "p.yaml"


def error_of(path: Path, text: str) -> str:
    """Return what is wrong with a file."""
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        examine(path)
    return "\n".join(caught.value.problems).replace(f"{path.parent}/", "")


@pytest.mark.process
def test_end_of_another_package(installed: Path) -> None:
    """A third-party end is found, built, run, planned and described (issue 23)."""
    assert [*ends()] == ["spark", "worker", "files", "journal", "kinesis"]
    assert [*ends(others=True)] == [*ends(), "lines"]
    report = anyio.run(pipeline_from_here(installed).run)
    assert (report.status, report.error) == ("done", None)
    assert (installed.parent / "out.txt").read_text().endswith("A\nB\n")
    plan = plan_of(*examine(installed))
    assert [part.what for part in plan.parts] == [
        "path in.txt", "python up.py", "path out.txt",
    ]  # fmt: skip
    assert ("path", str(installed.parent / "out.txt")) in plan.parts[-1].about
    assert dict(plan.about)["delivery"].startswith("at least once: ")
    assert "lines" in str(pipeline_schema()["properties"]["extract"]["properties"])
    assert Retries.of_file(installed)[0].stages == ["up", "load"]


@pytest.mark.process
def test_what_is_wrong_with_it(installed: Path) -> None:
    """Each mistake is reported at its place, with the remedy."""
    wrong = FILE.replace("in.txt", "im.txt").replace(
        "{path: out", "{paht: x, path: out"
    )
    assert error_of(installed, wrong).splitlines() == [
        "p.yaml:2:25: extract.lines.path: there is no file im.txt (did you mean 'in.txt'?)",
        "p.yaml:4:16: load.lines.paht: unknown key (did you mean 'path'?)",
    ]
    assert error_of(installed, f"{FILE}engine: spark\n").splitlines() == [
        "p.yaml:5:9: engine: can't be spark: the end of stage extract is only for engine local",
        "p.yaml:5:9: engine: can't be spark: the end of stage load is only for engine local",
    ]
    once = error_of(installed, f"{FILE}delivery: exactly-once\n")
    assert "exactly-once needs an end that loads each epoch once" in once
    both = FILE.replace(
        "{lines: {path: out.txt}", "{lines: {path: o}, spark: {path: n}"
    )
    assert "load.lines: can't be used together with spark" in error_of(installed, both)
    neither = FILE.replace("{lines: {path: out.txt}}", "{retries: 1}")
    assert "one of the keys spark, worker, files, journal, lines" in error_of(
        installed, neither
    )


@pytest.mark.process
def test_dialect_of_another_package(installed: Path) -> None:
    """An entry point of its package is enough for files to name it (issue 23)."""
    assert dialect_names() == ["marker", "cocaine", "kcl", "toy"]
    text = FILE.replace("up.py]}", "up.py]}, dialect: toy")
    installed.write_text(text)
    assert load(installed)[0].transform[0].dialect.name == "toy"
    assert dialect_class("toy").name == "toy"
    wrong = error_of(installed, text.replace("toy", "tov"))
    assert "unknown dialect 'tov' (did you mean 'toy'?)" in wrong


@pytest.mark.parametrize(
    ("module", "find", "value"),
    [
        (end, lambda: ends(others=True), "pathlib:Path"),
        (end, lambda: ends(others=True), "etlstage.config.ends.spark:SPARK"),
        (registry, lambda: dialect_class("mine"), "pathlib:Path"),
    ],
)
def test_package_that_names_something_else(
    module: object,
    find: Callable[[], object],
    value: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error names the entry point."""
    point = EntryPoint("mine", value, "etlstage.ends")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [point])
    with pytest.raises(ConfigError, match="entry point mine of group"):
        find()


def test_no_one_else_asks_which_end_it_is() -> None:
    """Other code calls an end's methods instead of asking which it is (issue 23)."""
    asks = re.compile(
        r"(SparkS(ink|ource)Keys|WorkerS(ink|ource)Keys|JournalS(ink|ource)Keys"
        r"|[=!]= ?\"(spark|worker)\"(?!\))|\"spark\" (not )?in\b|\.end\.name\b)"
    )
    found = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for folder in ("config", "cli", "pipeline")
        for path in (SOURCES / folder).rglob("*.py")
        if path.parent.name != "ends"
        for line in path.read_text().splitlines()
        if asks.search(line) and "engine" not in line
    ]
    assert found == []
