"""What signals do to a command before, during and behind a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from etlstage.cli.signals import Signals, deafen, interruptible, quit_at_once
from tests.cli.conftest import environment

pytestmark = pytest.mark.process

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", ALL)
@pytest.mark.parametrize(
    "words", [["-m", "etlstage"], ["-c", "from etlstage.cli import main; main()"]]
)
def test_interrupted_while_modules_are_imported(
    tmp_path: Path, words: list[str], number: signal.Signals
) -> None:
    """One line, no traceback, and an exit code of the table (issue 10)."""
    # The first thing that is imported beside our own.
    (tmp_path / "typer.py").write_text(
        "import sys, time; print('imports', file=sys.stderr, flush=True)\n"
        "time.sleep(600)\n"
    )
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    process = subprocess.Popen(
        [sys.executable, *words, "run", "x.yaml"],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        assert process.stderr.readline() == "imports\n"
        process.send_signal(number)
        assert process.stderr.read() == "etlstage: error: interrupted\n"
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


def test_signals_behind_the_end_do_nothing() -> None:
    """Nothing is left to be stopped (issue 10)."""
    with interruptible():  # puts them back
        quit_at_once()
        deafen()
        for number in ALL:
            signal.raise_signal(number)
