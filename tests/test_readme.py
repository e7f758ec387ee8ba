"""README's programs do what they are shown to do, as they stand there."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from inspect import CO_COROUTINE
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from etlstage import AsyncSupervisor, Pipeline, Stage, worker
from tests.examples.languages import ANY_MARKERS

README: Final = (Path(__file__).parents[1] / "README.md").read_text()
PROGRAMS: Final = dict(
    zip(
        (
            *("shout", "plain", "sdk", "supervisor", "meter", "transform", "ship"),
            *("data source", "model", "unique", "run", "fixtures", "properties"),
            *("faulty", "hostile", "memory", "scripted", "simulate"),
        ),
        re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL),
        strict=True,  # whoever adds one tries it here
    )
)
UPPER: Final = """
import sys
from etlstage import worker
worker.transform(lambda message: [message.upper()])
"""

pytestmark = pytest.mark.process


def run(name: str, **names: Any) -> dict[str, Any]:  # noqa: ANN401 - any it may use
    """Run a program that may wait at its top level; return its names."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(PROGRAMS[name], f"README, {name}", "exec", flags, dont_inherit=True)
    known = {"__name__": "readme", **names}

    async def main() -> None:
        await eval(code, known)  # noqa: S307 - README's own

    if code.co_flags & CO_COROUTINE:
        anyio.run(main)
    else:
        exec(code, known)  # noqa: S102 - likewise
    return known


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a folder with a worker, and the python that runs this first on the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    (tmp_path / "clean.py").write_text(UPPER)
    return tmp_path


@pytest.mark.parametrize("name", ["shout", "plain"])
def test_worker(name: str) -> None:
    """It answers each message in capitals."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAMS[name]],
        input=b"one\ntwo\n",
        capture_output=True,
        check=True,
    )
    assert ended.stdout == b"ONE\n\0TWO\n\0"


def test_calls_of_the_sdk() -> None:
    """Each function has such arguments."""
    tree = ast.parse(PROGRAMS["sdk"])
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        function = inspect.signature(getattr(worker, call.func.attr))
        named = {str(keyword.arg): keyword.value for keyword in call.keywords}
        function.bind(*call.args, **named)
    assert len(calls) == 9


def test_supervisor(capsys: pytest.CaptureFixture[str]) -> None:
    """All three ways to pass messages."""
    known = run("supervisor", messages=[b"three"])
    assert capsys.readouterr().out == "b'one' (b'ONE',) None\nb'two' (b'TWO',) None\n"
    assert known["result"].outputs == (b"THREE",)
    assert known["outputs"] == (b"ONE",)


def test_model() -> None:
    """It is a function as the SDK takes it (issue 12)."""
    clean = run("model")["clean"]
    assert worker.run(clean, [b" a b\t", b" "]) == [[b"a b"], worker.Refuse("no name")]


def test_function_in_this_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module of the first page can be imported (issue 12)."""
    (folder / "shout.py").write_text(PROGRAMS["shout"])
    monkeypatch.syspath_prepend(folder)
    run("run")
    del sys.modules["shout"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("fixtures", 3),
        # A hundred processes and more, one after the other.
        pytest.param("properties", 2, marks=pytest.mark.slow),
    ],
)
def test_tests(folder: Path, name: str, count: int) -> None:
    """In a pytest of its own (issue 12)."""
    (folder / "test_clean.py").write_text(PROGRAMS[name])
    mode = ("-o", "asyncio_mode=auto", "-p", "no:anyio")
    # By its module, so that this is about this tree, whatever is installed.
    plugin = ("-p", "no:etlstage", "-p", "etlstage.testing.plugin")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *mode, folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{count} passed" in ended.stdout, ended.stdout


def test_meter() -> None:
    """Its text is Prometheus's."""
    stage = Stage(name="clean", command=(sys.executable, "clean.py"))
    text = run("meter", AsyncSupervisor=AsyncSupervisor, stage=stage)["text"]
    assert 'worker_starts_total{stage="clean",worker="clean-1"} 1.0' in text


def test_hostile_worker_and_ends_in_memory() -> None:
    """A worker that may misbehave, and here does not, behind a stage of its own."""
    stage = run("hostile", Stage=Stage)["stage"]
    assert stage.command[0] == sys.executable

    clean = Stage(name="clean", command=(sys.executable, "clean.py"))
    report = run("memory", Pipeline=Pipeline, stage=clean)["report"]
    assert report.status == "done"


def test_faults_from_outside() -> None:
    """A worker that knows none is killed with a message, which is answered then."""
    stage = Stage(name="clean", command=(sys.executable, "clean.py"))
    known = run("faulty", AsyncSupervisor=AsyncSupervisor, stage=stage)
    assert [result.error for result in known["results"]] == [None] * 8


def test_scripted_worker() -> None:
    """It dies with its message, and needs a minute for it: at once."""
    stage = Stage(name="clean", command=("clean",))
    run("scripted", AsyncSupervisor=AsyncSupervisor, stage=stage, anyio=anyio)


def dialogue(heading: str, count: int) -> list[tuple[str, str]]:
    """Return what is typed below a heading, in the first blocks, and what is shown."""
    below = README.split(f"\n{heading}\n", 1)[1]
    blocks = re.findall(r"```console\n(.*?)```", below, flags=re.DOTALL)[:count]
    steps = [re.split(r"^\$ ", block, flags=re.MULTILINE)[1:] for block in blocks]
    return [tuple(step.split("\n", 1)) for block in steps for step in block]


def typed(steps: list[tuple[str, str]]) -> None:
    """Type it, and see the same but for times."""
    mark = "-- step --"
    script = "\n".join(f"echo '{mark}'; {command}" for command, _ in steps)
    ended = subprocess.run(
        ["/bin/sh", "-c", script], capture_output=True, text=True, check=False
    )
    seen = ended.stdout.replace(os.getcwd(), "/home/me").split(f"{mark}\n")[1:]
    for (command, shown), said in zip(steps, seen, strict=True):
        assert timeless(said) == timeless(shown), f"{command}\n{ended.stderr}"


def timeless(text: str) -> list[str]:
    """Return the lines without times, and without the room that they take."""
    time = re.compile(r" *\(?\d+\.\d+(?= s|$|  std)")
    return [time.sub(" #", line) for line in text.splitlines()]


def test_from_nothing_to_a_pipeline() -> None:
    """Up to the run, which needs Spark (issue 11)."""
    *steps, (last, _) = dialogue("## From nothing to a pipeline", 3)
    assert last == "etlstage run names/pipeline.yaml"
    typed(steps)


def test_simulation() -> None:
    """Of one's own stages (issue 12)."""
    run("simulate")["test_stages_come_through"]()


def test_trial(folder: Path) -> None:
    """Of the first worker in the shell, and of one that is none (issue 12)."""
    start = files("etlstage.examples") / "start"
    shutil.copy(str(start / "worker.sh"), folder)
    (folder / "worker.sh").chmod(0o700)  # as init does
    typed(dialogue("### Try it", 2))


@pytest.mark.slow  # a worker that does not answer is waited for
@pytest.mark.timeout(120)
def test_workers_with_a_bug(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is what there is (issue 12)."""
    heading = "### Three workers with a bug"
    below = README.split(f"\n{heading}\n", 1)[1].split("\n### ", 1)[0]
    for program in re.findall(r"```(?:python|sh|js)\n(.*?)```", below, flags=re.DOTALL):
        (name,) = re.findall(r"^(?:#|//) (\w+\.\w+)$", program, flags=re.MULTILINE)
        (folder / name).write_text(program)
        (folder / name).chmod(0o700)
    node = Path(ANY_MARKERS[-1].interpreter[0])  # it may have come as a wheel
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{node.parent}")
    typed(dialogue(heading, below.count("```console")))
