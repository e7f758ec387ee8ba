"""
How a supervisor handles each fault of a record processor.

Everything runs in memory and in virtual time; the processor itself is sound.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.errors import ConfigError
from etlstage.messages import Run, StageKind
from etlstage.protocol.events import Assignment
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.stage import BatchPolicy, Stage, Timeouts
from etlstage.supervisor import (
    AsyncSupervisor,
    CommitRequest,
    WorkerExited,
    WorkerFailed,
)
from etlstage.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    FaultyLaunch,
    Moment,
    ScriptedLaunch,
    virtual_time,
)
from etlstage.testing.faulty.wire import unknown
from etlstage.testing.fuzzing.steps import Records
from etlstage.testing.kcl import ProcessorUnderTest
from etlstage.transport.base import describe_status
from tests.testing.check.processors import Processor

pytestmark = [pytest.mark.core, pytest.mark.anyio]

RECORDS = [b"%d" % n for n in range(8)]
SHARD = Assignment("shardId-000000000000")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run in virtual time."""
    return virtual_time()


class Load:
    """
    A load of eight records, three per action, and what became of it.

    Args:
        faults: Injected from outside.
        bugs: Of the processor.

    """

    def __init__(self, *faults: Fault, bugs: tuple[str, ...] = ()) -> None:
        stage = Stage(
            name="load",
            kind=StageKind.LOAD,
            worker=["no-such-program"],
            dialect=KclDialect(),
            batch=BatchPolicy(size=3),
            timeout=Timeouts(message=5, start=5, stop=1),
        )
        self.launch = FaultyLaunch(
            ScriptedLaunch(Processor(*bugs)), {"load": FaultPlan(faults)}
        )
        self.stored: list[str] = []
        self.ended: list[int] = []
        self.failed: list[str] = []
        self._supervisor = AsyncSupervisor(
            stage, launch=self.launch, commit=self._store, assignment=SHARD
        )

    async def run(self) -> None:
        """Deliver all records, and end the shard."""

        async def runs() -> AsyncIterator[Run]:
            yield RECORDS
            self._supervisor.finish()

        with capture_logs(), anyio.fail_after(1000):
            async with self._supervisor as supervisor:
                events = supervisor.events()
                async for item in supervisor.answers(runs()):
                    if item.error is None:
                        ended = range(item.start, item.start + len(item.messages))
                        self.ended += ended
        with events:
            async for event in events:
                if isinstance(event, WorkerFailed):
                    self.failed.append(str(event.error))
                if isinstance(event, WorkerExited) and not event.stopped:
                    self.failed.append(describe_status(event.status))

    async def _store(self, request: CommitRequest) -> None:
        position: Any = request.position
        self.stored.append(position[0])


FIRST: dict[str, Any] = {"message": 5, "start": 1}
"""In the first process, at the second record of the second action."""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(FaultKind.KILL, **FIRST), "SIGKILL"),
        (Fault(FaultKind.EXIT, **FIRST, status=7), "status 7"),
        (Fault(FaultKind.PARTIAL, **FIRST), "SIGKILL"),
        (Fault(FaultKind.STALL, **FIRST), "did not answer"),
        (Fault(FaultKind.STOP, **FIRST), "did not answer"),
        (Fault(FaultKind.SKIP, **FIRST), "did not answer"),
        (Fault(FaultKind.TWICE, **FIRST), "is a callback called twice?"),
        (Fault(FaultKind.NEVER_READY, start=1), "instead of its status for initialize"),
        (Fault(FaultKind.CLOSE_STDOUT, **FIRST), "SIGTERM"),
        (Fault(FaultKind.PAUSE, **FIRST, seconds=9), "did not answer"),
        (Fault(FaultKind.END_INPUT, number=2, start=1), "status 1"),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else "",
)
async def test_process_that_fails_is_replaced(fault: Fault, said: str) -> None:
    """Records after the last checkpoint are delivered again, in order, and end once."""
    load = Load(fault)
    await load.run()
    assert load.ended == [*range(8)]
    assert load.stored == sorted(set(load.stored))
    assert load.stored[-1] == "SHARD_END"
    assert any(said in failed for failed in load.failed), load.failed
    assert len(load.launch.happened) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.GARBAGE, **FIRST),
        Fault(FaultKind.BYTE_ORDER_MARK, start=1),
        Fault(FaultKind.CUT, **FIRST),
        Fault(FaultKind.HUGE, **FIRST, size=100_000),
        Fault(FaultKind.FLOOD, **FIRST, size=100),
        Fault(FaultKind.REFUSE, **FIRST),
        Fault(FaultKind.STDERR, **FIRST, size=1000),
        Fault(FaultKind.PAUSE, **FIRST, seconds=1),
        Fault(FaultKind.PAUSE, Moment.CHECKPOINT, number=1, seconds=1),
        Fault(FaultKind.FAIL_CHECKPOINT, number=1),
        Fault(
            FaultKind.FAIL_CHECKPOINT,
            number=3,
            data=b"KinesisClientLibDependencyException",
        ),
    ],
    ids=lambda fault: fault.kind,
)
async def test_process_that_can_go_on_does(fault: Fault) -> None:
    """Other lines on stdout are ignored, and a processor retries checkpoints."""
    load = Load(fault)
    await load.run()
    assert (load.ended, load.failed) == ([*range(8)], [])
    assert load.stored == ["3", "6", "8", "SHARD_END"]
    assert len(load.launch.happened) == 1


async def test_checkpoint_that_fails_is_not_stored() -> None:
    """The processor gets an error, and the checkpoint covers nothing."""
    error = b"ShutdownException"
    fault = Fault(FaultKind.FAIL_CHECKPOINT, number=1, start=1, data=error)
    load = Load(fault, bugs=("dies of ShutdownException",))
    await load.run()
    assert load.ended == [*range(8)]
    assert load.stored == ["1", "2", "3", "6", "8", "SHARD_END"]
    assert load.failed == ["exited with status 3"]


@pytest.mark.parametrize(
    ("faults", "bug"),
    [
        ([Fault(FaultKind.FAIL_CHECKPOINT, number=2, start=1)], "dies asking"),
        (
            [
                Fault(FaultKind.END_INPUT, number=2, start=1),
                Fault(FaultKind.FAIL_CHECKPOINT, number=3, start=1),
            ],
            "asks again after the end",
        ),
    ],
    ids=["exited", "end_input"],
)
async def test_checkpoint_fails_of_a_process_that_reads_no_more(
    faults: list[Fault], bug: str
) -> None:
    """An answer that can't be written is dropped, and the exit is noticed (issue 26)."""
    load = Load(*faults, bugs=(bug,))
    await load.run()
    assert load.ended == [*range(8)]
    assert load.stored[-1] == "SHARD_END"
    assert load.failed == ["exited with status 3"]
    assert len(load.launch.happened) == len(faults)


async def test_late_answer_is_not_the_fault_of_the_processor() -> None:
    """Its time for an action excludes the pauses at its checkpoints (issue 25)."""
    pause = Fault(FaultKind.PAUSE, Moment.CHECKPOINT, seconds=15)
    processor = ProcessorUnderTest(
        Stage(name="load", kind=StageKind.LOAD, worker=["x"], dialect=KclDialect()),
        SHARD,
        faults=FaultPlan.of(pause),
        launch=ScriptedLaunch(Processor()),
        timeout=10,
    )
    async with processor:
        await processor.give(Records((b"a",)).run(1))
        assert await processor.end() == 0
    assert processor.stored.sequence == "SHARD_END"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FaultKind.EXTRA_EOP, "needs markers, which dialect kcl does not have"),
        (FaultKind.REVOKE, "needs a connection, which dialect kcl does not have"),
        (FaultKind.SPLIT_SHARD, "is only available in 'etlstage kcl simulate'"),
        (FaultKind.FAIL_CHECKPOINT, ""),
        (FaultKind.CLOSE_STDIN, ""),
    ],
)
def test_what_it_can_have(kind: FaultKind, reason: str) -> None:
    """Faults of shards can only be injected by ``etlstage kcl simulate``."""
    assert unknown(kind, "kcl").removeprefix(f"{kind} ") == reason
    assert "which dialect marker does not have" in unknown(
        FaultKind.FAIL_CHECKPOINT, "marker"
    )


def test_moments() -> None:
    """Each kind has its own; only what is counted has a number."""
    with pytest.raises(ConfigError, match="kill can't happen at checkpoint"):
        Fault(FaultKind.KILL, Moment.CHECKPOINT)
    with pytest.raises(ConfigError, match="no_records can't happen at checkpoint"):
        Fault(FaultKind.NO_RECORDS, Moment.CHECKPOINT)
    with pytest.raises(ConfigError, match="lose_lease can't happen at message"):
        Fault(FaultKind.LOSE_LEASE, Moment.MESSAGE)
    with pytest.raises(ConfigError, match="omit number"):
        Fault(FaultKind.KILL, number=3)


def test_times_need_a_number() -> None:
    """Without a number, a fault happens at all checkpoints, not some (issue 26)."""
    with pytest.raises(ConfigError, match="times counts from number on, and there is"):
        Fault(FaultKind.FAIL_CHECKPOINT, times=2)
    fault = Fault(FaultKind.FAIL_CHECKPOINT, number=3, times=2)
    due = FaultPlan.of(fault).due({})
    found = [n for n in range(9) if [*due.due(Moment.CHECKPOINT, n, b"")]]
    assert found == [3, 4]
