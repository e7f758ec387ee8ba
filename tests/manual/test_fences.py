"""Each section of README and of the pages works exactly as it is shown."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import anyio
import jsonschema
import pytest
from ruamel.yaml import YAML

from etlstage import AsyncSupervisor, Pipeline, Stage, worker
from etlstage.config.loader import load
from tests.cli.forked import Forks
from tests.examples.languages import ANY_MARKERS
from tests.manual.fences import FENCES, PAGES, ROOT, SECTIONS, run, write
from tests.reference import commands

pytestmark = pytest.mark.process

WITH_SPARK: Final = {
    name
    for name in SECTIONS
    if f'"{name}"' in (ROOT / "tests" / "spark" / "test_manual.py").read_text()
}
"""Sections that are run there."""

SLOW: Final = {
    "how-to/test-a-worker.md#Read a failure",
    "how-to/test-a-worker.md#Two more workers with a bug",
    "how-to/test-suite.md#State properties, with Hypothesis",
}
"""Sections that start a hundred processes or more."""

NEEDS: Final = {"c": "cc", "go": "go", "js": "node", "r": "Rscript"}
"""Program that runs or compiles a language; without it, a section is skipped."""

# --- what is there before a section ---------------------------------------------------

WITH_STAGE: Final = {
    "how-to/embed.md#Observe it",
    "how-to/faults.md#Inject faults",
    "how-to/test-suite.md#Test what embeds a supervisor",
}
"""Sections that use names of what is above them, or of their tutorial."""

UPPER: Final = """
from etlstage import worker
worker.transform(lambda message: [message.upper()])
"""
SHOUT, LOUD = (f.text for f in SECTIONS["README.md#etlstage"] if f.file)


def pipeline(name: str, stage: str = "", words: str = "one, two, three") -> str:
    """Return a pipeline with workers at both ends, and one between them."""
    between = f"transform: [{{{stage}}}]\n" if stage else ""
    return f"""\
name: {name}
extract: {{worker: {{command: [printf, '%s\\n', {words}]}}}}
{between}load: {{worker: {{command: [sh, -c, 'while read -r word; do printf "\\0"; done']}}}}
"""


CLEAN: Final = "name: clean, worker: {command: [python, clean.py]}"
FIVE: Final = "one, two, three, four, five"
FILES: Final[dict[str, dict[str, str]]] = {
    "how-to/cocaine-workers.md#Keep a session open": {
        "worker.py": (ROOT / "etlstage/examples/cocaine/worker.py").read_text()
    },
    "how-to/databases.md#Load into a database": {"password.txt": "secret"},
    "how-to/dead-letters.md#Handle dead letters": {
        "pipeline.yaml": pipeline(
            "letters", "name: upper, worker: {command: [./upper]}", FIVE
        ),
        "upper": r"""#!/bin/sh
while read -r word; do
    case $word in
    ?????) echo "a word of five letters" >&2; exit 1 ;;
    *) printf '%s\n\000' "$word" ;;
    esac
done
""",
        # Ids are made the same in all runs; a retry first removes the cause.
        "bin/etlstage": r"""#!/bin/sh
[ "$2" != retry ] || sed -i "s/exit 1/printf '\\\\000'/" upper
PATH=${PATH#*:} etlstage "$@"
sed -i -E 's/"(run|id)": "\w{8}/"\1": "af32b1c9/g
s/"time": "[^"]+/"time": "2026-01-02T12:00:00.000+00:00/' .etlstage/*/dead_letters/*
""",
    },
    "how-to/deploy.md#Airflow": {"pipeline.yaml": pipeline("strikes")},
    "how-to/deploy.md#Dagster": {"pipeline.yaml": pipeline("strikes")},
    "how-to/faults.md#Inject faults": {
        "pipeline.yaml": pipeline("names", CLEAN, "one, " * 11 + "two, three, four")
    },
    "how-to/record-and-replay.md#Record and replay": {
        "pipeline.yaml": pipeline("names", CLEAN, "a, b, c"),
        "clean-v2": r"""#!/bin/sh
while read -r word; do
    word=$(printf '%s' "$word" | tr a-z A-Z)
    [ "$word" = B ] && echo "$word"
    printf '%s\n\000' "$word"
done
""",
    },
    "how-to/run.md#Run and observe a pipeline": {
        "pipeline.yaml": pipeline("papers", CLEAN, FIVE),
        "clean.py": UPPER.replace(".upper()", ""),
    },
    "how-to/test-suite.md#Call the function": {"shout.py": SHOUT},
    "reference/pipeline-file.md#Errors": {
        "pipeline.yaml": LOUD.replace("workers", "wokers").replace("write", "wright"),
        "shout.py": "",
        "names.txt": "",
    },
}
"""Files that a section expects in its folder, by their names."""


@pytest.fixture(autouse=True)
def _folder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forks: Forks,
    request: pytest.FixtureRequest,
) -> Iterator[None]:
    """
    Run in a folder with a worker, with this Python first on the PATH.

    Before it is an ``etlstage`` that is forked, except on README, where it is started.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    node = Path(ANY_MARKERS[-1].interpreter[0]).parent  # it may have come as a wheel
    paths = [tmp_path / "bin", Path(sys.executable).parent, "/usr/bin", "/bin", node]
    if "README" not in request.node.name:
        paths.insert(1, forks.folder)
    monkeypatch.setenv("PATH", ":".join([*map(str, paths), os.environ["PATH"]]))
    write("clean.py", UPPER)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in SECTIONS
        if name not in WITH_SPARK
    ],
)
def test_section(
    section: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it shows is what happens (issues 11 and 27)."""
    for fence in SECTIONS[section]:
        needed = NEEDS.get(fence.language, "sh")
        if shutil.which(needed) is None:
            pytest.skip(f"needs {needed}")
    for name, text in FILES.get(section, {}).items():
        write(name, text)
    names = {"__name__": "manual", "update": pytestconfig.getoption("--update")}
    if section in WITH_STAGE:
        stage = Stage(name="clean", worker=(sys.executable, "clean.py"))
        names |= {"AsyncSupervisor": AsyncSupervisor, "Pipeline": Pipeline}
        names |= {"Stage": Stage, "anyio": anyio, "stage": stage}
    with AROUND.get(section, contextmanager(_nothing))(names, monkeypatch):
        run(section, names)


def test_no_section_is_left_out() -> None:
    """Pages with a fence have sections, and preparations are for them (issue 27)."""
    assert AROUND.keys() | FILES.keys() | SLOW | WITH_STAGE <= SECTIONS.keys()
    fenced = [path for path, text in PAGES.items() if "\n```" in text]
    assert len({name.partition("#")[0] for name in SECTIONS}) == len(fenced)


def test_no_program_is_left_out() -> None:
    """Each program is named by another fence of its page, which runs it (issue 27)."""
    for section in SECTIONS.keys() - AROUND.keys() - WITH_SPARK:
        page = section.partition("#")[0]
        for fence in SECTIONS[section]:
            stem = Path(fence.file).stem if fence.language != "yaml" else ""
            others = [
                f.text for f in FENCES if f.section.startswith(page) and f != fence
            ]
            assert not stem or stem in "".join(others), (section, fence.file)


def evaluate(text: str, **names: object) -> None:
    """Run a page of one fence."""
    page = Path("page.md").absolute()
    page.write_text(f"# A page\n\n{text}")
    run("page.md#A page", names, page)


@pytest.mark.parametrize(
    "text",
    [
        "```console\n$ echo one\ntwo\n```\n",
        "```python\nprint(1)\n```\n```text\n2\n```\n",
        "```python\nassert False\n```\n",
        "```yaml\nfaults: [{kind: kil}]\n```\n",
        "```yaml\nnamed: no\n```\n",
        "```sh\necho one\n```\n",
        "```bash\necho one\n```\n",
        "```text\na drawing without a word\n```\n",
        "```perl\nprint 1\n```\n",
        "```\nno language\n```\n",
    ],
)
def test_wrong_fence_fails(text: str) -> None:
    """None is passed over in silence (issue 27)."""
    with pytest.raises((AssertionError, KeyError, jsonschema.ValidationError)):
        evaluate(text)


def test_update() -> None:
    """What a command prints is written into the page (issue 27)."""
    evaluate("```console\n$ echo one; pwd\ntwo\n$ echo 3\n3\n```\n", update=True)
    written = Path("page.md").read_text()
    assert "$ echo one; pwd\none\n/home/me\n$ echo 3\n3\n```" in written
    evaluate(written)


# --- what else is true of a section ---------------------------------------------------

Names = dict[str, Any]
Around = Callable[[Names, pytest.MonkeyPatch], Iterator[None]]
AROUND: Final = dict[str, Callable[..., Any]]()
"""Functions that prepare a section, and check its results."""


def around(*sections: str) -> Callable[[Around], None]:
    """Register a function that prepares sections, and checks their results."""
    return lambda function: AROUND.update(
        dict.fromkeys(sections, contextmanager(function))
    )


def _nothing(_: Names, __: pytest.MonkeyPatch) -> Iterator[None]:
    yield


def _pass(file: str, count: int, *mode: str) -> None:
    """Run tests in a pytest process of their own."""
    # Load the plugin by its module, so that it is this tree's, whatever is installed.
    plugin = ("-p", "no:etlstage", "-p", "etlstage.testing.plugin")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *mode, file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{count} passed" in ended.stdout, ended.stdout


AUTO: Final = ("-o", "asyncio_mode=auto", "-p", "no:anyio")


@around("how-to/test-suite.md#Run the program, by fixtures of pytest")
def _(_: Names, __: pytest.MonkeyPatch) -> Iterator[None]:
    """It passes as it is copied, and without the mark (issues 12, 26)."""
    yield
    # Without pytest-asyncio, and without any configuration.
    _pass("test_clean.py", 5, "-p", "no:asyncio", "-c", os.devnull)
    text = Path("test_clean.py").read_text()
    unmarked = re.sub("^pytestmark.*", "", text, flags=re.MULTILINE)
    assert unmarked != text
    write("test_clean.py", unmarked)
    _pass("test_clean.py", 3, *AUTO)


@around("how-to/test-suite.md#State properties, with Hypothesis")
def _(_: Names, __: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    _pass("test_properties.py", 2, *AUTO)


@around("how-to/test-suite.md#Simulate a pipeline")
def _(names: Names, _: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    names["test_stages_come_through"]()


@around("how-to/test-a-worker.md#Write a model of it")
def _(_: Names, __: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    clean = importlib.import_module("model").clean
    assert worker.run(clean, [b" a b\t", b" "]) == [[b"a b"], worker.Refuse("no name")]


def answers(*command: str, sent: bytes) -> bytes:
    """Return what the worker of a section writes for an input."""
    return subprocess.run(command, input=sent, capture_output=True, check=True).stdout


@around("how-to/write-a-worker.md#In Node")
def _(_: Names, __: pytest.MonkeyPatch) -> Iterator[None]:
    """A byte that is a blank in another encoding is kept (issue 22)."""
    yield
    sent = " voilà \n".encode()
    assert answers("node", "clean.mjs", sent=sent) == "voilà\n\0".encode()


@around("how-to/write-a-worker.md#In Go")
def _(_: Names, __: pytest.MonkeyPatch) -> Iterator[None]:
    """Messages before one that is cut off are answered (issue 22)."""
    yield
    assert answers("./clean-go", sent=b" a \nb") == b"a\n\0"


@around("how-to/write-a-worker.md#The functions of the SDK")
def _(names: Names, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each function accepts the arguments shown."""
    for fence in SECTIONS["how-to/write-a-worker.md#The functions of the SDK"]:
        for name in re.findall(r"worker\.(\w+)\(", fence.text):
            bind = inspect.signature(getattr(worker, name)).bind
            monkeypatch.setattr(worker, name, bind)
    names |= {"f": None, "g": None}
    yield


@around(
    "how-to/cocaine-workers.md#Run Cocaine workers",
    "how-to/record-processors.md#Load with a processor",
)
def _(_: Names, __: pytest.MonkeyPatch) -> Iterator[None]:
    """They show all keys with their defaults (issues 15 and 25)."""
    yield
    path = Path("clicks.yaml" if Path("clicks.yaml").exists() else "pipeline.yaml")
    data = YAML(typ="safe", pure=True).load(path)
    model, _warnings = load(path)
    stages = *model.transform, model.load
    written = *data.get("transform", []), data["load"]
    for stage, keys in zip(stages, written, strict=True):
        if "dialect" in keys:
            assert stage.dialect == type(stage.dialect)()
            known = type(stage.dialect).section(stage.kind).keys.keys()
            assert keys["dialect"].keys() - {"name"} == known - {"driver"}


@around("how-to/deploy.md#systemd", "how-to/deploy.md#Kubernetes")
def _(_: Names, __: pytest.MonkeyPatch) -> Iterator[None]:
    """They can be parsed, and use commands and options that exist (issue 27)."""
    yield
    service = ConfigParser(interpolation=None)
    service.read("etlstage-strikes.service")
    started = service["Service"]["ExecStart"].split()
    deployment = YAML(typ="safe", pure=True).load(Path("deployment.yaml"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for command in (started[1:], container["command"][1:]):
        assert command[:2] == ["run", "pipeline.yaml"]
        known = {o for p in commands()["etlstage run"].params for o in p.opts}
        assert {word for word in command if word.startswith("--")} <= known


@around("how-to/deploy.md#Airflow")
def _(_: Names, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its task is a command that runs (issue 27)."""
    tasks = list[str]()

    def bash(**_: object) -> Callable[[Callable[[], str]], Callable[[], None]]:
        return lambda task: lambda: tasks.append(task())

    sdk = SimpleNamespace(dag=lambda **_: lambda f: f, task=SimpleNamespace(bash=bash))
    monkeypatch.setitem(sys.modules, "airflow", SimpleNamespace(sdk=sdk))
    monkeypatch.setitem(sys.modules, "airflow.sdk", sdk)
    yield
    importlib.import_module("strikes_dag")
    (command,) = tasks
    subprocess.run(shlex.split(command.removeprefix(".venv/bin/")), check=True)
    assert Path("report.json").exists()


@around("how-to/deploy.md#Dagster")
def _(_: Names, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It runs the pipeline, and finds its counts in the report (issue 27)."""
    dagster = SimpleNamespace(asset=lambda f: f, MaterializeResult=dict)
    monkeypatch.setitem(sys.modules, "dagster", dagster)
    yield
    made = importlib.import_module("strikes_asset").strikes()
    assert made == {"metadata": {"messages": 3, "dead": 0}}
