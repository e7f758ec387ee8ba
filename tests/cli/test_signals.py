"""What signals do to a command before, during and behind a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from etlstage.cli.signals import Signals, deafen, interruptible, quit_at_once
from etlstage.pipeline.report import KeptLetters
from tests.cli.forked import environment

pytestmark = pytest.mark.process

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stuck_in(
    module: str,
    folder: Path,
    *arguments: str,
    words: Sequence[str] = ("-m", "etlstage"),
) -> Iterator[subprocess.Popen[str]]:
    """Run a command that imports the module, and does not get on."""
    (folder / f"{module}.py").write_text(
        "import sys, time; print('imports', file=sys.stderr, flush=True)\n"
        "time.sleep(600)\n"
    )
    env = environment()
    env["PYTHONPATH"] = f"{folder}{os.pathsep}{env['PYTHONPATH']}"
    with subprocess.Popen(
        [sys.executable, *words, *arguments],
        cwd=folder,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "imports\n"
            yield process
        finally:
            process.kill()  # of one that imports it again, and again waits


@pytest.mark.parametrize("number", ALL)
@pytest.mark.parametrize(
    "words", [["-m", "etlstage"], ["-c", "from etlstage.cli import main; main()"]]
)
def test_interrupted_while_modules_are_imported(
    tmp_path: Path, words: list[str], number: signal.Signals
) -> None:
    """One line, no traceback, and an exit code of the table (issue 10)."""
    # The first thing that is imported beside our own.
    with stuck_in("typer", tmp_path, "run", "x.yaml", words=words) as process:
        process.send_signal(number)
        assert process.communicate(timeout=15)[1] == "etlstage: error: interrupted\n"
    assert process.returncode == 5


def test_signals_are_counted_from_before_the_run() -> None:
    """None is lost, whether somebody waits or not (issue 10)."""

    async def receive() -> None:
        for _ in range(3):
            await signals.receive()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(signals.receive)
            await anyio.wait_all_tasks_blocked()
            signal.raise_signal(signal.SIGTERM)
        with anyio.move_on_after(0) as scope:
            await signals.receive()
        assert scope.cancelled_caught

    with Signals() as signals:
        for number in ALL:
            signal.raise_signal(number)
        anyio.run(receive)
        signal.raise_signal(signal.SIGTERM)


def test_handlers_are_as_before() -> None:
    """Also where one was put into the other."""
    before = [signal.getsignal(number) for number in ALL]
    with interruptible(), Signals():
        pass
    assert [signal.getsignal(number) for number in ALL] == before


@pytest.mark.parametrize("number", ALL)
def test_what_has_to_be_cleaned_up_is(number: signal.Signals) -> None:
    """An exception does it (issue 10)."""
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(number)


def test_ignored_signals_stay_ignored() -> None:
    """As ``nohup`` wants it (issue 10)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(), interruptible():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", ALL)
def test_signal_in_the_last_moment_changes_no_exit_code(number: signal.Signals) -> None:
    """The interpreter gives up its handlers while it ends (issue 22)."""
    script = f"""\
import atexit, os, sys
atexit.register(os.kill, os.getpid(), {int(number)})
sys.argv[1:] = ["--version"]
from etlstage.cli import main
main()
"""
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, env=environment(), check=False).returncode == 0


# What reads the file, and what runs the pipeline, are imported when they are needed.
@pytest.mark.parametrize(
    ("number", "module"), [*((number, "ruamel") for number in ALL), (ALL[0], "asyncio")]
)
def test_signal_before_the_run_writes_its_report(
    tmp_path: Path, number: signal.Signals, module: str
) -> None:
    """That of an earlier run would be taken for this one's (issue 22)."""
    (tmp_path / "r.json").write_text('{"status": "done"}')
    (tmp_path / "r.html").write_text("done")
    words = ["run", "p.yaml", "--report", "r.json", "--report-html", "r.html"]
    with stuck_in(module, tmp_path, *words) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=15)
    assert process.returncode == 5
    assert errors == "etlstage: error: interrupted before the run began\n"
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["status"], report["stages"]) == ("forced", [])
    assert report["dead_letters"] == KeptLetters()._asdict()
    assert report["pipeline"] == "p.yaml"
    assert not (tmp_path / "r.html").exists()


def test_signals_behind_the_end_do_nothing() -> None:
    """Nothing is left to be stopped (issue 10)."""
    with interruptible():  # puts them back
        quit_at_once()
        deafen()
        for number in ALL:
            signal.raise_signal(number)
