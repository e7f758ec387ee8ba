from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from etlstage.cli.dlq import drop_letters
from etlstage.cli.state import reset_state, show_state, take_state_over
from etlstage.errors import ConfigError, StateUnusable
from etlstage.pipeline.delivery.delivery import Delivery
from etlstage.pipeline.delivery.holder import LOCK, holder_of
from etlstage.shard.sink import CheckpointFile
from tests.cli.conftest import Etlstage
from tests.cli.forked import environment
from tests.pipeline.dead_letter.test_retry import append, letter

HOLDER = """\
import sys
from pathlib import Path
from etlstage.pipeline.delivery.delivery import Delivery
with Delivery(Path(sys.argv[1]), exactly_once=True) as delivery:
    delivery.begin("r1", stages=["a", "b"], letters={})
    delivery.commit(4000)
    print("holds", flush=True)
    input()
    delivery.commit(5000)
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Return the state directory that an interrupted run has left."""
    append(tmp_path / "s", letter(1), letter(2))
    with Delivery(tmp_path / "s", exactly_once=True) as delivery:
        delivery.begin("r0", stages=["a", "b"], letters={})
        delivery.commit(17)
    return tmp_path / "s"


@pytest.fixture
def holder(state: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the state, and suspend it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, state],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        yield process
        process.kill()


def shown(state: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is shown."""
    assert show_state(state, as_json=False) == 0
    return capsys.readouterr().out


def test_show_what_is_stored(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows how far the last run came, and where the next one resumes (issue 14)."""
    (state / "checkpoint").mkdir()
    (state / "checkpoint" / "x").write_text("abc")
    text = re.sub(r"load \w{8}", "load ?", shown(state, capsys))
    assert text == (
        f"state         {state}\n"
        "lock          free\n"
        "fence         1\n"
        "last run      r0, exactly-once; interrupted\n"
        "next run      after epoch 1 of load ?, at position 17\n"
        "checkpoint    3 bytes\n"
        "dead letters  2 of stage clean\n"
    )
    assert show_state(state, as_json=True) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["lock"], plain["dead_letters"]) == (None, {"clean": 2})
    assert plain["record"]["position"] == 17


@pytest.mark.parametrize(
    ("position", "over", "text"),
    [
        (17, False, "ended at a position"),
        (None, False, "ended, its load is not complete"),
        (None, True, "completed"),
    ],
)
def test_run_has_completed_if_the_next_is_another_load(
    tmp_path: Path,
    *,
    position: int | None,
    over: bool,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Otherwise the next run resumes it, or completes it (issues 22 and 23)."""
    with Delivery(tmp_path, exactly_once=True) as delivery:
        delivery.begin("r0", stages=[], letters={})
        delivery.commit(position, ended=True)
        if over:
            delivery.settle()
    assert f"r0, exactly-once; {text}\n" in shown(tmp_path, capsys)


def test_long_names_stand_apart_from_their_text(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first column is as wide as its longest name (issue 23)."""
    (state / "spool-5f2d01c3.json").write_text("abc")
    lines = shown(state, capsys).splitlines()
    assert "spool-5f2d01c3.json  3 bytes" in lines
    assert "lock                 free" in lines


def test_last_load_that_ended_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    It is shown while the next one runs, and if that is interrupted (issue 23).

    Its last epoch has a number, which is not how many were loaded (issue 26).
    """
    to, of = "parquet out", "json in"
    first = ""
    for number, ended in (1, True), (2, False):
        with Delivery(tmp_path, exactly_once=True) as delivery:
            begin = partial(delivery.begin, stages=["a", "b"], letters={})
            begin(f"r{number}", output=to, input=of)
            assert ("last load" in shown(tmp_path, capsys)) is (number == 2)
            first = delivery.record.load if ended else first
            delivery.commit(7)
            delivery.commit(None, ended=ended)
            if ended:
                delivery.settle()
        assert (
            f"last load  {first}: from json in into parquet out, up to epoch 2\n"
        ) in shown(tmp_path, capsys)


def test_reset(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next run begins anew; letters are kept, and the fence goes on (issue 14)."""
    (state / "checkpoint").mkdir()
    (state / "spool-5f2d01c3").mkdir()
    (state / "staging-5f2d01c3-1").mkdir()
    assert reset_state(state, yes=True) == 0
    text = shown(state, capsys)
    assert "fence         2\nnext run      from the beginning\ndead letters  2" in text
    names = sorted(path.name for path in state.iterdir())
    assert names == ["dead_letters", "lock", "record.2.json"]


def test_reset_names_what_is_loaded_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question and its result name each output of an open load (issue 23)."""
    asked: list[str] = []
    monkeypatch.setattr("etlstage.cli.state.confirm", asked.append)
    edge = "edge-clean"
    places = ("", "edge clean"), (edge, "parquet a"), (edge, "parquet b")
    for folder, output in places:
        with Delivery(tmp_path / folder, exactly_once=True) as delivery:
            delivery.begin("r0", stages=["a"], letters={}, output=output)
            if output != "parquet b":
                delivery.commit(17, ended=output == "parquet a")
    twice = "what was loaded into parquet a up to epoch 1 stays, and is loaded again"
    assert reset_state(tmp_path) == 0
    anew = f"the next run starts from the beginning; {twice}"
    assert asked[0].endswith(f" so that {anew}?")
    assert capsys.readouterr().out == f"{anew}\n"
    assert reset_state(tmp_path, yes=True) == 0
    assert capsys.readouterr().out == "the next run starts from the beginning\n"


@pytest.mark.parametrize("over", [False, True])
def test_reset_after_a_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, over: bool
) -> None:
    """Only what the next run would not have loaded is named (issue 23)."""
    with Delivery(tmp_path, exactly_once=True) as delivery:
        delivery.begin("r0", stages=["a"], letters={}, output="parquet a")
        delivery.commit(None, ended=over)
        delivery.settle()
    assert reset_state(tmp_path, yes=True) == 0
    assert ("loaded again" in capsys.readouterr().out) is not over


def test_reset_of_checkpoints_of_record_processors(state: Path) -> None:
    """Else they would not be given what they have committed before (issue 26)."""
    edge = state / "edge-clean"
    edge.mkdir(mode=0o700)
    file = CheckpointFile(edge / "shards.json", {})
    file.store("a", ["5", 0])
    for name in ("leases.db", "leases.db-wal", "leases.db-shm"):
        (state / name).touch()
    assert reset_state(state, yes=True) == 0
    file.open()
    assert file.position("a") is None
    names = sorted(path.name for path in state.iterdir())
    assert names == ["dead_letters", "edge-clean", "lock", "record.2.json"]


def test_reset_that_is_killed_has_deleted_all_checkpoints_of_processors(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the record: from that, the next run would read in vain (issue 26)."""
    edge = state / "edge-clean"
    edge.mkdir(mode=0o700)
    file = CheckpointFile(edge / "shards.json", {})
    file.store("a", ["5", 0])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("etlstage.cli.state._forget", killed)
    with pytest.raises(KeyboardInterrupt):
        reset_state(state, yes=True)
    file.open()
    assert file.position("a") is None


def test_folder_of_which_a_killed_reset_has_deleted_a_part_is_not_used(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark would skip what a part of its checkpoint names (issue 26)."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("checkpoint", "spool-5f2d01c3"):
        (state / name).mkdir()
        with monkeypatch.context() as patch:
            patch.setattr("shutil.rmtree", killed)
            with pytest.raises(KeyboardInterrupt):
                reset_state(state, yes=True)
        assert not (state / name).exists()
        (state / name).mkdir()
        assert reset_state(state, yes=True) == 0
        left = sorted(path.name for path in state.iterdir())
        assert left == ["dead_letters", "lock", left[-1]]


@pytest.mark.parametrize("what", ["spool", "staging"])
def test_reset_leaves_what_is_noted(state: Path, what: str) -> None:
    """The next run removes what the file names, which may be elsewhere (issue 14)."""
    (state / f"{what}-5f2d01c3").mkdir()
    (state / f"{what}-5f2d01c3.1").mkdir()
    (state / f"{what}-5f2d01c3.json").touch()
    assert reset_state(state, yes=True) == 0
    assert [path.name for path in state.glob(f"{what}*")] == [f"{what}-5f2d01c3.json"]


def test_letters_of_a_run_that_is_to_go_on(state: Path) -> None:
    """Its last letters will be written anew, with the same ids (issue 14)."""
    with pytest.raises(
        StateUnusable, match=r"the run r0 that uses .* was interrupted: complete"
    ):
        drop_letters(state, ["r-1"], yes=True)
    assert reset_state(state, yes=True) == 0
    assert drop_letters(state, ["r-1"], yes=True) == 0


def test_letters_of_a_run_that_begins_anew(tmp_path: Path) -> None:
    """With at-least-once delivery letters are not rewritten: they may go (issue 14)."""
    append(tmp_path, letter(1))
    with Delivery(tmp_path) as delivery:
        delivery.begin("r0", stages=["a"], letters={})
        delivery.commit(17)
    assert drop_letters(tmp_path, ["r-1"], yes=True) == 0


@pytest.mark.process
def test_take_over(
    state: Path,
    holder: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Until then a suspended holder keeps its lock; then it can't commit (issue 14)."""
    text = shown(state, capsys)
    assert re.search(rf"lock +held by pid {holder.pid} on .*: stopped by a sign", text)
    with pytest.raises(StateUnusable, match=f"another run uses .*pid {holder.pid} on"):
        reset_state(state, yes=True)
    assert take_state_over(state, yes=True) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(
        r"taken over: .* after epoch 2 of load \w+, at position 4000\n", said
    )
    holder.send_signal(signal.SIGCONT)
    _, error = holder.communicate("go on\n", timeout=60)
    assert "another run has taken over the state directory" in error
    with Delivery(state) as delivery:
        assert delivery.record.position == 4000
    with pytest.raises(ConfigError, match="there is nothing to take over"):
        take_state_over(state, yes=True)


@pytest.mark.parametrize("another", [True, False])
def test_take_over_from_a_run_that_ends_during_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, another: bool
) -> None:
    """A run that has begun meanwhile keeps its state and its lock (issue 23)."""
    first, second = Delivery(tmp_path), Delivery(tmp_path)

    def answer(_question: str) -> None:
        first.__exit__()
        if another:
            second.__enter__()
            (tmp_path / LOCK).write_text('{"pid": 1, "host": "h", "since": "now"}')

    monkeypatch.setattr("etlstage.cli.state.confirm", answer)
    with first:
        with pytest.raises(
            ConfigError, match=f"held {tmp_path} has ended: nothing was taken over"
        ):
            take_state_over(tmp_path)
        (second if another else first).check()
        assert holder_of(tmp_path)[0] == another
    second.__exit__()


@pytest.mark.process
def test_state_of_a_pipeline(etlstage: Etlstage, pipeline: Path) -> None:
    """``show`` works before anything is stored; ``reset`` asks first."""
    result = etlstage("state", "show", "pipeline.yaml", code=0)
    where = pipeline.parent / ".etlstage" / "letters"
    assert result.stdout == f"nothing is stored in {where}\n"
    with Delivery(where):
        pass
    result = etlstage("state", "reset", "pipeline.yaml", given="n\n", code=1)
    assert "so that the next run starts from the beginning? [y/N]" in result.stdout
