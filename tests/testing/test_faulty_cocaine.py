"""
How a supervisor handles each fault of a worker that is connected.

Everything runs in memory and in virtual time; the worker itself is sound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from signal import SIGABRT, SIGKILL, SIGSEGV, SIGTERM
from typing import Any

import anyio
import msgpack
import pytest
from structlog.testing import capture_logs

from etlstage.errors import ConfigError
from etlstage.protocol.cocaine import CocaineVersion
from etlstage.protocol.cocaine.session import ConnectionState
from etlstage.protocol.cocaine.settings import CocaineDialect, Payload
from etlstage.stage import ErrorPolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import (
    AsyncSupervisor,
    WorkerExited,
    WorkerFailed,
    WorkerStarted,
)
from etlstage.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    FaultyLaunch,
    Moment,
    ScriptedLaunch,
    ScriptedWorker,
    virtual_time,
)
from etlstage.testing.faulty.wire import unknown
from tests.protocol.cocaine.scripted import CocaineWorker

pytestmark = pytest.mark.core

MESSAGES = [b"a", b"b", b"c", b"d"]
LATER = 40.0  # seconds: longer than between two heartbeats


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run in virtual time."""
    return virtual_time()


async def answer(worker: ScriptedWorker) -> int:
    """Reply in capitals, in two chunks; terminate when asked to."""
    dialect = worker.request.dialect
    assert isinstance(dialect, CocaineDialect)
    version = (
        CocaineVersion.ONE
        if dialect.protocol is CocaineVersion.AUTO
        else dialect.protocol
    )
    async with (
        CocaineWorker(worker, version, disown=20) as cocaine,
        anyio.create_task_group() as tasks,
    ):

        async def leave_when_abandoned() -> None:
            while cocaine.session.state is not ConnectionState.ERROR:  # noqa: ASYNC110
                await anyio.sleep(1)
            tasks.cancel_scope.cancel()

        tasks.start_soon(leave_when_abandoned)
        async for request in cocaine.requests():
            said = b"".join(request.messages).upper()
            if dialect.payload is Payload.MSGPACK:
                said = msgpack.packb(said, use_bin_type=False)
            await cocaine.reply(request, said, said)
        tasks.cancel_scope.cancel()
    return 0


@dataclass
class Account:
    """What became of messages and workers."""

    outputs: list[tuple[bytes, ...]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    exits: list[tuple[int, bool]] = field(default_factory=list)
    """Status of each worker, and whether it was asked to end."""
    failed: list[str] = field(default_factory=list)
    """Errors of the workers that failed."""
    starts: int = 0
    signals: list[int] = field(default_factory=list)
    happened: int = 0


async def account(
    *faults: Fault,
    messages: Sequence[bytes] = MESSAGES,
    wait: float = 0.0,
    **settings: Any,  # noqa: ANN401
) -> Account:
    """Return what becomes of messages if a worker has these faults."""
    given: dict[str, Any] = {
        "dialect": CocaineDialect(concurrency=1),
        "timeout": Timeouts(start=10, message=20, stop=5),
        "restart": RestartPolicy(delay=0.1),
        "on_error": ErrorPolicy(retries=1),
        **settings,
    }
    made = Stage(name="app", worker=("no-such-program",), **given)
    inner, found = ScriptedLaunch(answer), Account()
    launch = FaultyLaunch(inner, {"app": FaultPlan.of(*faults)})
    with capture_logs(), anyio.fail_after(1000):
        async with AsyncSupervisor(made, launch=launch) as supervisor:
            events = supervisor.events()
            for result in await supervisor.submit(messages):
                found.outputs.append(result.outputs)
                found.errors.append(str(result.error or ""))
            await anyio.sleep(wait)
    with events:
        async for event in events:
            found.starts += isinstance(event, WorkerStarted)
            if isinstance(event, WorkerExited):
                found.exits.append((event.status, event.stopped))
            if isinstance(event, WorkerFailed):
                found.failed.append(str(event.error))
    found.signals = [number for worker in inner.workers for number in worker.signals]
    found.happened = len(launch.happened)
    return found


ALL = [(m.upper(),) * 2 for m in MESSAGES]
ENDED = (0, True)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (FaultKind.KILL, -SIGKILL),
        (FaultKind.SEGFAULT, -SIGSEGV),
        (FaultKind.ABORT, -SIGABRT),
        (FaultKind.EXIT, 1),
        (FaultKind.PARTIAL, -SIGKILL),
    ],
)
@pytest.mark.parametrize("concurrency", [1, 4])
async def test_worker_that_dies_is_replaced(
    kind: FaultKind, status: int, concurrency: int
) -> None:
    """Another one answers what it held, in however many sessions (issue 15)."""
    found = await account(
        Fault(kind, message=2, start=1), dialect=CocaineDialect(concurrency=concurrency)
    )
    assert found.outputs == ALL
    assert found.exits == [(status, False), ENDED]
    assert found.happened == 1


async def test_worker_dies_each_time_at_what_it_can_not_bear() -> None:
    """The message is retried once, alone, and then fails (issue 15)."""
    found = await account(Fault(FaultKind.KILL, equals=b"b"), messages=[b"a", b"b"])
    assert found.outputs == [(b"A", b"A"), ()]
    assert "was killed by SIGKILL while it held 1 message" in found.errors[1]
    assert found.exits[:2] == [(-SIGKILL, False)] * 2


@pytest.mark.parametrize(
    ("kind", "ended"),
    [(FaultKind.STALL, (-SIGTERM, False)), (FaultKind.STOP, (-SIGTERM, False))],
)
async def test_worker_that_hangs_is_replaced(
    kind: FaultKind, ended: tuple[int, bool]
) -> None:
    """It sends no heartbeats either, and so it is noticed (issue 15)."""
    dialect = CocaineDialect(concurrency=2, heartbeat=15)
    found = await account(Fault(kind, message=2, start=1), dialect=dialect)
    assert found.outputs == ALL
    assert found.exits == [ended, ENDED]
    assert "there was no heartbeat within 15 s" in found.failed[0]


async def test_session_that_is_not_answered_costs_no_worker() -> None:
    """It is cancelled and retried; the others go on (issue 15)."""
    found = await account(
        Fault(FaultKind.SKIP, message=2), dialect=CocaineDialect(concurrency=4)
    )
    assert (found.outputs, found.exits) == (ALL, [ENDED])


async def test_pause_only_delays() -> None:
    """It may delay heartbeats, too, if it is not too long (issue 15)."""
    found = await account(Fault(FaultKind.PAUSE, message=2, seconds=9))
    assert (found.outputs, found.exits) == (ALL, [ENDED])


@pytest.mark.parametrize(
    ("fault", "outputs"),
    [
        (Fault(FaultKind.TWICE, message=2), (b"B", b"B")),
        (Fault(FaultKind.CUT, message=2), (b"B", b"B")),
        (Fault(FaultKind.FLOOD, message=2, size=3), (b"x", b"x", b"x", b"B", b"B")),
        (Fault(FaultKind.HUGE, message=2, size=70000), (b"x" * 70000,)),
        (Fault(FaultKind.REVOKE, message=2, data=b""), (b"B",)),
        (Fault(FaultKind.STDERR, message=2, size=300), (b"B", b"B")),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Fault) else "",
)
@pytest.mark.parametrize("version", [CocaineVersion.ZERO, CocaineVersion.ONE])
@pytest.mark.parametrize("payload", Payload)
async def test_reply_is_what_came_before_the_end(
    fault: Fault, outputs: tuple[bytes, ...], version: CocaineVersion, payload: Payload
) -> None:
    """Frames after the end affect no other session (issue 15)."""
    dialect = CocaineDialect(protocol=version, payload=payload, concurrency=4)
    found = await account(fault, dialect=dialect)
    assert found.outputs == [ALL[0], outputs, *ALL[2:]]
    assert (found.exits, found.happened) == ([ENDED], 1)


@pytest.mark.parametrize("version", [CocaineVersion.ZERO, CocaineVersion.ONE])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(FaultKind.REVOKE, message=2), "revoked"),
        (Fault(FaultKind.REVOKE, message=2, data=b"no more"), "no more"),
        (Fault(FaultKind.REFUSE, message=2), "refused"),
        (Fault(FaultKind.REFUSE, message=2, data=b"no B"), "no B"),
    ],
)
async def test_session_that_ends_with_an_error_is_refused(
    version: CocaineVersion, fault: Fault, reason: str
) -> None:
    """No other session is, though the rest of its reply comes later (issue 15)."""
    dialect = CocaineDialect(protocol=version, concurrency=4)
    found = await account(fault, dialect=dialect)
    assert found.outputs == [ALL[0], (), *ALL[2:]]
    category = ", category 42" if version is CocaineVersion.ONE else ""
    said = f"refused the message: {reason} (code 1{category})"
    assert found.errors[1].endswith(said)
    assert found.exits == [ENDED]


async def test_what_is_no_frame_ends_the_worker() -> None:
    """It is reported as a breach of the protocol (issue 15)."""
    found = await account(Fault(FaultKind.GARBAGE, message=2, start=1))
    assert found.outputs == ALL
    assert "broke the protocol: a frame is not an array" in found.failed[0]
    assert found.exits[1:] == [ENDED]


async def test_heart_that_is_not_heard_ends_an_idle_worker() -> None:
    """While a worker answers it is known to be alive (issue 15)."""
    dialect = CocaineDialect(heartbeat=15)
    fault = Fault(FaultKind.LOSE_HEARTBEATS, message=1, start=1)
    found = await account(fault, dialect=dialect)
    assert (found.outputs, found.exits) == (ALL, [ENDED])
    found = await account(fault, dialect=dialect, wait=LATER)
    assert found.outputs == ALL
    assert "there was no heartbeat within 15 s" in found.failed[0]
    assert found.exits == [(-SIGTERM, False), ENDED]


async def test_worker_whose_heart_is_never_heard_is_not_ready() -> None:
    """It is stopped when its deadline to start is over (issue 15)."""
    found = await account(Fault(FaultKind.NEVER_READY, start=1))
    assert found.outputs == ALL
    assert "was not ready within 10" in found.failed[0]
    assert found.starts == 2


async def test_worker_that_thinks_itself_abandoned_leaves() -> None:
    """An exit that was not requested is a failure, even with status 0 (issue 15)."""
    found = await account(Fault(FaultKind.LOSE_ANSWERS, message=1, start=1), wait=LATER)
    assert found.outputs == ALL
    assert found.exits[0] == (0, False)
    assert found.starts == 2


async def test_terminate_that_is_not_answered_is_no_failure() -> None:
    """The worker's exit means the same (issue 15)."""
    found = await account(Fault(FaultKind.LOSE_TERMINATE))
    assert (found.outputs, found.exits, found.failed) == (ALL, [ENDED], [])
    assert (found.happened, found.signals) == (1, [])


async def test_worker_that_stalls_at_its_end_is_killed() -> None:
    """It is killed when its time to terminate is over (issue 15)."""
    found = await account(Fault(FaultKind.STALL, at=Moment.END))
    assert (found.outputs, found.exits) == (ALL, [(-SIGTERM, True)])


@pytest.mark.parametrize("at", [Moment.MESSAGE, Moment.IDLE])
async def test_worker_without_a_connection_is_replaced(at: Moment) -> None:
    """It keeps running, so it has to be stopped (issue 15)."""
    found = await account(Fault(FaultKind.DISCONNECT, at=at, start=1), wait=LATER)
    assert found.outputs == ALL
    assert found.exits == [(-SIGTERM, False), ENDED]


def test_kind_that_the_dialect_does_not_know_is_refused() -> None:
    """The error states what the kind is about (issue 15)."""
    for dialect, about in (("cocaine", "markers"), ("marker", "a connection")):
        reasons = [unknown(kind, dialect) for kind in FaultKind if not kind.inside]
        assert f"which dialect {dialect} does not have" in "".join(reasons)
        assert any(f"needs {about}" in reason for reason in reasons)
    assert unknown(FaultKind.KILL, "cocaine") == ""


async def test_launch_refuses_such_a_kind_before_it_starts_a_worker() -> None:
    """The error names the kind (issue 15)."""
    with pytest.raises(ConfigError, match="fault extra_eop needs markers"):
        await account(Fault(FaultKind.EXTRA_EOP))


async def test_launch_refuses_a_message_that_no_frame_can_hold() -> None:
    """A string of msgpack has a length of four bytes (issue 26)."""
    found = (
        "fault huge has a size of 5,000,000,000 bytes, expected at most 4,294,967,290"
    )
    with pytest.raises(ConfigError, match=found):
        await account(Fault(FaultKind.HUGE, size=5_000_000_000))
    assert unknown(FaultKind.HUGE, "cocaine", 4_294_967_290) == ""
    assert unknown(FaultKind.HUGE, "marker", 5_000_000_000) == ""
