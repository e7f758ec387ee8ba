"""Messages of a lost worker are tried again by another, and judged alone."""

from __future__ import annotations

from signal import SIGSEGV

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.messages import Result
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, ErrorPolicy, Order, RestartPolicy, Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from tests.supervisor.workers import outputs

pytestmark = [pytest.mark.core, pytest.mark.virtual]

ROWS = [b'{"k":%d}' % (n % 5) for n in range(8)]


@pytest.mark.parametrize("window", [1, 2, 3, 8])
@pytest.mark.parametrize("retries", [0, 1])
async def test_message_is_blamed_only_for_what_it_does_alone(
    window: int, retries: int
) -> None:
    """Not for the effect of a message that its process has answered (issue 22)."""

    async def die_of_b_behind_a(worker: ScriptedWorker) -> int:
        seen = False
        async for message in worker.messages():
            seen = seen or message == b"a"
            if message == b"b" and seen:
                return -SIGSEGV
            await worker.reply(message.upper())
        return 0

    stage = Stage(
        name="t",
        worker=("no-such-program",),
        window=window,
        on_error=ErrorPolicy(retries=retries),
    )
    launch = ScriptedLaunch(die_of_b_behind_a)
    with capture_logs():
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            results = await supervisor.submit([b"a", b"b", b"c"])

    assert outputs(results) == [(b"A",), (b"B",), (b"C",)]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("order", Order)
async def test_worker_that_leaves_for_good_leaves_nothing_behind(
    order: Order, waits: bool
) -> None:
    """Even if it dies while it retires, or waits to be restarted (issue 22)."""

    async def die_once(worker: ScriptedWorker) -> int:
        if worker.name == "t-2" and worker.start > 1:
            return 3
        async for message in worker.messages():
            await anyio.sleep(1)
            if worker.name == "t-2":
                return -SIGSEGV
            await worker.reply(message)
        return 0

    stage = Stage(
        name="t",
        worker=("no-such-program",),
        workers=2,
        window=1,
        restart=RestartPolicy(delay=60, max_delay=60),
        order=order,
        key="/k" if order is Order.KEY else None,
    )
    results: list[Result] = []
    with capture_logs(), anyio.fail_after(300):
        async with (
            AsyncSupervisor(stage, launch=ScriptedLaunch(die_once)) as supervisor,
            anyio.create_task_group() as tasks,
        ):

            async def submit() -> None:
                results.extend(await supervisor.submit(ROWS))

            tasks.start_soon(submit)
            await anyio.sleep(20 if waits else 0.5)
            supervisor.scale(1)

    assert outputs(results) == [(row,) for row in ROWS]


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("mode", [Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER])
async def test_halves_of_a_refused_batch_outlive_their_worker(
    mode: Mode, status: int
) -> None:
    """Joined again, they would be refused by each new worker (issue 22)."""

    async def answer_one_batch(worker: ScriptedWorker) -> int:
        if len(launch.workers) > 50:
            await anyio.sleep_forever()
        batch: list[bytes] = []
        held = b""
        while not held.endswith(b"\x17") and len(batch) < 4:
            held += await worker.read(1)
            if held.endswith(b"\n"):
                batch.append(held[:-1])
                held = b""
                if mode is Mode.BATCH_WORKER and len(batch) < 4:
                    await worker.write(b"\x05")
        if mode is Mode.BATCH_SUPERVISOR and not held:
            await worker.read(1)
        if b"x" in batch:
            await worker.refuse("no x")
        else:
            await worker.reply(*batch)
        return status

    stage = Stage(
        name="t",
        worker=("no-such-program",),
        dialect=MarkerDialect(mode=mode),
        batch=BatchPolicy(size=4, seconds=0.1),
    )
    launch = ScriptedLaunch(answer_one_batch)
    with capture_logs(), anyio.fail_after(60):
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            results = await supervisor.submit([b"a", b"x", b"b", b"c"])

    assert [r.message for r in results if r.error] == [b"x"]
    assert [o for r in results for o in r.outputs] == [b"a", b"b", b"c"]
