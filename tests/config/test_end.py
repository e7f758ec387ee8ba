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
from tests.packages import install

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
        "p.yaml:2:11: extract.lines: works only with engine: local; for engine: spark use extract.spark or extract.worker",
        "p.yaml:4:8: load.lines: works only with engine: local; for engine: spark use load.spark or load.worker",
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


BROKEN = {
    "can't load tests.no_such_module:X: ModuleNotFoundError": "tests.no_such_module:X",
    "can't load pathlib:Nothing: AttributeError": "pathlib:Nothing",
    "expected package.module:name, got 'path lib'": "path lib",
    "expected an End, got pathlib:Path": "pathlib:Path",
    "there is already an end 'spark'": "etlstage.config.ends.spark:SPARK",
}
"""Values of entry points, and what is wrong with them."""


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file beside its input; packages can be installed in the folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "in.txt").write_text("a\n")
    return tmp_path / "p.yaml"


FILES = """\
name: p
extract: {files: {path: in.txt, format: text}}
load: {files: {path: out}}
"""


@pytest.mark.parametrize("text", BROKEN)
def test_broken_end_of_another_package(text: str, pipeline: Path) -> None:
    """The error is at the stage that names it; others are reported, too (issue 23)."""
    install(pipeline.parent, "theirs", end.GROUP, queue=BROKEN[text])
    wrong = FILES.replace("{files", "{queue", 1).replace("{path: out", "{paht: out")
    first, *others = error_of(pipeline, wrong).splitlines()
    where = f"entry point queue of group {end.GROUP} (theirs 1.0)"
    assert first.startswith(f"p.yaml:2:10: extract: {where}: {text}")
    assert "load.files.paht: unknown key (did you mean 'path'?)" in others[0]


@pytest.mark.parametrize("text", BROKEN)
def test_broken_end_that_is_not_used(text: str, pipeline: Path) -> None:
    """Neither a valid file nor an error in a file depends on it (issue 23)."""
    install(pipeline.parent, "theirs", end.GROUP, queue=BROKEN[text])
    pipeline.write_text(FILES)
    keys, _ = examine(pipeline)
    assert end.name_of(keys.extract.end) == "files"
    typo = error_of(pipeline, FILES.replace("{files", "{fils", 1))
    assert "extract.fils: unknown key (did you mean 'files'?)" in typo
    assert "entry point" not in typo
    with pytest.raises(ConfigError, match="entry point queue of group"):
        pipeline_schema()


@pytest.mark.process
def test_broken_end_beside_one_of_another_package(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end is found, built and named (issue 23)."""
    install(installed.parent, "theirs", end.GROUP, aaa="tests.no_such_module:X")
    monkeypatch.syspath_prepend(str(installed.parent))
    keys, _ = examine(installed)
    assert end.name_of(keys.extract.end) == "lines"


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("mine", "can't load tests.no_such_module:X: ModuleNotFoundError"),
        ("{name: mine}", "can't load tests.no_such_module:X: ModuleNotFoundError"),
        ("marker", "there is already a dialect 'marker'"),
        ("{name: marker, mode: batch}", "there is already a dialect 'marker'"),
    ],
)
def test_broken_dialect_of_another_package(
    dialect: str, text: str, pipeline: Path
) -> None:
    """It is an error only in a file that names it, where it does so (issue 23)."""
    points = dict.fromkeys(("mine", "marker"), "tests.no_such_module:X")
    install(pipeline.parent, "theirs", registry.GROUP, **points)
    plain = f"{FILES}transform: [{{worker: [cat]}}]\n"
    pipeline.write_text(plain)
    examine(pipeline)
    wrong = error_of(pipeline, plain.replace("[cat]", f"[cat], dialect: {dialect}"))
    assert wrong.startswith("p.yaml:4:")
    assert f"transform[0].dialect{'.name' if 'name' in dialect else ''}: " in wrong
    assert f"of group {registry.GROUP} (theirs 1.0): {text}" in wrong


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
