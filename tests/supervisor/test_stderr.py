"""Lines of stderr become log entries, up to a limited rate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict

from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor, WorkerStarted
from etlstage.supervisor.stderr import StderrLog
from etlstage.transport import LaunchRequest, launch_over_pipes
from etlstage.transport.process import PipeChild
from tests.patience import HANG

pytestmark = pytest.mark.process

WROTE = "worker wrote to stderr"
DROPPED = "stderr rate limit reached"


@contextmanager
def python(code: str) -> Iterator[PipeChild]:
    """Start a program that is killed and reaped at the end of the block."""
    command = (sys.executable, "-S", "-c", f"import os, sys, time\n{code}")
    request = LaunchRequest(command, {"PYTHONUNBUFFERED": "1"}, stdin=False)
    wire, child = launch_over_pipes(request)
    try:
        yield child
    finally:
        child.kill()
        wire.close()
        child.close()


def lines(logs: list[EventDict]) -> list[tuple[str, str]]:
    """Return level and text of the lines among log entries."""
    return [(e["log_level"], e["line"]) for e in logs if e["event"] == WROTE]


def log_of(child: PipeChild, **settings: Any) -> StderrLog:  # noqa: ANN401
    """Return the logger of a program's stderr."""
    return StderrLog(
        child.stderr, stage="clean", worker="clean-1", pid=child.pid, **settings
    )


async def run(
    code: str,
    **settings: Any,  # noqa: ANN401
) -> tuple[list[EventDict], StderrLog]:
    """Return the log entries of a program's whole stderr, and their logger."""
    with capture_logs() as logs, python(code) as child, anyio.fail_after(HANG):
        log = log_of(child, **settings)
        await log.run()
    return logs, log


async def test_line_is_logged_with_its_level() -> None:
    """And with its writer, but without sequences that control a terminal."""
    code = r"sys.stderr.write('one\nERROR: \x1b[31mtwo\0\nwarning: three\n\n{\"level\":10}')"
    with capture_logs() as logs, python(code) as child:
        await StderrLog(
            child.stderr, pid=child.pid, stage="clean", worker="clean-1"
        ).run()
    assert lines(logs) == [
        ("info", "one"),
        ("error", r"ERROR: two\x00"),
        ("warning", "warning: three"),
        ("debug", '{"level":10}'),
    ]
    assert {(e["stage"], e["worker"], e["pid"]) for e in logs} == {
        ("clean", "clean-1", child.pid)
    }


async def test_flood_fills_no_log() -> None:
    """Of ten megabytes a burst is logged, the rest is counted, the end is kept."""
    code = "sys.stderr.write(''.join(f'line {n:06d} {\"x\" * 88}\\n' for n in range(100_000)))"
    logs, log = await run(code, clock=float)

    logged = lines(logs)
    assert sum(e.get("dropped_lines", 0) for e in logs) == 99_000
    assert [text[:11] for _, text in logged] == [f"line {n:06d}" for n in range(1000)]
    assert log.tail[-1].startswith("line 099999")


async def test_others_get_their_turn() -> None:
    """A worker that writes faster than we read does not keep the loop to itself."""

    class Flooding:
        turns = 0
        reads = 0

        def read(self, size: int) -> bytes:
            self.reads += 1
            return b"x\n" * (size // 2) if self.reads < 100 else b""

        async def readable(self) -> None:
            raise AssertionError("there is always more")

        def stop_waiting(self) -> None:
            raise AssertionError("nobody waits")

    async def watch() -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            flood.turns += 1

    flood = Flooding()
    with capture_logs():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await StderrLog(flood, pid=1, stage="s", worker="s-1").run()
            tasks.cancel_scope.cancel()
    assert flood.turns >= 90


async def test_what_was_dropped_is_reported_at_the_end() -> None:
    """In one event, with its size."""
    logs, _ = await run("sys.stderr.write('abc\\n' * 10)", rate=0.1, burst=3)
    assert lines(logs) == [("info", "abc")] * 3
    assert [e for e in logs if e["event"] == DROPPED] == [
        dict(logs[-1])
        | {
            "log_level": "warning",
            "dropped_lines": 7,
            "dropped_bytes": 21,
            "worker": "clean-1",
        }
    ]


async def test_what_was_dropped_is_reported_after_a_silence() -> None:
    """The worker may live for months."""
    code = "os.write(2, b'a\\nb\\n'); time.sleep(60)"
    with capture_logs() as logs, python(code) as child:
        log = log_of(child, rate=0.1, burst=1)
        with anyio.move_on_after(2.5):
            await log.run()
    assert [e.get("dropped_lines") for e in logs] == [None, 1]


async def test_draining_reports_what_was_dropped() -> None:
    """Even if there is more to read than one drain reads."""
    with capture_logs() as logs, python("os.write(2, b'x\\n' * 60000)") as child:
        log = log_of(child, burst=5, clock=float)
        child._popen.wait()
        log.drain()
        assert logs[-1]["event"] == DROPPED
        first = logs[-1]["dropped_lines"]
        assert len(lines(logs)) + first == 32768
        log.drain()
    assert sum(e.get("dropped_lines", 0) for e in logs) + len(lines(logs)) == 60000


async def test_lines_are_counted() -> None:
    """Whether logged or not, in groups instead of one by one."""
    counts: list[int] = []
    with capture_logs(), python("sys.stderr.write('x\\n' * 10000 + 'y')") as child:
        log = log_of(child, counted=counts.append)
        await log.run()
    assert sum(counts) == 10001
    assert len(counts) < 100


async def test_time_comes_from_the_clock() -> None:
    """If its time flies, nothing is dropped."""
    now = iter(range(0, 10**9, 1000))
    with capture_logs() as logs, python("sys.stderr.write('x\\n' * 20000)") as child:
        await log_of(
            child,
            burst=10_000,
            clock=lambda: next(now),
        ).run()
    assert len(lines(logs)) == 20000


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError])
async def test_log_that_is_gone(error: type[Exception]) -> None:
    """Stderr is still read to its end."""

    def broken(logger: object, method: str, event: EventDict) -> EventDict:
        raise error

    structlog.configure(processors=[broken])
    try:
        with python("sys.stderr.write('x\\n' * 10000 + 'end')") as child:
            log = log_of(child)
            await log.run()
    finally:
        structlog.reset_defaults()
    assert log.tail[-1] == "end"


async def test_lines_of_stderr_are_logged() -> None:
    """With stage, worker and pid; empty lines are not, an unfinished last line is."""
    script = r"printf 'one\r\n\ntwo \377\nthree' >&2; cat >/dev/null"
    supervisor = AsyncSupervisor(Stage(name="clean", worker=("sh", "-c", script)))
    with capture_logs() as logs, supervisor.events() as events:
        async with supervisor:
            started = events.receive_nowait()
            assert isinstance(started, WorkerStarted)

    lines = [entry for entry in logs if entry["event"] == "worker wrote to stderr"]
    assert [entry["line"] for entry in lines] == ["one", r"two \xff", "three"]
    assert {(e["stage"], e["worker"], e["pid"], e["log_level"]) for e in lines} == {
        ("clean", "clean-1", started.pid, "info")
    }
