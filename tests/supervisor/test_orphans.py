"""What happens to workers, and to their children, when the host is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

import etlstage
from tests.supervisor import orphans

ROOT = Path(etlstage.__file__).parent.parent
PATIENCE = 5.0  # seconds, as promised


class Host:
    """A host process; everything that it printed is killed at the end of a test."""

    def __init__(self, place: str, launcher: str = "setpriv") -> None:
        self._process = subprocess.Popen(
            [sys.executable, orphans.__file__, place, launcher],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            bufsize=0,
        )
        self.pid = self._process.pid
        self._told: list[psutil.Process] = []

    def started(self) -> list[psutil.Process]:
        """Return the host, the worker, its child, and its child in another session."""
        assert self._process.stdout is not None
        pids = map(int, self._process.stdout.readline().split())
        told = [psutil.Process(pid) for pid in pids]
        self._told += [*told, *watchdogs(self.pid)]
        return told

    def go_on(self) -> None:
        """Have it start the next thing."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    def kill(self) -> None:
        """Kill and reap it."""
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Return its status once it has exited by itself."""
        return self._process.wait(10)

    def close(self) -> None:
        """Kill it and everything that it has started."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        for process in self._told:
            if lives(process):
                process.kill()


HostMaker = Callable[..., Host]


@pytest.fixture
def host() -> Iterator[HostMaker]:
    """Yield a function that starts hosts, which are closed at the end."""
    hosts: list[Host] = []

    def start(place: str, launcher: str = "setpriv") -> Host:
        hosts.append(Host(place, launcher))
        return hosts[-1]

    yield start
    for one in hosts:
        one.close()


def watchdogs(pid: int) -> list[psutil.Process]:
    """Return the watchdog of a process, if it has one."""
    children = psutil.Process(pid).children()
    return [c for c in children if any("guard.py" in word for word in c.cmdline())]


def holds(pid: int) -> set[str]:
    """Return the kinds, or paths, of a process's open files."""
    kinds = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kinds.add(os.readlink(descriptor).partition(":")[0])
        except FileNotFoundError:
            continue  # closed in the meantime
    return kinds


def lives(process: psutil.Process) -> bool:
    """Return whether a process exists, and is not a zombie."""
    try:
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return bool(process.is_running() and not zombie)
    except psutil.NoSuchProcess:
        return False


def wait_until(true: Callable[[], object]) -> None:
    """Wait for something that a process does eventually; no time is promised."""
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def until_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait until processes are gone; return those that are not in time."""
    deadline = time.monotonic() + PATIENCE
    while (left := [p for p in processes if lives(p)]) and time.monotonic() < deadline:
        time.sleep(0.005)
    return left


@pytest.mark.parametrize(
    ("place", "launcher"), [("main", "setpriv"), ("thread", "shim")]
)
def test_nothing_outlives_a_killed_host(
    host: HostMaker, place: str, launcher: str
) -> None:
    """
    Worker, child and grandchild ignore EOF and SIGTERM, and hold the pipes.

    One of them has a session of its own.
    """
    killed = host(place, launcher)
    _, *started = killed.started()
    assert len(started) == 3
    assert all(map(lives, started))
    killed.kill()

    assert until_gone(started) == []


def test_nothing_outlives_a_killed_fork(host: HostMaker) -> None:
    """A fork without exec has its own watchdog; its parent's is undisturbed."""
    parent = host("fork")
    _, *first = parent.started()
    (watchdog,) = watchdogs(parent.pid)
    parent.go_on()
    child, *second = parent.started()
    assert child.pid != parent.pid
    assert watchdogs(child.pid) not in ([], [watchdog])
    child.kill()

    assert until_gone(second) == []
    assert all(map(lives, [*first, watchdog]))
    parent.kill()
    assert until_gone([*first, watchdog]) == []


def test_fork_does_not_hide_the_end_of_its_parent(host: HostMaker) -> None:
    """The inherited connection to the parent's watchdog is closed in the fork."""
    parent = host("fork")
    _, *first = parent.started()
    parent.go_on()
    child, *second = parent.started()
    parent.kill()

    assert until_gone(first) == []
    assert all(map(lives, [child, *second]))
    child.kill()
    assert until_gone(second) == []


def test_fork_that_never_heard_of_us_hides_nothing(host: HostMaker) -> None:
    """The inherited connection is closed in it automatically."""
    parent = host("fork to no end")
    _, *started = parent.started()
    parent.go_on()
    (child,) = parent.started()
    parent.kill()

    assert until_gone(started) == []
    assert lives(child)


def test_killed_watchdog_is_replaced(host: HostMaker) -> None:
    """With the next worker; the new one also knows the old worker."""
    killed = host("main")
    _, *first = killed.started()
    (watchdog,) = watchdogs(killed.pid)
    watchdog.kill()
    assert until_gone([watchdog]) == []
    assert all(map(lives, first))
    killed.go_on()
    _, *second = killed.started()
    (replacement,) = watchdogs(killed.pid)
    assert replacement != watchdog
    killed.kill()

    assert until_gone([*first, *second, replacement]) == []


@pytest.mark.parametrize("launcher", ["setpriv", "shim"])
def test_worker_dies_with_us_without_a_watchdog(host: HostMaker, launcher: str) -> None:
    """Its launcher asked the kernel for a signal, before the worker was executed."""
    killed = host("main", launcher)
    _, worker, *_ = killed.started()
    (watchdog,) = watchdogs(killed.pid)
    watchdog.kill()
    assert until_gone([watchdog]) == []
    killed.kill()

    assert until_gone([worker]) == []


def test_watchdog_kills_what_is_deaf_to_all_else(host: HostMaker) -> None:
    """Even if the host exits in an orderly way, but forgets its worker."""
    careless = host("once")
    _, worker = careless.started()
    watching = watchdogs(careless.pid)
    careless.go_on()
    assert careless.wait() == 0

    assert until_gone([worker, *watching]) == []


def test_watchdog_and_worker_have_nothing_of_each_other(host: HostMaker) -> None:
    """A reader of our output sees its end, as the watchdog holds no file of ours."""
    watched = host("once")
    _, worker = watched.started()
    (watchdog,) = watchdogs(watched.pid)
    # Python still has its program open while it starts.
    wait_until(lambda: holds(watchdog.pid) <= {"socket", "/dev/null"})

    assert watchdog.cwd() == "/"
    assert os.getsid(watchdog.pid) == watchdog.pid
    # It ignores a SIGTERM to all programs, as it must exit after them.
    asked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    wait_until(lambda: asked <= ignored(watchdog.pid))
    # If the worker inherited its connection, our end could stay unnoticed.
    assert holds(worker.pid) == {"pipe"}


def ignored(pid: int) -> set[int]:
    """Return the signals that a process ignores."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


HOST_IGNORING_SIGCHLD = """\
import anyio
from etlstage import AsyncSupervisor, Stage, StageKind

async def main():
    answers = 'while read line; do printf "\\\\0"; done; exit 4'
    stage = Stage(name="load", worker=["sh", "-c", answers], kind=StageKind.LOAD)
    async with AsyncSupervisor(stage) as supervisor:
        print([result.error for result in await supervisor.submit([b"a", b"b"])])
    print(supervisor.doubtful)
    print(supervisor.doubt)

anyio.run(main)
"""


def test_exit_status_in_a_host_that_ignores_sigchld() -> None:
    """It is unknown, which is a failure with the remedy, not success (issue 22)."""
    done = subprocess.run(
        [sys.executable, "-c", HOST_IGNORING_SIGCHLD],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers, doubtful, doubt = done.stdout.splitlines()
    assert (answers, doubtful) == ("[None, None]", "2")
    assert (
        "has ended (exit status unknown) while it was stopping; 2 messages that it had"
        " answered may not have been loaded; the host process reaps its children: set"
        " SIGCHLD to SIG_DFL in it, and let it wait for no process that it did not"
        " start" in doubt
    )
