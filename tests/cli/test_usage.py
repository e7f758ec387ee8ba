from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from tests.cli.conftest import Etlstage

LONG: Final = "x" * 300
UNREAD: Final = "LONG.yaml: can't be read: file name too long"
UNREAD_SPEC: Final = "LONG/spec.json: can't be read: file name too long"
SHARD: Final = "shardId-000000000000"
UNSTARTED: Final = (
    "stage worker: can't start worker worker-1: File name too long; command: LONG.yaml"
)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "missing command; see 'etlstage --help'"),
        (["rum"], "no such command 'rum' (did you mean 'run'?); see 'etlstage --help'"),
        (["run"], "missing argument 'FILE'; see 'etlstage run --help'"),
        (["init"], "missing argument 'DIR'; see 'etlstage init --help'"),
        (["run", "--bug", "a"], "no such option: --bug"),
        (["replay", "--grace", "-5", "a"], "invalid value for '--grace': "),
        (["run", "a.yaml"], "a.yaml: no such file"),
        (["run", "."], ".: is a directory, expected a pipeline file"),
    ],
)
def test_wrong_usage(etlstage: Etlstage, arguments: list[str], error: str) -> None:
    """There is one line on stderr, nothing on stdout, and exit code 2."""
    result = etlstage(*arguments, code=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"etlstage: error: {error}")


@pytest.mark.parametrize("seconds", ["inf", "1e400", "nan"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("check", "--timeout"),
        ("fuzz", "--timeout"),
        ("fuzz", "--seconds"),
        ("try", "--timeout"),
        ("replay", "--grace"),
        ("kcl simulate", "--timeout"),
    ],
)
def test_seconds_are_finite(
    etlstage: Etlstage, command: str, option: str, seconds: str
) -> None:
    """No timeout is without end, or not a number (issue 26)."""
    result = etlstage(*command.split(), option, seconds, "--", "cat", code=2)
    assert result.stdout == ""
    assert result.stderr.startswith(f"etlstage: error: invalid value for '{option}': ")
    if seconds != "nan":  # is below the minimum for some versions of the parser
        assert "inf is not a finite number of seconds; see" in result.stderr


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("state show LONG.yaml", 2, UNREAD),
        ("state reset LONG.yaml", 2, UNREAD),
        ("state take-over LONG.yaml", 2, UNREAD),
        ("dlq ls LONG.yaml", 2, UNREAD),
        ("dlq ls LONG.jsonl", 2, "LONG.jsonl: can't be read: file name too long"),
        ("dlq show LONG.yaml 1", 2, UNREAD),
        ("dlq drop LONG.yaml", 2, UNREAD),
        ("dlq retry LONG.yaml", 2, UNREAD),
        ("shards ls LONG", 2, "LONG: there is no file LONG"),
        ("check LONG.yaml", 1, UNSTARTED),
        ("try LONG.yaml", 1, UNSTARTED),
        ("fuzz LONG.yaml", 2, UNSTARTED),
        ("kcl simulate LONG.yaml", 1, UNSTARTED.replace("worker-1", SHARD)),
        ("replay LONG", 2, "LONG: file name too long"),
        ("expect infer LONG", 2, "LONG: file name too long"),
        ("init LONG", 2, "LONG can't be written: file name too long"),
        ("init --worker python LONG", 2, "LONG can't be written: file name too long"),
        ("demo LONG", 2, "LONG can't be written: file name too long"),
        ("journal ls LONG", 2, UNREAD_SPEC),
        ("journal append LONG", 2, UNREAD_SPEC),
    ],
)
def test_name_that_is_too_long(
    etlstage: Etlstage, line: str, code: int, error: str
) -> None:
    """It is refused like any other that does not exist (issue 26)."""
    result = etlstage(*line.replace("LONG", LONG).split())
    assert (result.returncode, result.stdout) == (code, "")
    # An old Hypothesis warns of itself before that.
    *_, shown = result.stderr.splitlines()
    assert shown.replace(LONG, "LONG") == f"etlstage: error: {error}"


@pytest.mark.parametrize(
    ("line", "code", "output"),
    [
        ("state show FILE", 0, "nothing is stored in LONG"),
        ("state reset FILE", 0, "nothing is stored in LONG"),
        ("dlq ls FILE", 0, "no dead letters"),
        (
            "dlq show FILE 1",
            2,
            (
                "etlstage: error: there is no dead letter '1';"
                " see 'etlstage dlq ls pipeline.yaml'"
            ),
        ),
        ("dlq drop FILE", 0, "no dead letters"),
        ("dlq retry FILE", 0, "no dead letters: nothing to retry"),
        (
            "state take-over FILE",
            2,
            "etlstage: error: LONG/lock: can't be read: file name too long",
        ),
    ],
)
@pytest.mark.parametrize("durable", ["", "\n    durable: true"])
def test_state_whose_name_is_too_long(
    etlstage: Etlstage, pipeline: Path, line: str, code: int, output: str, durable: str
) -> None:
    """Nothing is stored there, as in any other that does not exist (issue 26)."""
    text = pipeline.read_text().replace("upper.py]}", f"upper.py]}}{durable}")
    pipeline.write_text(f"{text}state: {LONG}\n")
    result = etlstage(*line.replace("FILE", str(pipeline)).split())
    shown = (result.stdout + result.stderr).replace(f"{pipeline.parent}/", "")
    assert result.returncode == code
    assert shown.replace(LONG, "LONG") == f"{output}\n"


def test_wrong_file(etlstage: Etlstage, tmp_path: Path) -> None:
    """All problems are reported at once, a line each, in the order of the file."""
    (tmp_path / "p.yaml").write_text("nam: x\nextract: {}\n")
    result = etlstage("run", "p.yaml", code=2)
    assert result.stderr.splitlines() == [
        "etlstage: error: p.yaml:1:1: load: required key is missing",
        "etlstage: error: p.yaml:1:1: nam: unknown key (did you mean 'name'?)",
        (
            "etlstage: error: p.yaml:2:1: extract: needs one of the keys spark, worker, files, journal, kinesis"
        ),
    ]


def test_version(etlstage: Etlstage) -> None:
    """It answers without a pipeline."""
    result = etlstage("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("etlstage ")


def test_help(etlstage: Etlstage) -> None:
    """It lists the commands, by group."""
    result = etlstage("--help", code=0)
    for name in ("run", "init", "demo", "--version"):
        assert name in result.stdout
    titles = re.findall(r"^(\w+):$", result.stdout, re.MULTILINE)
    assert titles == ["Options", "Run", "Define", "Test", "Operate", "Manual"]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["fuzz", "--help"], ["--version"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Help is fast: commands are imported only when they are called (issue 26)."""
    code = (
        "import atexit, sys; from etlstage.cli import main;"
        f"sys.argv = ['etlstage', *{arguments}];"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"anyio", "asyncio", "hypothesis", "pyarrow", "rich", "ruamel", "structlog"}
    if arguments[0] == "fuzz":  # finds out what can be tried
        heavy = {"hypothesis", "pyarrow"}
    assert heavy.isdisjoint(done.stderr.split())


@pytest.mark.parametrize("name", ["nowhere/r.json", "pipe", "."])
def test_report_that_cant_be_written(
    etlstage: Etlstage, pipeline: Path, tmp_path: Path, name: str
) -> None:
    """The error comes before the run starts."""
    # Not a device of the machine: where tests run as root, a bug of ours would replace
    # the device.
    os.mkfifo(tmp_path / "pipe")
    result = etlstage("run", pipeline, "--report", name, code=2)
    assert result.stderr.startswith(f"etlstage: error: report {name} ")
    assert not (tmp_path / "loaded.txt").exists()


def test_init(etlstage: Etlstage, tmp_path: Path) -> None:
    """Examples are copied, and are not overwritten a second time."""
    result = etlstage("init", "here")
    assert (result.returncode, result.stderr) == (0, "")
    assert "etlstage run here/demo/pipeline.yaml" in result.stdout
    assert (tmp_path / "here" / "demo" / "pipeline.yaml").is_file()
    again = etlstage("init", "here", code=2)
    assert "exists already and is not overwritten" in again.stderr


WITHOUT_ARROW = """\
import sys
sys.modules["pyarrow"] = None
from etlstage.cli import main
"""


def without_arrow(
    folder: Path, then: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a program, or a command, where Arrow is not installed."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_ARROW + then, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_of_diff_needs_no_arrow(tmp_path: Path) -> None:
    """Only a comparison does, and names the missing extra (issue 27)."""
    pipeline = (
        "name: p\nextract: {worker: {command: [seq, '3']}}\n"
        "load: {worker: {command: [cat]}}\n"
    )
    (tmp_path / "p.yaml").write_text(pipeline)

    diff = partial(without_arrow, tmp_path, "main()", "diff")
    assert "Usage: " in diff("--help").stdout
    failed = diff("p.yaml", "--on", "local,local")
    assert failed.returncode == 2
    assert "diff needs Arrow: pip install 'etlstage[arrow]'" in failed.stderr


CAT: Final = "worker: {command: [cat]}"


@pytest.mark.parametrize(
    ("place", "ends"),
    [
        ("extract.files", f"extract: {{files: {{path: p.yaml}}}}\nload: {{{CAT}}}"),
        ("extract.journal", f"extract: {{journal: {{path: .}}}}\nload: {{{CAT}}}"),
        ("load.journal", f"extract: {{{CAT}}}\nload: {{journal: {{path: set}}}}"),
        (
            "transform[0].durable",
            f"extract: {{{CAT}}}\ntransform: [{{{CAT}, durable: true}}]\nload: {{{CAT}}}",
        ),
    ],
)
def test_what_needs_arrow_is_named(place: str, ends: str, tmp_path: Path) -> None:
    """The error is at its key, before anything runs (issue 27)."""
    (tmp_path / "p.yaml").write_text(f"name: p\nstate: state\n{ends}\n")
    failed = without_arrow(tmp_path, "main()", "run", "p.yaml")
    assert failed.returncode == 2
    assert f"{place}: needs PyArrow: pip install 'etlstage[arrow]'" in failed.stderr


def test_journals_need_arrow(tmp_path: Path) -> None:
    """Importing them names the extra that has it (issue 27)."""
    failed = without_arrow(tmp_path, "import etlstage.journal")
    assert "journals need PyArrow: pip install 'etlstage[arrow]'" in failed.stderr
