"""Workers that are replaced although nothing is wrong with them, in virtual time."""

from __future__ import annotations

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, ErrorPolicy, RecyclePolicy, Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from tests.supervisor.workers import errors

pytestmark = [pytest.mark.core, pytest.mark.virtual]


@pytest.mark.parametrize("batches", [False, True])
async def test_who_refuses_its_last_message_is_replaced(batches: bool) -> None:
    """Even while the messages that it refused wait for a worker (issue 12)."""

    async def refuse(worker: ScriptedWorker) -> None:
        while data := await worker.read():
            for _ in range(data.count(b"\x17" if batches else b"\n")):
                await worker.refuse("no date")

    stage = Stage(
        name="t",
        worker=("no-such-program",),
        dialect=MarkerDialect(mode=Mode.BATCH_SUPERVISOR if batches else Mode.SINGLE),
        batch=BatchPolicy(size=2, seconds=0.1),
        on_error=ErrorPolicy(retries_refused=1),
        recycle=RecyclePolicy(max_messages=1, variance=0),
    )
    launch = ScriptedLaunch(refuse)
    with capture_logs(), anyio.fail_after(60):
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            failed = errors(await supervisor.submit([b"a", b"b"]))

    assert len(failed) == 2
    assert all("refused the message: no date" in text for text in failed)
