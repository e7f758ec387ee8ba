"""Each section of README and of the pages does what it is shown to do, as it stands there."""

from __future__ import annotations

import ast
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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import anyio
import jsonschema
import pytest
from ruamel.yaml import YAML

from etlstage import AsyncSupervisor, Pipeline, ReplyContract, Stage, worker
from etlstage.cli.init import copy_examples
from etlstage.config.loader import load
from etlstage.config.schema import pipeline_schema
from tests.examples.languages import ANY_MARKERS
from tests.manual.fences import (
    PAGES,
    SECTIONS,
    SYBIL,
    Here,
    Section,
    as_shown,
    fences_of,
    section,
    steps,
    typed,
)
from tests.reference import commands

ELSEWHERE: Final = os.environ["PATH"]
UPPER: Final = """
import sys
from etlstage import worker
worker.transform(lambda message: [message.upper()])
"""

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


OTHERS: Final = {
    "README.md#etlstage": "spark.test_manual",
    "how-to/compare-engines.md#Compare two engines": "spark.test_manual",
    "how-to/data-source.md#Read and write as a Spark data source": "spark.test_manual",
    "how-to/journals.md#With Spark": "spark.test_manual",
    "how-to/test-a-pipeline.md#Test a pipeline": "spark.test_manual",
    "how-to/transform.md#On a cluster": "spark.test_manual",
    "how-to/transform.md#Transform a DataFrame in a notebook": "spark.test_manual",
    "tutorials/notebook.md": "spark.test_manual",
    # Of ids, which no two runs have in common, and in which nothing is defined.
    "how-to/dead-letters.md#Handle dead letters": "manual.test_fences",
    "how-to/write-a-worker.md#The functions of the SDK": "manual.test_fences",
}
"""Sections that tests of their own run, and where."""

SLOW: Final = {
    "how-to/test-a-worker.md#Read a failure",
    "how-to/test-a-worker.md#Two more workers with a bug",
    "how-to/test-suite.md#State properties, with Hypothesis",
}
"""Those that start a hundred processes and more."""

NEEDS: Final = {
    "In the shell": "sh",
    "In awk": "awk",
    "In Node": "node",
    "In C": "cc",
    "In Go": "go",
    "In R": "Rscript",
}
"""What runs or compiles a worker; where a machine lacks it, its test is skipped."""

Around = Callable[[Here, pytest.MonkeyPatch], Iterator[None]]
AROUND: Final = dict[str, Callable[..., AbstractContextManager[None]]]()


def around(*names: str) -> Callable[[Around], Around]:
    """Have this prepare the sections, and look at what has come of them."""

    def register(function: Around) -> Around:
        AROUND.update(dict.fromkeys(names, contextmanager(function)))
        return function

    return register


@pytest.fixture(autouse=True)
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Here:
    """Have a folder with a worker, and the python that runs this first on the PATH."""
    monkeypatch.chdir(tmp_path)
    node = Path(ANY_MARKERS[-1].interpreter[0]).parent  # it may have come as a wheel
    paths = (str(Path(sys.executable).parent), "/usr/bin", "/bin", str(node), ELSEWHERE)
    monkeypatch.setenv("PATH", ":".join(paths))
    here = Here(tmp_path, update=request.config.getoption("--update"))
    here.write("clean.py", UPPER)
    return here


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(
            each,
            id=str(each),
            marks=[pytest.mark.slow, pytest.mark.timeout(120)] * (str(each) in SLOW),
        )
        for each in SECTIONS
        if str(each) not in OTHERS
    ],
)
def test_section(each: Section, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is what happens (issues 11 and 27)."""
    needed = NEEDS.get(each.heading, "sh")
    if shutil.which(needed) is None:
        pytest.skip(f"needs {needed}")
    prepared = AROUND.get(str(each))
    with prepared(here, monkeypatch) if prepared is not None else nullcontext():
        each.run(here)


def test_no_section_is_left_out() -> None:
    """What is not run here is run by a test that names it (issue 27)."""
    known = {str(each) for each in SECTIONS}
    assert AROUND.keys() | SLOW | OTHERS.keys() <= known
    assert {each.heading for each in SECTIONS} >= NEEDS.keys()
    for name, module in OTHERS.items():
        assert module == "manual.test_fences" or name in inspect.getsource(
            importlib.import_module(f"tests.{module}")
        )


def test_no_program_is_left_out() -> None:
    """One that is written is named by what runs it (issue 27)."""
    for each in SECTIONS:
        if str(each) in AROUND or str(each) in OTHERS:
            continue
        page = fences_of(each.page)
        for fence in each.fences:
            stem = Path(fence.file).stem if fence.language != "yaml" else ""
            others = [other.text for other in page if other != fence]
            assert not stem or stem in "".join(others), (each, fence.file)


def evaluate(here: Here, text: str) -> None:
    """Run a page of one fence."""
    here.write("page.md", f"# A page\n\n{text}")
    document = SYBIL.parse(here.folder / "page.md")
    document.namespace["here"] = here
    for example in document.examples():
        example.evaluate()


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
def test_wrong_fence_fails(text: str, here: Here) -> None:
    """None is passed over in silence (issue 27)."""
    with pytest.raises((AssertionError, KeyError, jsonschema.ValidationError)):
        evaluate(here, text)


def test_update(here: Here) -> None:
    """What a command prints is written into the page (issue 27)."""
    here.update = True
    evaluate(here, "```console\n$ echo one; pwd\ntwo\n$ echo 3\n3\n```\n")
    here.update = False
    written = (here.folder / "page.md").read_text()
    assert "$ echo one; pwd\none\n/home/me\n$ echo 3\n3\n```" in written
    evaluate(here, written)


# --- what a section needs, and what is true of it -------------------------------------


@around("README.md#Embed a stage in a service")
def _one_answer(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    assert here.names["outputs"] == (b"ONE",)


@around("how-to/embed.md#Send messages")
def _all_ways(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    here.names["messages"] = [b"three"]
    yield
    assert here.printed == "b'one' (b'ONE',) None\nb'two' (b'TWO',) None\n"
    assert here.names["result"].outputs == (b"THREE",)
    assert here.names["outputs"] == (b"ONE",)
    assert here.names["replies"][-1:] == [(b"FOUR",)]


@around("how-to/embed.md#Configure the stage")
def _markers_and_batches(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    here.write(
        "count.py",
        "from etlstage import worker\n"
        "worker.transform_batch(lambda batch: [b'%d' % len(list(batch))])\n",
    )
    here.names["Stage"] = Stage
    yield

    async def outputs() -> tuple[bytes, ...]:
        async with AsyncSupervisor(here.names["stage"]) as supervisor:
            results = await supervisor.submit([b"a\n", b"b", b"c"])
            return tuple(output for result in results for output in result.outputs)

    assert anyio.run(outputs) == (b"3",)


def _clean(here: Here, *command: str) -> None:
    """Have what these sections use without having defined it."""
    stage = Stage(name="clean", worker=command or (sys.executable, "clean.py"))
    here.names.update(
        AsyncSupervisor=AsyncSupervisor, Pipeline=Pipeline, stage=stage, anyio=anyio
    )


@around("how-to/embed.md#Observe it")
def _meter(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    _clean(here)
    yield
    started = 'worker_starts_total{stage="clean",worker="clean-1"} 1.0'
    assert started in here.names["text"]


@around("how-to/embed.md#Serve HTTP with Starlette or FastAPI")
def _application(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    # tests/test_asgi.py asks it for an answer.
    _clean(here)
    yield


@around("how-to/cocaine-workers.md#Keep a session open")
def _session(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    copy_examples(here.folder, "cocaine")
    yield
    assert here.printed == "b'1'\n"


@around("how-to/test-suite.md#Call the function")
def _importable(here: Here, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The worker of the first page can be imported (issue 12)."""
    (shout,) = (f for f in section("README.md#etlstage").fences if f.file == "shout.py")
    shout.write(here.folder)
    monkeypatch.syspath_prepend(here.folder)
    yield
    del sys.modules["shout"]


AUTO: Final = ("-o", "asyncio_mode=auto", "-p", "no:anyio")


@around("how-to/test-suite.md#Run the program, by fixtures of pytest")
def _fixtures(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    """It passes as it is copied, or without the mark (issues 12, 26)."""
    yield
    # Without pytest-asyncio, and without a word of configuration.
    _pass("test_clean.py", 5, "-p", "no:asyncio", "-c", os.devnull)
    text = (here.folder / "test_clean.py").read_text()
    unmarked = re.sub("^pytestmark.*", "", text, flags=re.MULTILINE)
    assert unmarked != text
    here.write("test_clean.py", unmarked)
    _pass("test_clean.py", 3, *AUTO)


@around("how-to/test-suite.md#State properties, with Hypothesis")
def _properties(_: Here, __: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    _pass("test_properties.py", 2, *AUTO)


def _pass(file: str, count: int, *mode: str) -> None:
    """Run tests in a pytest of their own."""
    # By its module, so that this is about this tree, whatever is installed.
    plugin = ("-p", "no:etlstage", "-p", "etlstage.testing.plugin")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *mode, file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{count} passed" in ended.stdout, ended.stdout


@around("how-to/test-suite.md#Test what embeds a supervisor")
def _hostile_and_scripted(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A worker that may misbehave, two ends in memory, a minute that takes no time."""
    stage = Stage(name="clean", worker=(sys.executable, "clean.py"))
    _clean(here)
    made = list[Stage]()

    def defined(**given: Any) -> Stage:  # noqa: ANN401 - what a stage takes
        made.append(Stage(**given))
        return stage

    here.names["Stage"] = defined
    yield
    assert made[0].program.command[0] == sys.executable
    assert here.names["report"].status == "done"


@around("how-to/test-suite.md#Simulate a pipeline")
def _simulation(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    here.names["test_stages_come_through"]()


@around("how-to/test-a-worker.md#Write a model of it")
def _model(here: Here, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.syspath_prepend(here.folder)
    clean = importlib.import_module("model").clean
    assert worker.run(clean, [b" a b\t", b" "]) == [[b"a b"], worker.Refuse("no name")]
    del sys.modules["model"]


@around("how-to/databases.md#Load into a database")
def _password(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    here.write("password.txt", "secret")
    yield


@around("explanation/failures.md#Replies that are not as expected")
def _expected_replies(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    stage = load(here.folder / "pipeline.yaml")[0].transform[0].stage
    assert stage is not None
    assert stage.expect == ReplyContract(outputs=1, json=True, where="total >= 0")


@around("reference/pipeline-file.md#Errors")
def _misspelt(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    """The first page's, with two typing errors."""
    fences = section("README.md#etlstage").fences
    (text,) = (f.text for f in fences if f.file == "pipeline.yaml")
    for right, wrong in ("workers", "wokers"), ("overwrite", "overwright"):
        text = text.replace(right, wrong)
    here.write("pipeline.yaml", text)
    here.write("shout.py", "")
    here.write("names.txt", "")
    yield


@around("how-to/cocaine-workers.md#Run Cocaine workers")
def _cocaine_keys(here: Here, __: pytest.MonkeyPatch) -> Iterator[None]:
    """It shows all keys with what holds without them (issue 15)."""
    yield
    model, _ = load(here.folder / "pipeline.yaml")
    (keys,) = model.transform
    dialect = type(keys.dialect)
    assert keys.dialect == dialect()
    data = YAML(typ="safe", pure=True).load(here.folder / "pipeline.yaml")
    written = data["transform"][0]["dialect"].keys()
    assert written >= dialect.section(keys.kind).keys.keys() - {"driver"}


@around("how-to/record-processors.md#Load with a processor")
def _processor_keys(here: Here, __: pytest.MonkeyPatch) -> Iterator[None]:
    """Likewise (issue 25)."""
    yield
    model, _ = load(here.folder / "clicks.yaml")
    dialect = type(model.load.dialect)
    assert model.load.dialect == dialect()
    data = YAML(typ="safe", pure=True).load(here.folder / "clicks.yaml")
    known = dialect.section(model.load.kind).keys
    assert data["load"]["dialect"].keys() == {"name", *known}
    jsonschema.Draft202012Validator(pipeline_schema()).validate(data)


@around("how-to/journals.md#Use journals")
def _journals(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    """A reader with a name resumes where it stood."""
    yield
    assert here.printed == "7 12\n"
    here.printed = ""
    section("how-to/journals.md#Use journals").run(here)
    assert here.printed == "7 12\n"


@around("how-to/journals.md#Journals between pipelines")
def _journals_between(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    """What one appends the other reads, once and in the order of each customer."""
    yield
    lines = (here.folder / "billed").read_text().splitlines()
    found = [YAML(typ="safe").load(line) for line in lines]
    assert sorted(m["n"] for m in found) == [*range(1000)]
    for customer in range(9):
        of = [m["n"] for m in found if m["customer"] == customer]
        assert of == sorted(of)


def _pipeline(here: Here, name: str, stage: str, command: str, words: str) -> None:
    """Write a file with workers at both ends."""
    here.write(
        "pipeline.yaml",
        f"""\
name: {name}
extract: {{worker: {{command: [printf, '%s\\n', {words}]}}}}
transform:
  - {{name: {stage}, worker: {{command: [{command}]}}}}
load: {{worker: {{command: [sh, -c, 'while read -r word; do printf "\\0"; done']}}}}
""",
    )


FIVE: Final = "one, two, three, four, five"


@around("how-to/run.md#Run and observe a pipeline")
def _looks(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    _pipeline(here, "papers", "clean", "python, clean.py", FIVE)
    here.write("clean.py", UPPER.replace("message.upper()", "message"))
    yield


TWICE: Final = r"""#!/bin/sh
while read -r word; do
    word=$(printf '%s' "$word" | tr a-z A-Z)
    [ "$word" = B ] && echo "$word"
    printf '%s\n\000' "$word"
done
"""


@around("how-to/record-and-replay.md#Record and replay")
def _recorded(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    _pipeline(here, "names", "clean", "python, clean.py", "a, b, c")
    here.write("clean-v2", TWICE)
    typed([("etlstage run pipeline.yaml --record recordings", "")])
    yield


@around("how-to/faults.md#Inject faults")
def _faults(here: Here, _: pytest.MonkeyPatch) -> Iterator[None]:
    """In a run; and in a service, where a worker that knows none is killed."""
    _pipeline(here, "names", "clean", "python, clean.py", "one, " * 11 + FIVE[5:])
    _clean(here)
    yield
    assert [result.error for result in here.names["results"]] == [None] * 8


@around("how-to/deploy.md#systemd", "how-to/deploy.md#Kubernetes")
def _units(here: Here, __: pytest.MonkeyPatch) -> Iterator[None]:
    """They can be read, and run commands that there are (issue 27)."""
    yield
    service = ConfigParser(interpolation=None)
    service.read(here.folder / "etlstage-strikes.service")
    started = service["Service"]["ExecStart"].split()
    yaml = YAML(typ="safe", pure=True)
    pod = yaml.load(here.folder / "deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for _, *command in (started, container["command"]):
        assert command[:2] == ["run", "pipeline.yaml"]
        known = {o for p in commands()["etlstage run"].params for o in p.opts}
        assert {word for word in command if word.startswith("--")} <= known


SMALL: Final = """\
name: strikes
extract: {worker: {command: [seq, "3"]}}
load: {worker: {command: [sh, -c, 'while read -r word; do printf "\\0"; done']}}
"""


@around("how-to/deploy.md#Airflow")
def _dag(here: Here, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its task is a command that runs (issue 27)."""
    tasks = list[str]()

    def bash(**_: object) -> Callable[[Callable[[], str]], Callable[[], None]]:
        return lambda task: lambda: tasks.append(task())

    sdk = SimpleNamespace(dag=lambda **_: lambda f: f, task=SimpleNamespace(bash=bash))
    monkeypatch.setitem(sys.modules, "airflow", SimpleNamespace(sdk=sdk))
    monkeypatch.setitem(sys.modules, "airflow.sdk", sdk)
    here.write("pipeline.yaml", SMALL)
    yield
    exec((here.folder / "strikes_dag.py").read_text(), {})  # noqa: S102 - the manual's own
    (command,) = tasks
    subprocess.run(shlex.split(command), check=True)
    assert (here.folder / "report.json").exists()


@around("how-to/deploy.md#Dagster")
def _asset(here: Here, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It runs the pipeline, and finds its counts in the report (issue 27)."""
    dagster = SimpleNamespace(asset=lambda f: f, MaterializeResult=dict)
    monkeypatch.setitem(sys.modules, "dagster", dagster)
    here.write("pipeline.yaml", SMALL)
    yield
    names: dict[str, Any] = {}
    exec((here.folder / "strikes_asset.py").read_text(), names)  # noqa: S102 - likewise
    assert names["strikes"]() == {"metadata": {"messages": 3, "dead": 0}}


# --- sections with tests of their own ---------------------------------------------------


def test_calls_of_the_sdk() -> None:
    """Each function has such arguments."""
    (fence,) = section("how-to/write-a-worker.md#The functions of the SDK").fences
    calls = [n for n in ast.walk(ast.parse(fence.text)) if isinstance(n, ast.Call)]
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        function = inspect.signature(getattr(worker, call.func.attr))
        named = {str(keyword.arg): keyword.value for keyword in call.keywords}
        function.bind(*call.args, **named)
    assert len(calls) == 9


FIVE_LETTERS: Final = r"""#!/bin/sh
while read -r word; do
    case $word in
    ?????) echo "a word of five letters" >&2; exit 1 ;;
    *) printf '%s\n\000' "$word" ;;
    esac
done
"""


def test_dead_letters(here: Here) -> None:
    """They are listed and shown, tried by hand, and again when all is well (issue 11)."""
    (fence,) = section("how-to/dead-letters.md#Handle dead letters").fences
    _pipeline(here, "letters", "upper", "./upper", FIVE)
    here.write("upper", FIVE_LETTERS)
    run, *looks, by_hand, retry = steps(fence.text)

    def type_in(command: tuple[str, str], *, stderr: bool = False) -> None:
        (seen,) = typed([command], stderr=stderr)
        assert not as_shown(seen, command[1])

    type_in(run)
    (letters,) = (here.folder / ".etlstage/letters/dead_letters").iterdir()
    text = letters.read_text()
    for pattern, instead in {
        r'"run": "\w+': '"run": "af32b1c9',
        r'"id": "\w+': '"id": "af32b1c9',
        r'"time": "[^"]+': '"time": "2026-01-02T12:00:00.000+00:00',
    }.items():
        text = re.sub(pattern, instead, text)
    letters.write_text(text)
    for look in looks:
        type_in(look)
    type_in(by_hand, stderr=True)
    here.write("upper", FIVE_LETTERS.replace("exit 1", "printf '\\000'"))
    type_in(retry)


def test_every_page_has_been_read() -> None:
    """A page without a fence has no section, and any other has one (issue 27)."""
    fenced = {path for path, text in PAGES.items() if "\n```" in text}
    assert len({each.page for each in SECTIONS}) == len(fenced)
