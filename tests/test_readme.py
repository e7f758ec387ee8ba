"""The manual's programs do what they are shown to do, as they stand there."""

from __future__ import annotations

import ast
import inspect
import json
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
import jsonschema
import pytest
from ruamel.yaml import YAML

from etlstage import AsyncSupervisor, Pipeline, ReplyContract, Stage, worker
from etlstage.cli.init import copy_examples
from etlstage.config.loader import load
from etlstage.config.schema import pipeline_schema
from tests.examples.languages import ANY_MARKERS
from tests.readme import runs, steps, typed

UPPER: Final = """
import sys
from etlstage import worker
worker.transform(lambda message: [message.upper()])
"""

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


def run(program: str, **names: Any) -> dict[str, Any]:  # noqa: ANN401 - any it may use
    """Run a program that may wait at its top level; return its names."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(program, "manual", "exec", flags, dont_inherit=True)
    known = {"__name__": "readme", **names}

    async def main() -> None:
        await eval(code, known)  # noqa: S307 - the manual's own

    if code.co_flags & CO_COROUTINE:
        anyio.run(main)
    else:
        exec(code, known)  # noqa: S102 - likewise
    return known


FIVE_LETTERS: Final = r"""#!/bin/sh
while read -r word; do
    case $word in
    ?????) echo "a word of five letters" >&2; exit 1 ;;
    *) printf '%s\n\000' "$word" ;;
    esac
done
"""
TWICE: Final = r"""#!/bin/sh
while read -r word; do
    word=$(printf '%s' "$word" | tr a-z A-Z)
    [ "$word" = B ] && echo "$word"
    printf '%s\n\000' "$word"
done
"""


def pipeline(name: str, stage: str, command: str) -> str:
    """Return a file with workers at both ends."""
    return f"""\
name: {name}
extract: {{worker: {{command: [printf, '%s\\n', one, two, three, four, five]}}}}
transform:
  - {{name: {stage}, worker: {{command: [{command}]}}}}
load: {{worker: {{command: [sh, -c, 'while read -r word; do printf "\\0"; done']}}}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a folder with a worker, and the python that runs this first on the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    (tmp_path / "clean.py").write_text(UPPER)
    return tmp_path


@runs("etlstage 2")
def test_first_worker(blocks: list[str]) -> None:
    """It answers each message in capitals."""
    answers_in_capitals(blocks[0])


@runs("Define a pipeline and run it 1")
def test_start_of_a_pipeline(blocks: list[str]) -> None:
    """Without Spark (issue 27)."""
    typed(steps(*blocks))


@runs("Embed a stage in a service 1", "etlstage 2")
def test_supervisor_of_the_first_page(blocks: list[str], folder: Path) -> None:
    """With its worker (issue 27)."""
    program, shout = blocks
    written(folder, "shout.py", shout)
    assert run(program)["outputs"] == (b"ONE",)


@runs("Test a worker, in whatever language 1", "etlstage 2")
def test_worker_of_the_first_page(blocks: list[str], folder: Path) -> None:
    """As it is checked there (issue 27)."""
    dialogue, shout = blocks
    written(folder, "shout.py", shout)
    typed(steps(dialogue))


def answers_in_capitals(program: str) -> None:
    """Run a worker."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=b"one\ntwo\n",
        capture_output=True,
        check=True,
    )
    assert ended.stdout == b"ONE\n\0TWO\n\0"


@runs("The functions of the SDK 1")
def test_calls_of_the_sdk(blocks: list[str]) -> None:
    """Each function has such arguments."""
    tree = ast.parse(*blocks)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        function = inspect.signature(getattr(worker, call.func.attr))
        named = {str(keyword.arg): keyword.value for keyword in call.keywords}
        function.bind(*call.args, **named)
    assert len(calls) == 9


@runs("Send messages 1")
def test_supervisor(blocks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """All ways to pass messages."""
    known = run(*blocks, messages=[b"three"])
    assert capsys.readouterr().out == "b'one' (b'ONE',) None\nb'two' (b'TWO',) None\n"
    assert known["result"].outputs == (b"THREE",)
    assert known["outputs"] == (b"ONE",)
    assert known["replies"][-1:] == [(b"FOUR",)]


@runs("Use journals 1")
def test_journals(
    blocks: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A reader with a name goes on where it stood."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run(*blocks)
        assert capsys.readouterr().out == "7 12\n"


@runs("Keep a session open 1")
def test_session(
    blocks: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker is the one that ``etlstage init`` writes (issue 15)."""
    (folder / "worker.py").unlink(missing_ok=True)
    copy_examples(folder, "cocaine")
    run(*blocks)
    assert capsys.readouterr().out == "b'1'\n"


@runs("Write a model of it 1")
def test_model(blocks: list[str]) -> None:
    """It is a function as the SDK takes it (issue 12)."""
    clean = run(*blocks)["clean"]
    assert worker.run(clean, [b" a b\t", b" "]) == [[b"a b"], worker.Refuse("no name")]


@runs("Call the function 1", "etlstage 2")
def test_function_in_this_process(
    blocks: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module of the first page can be imported (issue 12)."""
    program, shout = blocks
    (folder / "shout.py").write_text(shout)
    monkeypatch.syspath_prepend(folder)
    run(program)
    del sys.modules["shout"]


AUTO: Final = ("-o", "asyncio_mode=auto", "-p", "no:anyio")


@runs("Run the program, by fixtures of pytest 1")
def test_fixtures(blocks: list[str], folder: Path) -> None:
    """In a pytest of its own, as it is copied, or without the mark (issues 12, 26)."""
    unmarked = re.sub("^pytestmark.*", "", blocks[0], flags=re.MULTILINE)
    assert unmarked != blocks[0]
    pass_in_pytest(unmarked, folder, 3, *AUTO)
    # Without pytest-asyncio, and without a word of configuration.
    pass_in_pytest(blocks[0], folder, 5, "-p", "no:asyncio", "-c", os.devnull)


@pytest.mark.slow  # a hundred processes and more, one after the other
@pytest.mark.timeout(120)
@runs("State properties, with Hypothesis 1")
def test_properties(blocks: list[str], folder: Path) -> None:
    """Likewise."""
    pass_in_pytest(blocks[0], folder, 2, *AUTO)


def pass_in_pytest(program: str, folder: Path, count: int, *mode: str) -> None:
    """Run tests."""
    (folder / "test_clean.py").write_text(program)
    # By its module, so that this is about this tree, whatever is installed.
    plugin = ("-p", "no:etlstage", "-p", "etlstage.testing.plugin")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *mode, folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{count} passed" in ended.stdout, ended.stdout


@runs("Configure the stage 1")
def test_markers_and_batches(blocks: list[str], folder: Path) -> None:
    """The worker reads its markers from its environment."""
    (folder / "count.py").write_text(
        "from etlstage import worker\n"
        "worker.transform_batch(lambda batch: [b'%d' % len(list(batch))])\n"
    )

    async def pass_through(stage: Stage) -> tuple[bytes, ...]:
        async with AsyncSupervisor(stage) as supervisor:
            results = await supervisor.submit([b"a\n", b"b", b"c"])
            return tuple(output for result in results for output in result.outputs)

    stage = run(*blocks, Stage=Stage)["stage"]
    assert anyio.run(pass_through, stage) == (b"3",)


@runs("Observe it 1")
def test_meter(blocks: list[str]) -> None:
    """Its text is Prometheus's."""
    stage = Stage(name="clean", worker=(sys.executable, "clean.py"))
    text = run(*blocks, AsyncSupervisor=AsyncSupervisor, stage=stage)["text"]
    assert 'worker_starts_total{stage="clean",worker="clean-1"} 1.0' in text


@runs("Test what embeds a supervisor 1", "Test what embeds a supervisor 2")
def test_hostile_worker_and_ends_in_memory(blocks: list[str]) -> None:
    """A worker that may misbehave, and here does not, behind a stage of its own."""
    hostile, memory = blocks
    stage = run(hostile, Stage=Stage)["stage"]
    assert stage.program.command[0] == sys.executable

    clean = Stage(name="clean", worker=(sys.executable, "clean.py"))
    report = run(memory, Pipeline=Pipeline, stage=clean)["report"]
    assert report.status == "done"


@runs("Inject faults 3")
def test_faults_from_outside(blocks: list[str]) -> None:
    """A worker that knows none is killed with a message, which is answered then."""
    stage = Stage(name="clean", worker=(sys.executable, "clean.py"))
    known = run(*blocks, AsyncSupervisor=AsyncSupervisor, stage=stage)
    assert [result.error for result in known["results"]] == [None] * 8


@runs("Test what embeds a supervisor 3")
def test_scripted_worker(blocks: list[str]) -> None:
    """It dies with its message, and needs a minute for it: at once."""
    stage = Stage(name="clean", worker=("clean",))
    run(*blocks, AsyncSupervisor=AsyncSupervisor, stage=stage, anyio=anyio)


@runs("Simulate a pipeline 1")
def test_simulation(blocks: list[str]) -> None:
    """Of one's own stages (issue 12)."""
    run(*blocks)["test_stages_come_through"]()


@runs("Try a few messages 1", "Try a few messages 2")
def test_trial(blocks: list[str], folder: Path) -> None:
    """Of the first worker in the shell, and of one that is none (issue 12)."""
    start = files("etlstage.examples") / "start"
    shutil.copy(str(start / "worker.sh"), folder)
    (folder / "worker.sh").chmod(0o700)  # as init does
    typed(steps(*blocks))


@runs("Filter in the shell 1")
def test_filter(blocks: list[str], folder: Path) -> None:
    """The first worker in the shell refuses the empty line."""
    start = files("etlstage.examples") / "start"
    shutil.copy(str(start / "worker.sh"), folder)
    (folder / "worker.sh").chmod(0o700)  # as init does
    typed(steps(*blocks))


@runs("A worker on a socket 1", "A worker on a socket 2")
def test_trial_of_a_worker_that_connects(blocks: list[str], folder: Path) -> None:
    """Frames are shown by name (issue 15)."""
    program, dialogue = blocks
    written(folder, "shout.py", program)
    typed(steps(dialogue))


def written(folder: Path, name: str, text: str) -> None:
    """Write a file, which may be a program."""
    (folder / name).write_text(text)
    (folder / name).chmod(0o700)


@runs("Check it 1", "Check it 2", "Fuzz it 1")
def test_worker_that_forgets_to_answer(blocks: list[str], folder: Path) -> None:
    """It is found by both (issue 11)."""
    program, *dialogues = blocks
    written(folder, "names.sh", program)
    typed(steps(*dialogues))


@runs("Fuzz it 2")
def test_search_that_finds_nothing(blocks: list[str], folder: Path) -> None:
    """It says what was asked; of numbers there are others (issue 27)."""
    start = files("etlstage.examples") / "start"
    shutil.copy(str(start / "worker.sh"), folder)
    asked = "etlstage fuzz --stateless --max-examples 20 --seed 1 -- sh worker.sh"
    ended = subprocess.run(asked.split(), capture_output=True, text=True, check=True)
    said, shown = (re.sub(r"\d[\d,]*", "#", text) for text in (ended.stdout, *blocks))
    assert said == shown


@pytest.mark.slow  # it is tried in many ways
@pytest.mark.timeout(120)
@runs(*(f"Two more workers with a bug {number}" for number in (1, 2)))
def test_worker_that_remembers(blocks: list[str], folder: Path) -> None:
    """What is found is what there is (issue 12)."""
    program, dialogue = blocks
    written(folder, "unique.py", program)
    typed(steps(dialogue))


@pytest.mark.slow  # it is tried in many ways
@pytest.mark.timeout(120)
@runs(
    *(f"Two more workers with a bug {number}" for number in (3, 4)), "Read a failure 1"
)
def test_worker_that_takes_parts_for_lines(
    blocks: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise, and here is how that is told (issue 12)."""
    program, dialogue, told = blocks
    written(folder, "shout.mjs", program)
    node = Path(ANY_MARKERS[-1].interpreter[0])  # it may have come as a wheel
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{node.parent}")
    found = ("etlstage check -- node shout.mjs | grep -A 5 'cuts at every'", told)
    typed([*steps(dialogue), found])


@runs(
    "The pipeline file 1",
    "Scale out: Spark's executors and streams 1",
    "Load exactly once 1",
    "Read and write files without Spark 1",
    "Load into a database 1",
    "Several runners 1",
)
def test_files_are_loaded(blocks: list[str], folder: Path) -> None:
    """Without an error (issue 11)."""
    (folder / "password.txt").write_text("secret")
    for block in blocks:
        (folder / "pipeline.yaml").write_text(block)
        load(folder / "pipeline.yaml")


@runs("Replies that are not as expected 1")
def test_expected_replies(blocks: list[str], folder: Path) -> None:
    """They are read as they are written (issue 26)."""
    ends = "name: p\nextract: {worker: [seq, 3]}\nload: {worker: [cat]}\n"
    (folder / "pipeline.yaml").write_text(f"{ends}{blocks[0]}")
    stage = load(folder / "pipeline.yaml")[0].transform[0].stage
    assert stage is not None
    assert stage.expect == ReplyContract(outputs=1, json=True)


@runs("etlstage 3", "Errors 1")
def test_wrong_file(blocks: list[str], folder: Path) -> None:
    """The first page's, with two typing errors (issue 11)."""
    text, dialogue = blocks
    for right, wrong in ("workers", "wokers"), ("overwrite", "overwright"):
        text = text.replace(right, wrong)
    (folder / "pipeline.yaml").write_text(text)
    (folder / "shout.py").touch()
    (folder / "names.txt").touch()
    typed(steps(dialogue), stderr=True)


@runs("Journals between pipelines 1", "Journals between pipelines 2")
def test_journals_between_pipelines(blocks: list[str], folder: Path) -> None:
    """What one appends the other reads, once; the next run has nothing new."""
    written(folder, "translate.yaml", blocks[0])
    written(folder, "bill.yaml", blocks[1])
    written(
        folder,
        "fetch.py",
        "from etlstage import worker\n"
        "def some(start, end):\n"
        "    for n in range(start, end):\n"
        '        yield b\'{"customer": %d, "n": %d}\' % (n % 9, n)\n'
        "worker.extract_cycle(some, offsets='supervisor')\n",
    )
    written(folder, "dear.py", UPPER.replace("message.upper()", "message"))
    written(
        folder,
        "bill.py",
        "from etlstage import worker\n"
        "billed = open('billed', 'ab')\n"
        "worker.load(lambda m: billed.write(m + b'\\n') and None)\n",
    )
    for name, said in (
        ("translate", "1,000 messages appended to journals in"),
        ("bill", "1,000 messages loaded"),
        ("bill", "0 messages loaded"),
    ):
        command = ["etlstage", "run", f"{name}.yaml"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert said in ended.stdout, ended.stderr
    found = [json.loads(line) for line in (folder / "billed").read_text().splitlines()]
    assert sorted(m["n"] for m in found) == [*range(1000)]
    for customer in range(9):
        of = [m["n"] for m in found if m["customer"] == customer]
        assert of == sorted(of)


@runs("Run Cocaine workers 1")
def test_cocaine(blocks: list[str], folder: Path) -> None:
    """It shows all keys with what holds without them (issue 15)."""
    ends = pipeline("c", "u", "./u").replace("transform:\n", "").splitlines()
    lines = [line for line in ends if "name: u" not in line]
    (folder / "pipeline.yaml").write_text("\n".join([*lines, *blocks]))
    model, _ = load(folder / "pipeline.yaml")
    (keys,) = model.transform
    dialect = type(keys.dialect)
    assert keys.dialect == dialect()
    data = YAML(typ="safe", pure=True).load(folder / "pipeline.yaml")
    written = data["transform"][0]["dialect"].keys()
    assert written >= dialect.section(keys.kind).keys.keys() - {"driver"}
    jsonschema.Draft202012Validator(pipeline_schema()).validate(data)


@runs(
    "Run a Kinesis record processor 1",
    "Simulate a daemon 1",
    "Load with a processor 1",
    "Load with a processor 2",
)
def test_record_processor(blocks: list[str], folder: Path) -> None:
    """It runs, and the file shows all keys with what holds without them (issue 25)."""
    processor, simulation, file, dialogue = blocks
    (folder / "processor.py").write_text(processor)
    typed(steps(simulation))
    (folder / "clicks.yaml").write_text(file)
    typed(steps(dialogue))
    model, _ = load(folder / "clicks.yaml")
    dialect = type(model.load.dialect)
    assert model.load.dialect == dialect()
    data = YAML(typ="safe", pure=True).load(folder / "clicks.yaml")
    assert data["load"]["dialect"].keys() == {
        "name",
        *dialect.section(model.load.kind).keys,
    }
    jsonschema.Draft202012Validator(pipeline_schema()).validate(data)


@runs("Handle dead letters 1")
def test_dead_letters(blocks: list[str], folder: Path) -> None:
    """They are listed and shown, tried by hand, and again when all is well (issue 11)."""
    written(folder, "upper", FIVE_LETTERS)
    written(folder, "pipeline.yaml", pipeline("letters", "upper", "./upper"))
    run, *looks, by_hand, retry = steps(*blocks)
    typed([run])
    (letters,) = (folder / ".etlstage/letters/dead_letters").iterdir()
    names = {r'"run": "\w+': '"run": "af32b1c9', r'"id": "\w+': '"id": "af32b1c9'}
    times = {r'"time": "[^"]+': '"time": "2026-01-02T12:00:00.000+00:00'}
    text = letters.read_text()
    for pattern, instead in (names | times).items():
        text = re.sub(pattern, instead, text)
    letters.write_text(text)
    typed(looks)
    typed([by_hand], stderr=True)
    written(folder, "upper", FIVE_LETTERS.replace("exit 1", "printf '\\000'"))
    typed([retry])


@runs("Run and observe a pipeline 1")
def test_looks_before_a_run(blocks: list[str], folder: Path) -> None:
    """They load nothing (issue 27)."""
    text = pipeline("papers", "clean", "python, clean.py")
    written(folder, "clean.py", UPPER.replace("message.upper()", "message"))
    written(folder, "pipeline.yaml", text)
    typed(steps(*blocks))


@runs("Record and replay 1")
def test_replay(blocks: list[str], folder: Path) -> None:
    """Of a recorded run (issue 11)."""
    text = pipeline("names", "clean", "python, clean.py")
    text = text.replace("one, two, three, four, five", "a, b, c")
    written(folder, "pipeline.yaml", text)
    written(folder, "clean-v2", TWICE)
    typed([("etlstage run pipeline.yaml --record recordings", "..."), *steps(*blocks)])


@runs("Inject faults 1", "Inject faults 2")
def test_faults_in_a_file(blocks: list[str], folder: Path) -> None:
    """They happen in a run (issue 11)."""
    faults, dialogue = blocks
    text = pipeline("names", "clean", "python, clean.py").replace("one,", "one, " * 11)
    written(folder, "pipeline.yaml", text + faults)
    typed(steps(dialogue))
