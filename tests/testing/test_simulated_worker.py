"""The hostile worker without a process: each fault has the effect that it should."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.errors import ConfigError
from etlstage.messages import Result
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, ErrorPolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    Moment,
    ScriptedLaunch,
    ScriptedWorker,
    WorkerUnderTest,
)
from etlstage.testing.scripted import SimulatedWorker
from etlstage.testing.transcript import Channel
from etlstage.transport.base import LaunchRequest
from tests.staged import staged

pytestmark = [pytest.mark.core, pytest.mark.virtual]

X = b"x"


def upper(message: bytes) -> Iterable[bytes]:
    """Return each word in capitals; fail for ``bad``."""
    if message == b"bad":
        raise ValueError("no date")
    return message.upper().split()


async def run(
    *faults: Fault,
    messages: Iterable[bytes] = (X,),
    told: list[str] | None = None,
    **settings: Any,  # noqa: ANN401
) -> list[Result]:
    """Return the results of messages when workers have these faults."""

    async def script(worker: ScriptedWorker) -> int:
        said = [] if told is None else told
        plan = FaultPlan(faults)
        simulated = SimulatedWorker(worker, stage, upper, plan, said.append)
        return await simulated.run()

    given = {
        "timeout": Timeouts(message=1.0, stop=0.1),
        "restart": RestartPolicy(delay=0.001, max=100),
        "on_error": ErrorPolicy(retries=1),
    }
    stage = staged(("simulated",), **(given | settings))
    with capture_logs(), anyio.fail_after(600):
        async with AsyncSupervisor(stage, launch=ScriptedLaunch(script)) as supervisor:
            return await supervisor.submit(messages)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (FaultKind.KILL, "was killed by SIGKILL"),
        (FaultKind.EXIT, "exited with status 1"),
        (FaultKind.STALL, "did not answer a message within 1 s"),
        (FaultKind.SPIN, "did not answer a message within 1 s"),
        (FaultKind.STOP, "did not answer a message within 1 s"),
        (FaultKind.SKIP, "did not answer a message within 1 s"),
        (FaultKind.CLOSE_STDOUT, "closed its stdout"),
        (FaultKind.REFUSE, "refused the message: X"),
    ],
)
async def test_fault_of_a_message(kind: FaultKind, why: str) -> None:
    """That message is lost or refused, and no other is."""
    told: list[str] = []
    fault = Fault(kind, equals=X)
    results = await run(fault, messages=[b"a", X, b"c"], told=told)
    assert [result.outputs for result in results] == [(b"A",), (), (b"C",)]
    assert why in str(results[1].error)
    assert told[0] == f"fault {kind.value} at b'x'"


@pytest.mark.parametrize(
    ("fault", "outputs"),
    [
        (Fault(FaultKind.PAUSE, seconds=0.5), (b"X",)),
        (Fault(FaultKind.CUT), (b"X",)),
        (Fault(FaultKind.STDERR, size=300), (b"X",)),
        (Fault(FaultKind.STDERR, data=b"warning"), (b"X",)),
        (Fault(FaultKind.IGNORE_SIGTERM), (b"X",)),
        (Fault(FaultKind.CLOSE_STDIN), (b"X",)),
        (Fault(FaultKind.EXTRA_EOP, start=1), (b"X",)),
        (Fault(FaultKind.KILL, at=Moment.END), (b"X",)),
        (Fault(FaultKind.KILL, at=Moment.START, start=1), (b"X",)),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Fault) else "",
)
async def test_fault_that_costs_nothing(
    fault: Fault, outputs: tuple[bytes, ...]
) -> None:
    """The message is answered."""
    (result,) = await run(fault)
    assert (result.outputs, result.error) == (outputs, None)


async def test_worker_without_heartbeat_is_replaced() -> None:
    """This one never reports that it is ready."""
    silent = Fault(FaultKind.NEVER_READY, start=1)
    timeout = Timeouts(start=2.0, heartbeat=1.0, stop=0.1)
    (result,) = await run(silent, ready=True, timeout=timeout)
    assert result.outputs == (b"X",)


@pytest.mark.parametrize("mode", [Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER])
@pytest.mark.parametrize("eob_then_eom", [False, True])
async def test_batches(*, mode: Mode, eob_then_eom: bool) -> None:
    """Each is answered as a whole, the last one, too."""
    dialect = MarkerDialect(mode=mode, eob_then_eom=eob_then_eom, bnc_after_eob=False)
    results = await run(
        messages=[b"a", b"b", b"c d"],
        dialect=dialect,
        batch=BatchPolicy(size=2, seconds=0.1),
    )
    made = [output for result in results for output in result.outputs]
    assert made == [b"A", b"B", b"C", b"D"]


async def test_what_its_work_raises_is_a_refusal() -> None:
    """The reason has the name and the text of the exception."""
    (result,) = await run(messages=[b"bad"])
    assert "refused the message: ValueError: no date" in str(result.error)


async def test_without_err_it_dies_of_what_its_work_raises() -> None:
    """It can't refuse anything then."""
    dialect = MarkerDialect(markers=Markers(err=None))
    (result,) = await run(messages=[b"bad"], dialect=dialect)
    assert "exited with status 1" in str(result.error)


@pytest.mark.parametrize("kind", [FaultKind.GRANDCHILD, FaultKind.LEAK])
async def test_what_takes_a_process_is_refused(kind: FaultKind) -> None:
    """The error comes before anything is run."""
    stage = Stage(name="t", worker=("simulated",))

    async def script(worker: ScriptedWorker) -> int:
        plan = FaultPlan.of(Fault(kind))
        with pytest.raises(ConfigError, match=f"{kind.value} can't be simulated"):
            SimulatedWorker(worker, stage, upper, plan)
        return 0

    async with AsyncSupervisor(stage, launch=ScriptedLaunch(script)):
        await anyio.sleep(0.1)


@pytest.mark.parametrize(
    ("mode", "data", "made_up"),
    [
        (Mode.BATCH_WORKER, b"x\n\x17a\nb\n\x17", True),
        (Mode.BATCH_WORKER, b"x\n\x17a\n\x17b\n\x17", False),
        (Mode.BATCH_WORKER, b"a\nb\n\x17a\nb\n\x17x\n\x17", False),
        (Mode.BATCH_SUPERVISOR, b"x\n\x17a\nb\n\x17", False),
    ],
)
async def test_reply_too_many_is_made_up_for(
    mode: Mode, data: bytes, *, made_up: bool
) -> None:
    """It may pass for the reply to a batch that the worker ended early (issue 12)."""
    told: list[str] = []
    dialect = MarkerDialect(mode=mode)
    stage = Stage(name="t", worker=("simulated",), dialect=dialect)
    found: list[bool] = []

    async def script(worker: ScriptedWorker) -> None:
        plan = FaultPlan.of(Fault(FaultKind.TWICE, equals=X))
        simulated = SimulatedWorker(worker, stage, upper, plan, told.append)
        await simulated.run()
        found.append(simulated.made_up)

    wire, child = ScriptedLaunch(script)(LaunchRequest(("simulated",), {}))
    wire.write(data)
    wire.close_write()
    assert await child.wait() == 0
    assert found == [made_up]
    assert ("extra reply was taken for the reply to b'a'" in told[-1]) is made_up


@pytest.mark.parametrize("size", [3, 7])
async def test_stderr_has_the_bytes_of_the_fault(size: int) -> None:
    """They are those that the hostile worker writes (issue 26)."""
    run_of = staged(("no-such-program",))
    plan = FaultPlan.of(Fault(FaultKind.STDERR, data="\xe9".encode(), size=size))

    async def script(worker: ScriptedWorker) -> int:
        return await SimulatedWorker(worker, run_of, upper, plan).run()

    async with WorkerUnderTest(run_of, launch=ScriptedLaunch(script)) as worker:
        await worker.exchange([X])
        await worker.close()
    assert worker.transcript.of(Channel.STDERR) == (b"\xc3\xa9\n" * 3)[:size]
