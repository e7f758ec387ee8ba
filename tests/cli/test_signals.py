"""What signals do to a command before, during and after a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from etlstage.cli.signals import FORCED, Signals, deafen, interruptible, quit_at_once
from etlstage.journal import Journals
from etlstage.pipeline.report import KeptLetters
from tests.cli.forked import environment
from tests.cli.test_kills import wait_until
from tests.patience import HANG

pytestmark = pytest.mark.process

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stuck_in(
    module: str,
    folder: Path,
    *arguments: str,
    words: Sequence[str] = ("-m", "etlstage"),
) -> Iterator[subprocess.Popen[str]]:
    """Run a command that imports ``module``, and hangs there."""
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
            process.kill()  # it may have imported the module again, and hang there


# Python has a handler of its own for SIGINT.
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, ["-m", "etlstage"]),
        (signal.SIGINT, ["-c", "from etlstage.cli import main; main()"]),
        (signal.SIGTERM, ["-m", "etlstage"]),
        (signal.SIGHUP, ["-c", "from etlstage.cli import main; main()"]),
    ],
)
def test_interrupted_while_modules_are_imported(
    tmp_path: Path, number: signal.Signals, words: list[str]
) -> None:
    """One line, no traceback, and a documented exit code are the result (issue 10)."""
    # The first module that is imported besides our own.
    with stuck_in("typer", tmp_path, "run", "x.yaml", words=words) as process:
        process.send_signal(number)
        assert process.communicate(timeout=HANG)[1] == "etlstage: error: interrupted\n"
    assert process.returncode == 5


@pytest.mark.parametrize("command", ["check", "fuzz", "try"])
def test_interrupted_command_reports_it(tmp_path: Path, command: str) -> None:
    """Whatever the parser of the command line makes of it (issue 26)."""
    hangs = "import pathlib, time; pathlib.Path('started').touch(); time.sleep(600)"
    words = ["-m", "etlstage", command, "--", sys.executable, "-c", hangs]
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until((tmp_path / "started").exists)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            last = process.stderr.read().splitlines()[-1]
            assert last == "etlstage: error: interrupted"
        finally:
            process.kill()
    assert process.returncode == 5


def test_signals_are_counted_from_before_the_run() -> None:
    """None is lost, whether a task waits for it or not (issue 10)."""

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
    """This holds for nested ones, too."""
    before = [signal.getsignal(number) for number in ALL]
    with interruptible(), Signals():
        pass
    assert [signal.getsignal(number) for number in ALL] == before


@pytest.mark.parametrize("number", ALL)
def test_what_has_to_be_cleaned_up_is(number: signal.Signals) -> None:
    """A signal raises an exception, so that cleanup code runs (issue 10)."""
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(number)


def test_ignored_signals_stay_ignored() -> None:
    """``nohup`` relies on that (issue 10)."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(), interruptible():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", ALL)
def test_signal_in_the_last_moment_changes_no_exit_code(number: signal.Signals) -> None:
    """Python drops its handlers while it exits (issue 22)."""
    script = f"""\
import atexit, os, sys
atexit.register(os.kill, os.getpid(), {int(number)})
sys.argv[1:] = ["--version"]
from etlstage.cli import main
main()
"""
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, env=environment(), check=False).returncode == 0


# The modules that read the file and that run the pipeline are imported when needed.
@pytest.mark.parametrize(
    ("number", "module"), [*zip(ALL, ("ruamel", "ruamel", "asyncio"), strict=True)]
)
def test_signal_before_the_run_writes_its_report(
    tmp_path: Path, number: signal.Signals, module: str
) -> None:
    """An earlier run's report would be taken for this run's (issue 22)."""
    (tmp_path / "r.json").write_text('{"status": "done"}')
    (tmp_path / "r.html").write_text("done")
    words = ["run", "p.yaml", "--report", "r.json", "--report-html", "r.html"]
    with stuck_in(module, tmp_path, *words) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 5
    assert errors == "etlstage: error: interrupted before the run began\n"
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["status"], report["stages"]) == ("forced", [])
    assert report["dead_letters"] == KeptLetters()._asdict()
    assert report["pipeline"] == "p.yaml"
    assert not (tmp_path / "r.html").exists()


def test_failed_worker_with_sigchld_ignored_by_the_parent(tmp_path: Path) -> None:
    """Its exit status is known all the same, and the run fails (issue 22)."""
    (tmp_path / "p.yaml").write_text(
        "name: p\n"
        "extract:\n"
        '  worker: {command: [sh, -c, "echo one; sleep 0.2; exit 3"]}\n'
        "  dialect: {mode: plain}\n"
        "load: {files: {path: out, format: text}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "etlstage", "run", "p.yaml"],
        cwd=tmp_path,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "exited with status 3" in done.stderr
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_signals_behind_the_end_do_nothing() -> None:
    """Nothing is left to be stopped (issue 10)."""
    with interruptible():  # restores the handlers
        quit_at_once()
        deafen()
        for number in ALL:
            signal.raise_signal(number)


@pytest.mark.parametrize("number", ALL)
def test_appended_lines_are_counted_when_interrupted(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A signal ends the command also while it waits for readers (issue 24)."""
    with Journals.open(tmp_path, limit="1KiB") as journals:
        journals.read_committed("slow").close()
    (tmp_path / "lines").write_bytes(b'{"n": 1}\n' * 50)
    with (
        (tmp_path / "lines").open("rb") as lines,
        subprocess.Popen(
            [sys.executable, "-m", "etlstage", "journal", "append", str(tmp_path)],
            env=environment(),
            stdin=lines,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stderr is not None
        assert "waiting for reader 'slow'" in process.stderr.readline()
        process.send_signal(number)
        printed = process.communicate(timeout=HANG)[1]
    with Journals.open(tmp_path) as journals:
        count = len(list(journals.read_committed()))
    assert 1 < count < 50
    assert printed.splitlines() == [
        f"etlstage: warning: {count} lines appended",
        "etlstage: error: interrupted",
    ]
    assert process.returncode == FORCED


@pytest.mark.parametrize("number", ALL)
def test_append_that_waits_for_the_lock_is_interrupted(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A signal ends the command while another process appends (issue 24)."""
    with Journals.open(tmp_path) as journals:
        (spec,) = journals.select()
        with (
            journals.storage.locked(journals.byte_log(spec.name).lock),
            subprocess.Popen(
                [sys.executable, "-m", "etlstage", "journal", "append", str(tmp_path)],
                env=environment(),
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
            ) as process,
        ):
            assert process.stdin is not None
            process.stdin.write(b'{"n": 1}\n')
            process.stdin.flush()
            waits = re.compile(rf"-> FLOCK +ADVISORY +WRITE +{process.pid} ")
            try:
                wait_until(lambda: waits.search(Path("/proc/locks").read_text()))
                process.send_signal(number)
                printed = process.communicate(timeout=HANG)[1]
            finally:
                process.kill()
    assert printed.decode().splitlines() == [
        "etlstage: warning: 0 lines appended, and perhaps line 1",
        "etlstage: error: interrupted",
    ]
    assert process.returncode == FORCED
