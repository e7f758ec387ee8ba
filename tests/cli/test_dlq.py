from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest

from etlstage.cli.dlq import list_letters, show_letter
from etlstage.cli.screen import Screen
from etlstage.errors import Attempt, WorkerLost
from etlstage.pipeline import DeadLetters
from etlstage.pipeline.dead_letter.policy import config_of
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    ErrorBudget,
    ErrorPolicy,
    PoolPolicy,
    Stage,
    Timeouts,
    WorkerProgram,
)
from tests.cli.conftest import Etlstage
from tests.cli.forked import Forks, environment
from tests.cli.terminal import on_terminal
from tests.cli.test_screen import Terminal

DIED = "stage upper: worker upper-2 (pid 12) "
NOON = datetime(2026, 1, 2, 12, 0, 0, 0, UTC)
SECOND = timedelta(seconds=1)
ESCAPES = "bad \x1b[31mred\x07\x1b]0;title\x07\x9b1m\r\nsecond line"
TRAP = """\
import sys
from dataclasses import replace
for line in sys.stdin.buffer:
    if b"b" in line:
        sys.exit("no b, please")
    sys.stdout.buffer.write(line.upper() + b"\\0")
    sys.stdout.flush()
"""


class Kept(NamedTuple):
    """A message that is dead-lettered."""

    stage: str
    message: bytes
    error: Exception
    config: Mapping[str, Any] = {}
    when: datetime = NOON
    place: int = 0


async def keep(state: Path, *rows: Kept, run: str = "r", pipeline: str = "p") -> None:
    """Dead-letter messages of one run."""
    letters = DeadLetters(state, pipeline=pipeline, run=run)
    for row in rows:
        letter = letters.letter(
            row.stage,
            row.place,
            row.message,
            row.error,
            config=row.config,
            time=row.when.isoformat(timespec="milliseconds"),
        )
        await letters.keep([letter])
    letters.close()


@pytest.fixture
def state(tmp_path: Path, pipeline: Path) -> Path:
    """Dead-letter some messages of the pipeline; return the state directory."""
    folder = tmp_path / ".etlstage" / "letters"
    error = WorkerLost(ESCAPES, stage="upper")
    error.attempts = (
        Attempt("upper-1", 11, "exited\x1b[2J", ("started\x07",), ("oh\x1b[1m no",)),
        Attempt("upper-2", 12, "killed", ("killed\x07",), ("bye",)),
    )
    rows = [
        ("abc", "upper", b"hello\tthere\nyou", error),
        ("abd", "upper", b"\x1b[31m\0\xff" * 9, error),
        ("abd", "other one", b"x" * 5000, ValueError(f"{DIED}fell; it\nsaid; so")),
        ("zzz", "upper", b"\xc3\xa9" * 2049, ValueError("")),
    ]

    async def put() -> None:
        for run, stage, message, why in rows:
            config: dict[str, Any] = {
                "name": stage,
                "worker": {"command": ["a", "\x1b[1m"], "env": ["TOKEN"]},
            }
            kept = Kept(stage, message, why, config, place=41)
            await keep(folder, kept, run=run, pipeline="letters")

    anyio.run(put)
    return folder


Raw = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def raw(tmp_path: Path, forks: Forks) -> Raw:
    """Run the command line; keep its output as bytes."""

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [forks.program, *arguments],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            check=False,
        )

    return run


@pytest.mark.usefixtures("state")
def test_list(etlstage: Etlstage) -> None:
    """Each letter has a line, with its error's first line; the last line is a count."""
    result = etlstage("dlq", "ls", "pipeline.yaml")
    assert (result.returncode, result.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines == [
        "id time (UTC) stage error",
        "abd-1 2026-01-02 12:00:00 other one fell",
        r"abc-1 2026-01-02 12:00:00 upper bad red\x07\x9b1m",
        r"abd-1 2026-01-02 12:00:00 upper bad red\x07\x9b1m",
        "zzz-1 2026-01-02 12:00:00 upper ValueError",
        "4 dead letters",
    ]


@pytest.mark.parametrize(
    "place",
    [
        "pipeline.yaml",
        ".etlstage/letters",
        ".etlstage/letters/dead_letters",
        ".etlstage/letters/dead_letters/upper.jsonl",
    ],
)
@pytest.mark.usefixtures("state")
def test_places_to_look_at(etlstage: Etlstage, place: str) -> None:
    """The pipeline, its state, or a part of that; ``--stage`` selects one stage."""
    result = etlstage("dlq", "ls", place, "--stage", "upper")
    assert result.stdout.splitlines()[-1] == "3 dead letters of stage upper"


@pytest.mark.parametrize("command", ["dlq drop", "state reset", "state take-over"])
@pytest.mark.usefixtures("state")
def test_exported_letters_are_not_changed(
    etlstage: Etlstage, tmp_path: Path, command: str
) -> None:
    """They can be looked at; the folder around them is no state (issue 26)."""
    (tmp_path / "sub").mkdir()
    place = "sub/letters.jsonl"
    assert etlstage("dlq", "export", "pipeline.yaml", "--to", place).returncode == 0
    before = sorted(tmp_path.iterdir())
    refused = etlstage(*command.split(), place, "--yes")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        f"etlstage: error: {place}: is an exported copy, as it is not in the folder"
        " dead_letters of a state directory: give the pipeline file, or its state"
        " directory\n"
    )
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("state")
def test_pipeline_that_is_changed(etlstage: Etlstage, pipeline: Path) -> None:
    """``--overlay`` and ``--set`` apply as in the run (issue 11)."""
    (pipeline.parent / "prod.yaml").write_text("name: others")
    found = "--overlay", "prod.yaml", "--set", "state=.etlstage/letters"
    for changes, last in ((found[:2], "no dead letters"), (found, "4 dead letters")):
        result = etlstage("dlq", "ls", "pipeline.yaml", *changes)
        assert result.stdout.splitlines()[-1] == last
    shown = etlstage("dlq", "show", "pipeline.yaml", "abc", "--raw", *found)
    assert shown.stdout == "hello\tthere\nyou"
    refused = etlstage("dlq", "ls", ".etlstage/letters", "--set", "name=x", code=2)
    assert refused.stderr.endswith("need a pipeline file, got .etlstage/letters\n")


@pytest.mark.usefixtures("state")
def test_list_as_json(etlstage: Etlstage) -> None:
    """Each letter is an object on a line of its own, for other programs."""
    result = etlstage("dlq", "ls", "pipeline.yaml", "--json", "--stage", "upper")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [letter["id"] for letter in found] == ["abc-1", "abd-1", "zzz-1"]
    assert {letter["place"] for letter in found} == {42}
    assert found[0]["attempts"][0]["worker"] == "upper-1"


@pytest.mark.usefixtures("state")
def test_pipeline_that_is_wrong_elsewhere(etlstage: Etlstage, pipeline: Path) -> None:
    """Reading letters doesn't need the secrets of the run."""
    pipeline.write_text(pipeline.read_text() + "\nstuff: ${NOT_SET_HERE}\n")
    assert etlstage("dlq", "ls", pipeline).returncode == 0
    pipeline.write_text(pipeline.read_text() + "\nstate: ${NOT_SET_HERE}\n")
    result = etlstage("dlq", "ls", pipeline, code=2)
    assert "state: environment variable NOT_SET_HERE is not set" in result.stderr


@pytest.mark.parametrize("wrong", ["nonsense", "{}", "[{name: [upper]}]"])
@pytest.mark.usefixtures("state")
def test_pipeline_of_which_no_stage_can_be_read(
    etlstage: Etlstage, pipeline: Path, wrong: str
) -> None:
    """Its names are unknown, so that each is accepted (issue 26)."""
    text = f"name: letters\nextract: 5\nload: []\ntransform: {wrong}\n"
    pipeline.write_text(text)
    for words, last in (((), "4 dead letters"), (("--stage", "x"), "no dead letters")):
        result = etlstage("dlq", "ls", pipeline, *words, code=0)
        assert result.stdout.splitlines()[-1].startswith(last)
    assert etlstage("state", "show", pipeline).returncode == 0


@pytest.mark.parametrize("key", ["name", "state"])
@pytest.mark.parametrize("command", ["dlq ls", "dlq drop", "state show", "state reset"])
def test_state_whose_name_can_not_be_read(
    etlstage: Etlstage, pipeline: Path, command: str, key: str
) -> None:
    """Another folder must not be taken for it (issue 26)."""
    keys = {"name": "letters", "extract": "{}", "load": "{}"} | {key: "[a]"}
    pipeline.write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    line = [*keys].index(key) + 1
    result = etlstage(*command.split(), "pipeline.yaml")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"etlstage: error: pipeline.yaml:{line}:{len(key) + 3}: {key}: expected text,"
        " got a list\n"
    )


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command write to a terminal of 80 columns."""
    monkeypatch.setattr(
        "etlstage.cli.dlq.Screen", lambda: Screen(file=Terminal(), width=80)
    )


NO_DATE = "refused the message: no date in row {}, of the form that is asked for"


async def test_list_on_a_wide_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At 200 columns a letter fits on one line (issue 11)."""
    wide = Screen(file=Terminal(), width=200)
    monkeypatch.setattr("etlstage.cli.dlq.Screen", lambda: wide)
    row = Kept("clean", b"m", ValueError(NO_DATE.format(12)))
    await keep(tmp_path, row, run="af32b1c9")
    assert list_letters(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) for line in lines] == [48, 112, 13]
    assert lines[1].endswith(NO_DATE.format(12))


@pytest.mark.usefixtures("narrow")
async def test_list_on_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """At 80 columns an error is shown in full, or its first three lines (issue 11)."""
    where = f"stage clean: worker clean-1 (pid 7) {NO_DATE.format(12)}; last events: x"
    await keep(
        tmp_path,
        Kept("clean", b"m", WorkerLost(where, stage="clean")),
        Kept("load", b"m", ValueError("one " * 60)),
        run="af32b1c9",
    )
    assert list_letters(tmp_path) == 0
    assert capsys.readouterr().out == (
        "id             time (UTC)           stage  error\n"
        "af32b1c9-1     2026-01-02 12:00:00  clean  refused the message: no date in row\n"
        "                                           12, of the form that is asked for\n"
        "af32b1c9-2     2026-01-02 12:00:00  load   one one one one one one one one one\n"
        "                                           one one one one one one one one one\n"
        "                                           one one one one one one one one ...\n"
        "2 dead letters\n"
    )


@pytest.mark.usefixtures("narrow")
async def test_groups_on_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each cause has a row, with its error below, in 80 columns (issue 11)."""
    refused = [
        Kept("clean", b"m", ValueError(NO_DATE.format(n)), when=NOON + n * SECOND)
        for n in range(5000)
    ]
    first = Kept("load", b"m", KeyError("id"))
    await keep(tmp_path, first, *refused, run="af32b1c9")
    assert list_letters(tmp_path, group=True) == 0
    assert capsys.readouterr().out == (
        "  count  stage  first (UTC)          last (UTC)           example\n"
        "  5,000  clean  2026-01-02 12:00:00  2026-01-02 13:23:19  af32b1c9-5001\n"
        "         ValueError: refused the message: no date in row #, of the form that is\n"
        "         asked for\n"
        "      1  load   2026-01-02 12:00:00  2026-01-02 12:00:00  af32b1c9-1\n"
        "         KeyError: 'id'\n"
        "5,001 dead letters, 2 causes\n"
    )


@pytest.mark.usefixtures("state")
def test_groups(etlstage: Etlstage) -> None:
    """``--stage`` and ``--json`` apply; control characters are escaped (issue 11)."""
    result = etlstage("dlq", "ls", "pipeline.yaml", "--group", "--stage", "upper")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[2:] == [
        r"         WorkerLost: bad red\x07\x9b1m",
        "      1  upper      2026-01-02 12:00:00  2026-01-02 12:00:00  zzz-1",
        "         ValueError",
        "3 dead letters of stage upper, 2 causes",
    ]
    result = etlstage("dlq", "ls", "pipeline.yaml", "--group", "--json")
    first, *others = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(others) == 2
    assert first == {
        "stage": "upper",
        "kind": "WorkerLost",
        "why": "bad \x1b[31mred\x07\x1b]#;title\x07\x9b1m",
        "count": 2,
        "first": "2026-01-02T12:00:00.000+00:00",
        "last": "2026-01-02T12:00:00.000+00:00",
        "example": "abd-1",
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no dead letters\n"),
        (("--stage", "upper"), "no dead letters of stage upper\n"),
        (("--json",), ""),
        (("--group",), "no dead letters\n"),
    ],
)
@pytest.mark.usefixtures("pipeline")
def test_no_dead_letters(
    etlstage: Etlstage, options: tuple[str, ...], said: str
) -> None:
    """A sentence is printed in place of an empty table."""
    result = etlstage("dlq", "ls", "pipeline.yaml", *options)
    assert (result.returncode, result.stdout, result.stderr) == (0, said, "")


@pytest.mark.parametrize("kept", ["record.1.json", "dead_letters/x"])
def test_state_without_letters(etlstage: Etlstage, tmp_path: Path, kept: str) -> None:
    """A folder with other files of a run is a state directory, too."""
    (tmp_path / "s" / kept).parent.mkdir(parents=True)
    (tmp_path / "s" / kept).write_text("")
    result = etlstage("dlq", "ls", "s")
    assert (result.returncode, result.stdout) == (0, "no dead letters\n")


def test_folder_that_is_no_state(
    etlstage: Etlstage, pipeline: Path, tmp_path: Path
) -> None:
    """It is an error: an empty list would look like good news."""
    (tmp_path / "x").mkdir()
    result = etlstage("dlq", "ls", "x")
    error = "etlstage: error: x: is not the state directory of a pipeline"
    assert (result.returncode, result.stderr) == (2, f"{error}\n")
    result = etlstage("dlq", "ls", tmp_path, code=2)
    assert result.stderr.endswith(f" (did you mean {pipeline}?)\n")


def test_file_that_is_no_pipeline(etlstage: Etlstage, tmp_path: Path) -> None:
    """It is an error, as for such a folder."""
    (tmp_path / "x.yaml").write_text("name: x\nservices: {}\n")
    result = etlstage("dlq", "ls", "x.yaml", code=2)
    assert result.stderr == (
        "etlstage: error: x.yaml: is not a pipeline: it has no key extract and no key"
        " load\n"
    )


@pytest.mark.usefixtures("state")
def test_stage_that_there_is_not(etlstage: Etlstage) -> None:
    """The error lists the names, also of a stage that only has letters."""
    result = etlstage("dlq", "ls", "pipeline.yaml", "--stage", "uper")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "etlstage: error: there is no stage 'uper' (did you mean 'upper'?), the stages"
        " are extract, upper, load, other one\n"
    )
    result = etlstage("dlq", "ls", "pipeline.yaml", "--stage", "other one")
    assert result.stdout.splitlines()[-1] == "1 dead letter of stage other one"


def test_no_such_pipeline(etlstage: Etlstage) -> None:
    """It is reported as by every command."""
    result = etlstage("dlq", "show", "nope.yaml", "x")
    assert (result.returncode, result.stderr) == (
        2,
        "etlstage: error: nope.yaml: no such file\n",
    )


def test_show(etlstage: Etlstage, state: Path) -> None:
    """The whole letter is shown, with control characters escaped."""
    result = etlstage("dlq", "show", "pipeline.yaml", "abc")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "id        abc-1\n"
        "time      2026-01-02T12:00:00.000+00:00\n"
        "pipeline  letters, run abc\n"
        "stage     upper, message 42 of its input\n"
        "error     WorkerLost: bad red\\x07\\x9b1m\n"
        "          second line\n"
        "message   15 bytes\n"
        "  hello\tthere\n"
        "  you\n"
        "attempt   1: upper-1 (pid 11): exited\n"
        "          stderr  oh no\n"
        "attempt   2: upper-2 (pid 12): killed\n"
        "          stderr  bye\n"
        "          story   killed\\x07\n"
        "config, where it differs from the defaults\n"
        '          name: "upper"\n'
        '          worker: {"command": ["a", "\\u001b[1m"], "env": ["TOKEN"]}\n'
    )


@pytest.mark.usefixtures("state")
def test_message_that_is_no_text(etlstage: Etlstage) -> None:
    """It is shown as a hex dump."""
    result = etlstage(
        "dlq", "show", ".etlstage/letters/dead_letters/upper.jsonl", "abd"
    )
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    at = lines.index("message   63 bytes")
    assert lines[at + 1] == (
        "  00000000  1b 5b 33 31 6d 00 ff 1b 5b 33 31 6d 00 ff 1b 5b  .[31m...[31m...["
    )
    assert lines[at + 4].startswith("  00000030  ")
    assert lines[at + 5].startswith("attempt ")


@pytest.mark.parametrize(
    ("number", "rest"), [("zzz-1", 2), ("abd-1", 904)], ids=["text", "cut"]
)
@pytest.mark.usefixtures("state")
def test_long_message_is_cut(etlstage: Etlstage, number: str, rest: int) -> None:
    """A line counts the bytes that are missing; no character is split."""
    result = etlstage("dlq", "show", "pipeline.yaml", number)
    lines = result.stdout.splitlines()
    assert lines[lines.index("config, where it differs from the defaults") - 1] == (
        f"  ... {rest:,} more bytes: --raw writes the whole message to stdout"
    )
    assert "00000000  " not in result.stdout


@pytest.mark.usefixtures("state")
def test_raw_message(raw: Raw) -> None:
    """The output is its bytes alone: this letter's config has no markers."""
    place = ".etlstage/letters/dead_letters/upper.jsonl"
    result = raw("dlq", "show", place, "abd-1", "--raw")
    assert (result.stdout, result.stderr) == (b"\x1b[31m\0\xff" * 9, b"")


@pytest.mark.usefixtures("state")
def test_raw_message_on_a_terminal(tmp_path: Path, forks: Forks) -> None:
    """Bytes that may steer it are written only after a yes (issue 26)."""
    place = ".etlstage/letters/dead_letters/upper.jsonl"
    words = [forks.program, "dlq", "show", place, "zzz-1", "--raw"]
    shown = on_terminal(words, width=80, folder=tmp_path, env=environment(), given="n")
    assert "unescaped, though they may control it?" in shown.text
    assert "nothing was written" in shown.text
    shown = on_terminal([*words, "--yes"], width=80, folder=tmp_path, env=environment())
    assert "control it" not in shown.text


def test_config_is_shown_where_it_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defaults are left out; ``--json`` has all settings (issue 26)."""
    stage = Stage(
        name="s",
        worker=WorkerProgram(command=("a",), env={"TOKEN": "x"}),
        dialect=MarkerDialect(markers=Markers(eom=b"<m>")),
        timeout=Timeouts(message=5.0),
        workers=PoolPolicy(min=2, max=2),
    )

    kept = Kept("s", b"x", ValueError("e"), config_of(stage))
    anyio.run(partial(keep, tmp_path, kept))
    assert show_letter(tmp_path, "r") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("config, where it differs from the defaults") + 1 :] == [
        '          name: "s"',
        '          worker: {"command": ["a"], "env": ["TOKEN"]}',
        '          dialect: {"name": "marker", "markers": {"eom": "<m>"}}',
        '          workers: {"min": 2, "max": 2}',
        '          timeout: {"message": 5.0}',
    ]
    assert show_letter(tmp_path, "r", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["config"] == config_of(stage)


def test_budget_of_a_retry_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A retry has no error budget, which is no setting of the user's (issue 26)."""
    policy = ErrorPolicy(retries=3, budget=ErrorBudget())
    stage = Stage(name="s", worker=("a",), on_error=policy)
    kept = Kept("s", b"x", ValueError("e"), config_of(stage))
    anyio.run(partial(keep, tmp_path, kept))
    assert show_letter(tmp_path, "r") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == '          on_error: {"retries": 3}'


@pytest.mark.parametrize(
    ("dialect", "behind"),
    [
        (MarkerDialect(mode=Mode.SINGLE), b"<m>"),
        (MarkerDialect(mode=Mode.BATCH_WORKER, eob_then_eom=True), b"<m>"),
        (MarkerDialect(mode=Mode.BATCH_SUPERVISOR), b"<m>\x17"),
        (MarkerDialect(mode=Mode.BATCH_SUPERVISOR, eob_then_eom=True), b"<m>\x17<m>"),
    ],
)
async def test_raw_message_as_its_worker_reads_it(
    tmp_path: Path, raw: Raw, dialect: MarkerDialect, behind: bytes
) -> None:
    """The markers are the letter's own, not those of today's pipeline."""
    dialect = replace(dialect, markers=Markers(eom=b"<m>"))
    stage = Stage(name="s", worker=("a",), dialect=dialect)
    await keep(tmp_path, Kept("s", b"one", ValueError("e"), config_of(stage)))
    shown = raw("dlq", "show", ".", "r", "--raw")
    assert (shown.stdout, shown.stderr) == (b"one" + behind, b"")


@pytest.mark.parametrize("driver", ["none", "supervisor", "worker"])
async def test_raw_message_is_answered(tmp_path: Path, raw: Raw, driver: str) -> None:
    """A worker made with the SDK replies to it, as the README's recipe promises."""
    mode = {"supervisor": Mode.BATCH_SUPERVISOR, "worker": Mode.BATCH_WORKER}.get(
        driver, Mode.SINGLE
    )
    call = {
        "none": "transform(lambda m: [m.upper()])",
        "supervisor": "transform_batch(lambda b: [m.upper() for m in b])",
        "worker": "transform_batch(lambda b: [m.upper() for m in b], driver='worker')",
    }[driver]
    code = f"from etlstage import worker; worker.{call}"
    stage = Stage(name="s", worker=("a",), dialect=MarkerDialect(mode=mode))
    await keep(tmp_path, Kept("s", b"one", ValueError("e"), config_of(stage)))
    shown = raw("dlq", "show", ".", "r", "--raw")
    replied = await anyio.run_process(
        [sys.executable, "-c", code], input=shown.stdout, env=environment()
    )
    assert replied.stdout.lstrip(b"\x05") == b"ONE\n\0"


@pytest.mark.usefixtures("state")
def test_raw_and_json(etlstage: Etlstage) -> None:
    """The two options exclude each other."""
    result = etlstage("dlq", "show", "pipeline.yaml", "abc", "--raw", "--json")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "etlstage: error: --raw can't be used together with --json; see 'etlstage dlq"
        " show --help'\n"
    )


@pytest.mark.usefixtures("state")
def test_letter_as_json(etlstage: Etlstage) -> None:
    """Control characters are escaped."""
    result = etlstage("dlq", "show", "pipeline.yaml", "abc-1", "--json")
    assert json.loads(result.stdout)["error"] == ESCAPES
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("number", "error"),
    [
        ("nope", "there is no dead letter 'nope'; see 'etlstage dlq ls pipeline.yaml'"),
        ("", "there is no dead letter ''; see 'etlstage dlq ls pipeline.yaml'"),
        ("ab", "the ids of several dead letters begin with 'ab': abd-1, abc-1, abd-1"),
    ],
)
@pytest.mark.usefixtures("state")
def test_id_that_names_none_or_several(
    etlstage: Etlstage, number: str, error: str
) -> None:
    """The error states what to do next."""
    result = etlstage("dlq", "show", "pipeline.yaml", number)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"etlstage: error: {error}\n"


def test_torn_letter_is_reported(etlstage: Etlstage, state: Path) -> None:
    """The others are listed all the same."""
    path = state / "dead_letters" / "upper.jsonl"
    path.write_bytes(path.read_bytes() + b'{"id": "x')
    result = etlstage("dlq", "ls", "pipeline.yaml", code=0)
    assert result.stderr == (
        f"etlstage: warning: {path}:4: skipped a truncated record of 9 bytes\n"
    )
    assert result.stdout.splitlines()[-1] == "4 dead letters"


def test_run_puts_aside_and_goes_on(
    etlstage: Etlstage, raw: Raw, pipeline: Path, tmp_path: Path
) -> None:
    """A poison message is dead-lettered, listed and shown, and secrets are not."""
    (tmp_path / "upper.py").write_text(TRAP)
    pipeline.write_text(
        pipeline.read_text().replace(
            "{command: [python, upper.py]}",
            '{command: [python, upper.py, "${TOKEN}"], env: {TOKEN: "${TOKEN}"}}',
        )
    )
    env = {"TOKEN": "hunter2"}
    result = etlstage("run", "pipeline.yaml", "--report", "r.json", env=env, code=0)
    assert (tmp_path / "loaded.txt").read_text() == "A\nC\n"
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[2][:6] == ["upper", "3", "2", "1", "0", "0"]
    assert "accounted for: 2 loaded, 1 dead-lettered\n" in result.stdout
    look = "to see the dead letters: etlstage dlq ls pipeline.yaml\n"
    assert look in result.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["dead_letters"]["command"] == "etlstage dlq ls pipeline.yaml"

    listed = etlstage("dlq", "ls", "pipeline.yaml", "--json", env=env)
    assert "hunter2" not in listed.stdout
    letter = json.loads(listed.stdout)
    assert letter["config"]["worker"]["command"] == ["python", "upper.py", "${TOKEN}"]
    assert letter["config"]["worker"]["env"] == ["TOKEN"]
    assert letter["attempts"][-1]["stderr"] == ["no b, please"]
    message = raw("dlq", "show", ".etlstage/letters", letter["id"], "--raw")
    assert message.stdout == b"b\n"

    logged = [json.loads(line) for line in result.stderr.splitlines()]
    assert [x["event"] for x in logged if x["event"] != "worker wrote to stderr"] == [
        "message dead-lettered"
    ]
    assert {n: logged[-1][n] for n in ("stage", "message", "id", "error")} == {
        "stage": "upper",
        "message": 2,
        "id": letter["id"],
        "error": "no b, please",
    }
