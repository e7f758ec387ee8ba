from __future__ import annotations

from unittest.mock import ANY

import anyio
import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict

from etlstage.errors import WorkerLost
from etlstage.stage import Timeouts
from etlstage.supervisor import (
    SupervisorEvent,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
)
from tests.supervisor.acts import acting
from tests.supervisor.workers import QUICK, outputs, plain, stage

pytestmark = [pytest.mark.core, pytest.mark.virtual]


async def test_events_of_a_worker_that_behaves() -> None:
    """It starts and exits; the stream of events ends with the supervisor."""
    supervisor = acting(stage("echo"))
    events = supervisor.events()
    async with supervisor:
        await supervisor.submit([b"one"])
    with events:
        started, exited = [event async for event in events]

    assert isinstance(started, WorkerStarted)
    assert started.worker == "t-1"
    assert exited == WorkerExited(
        "t-1",
        started.pid,
        status=0,
        lost=0,
        answered=1,
        stopped=True,
        untouched=False,
        fate="exited with status 0",
    )


async def test_events_of_a_worker_that_is_given_up() -> None:
    """It fails, with the error that its message gets, before it exits."""
    # A worker that has not started would have read nothing.
    timeout = Timeouts(message=0.2, stop=0.2)
    run = stage("never_answers", timeout=timeout, ready=True)
    supervisor = acting(run)
    events = supervisor.events()
    with anyio.fail_after(1000):
        async with supervisor:
            (result,) = await supervisor.submit([b"one"])
    with events:
        started, ready, failed, exited = [event async for event in events]

    assert isinstance(started, WorkerStarted)
    assert isinstance(ready, WorkerReady)
    assert isinstance(failed, WorkerFailed)
    assert "did not answer a message within 0.2 s" in str(failed.error)
    assert "did not answer a message within 0.2 s" in str(result.error)
    assert exited == WorkerExited(
        "t-1",
        started.pid,
        status=-15,
        lost=1,
        failed=1,
        tries=0,
        unknown=1,
        fate="was killed by SIGTERM",
    )


async def test_events_of_a_worker_that_dies() -> None:
    """The exit has the number of messages that it held."""
    supervisor = acting(stage("exits_at", 2, 3, window=4))
    events = supervisor.events()
    async with supervisor:
        await supervisor.submit([b"one"] * 4)
    with events:
        *_, exited = [event async for event in events]

    assert isinstance(exited, WorkerExited)
    # Its first reply was not proven.
    assert (exited.status, exited.lost, exited.answered) == (3, 4, 0)
    assert (exited.retried, exited.failed, exited.tries) == (4, 0, 1)
    assert (exited.untouched, exited.stopped, exited.late) == (False, False, 0)
    assert exited.fate == "exited with status 3"


async def test_events_of_extraction() -> None:
    """In plain mode each round has a worker of its own."""
    supervisor = acting(plain("extract", "one"))
    events = supervisor.events()
    async with supervisor:
        for _ in range(2):
            assert [m async for m in supervisor.extract()] == [b"one"]
    with events:
        seen = [event async for event in events]

    assert [(type(e), e.worker) for e in seen] == [
        (WorkerStarted, "e-1"),
        (WorkerExited, "e-1"),
    ] * 2
    assert [e.start for e in seen if isinstance(e, WorkerStarted)] == [1, 2]


async def test_every_listener_hears_everything() -> None:
    """A listener that has closed is dropped, and others are not disturbed."""
    supervisor = acting(stage("echo"))
    gone, first, second = (supervisor.events() for _ in range(3))
    gone.close()
    async with supervisor:
        pass
    heard: list[list[SupervisorEvent]] = []
    for events in first, second:
        with events:
            heard.append([event async for event in events])

    assert heard[0] == heard[1]
    assert len(heard[0]) == 2


async def test_events_behind_the_end_are_none() -> None:
    """No one waits for a supervisor that has ended."""
    async with acting(stage("echo")) as supervisor:
        pass
    with supervisor.events() as events, anyio.fail_after(1000):
        assert [event async for event in events] == []


# --- stderr --------------------------------------------------------------------------


async def test_long_lines_of_stderr_are_logged_in_pieces() -> None:
    """A line without an end does not fill the memory."""
    run = stage("complains", 100_000)
    with capture_logs() as logs:
        async with acting(run) as supervisor:
            outputs(await supervisor.submit([b"one"]))

    pieces = [entry["line"] for entry in logs if "line" in entry]
    assert "".join(pieces) == "x" * 100_000
    assert len(pieces) > 10


async def test_failure_of_a_worker_is_logged() -> None:
    """It is a warning with the whole story; an ordinary exit is no news."""
    timeout = Timeouts(message=0.2, stop=0.2)
    run = stage("writes_no_eop_at", 1, timeout=timeout, ready=True)
    with capture_logs() as logs, anyio.fail_after(1000):
        async with acting(run) as supervisor:
            (result,) = await supervisor.submit([b"one"])

    news = [e for e in logs if e["log_level"] != "debug"]
    assert [e for e in news if e["event"] != "worker wrote to stderr"] == [
        {
            "event": "worker failed",
            "log_level": "warning",
            "stage": "t",
            "error": ANY,
        }
    ]
    (entry,) = (e for e in logs if e["event"] == "worker failed")
    assert "it wrote 4 bytes without the marker eop" in entry["error"]
    assert "it wrote 4 bytes without the marker eop" in str(result.error)


async def test_each_step_of_a_worker_is_logged() -> None:
    """At debug level: from its start to its exit, by itself or not (issue 22)."""
    with capture_logs() as logs, anyio.fail_after(1000):
        async with acting(stage("echo")) as supervisor:
            await supervisor.submit([b"one"])
        async with acting(plain("extract", "one")) as supervisor:
            assert [m async for m in supervisor.extract()] == [b"one"]
        async with acting(stage("deaf_to_eof", timeout=QUICK)) as supervisor:
            await supervisor.submit([b"one"])
    assert {log["log_level"] for log in logs} == {"debug"}
    assert [
        (log["event"], log["worker"], log.get("sent", log.get("by_itself")))
        for log in logs
    ] == [
        ("worker started", "t-1", None),
        ("stopping worker", "t-1", "the end of its input"),
        ("worker exited", "t-1", False),
        ("worker started", "e-1", None),
        ("worker exited", "e-1", True),
        ("worker started", "t-1", None),
        ("stopping worker", "t-1", "the end of its input"),
        ("stopping worker", "t-1", "SIGTERM"),
        ("worker exited", "t-1", False),
    ]
    assert logs[-1]["exit"] == "was killed by SIGTERM"


async def test_round_of_a_program_is_no_restart() -> None:
    """The program runs once for each round, as intended (issue 22)."""
    async with acting(plain("extract", "one")) as supervisor:
        for _ in range(3):
            assert [m async for m in supervisor.extract()] == [b"one"]
    assert supervisor.faults.restarts == 0


async def test_log_that_is_gone_stops_no_one() -> None:
    """If logs go to a closed pipe, say, workers still do their work."""

    def broken(logger: object, method: str, event: EventDict) -> EventDict:
        raise BrokenPipeError

    timeout = Timeouts(message=0.2, stop=0.2)
    run = stage("writes_no_eop_at", 1, timeout=timeout, ready=True)
    structlog.configure(processors=[broken])
    try:
        with anyio.fail_after(1000):
            async with acting(run) as supervisor:
                (result,) = await supervisor.submit([b"one"])
            async with acting(stage("complains", 100_000)) as supervisor:
                outputs(await supervisor.submit([b"one"]))
    finally:
        structlog.reset_defaults()
    assert isinstance(result.error, WorkerLost)
