"""``etlstage run`` with workers on executors: signals leave no processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Started, start
from tests.cli.test_run import wait_for
from tests.spark.processes import HANGING, TELL, are_gone, parent, wait_for_pids

__all__ = ("start",)

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

FIRST = f"""{TELL}
from etlstage import worker

def answer(message):
    if message == b"row 0":
        return (message,)
    if not any(os.scandir(sys.argv[1])):
        tell(sys.argv[1])
        while not os.path.exists("go on"):
            time.sleep(0.05)
    return (message,)

def tell(place):
    with open(place + "/part", "w") as file:
        print(os.getppid(), os.getpid(), os.getpid(), file=file)
    os.rename(place + "/part", place + "/1.pids")

worker.transform(answer)
"""
"""A worker that replies to the second message only when it is told to."""
FILE = """\
name: p
engine: {engine}
state: state
spark: {{master: "local[2]"}}
extract:
  spark: {{format: text, path: in, options: {{{options}}}}}
  {every}
transform:
  - name: t
    worker: {{command: [python, worker.py, pids]}}
    timeout: {{message: null}}
load:
  spark: {{format: text, path: out, mode: append}}
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., list[str]]:
    """Write a pipeline and a worker; return the command that runs it."""

    def write(engine: str, worker: str = HANGING) -> list[str]:
        (tmp_path / "pids").mkdir()
        (tmp_path / "in").mkdir()
        for number in range(2):
            (tmp_path / f"in/{number}.txt").write_text(f"row {number}\n")
            os.utime(tmp_path / f"in/{number}.txt", (number, number))
        (tmp_path / "worker.py").write_text(worker)
        stream = engine == "streaming"
        text = FILE.format(
            engine=engine,
            options='maxFilesPerTrigger: "1"' if stream else "",
            every="every: 100ms" if stream else "",
        )
        (tmp_path / "p.yaml").write_text(text)
        return ["run", "p.yaml", "--report", "r.json"]

    return write


def status(folder: Path) -> str:
    """Return the run's status from its report."""
    found: str = json.loads((folder / "r.json").read_text())["status"]
    return found


def to_group(process: int, number: signal.Signals) -> None:
    """Send a signal as a terminal does: to the whole process group."""
    os.killpg(process, number)


# Each signal in each way, with one engine or both: each run starts its own Spark.
INTERRUPT = (signal.SIGINT, to_group)


@pytest.mark.parametrize(("number", "send"), [INTERRUPT, (signal.SIGTERM, os.kill)])
def test_one_signal_calls_off_what_loads_nothing(
    start: Started,
    write: Callable[..., list[str]],
    tmp_path: Path,
    number: signal.Signals,
    send: Callable[[int, signal.Signals], None],
) -> None:
    """Exit status 4, and no workers are left: a DataFrame is read as a whole."""
    process = start(*write("spark"))
    pids = wait_for_pids(tmp_path / "pids")
    send(process.pid, number)
    out, err = process.communicate()
    assert process.returncode == 4, err
    assert "draining: press Ctrl-C again to stop at once\n" in err
    assert "p: drained in" in out
    assert "\naccounted for: 0 loaded" in out
    assert "Traceback" not in err
    assert status(tmp_path) == "drained"
    assert not (tmp_path / "out").exists()
    assert are_gone(pids)


@pytest.mark.parametrize(("number", "send"), [INTERRUPT, (signal.SIGTERM, to_group)])
def test_one_signal_ends_a_stream_behind_its_batch(
    start: Started,
    write: Callable[..., list[str]],
    tmp_path: Path,
    number: signal.Signals,
    send: Callable[[int, signal.Signals], None],
) -> None:
    """Exit status 4, and the batch that had begun is loaded."""
    process = start(*write("streaming", FIRST))
    pids = wait_for_pids(tmp_path / "pids")
    send(process.pid, number)
    wait_for(process.stderr, "draining: press Ctrl-C again to stop at once")
    (tmp_path / "go on").touch()
    out, err = process.communicate()
    assert process.returncode == 4, err
    assert "p: drained in" in out
    assert "wrote 2 messages in 2 epochs to" in out
    assert "Traceback" not in err
    assert status(tmp_path) == "drained"
    assert are_gone(pids)


@pytest.mark.parametrize("engine", ["spark", "streaming"])
def test_two_signals_stop_at_once(
    start: Started, write: Callable[..., list[str]], tmp_path: Path, engine: str
) -> None:
    """Exit status 5; workers that never reply are killed, with their children."""
    process = start(*write(engine))
    pids = wait_for_pids(tmp_path / "pids")
    to_group(process.pid, signal.SIGINT)
    wait_for(process.stderr, "draining: press Ctrl-C again to stop at once")
    to_group(process.pid, signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 5, err
    assert "p: stopped by force in" in out
    assert "Traceback" not in err
    assert status(tmp_path) == "forced"
    assert are_gone(pids)


@pytest.mark.parametrize("engine", ["spark", "streaming"])
def test_workers_go_with_a_run_that_is_killed(
    start: Started, write: Callable[..., list[str]], tmp_path: Path, engine: str
) -> None:
    """Also after SIGKILL, when no code of ours runs; Spark ends, too."""
    process = start(*write(engine))
    pids = wait_for_pids(tmp_path / "pids")  # with engine spark: of one task or both
    spark = parent(parent(pids[0]))
    process.kill()
    assert are_gone([spark, *pids])


@pytest.mark.parametrize("engine", ["spark", "streaming"])
def test_spark_that_is_killed_is_reported(
    start: Started, write: Callable[..., list[str]], tmp_path: Path, engine: str
) -> None:
    """As if by the kernel for lack of memory: in one line, with no processes left."""
    process = start(*write(engine))
    pids = wait_for_pids(tmp_path / "pids")
    os.kill(parent(parent(pids[0])), signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 1, err
    *_, line = err.splitlines()
    assert line.startswith("etlstage: error: ")
    assert "the JVM of Spark has exited; Spark's log is /" in line
    assert "Traceback" not in err
    assert "p: failed in" in out
    assert are_gone(pids)
