"""What signals do to a command before, during and after a run."""

from __future__ import annotations

import gc
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

from etlstage.cli.signals import (
    FORCED,
    Signals,
    deafen,
    interruptible,
    quit_at_once,
    run_interruptible,
)
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


INTERRUPTED_IN_A_LOOP = """\
import asyncio, gc, os, pathlib, signal, sys
from etlstage.cli import main

def interrupt(phase, info):
    if asyncio._get_running_loop() is not None:
        gc.callbacks.remove(interrupt)
        signal.raise_signal({number})

pathlib.Path("command.pid").write_text(str(os.getpid()))
if {at_once}:
    gc.callbacks.append(interrupt)
    gc.set_threshold(20)
main()
"""
"""Runs a command; its callback for collected garbage, if any, is sent a signal."""

INTERRUPTS = """\
import os, pathlib, sys, time
here = pathlib.Path(__file__).absolute().parent
(here / "worker.pid").write_text(str(os.getpid()))
sys.stdin.buffer.read(1)
os.kill(int((here / "command.pid").read_text()), {number})
time.sleep(600)
"""
"""A worker that sends its command a signal when it is given a message."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a case in which ``worker.py`` failed, and a pipeline."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "worker.py").write_text("raise SystemExit(3)")
    words = ["fuzz", "--max-examples", "1", "--", sys.executable, "worker.py"]
    command = [sys.executable, "-m", "etlstage", *words]
    subprocess.run(command, cwd=folder, env=environment(), check=False)
    (case,) = folder.glob(".etlstage/failures/*.rec")
    case.rename(folder / "case.rec")
    worker = {"command": [sys.executable, str(folder / "worker.py")]}
    test = {"name": "t", "stage": "a", "input": ["1"], "output": ["1"]}
    pipeline = {
        "name": "p",
        "extract": {"files": {"path": "case.rec", "format": "text"}},
        "transform": [{"name": "a", "worker": worker}],
        "load": {"files": {"path": "out", "format": "text"}},
        "tests": [test | {"timeout": "10m"}],
    }
    (folder / "p.yaml").write_text(json.dumps(pipeline))
    return folder


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, ["test", "p.yaml"]),
        (signal.SIGTERM, ["try", "--timeout", "600", "--sample", "case.rec"]),
        (signal.SIGHUP, ["check", "--timeout", "600"]),
        (signal.SIGINT, ["fuzz", "--timeout", "600"]),
        (signal.SIGINT, ["fuzz", "--timeout", "600", "--batch", "supervisor"]),
        (signal.SIGTERM, ["replay", "case.rec", "--grace", "600"]),
        (signal.SIGHUP, ["replay"]),
        (signal.SIGINT, ["kcl", "simulate", "--timeout", "600"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_signal_in_an_event_loop_ends_it(
    kept: Path, number: signal.Signals, words: list[str], *, at_once: bool
) -> None:
    """Wherever it comes, the command ends with one line, and its worker (issue 26)."""
    (kept / "worker.py").write_text(INTERRUPTS.format(number=int(number)))
    (kept / "worker.pid").unlink(missing_ok=True)
    script = INTERRUPTED_IN_A_LOOP.format(number=int(number), at_once=at_once)
    if words[0] not in ("test", "replay"):
        words = [*words, "--", sys.executable, "worker.py"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=kept,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert (done.returncode, done.stderr) == (5, "etlstage: error: interrupted\n")
    if not at_once:
        pid = (kept / "worker.pid").read_text()
        assert not os.path.exists(f"/proc/{pid}")


def test_signal_while_a_message_is_drawn_ends_the_command(tmp_path: Path) -> None:
    """It is not left to the strategy, which may hang or ignore it (issue 26)."""
    (tmp_path / "drawn.py").write_text(
        "import os, signal, time\n"
        "from hypothesis import strategies as st\n"
        "def draw(value):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(600)\n"
        "    except BaseException:\n"
        "        return b'ignored'\n"
        "messages = st.binary().map(draw)\n"
    )
    words = ["fuzz", "--strategy", "drawn:messages", "--", "cat"]
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "etlstage", *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert (done.returncode, done.stderr) == (5, "etlstage: error: interrupted\n")


@pytest.mark.parametrize("number", ALL)
def test_event_loop_is_cancelled(number: signal.Signals) -> None:
    """What has to be cleaned up is, shielded from the signal, and then it is raised."""
    cleaned = False

    def interrupt(*_: object) -> None:
        gc.callbacks.remove(interrupt)  # errors of callbacks are ignored
        signal.raise_signal(number)

    async def main() -> None:
        nonlocal cleaned
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            gc.callbacks.append(interrupt)
            try:
                with anyio.CancelScope(shield=True):
                    gc.collect()
                    await anyio.wait_all_tasks_blocked()
                    cleaned = True
            finally:
                await anyio.sleep_forever()

    before = [signal.getsignal(number) for number in ALL]
    with pytest.raises(KeyboardInterrupt):
        run_interruptible(main)
    assert cleaned
    assert [signal.getsignal(number) for number in ALL] == before


def test_signal_outlives_the_error_that_it_causes() -> None:
    """A command that fails while it is cancelled was interrupted (issue 26)."""

    async def main() -> None:
        signal.raise_signal(signal.SIGTERM)
        raise OSError

    with pytest.raises(KeyboardInterrupt):
        run_interruptible(main)


def test_signal_before_the_event_loop_cancels_it() -> None:
    """It is not lost while the loop is made (issue 26)."""
    cancelled = False

    async def obey() -> None:
        nonlocal cancelled
        with pytest.raises(anyio.get_cancelled_exc_class()):
            await signals.cancel(anyio.sleep_forever)
        cancelled = True

    with Signals() as signals:
        signal.raise_signal(signal.SIGINT)
        anyio.run(obey)
    assert cancelled


def test_later_signal_ends_an_event_loop_that_hangs() -> None:
    """Code that blocks the loop can't be cancelled; others clean up (issue 26)."""
    script = """\
import signal
from etlstage.cli import signals
times = iter([5.0, 5.0, 14.9, 15.0])
signals.monotonic = lambda: next(times)
async def main():
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    print("goes on", flush=True)
    signal.raise_signal(signal.SIGINT)
    print("not ended", flush=True)
signals.run_interruptible(main)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (5, "goes on\n")
    assert done.stderr == "etlstage: error: interrupted\n"


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

        async def main() -> bool:
            signal.raise_signal(signal.SIGHUP)
            return True

        assert run_interruptible(main)
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
