"""
``etlstage diff``, with two builders in place of two engines.

The command must find where the builders' pipelines differ.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from etlstage.cli.diff import Build, compare
from etlstage.config.build import pipeline_from_yaml
from etlstage.config.variant import DryRun
from etlstage.errors import ConfigError
from tests.cli.conftest import Etlstage, Started, left_behind
from tests.patience import HANG

NUMBERS = """\
name: numbers
extract: {worker: {command: [seq, "6"]}}
transform:
  - name: times
    worker: {command: [python, times.py]}
    on_error: {retries: 0, budget: 10}
load: {name: end, worker: {command: [touch, loaded]}}
dead_letters: {spark: {path: dead}}
"""
TIMES = """\
import sys
for line in sys.stdin:
    if int(line) == DIES:
        sys.exit(1)
    for output in OUTPUTS:
        sys.stdout.write(f"{output} of {int(line)}\\n")
    sys.stdout.write("\\0")
    sys.stdout.flush()
"""
CYCLES = """\
name: cycles
state: state
extract:
  worker: {command: [python, rounds.py]}
  dialect: {mode: cyclic}
  offsets: {by: supervisor, step: 2, end: 6}
  every: 1h
load: {worker: {command: [touch, loaded]}}
"""
ROUNDS = """\
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    for number in range(request["start"], request["end"]):
        sys.stdout.write(f"{number}\\n")
    sys.stdout.write("\\0")
    sys.stdout.flush()
"""


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """Write a pipeline whose worker returns one message for each."""
    return written(tmp_path)


def written(folder: Path, outputs: str = "'half'", dies: int = 0) -> Path:
    """Write a pipeline, and its worker beside it."""
    folder.mkdir(exist_ok=True)
    text = TIMES.replace("OUTPUTS", f"[{outputs}]").replace("DIES", str(dies))
    (folder / "times.py").write_text(text)
    path = folder / "pipeline.yaml"
    path.write_text(NUMBERS)
    return path


def builder(path: Path) -> Build:
    """Return a function that builds the pipeline of a file."""
    return lambda state, sink: pipeline_from_yaml(
        path, trial=DryRun("local", state, sink)
    )


def compared(first: Path, second: Path, *, ordered: bool = True) -> int:
    """Return the exit code of a comparison of two files."""
    return compare(
        ("local", builder(first)),
        ("spark", builder(second)),
        load_stage="end",
        ordered=ordered,
        debug=False,
    )


said = pytest.CaptureFixture[str]


# --- what differs --------------------------------------------------------------------


def test_runs_that_agree(tmp_path: Path, capsys: said) -> None:
    """One line states how much was compared."""
    first, second = written(tmp_path / "1", dies=2), written(tmp_path / "2", dies=2)

    assert compared(first, second) == 0
    assert capsys.readouterr().out == (
        "local and spark agree: 5 messages in order, ledgers equal, 1 dead letter\n"
    )


def test_message_that_differs(tmp_path: Path, capsys: said) -> None:
    """It is found although all counts are equal."""
    first, second = written(tmp_path / "1"), written(tmp_path / "2", "'HALF'")

    assert compared(first, second) == 1
    assert capsys.readouterr().out == (
        "message 1 differs: local has 'half of 1', spark has 'HALF of 1'\n"
    )


def test_order_of_messages(tmp_path: Path, capsys: said) -> None:
    """A different order is a difference only where order is compared."""
    first = written(tmp_path / "1", "'a', 'b'")
    second = written(tmp_path / "2", "'b', 'a'")

    assert compared(first, second) == 1
    assert capsys.readouterr().out == (
        "the messages are the same, their order is not:"
        " message 1 differs: local has 'a of 1', spark has 'b of 1'\n"
    )
    assert compared(first, second, ordered=False) == 0
    assert capsys.readouterr().out == (
        "local and spark agree: 12 messages in any order, ledgers equal,"
        " 0 dead letters\n"
    )


def test_first_difference_of_each_kind(tmp_path: Path, capsys: said) -> None:
    """Ledgers that differ name the first stage that does."""
    first, second = written(tmp_path / "1", dies=2), written(tmp_path / "2", dies=5)

    assert compared(first, second, ordered=False) == 1
    assert capsys.readouterr().out.splitlines() == [
        "spark lacks a message that local has (place 4): 'half of 5'",
        "spark lacks a dead letter that local has: stage times, '2'",
    ]
    assert compared(first, written(tmp_path / "2"), ordered=False) == 1
    assert capsys.readouterr().out.splitlines() == [
        "stage times: local has 5 done, spark has 6",
        "local lacks a message that spark has (place 2): 'half of 2'",
        "spark lacks a dead letter that local has: stage times, '2'",
    ]


def test_run_that_fails_is_not_compared(tmp_path: Path, capsys: said) -> None:
    """The error names the engine and the reason."""
    first, second = written(tmp_path / "1"), written(tmp_path / "2", dies=2)
    second.write_text(NUMBERS.replace("{retries: 0, budget: 10}", "{then: fail}"))

    assert compared(first, second) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "etlstage: error: stage times: worker times-1" in err
    assert err.endswith("error: not compared: the run on spark failed\n")


def test_pipeline_that_can_not_be_built(tmp_path: Path) -> None:
    """The error comes before the other pipeline runs."""
    first, second = written(tmp_path / "1"), written(tmp_path / "2")
    first.write_text(NUMBERS.replace('[seq, "6"]', "[touch, ran]"))
    second.write_text(NUMBERS.replace("load:", "laod:"))

    with pytest.raises(ConfigError, match="did you mean 'load'"):
        compared(first, second)
    assert not (tmp_path / "1" / "ran").exists()


# --- the command ---------------------------------------------------------------------


def test_nothing_is_loaded_and_nothing_is_left(
    etlstage: Etlstage, numbers: Path, tmp_path: Path
) -> None:
    """Neither output, nor state, nor dead letters, nor temporary files."""
    written(tmp_path, dies=3)
    (tmp_path / "tmp").mkdir()
    before = set(tmp_path.rglob("*"))

    done = etlstage(
        "diff", numbers, "--on", "local,local", env={"TMPDIR": str(tmp_path / "tmp")}
    )

    assert done.returncode == 0
    assert done.stdout == (
        "local and local again agree: 5 messages in order, ledgers equal,"
        " 1 dead letter\n"
    )
    assert set(tmp_path.rglob("*")) == before


def test_worker_of_another_mind_each_time(
    etlstage: Etlstage, numbers: Path, tmp_path: Path
) -> None:
    """Naming one engine twice shows whether a pipeline can be compared at all."""
    (tmp_path / "times.py").write_text(
        TIMES.replace("OUTPUTS", "[__import__('os').getpid()]").replace("DIES", "0")
    )

    done = etlstage("diff", numbers, "--on", "local,local", code=1)

    assert done.stdout.startswith("message 1 differs: local has '")


def test_order_is_not_compared_where_none_is_promised(
    etlstage: Etlstage, numbers: Path
) -> None:
    """One stage without order is enough; ``--set`` applies to both runs (issue 11)."""
    changed = "--set", "transform[0].order=none", "--set", "extract.worker.command[1]=7"

    done = etlstage("diff", numbers, "--on", "local,local", *changed)

    assert (done.returncode, done.stderr) == (0, "")
    assert "7 messages in any order" in done.stdout


@pytest.mark.parametrize(
    ("engines", "error"),
    [
        ("local", "--on needs two engines, as in A,B, got 1: 'local'"),
        ("a,b,c", "--on needs two engines, as in A,B, got 3: 'a,b,c'"),
        ("local,locale", "--on: unknown engine 'locale' (did you mean 'local'?)"),
        (
            "local,streaming",
            "--on: unknown engine 'streaming', expected 'local' or 'spark'",
        ),
    ],
)
def test_engines_that_are_none(
    etlstage: Etlstage, numbers: Path, engines: str, error: str
) -> None:
    """The error names the option, and nothing runs."""
    done = etlstage("diff", numbers, "--on", engines)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"etlstage: error: {error}\n"


def test_engine_that_the_extract_stage_is_not_for(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """The error has the remedy where another end can replace it (issue 23)."""
    (tmp_path / "in.txt").write_text("a\n")
    (tmp_path / "p.yaml").write_text(
        "name: p\nextract: {files: {path: in.txt, format: text}}\n"
        "load: {files: {path: out, format: text}}\n"
    )
    result = etlstage("diff", "p.yaml", code=2)
    assert result.stderr == (
        "etlstage: error: --on: p.yaml:2:10: the end files is not for engine spark:"
        " compare ends, as in --on files,spark\n"
    )


def test_file_that_is_wrong(etlstage: Etlstage, numbers: Path) -> None:
    """It is reported as by every command."""
    numbers.write_text(NUMBERS.replace("load:", "laod:"))

    done = etlstage("diff", numbers, "--on", "local,local", code=2)

    assert "unknown key (did you mean 'load'?)" in done.stderr


def test_cyclic_extraction_begins_anew_and_ends(
    etlstage: Etlstage, tmp_path: Path
) -> None:
    """Neither run reads or moves the stored offset; ``every`` is ignored."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(CYCLES)
    (tmp_path / "rounds.py").write_text(ROUNDS)
    stored = tmp_path / "state" / "record.1.json"
    stored.parent.mkdir()
    stored.write_text('{"position": 4}')

    done = etlstage("diff", path, "--on", "local,local")

    assert (done.returncode, done.stderr) == (0, "")
    assert "agree: 6 messages in order" in done.stdout
    assert stored.read_text() == '{"position": 4}'
    assert list(stored.parent.iterdir()) == [stored]


def test_signal_ends_it_without_a_comparison(
    start: Started, numbers: Path, tmp_path: Path
) -> None:
    """A drained run is incomplete, so it can't be compared."""
    numbers.write_text(
        NUMBERS.replace(
            '[seq, "6"]', "[sh, -c, 'echo here >&2; while echo 1; do sleep 0.01; done']"
        )
    )
    process = start("diff", numbers, "--on", "local,local")
    assert process.stderr is not None
    assert "here" in process.stderr.readline()

    process.send_signal(signal.SIGINT)

    out, err = process.communicate(timeout=HANG)
    assert (process.returncode, out) == (4, "")
    assert err.endswith(
        "error: not compared: the run on local was drained after a signal\n"
    )
    assert left_behind(tmp_path) == []
