"""Pages of the manual that are followed from their beginning to their end."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from configparser import ConfigParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from ruamel.yaml import YAML

from tests.examples.languages import ANY_MARKERS
from tests.readme import follow, runs, runs_below, runs_whole
from tests.reference import commands

ELSEWHERE: Final = os.environ["PATH"]

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have an empty folder, and the python that runs this first on the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    return tmp_path


@runs_whole(
    "tutorials/first-pipeline.md",
    "tutorials/service.md",
    "tutorials/worker-and-tests.md",
    "tutorials/record-processor.md",
)
def test_page(page: str, folder: Path) -> None:
    """What it says is what happens (issue 27)."""
    follow(page, folder)


LANGUAGES: Final = {
    "With the SDK for Python": "python",
    "In plain Python": "python",
    "In the shell": "sh",
    "In awk": "awk",
    "In Node": "node",
    "In C": "cc",
    "In Go": "go",
    "In R": "Rscript",
}
"""What runs or compiles a worker; where a machine lacks it, its test is skipped."""


@runs_below("how-to/write-a-worker.md", *LANGUAGES)
def test_worker(heading: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each language it is checked as it is shown (issue 27)."""
    node = Path(ANY_MARKERS[-1].interpreter[0])  # it may have come as a wheel
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{ELSEWHERE}:{node.parent}")
    if shutil.which(LANGUAGES[heading]) is None:
        pytest.skip(f"needs {LANGUAGES[heading]}")
    follow("how-to/write-a-worker.md", folder, below=heading)


SMALL: Final = """\
name: strikes
extract: {worker: {command: [seq, "3"]}}
load: {worker: {command: [sh, -c, 'while read -r word; do printf "\\0"; done']}}
"""


@runs("systemd 1", "Kubernetes 1")
def test_units_can_be_read(blocks: list[str]) -> None:
    """And run commands that there are (issue 27)."""
    unit, deployment = blocks
    service = ConfigParser(interpolation=None)
    service.read_string(unit)
    started = service["Service"]["ExecStart"].split()
    pod = YAML(typ="safe", pure=True).load(deployment)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for _, *command in (started, container["command"]):
        assert command[:2] == ["run", "pipeline.yaml"]
        known = {o for p in commands()["etlstage run"].params for o in p.opts}
        assert {word for word in command if word.startswith("--")} <= known


@runs("Airflow 1")
def test_dag(blocks: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task is a command that runs (issue 27)."""
    typed_so = list[str]()

    def bash(**_: object) -> Callable[[Callable[[], str]], Callable[[], None]]:
        return lambda task: lambda: typed_so.append(task())

    sdk = SimpleNamespace(dag=lambda **_: lambda f: f, task=SimpleNamespace(bash=bash))
    monkeypatch.setitem(sys.modules, "airflow", SimpleNamespace(sdk=sdk))
    monkeypatch.setitem(sys.modules, "airflow.sdk", sdk)
    (folder / "pipeline.yaml").write_text(SMALL)
    exec(compile(blocks[0], "strikes_dag.py", "exec"), {})  # noqa: S102 - the manual's own
    (command,) = typed_so
    subprocess.run(shlex.split(command), check=True)
    assert (folder / "report.json").exists()


@runs("Dagster 1")
def test_asset(
    blocks: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs the pipeline, and finds its counts in the report (issue 27)."""
    dagster = SimpleNamespace(asset=lambda f: f, MaterializeResult=dict)
    monkeypatch.setitem(sys.modules, "dagster", dagster)
    (folder / "pipeline.yaml").write_text(SMALL)
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "strikes_asset.py", "exec"), names)  # noqa: S102 - likewise
    assert names["strikes"]() == {"metadata": {"messages": 3, "dead": 0}}
