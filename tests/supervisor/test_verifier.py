"""Workers that reply too often or too seldom: no reply goes to another message."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import anyio
import pytest
import structlog.testing

from etlstage.errors import (
    RemoteProtocolError,
    RepliesDoubtful,
    StageFailed,
    WorkerLost,
)
from etlstage.messages import Result, StageKind
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import WorkerFailed
from etlstage.testing import ScriptedWorker
from etlstage.testing.scripted import Script
from tests.supervisor.acts import acting

pytestmark = [pytest.mark.core, pytest.mark.virtual]

MANY = [b"m-%d" % n for n in range(150)]


def planted(**settings: Any) -> Stage:  # noqa: ANN401 - passed on
    """Return a stage whose workers run a script."""
    restart = RestartPolicy(delay=0.001)
    return Stage(name="t", worker=("scripted",), restart=restart, **settings)


Fault = Callable[[ScriptedWorker, bytes], Coroutine[Any, Any, None]]


def single(fault: Fault, *, every: int = 50, greeting: bytes = b"") -> Script:
    """Return a worker with a fault at each ``every``-th message."""

    async def answer(worker: ScriptedWorker) -> int:
        await worker.write(greeting)
        async for message in worker.messages():
            reply = message.upper() + b"\n\0"
            if int(message.rpartition(b"-")[2]) % every == every - 1:
                await fault(worker, reply)
            else:
                await worker.write(reply)
        return 0

    return answer


def twice(late: float) -> Fault:
    """Return a fault: one EOP too many, ``late`` seconds after the reply."""

    async def answer(worker: ScriptedWorker, reply: bytes) -> None:
        await worker.write(reply)
        await anyio.sleep(late)
        await worker.write(b"\0")

    return answer


async def run(
    stage: Stage, script: Script, messages: Sequence[bytes]
) -> tuple[list[Result], int]:
    """Return the results, and the number of doubtful ones."""
    with anyio.fail_after(3000):
        async with acting(stage, script) as supervisor:
            results = await supervisor.submit(messages)
    return results, supervisor.doubtful


def wrong(results: Sequence[Result]) -> list[Result]:
    """Return the results that belong to another message."""
    return [r for r in results if not r.error and r.outputs != (r.message.upper(),)]


def failed(results: Sequence[Result]) -> list[bytes]:
    """Return the messages that have an error."""
    return [r.message for r in results if r.error is not None]


WAYS = pytest.mark.parametrize(
    ("window", "workers"), [(1, 1), (8, 1), (None, 1), (None, 3)]
)


@pytest.mark.no_cover
@WAYS
@pytest.mark.parametrize("late", [0.0, 0.001, 0.01])
async def test_reply_too_many(window: int | None, workers: int, late: float) -> None:
    """Its message is found, however late it comes; all others are right (issue 10)."""
    stage = planted(window=window, workers=workers)
    results, doubtful = await run(stage, single(twice(late)), MANY)

    assert wrong(results) == []
    culprits = {b"m-49", b"m-99", b"m-149"}
    # An extra reply after the very last one only shows as doubt.
    assert set(failed(results)) == culprits or doubtful
    assert set(failed(results)) <= culprits
    for error in filter(None, (r.error for r in results)):
        assert "wrote 1 reply too many: <EOP>" in str(error)


@WAYS
async def test_reply_too_few(window: int | None, workers: int) -> None:
    """It is noticed at the end of its block, and its message found (issue 10)."""

    async def forget(worker: ScriptedWorker, reply: bytes) -> None:
        await worker.write(reply[:-1])

    stage = planted(window=window, workers=workers, timeout=Timeouts(message=0.5))
    results, doubtful = await run(stage, single(forget, every=120), MANY)

    assert (wrong(results), failed(results), doubtful) == ([], [b"m-119"], 0)
    (error,) = (r.error for r in results if r.error is not None)
    assert isinstance(error, WorkerLost)


@WAYS
@pytest.mark.parametrize("lines", [1, 100])
async def test_worker_that_greets(window: int | None, workers: int, lines: int) -> None:
    """No message is blamed, and no restart helps: the stage fails (issue 10)."""
    stage = planted(window=window, workers=workers)
    script = single(ScriptedWorker.write, greeting=b"hello\n" * lines)
    results, _ = await run(stage, script, MANY)

    assert {type(r.error) for r in results} == {StageFailed}
    text = str(results[0].error)
    assert "without progress" in text
    assert "wrote unsolicited output: hello<EOM>" in text
    assert "diagnostics belong on stderr" in text


async def test_reply_too_many_behind_the_last_is_doubtful() -> None:
    """Its reply was already returned; doubt is reported at the end (issue 10)."""
    script = single(twice(0.2), every=10)
    with anyio.fail_after(10):
        async with acting(planted(window=1), script) as supervisor:
            for n in range(10):
                results = await supervisor.submit([b"m-%d" % n])
                assert wrong(results) == []
            assert supervisor.doubtful == 0

    assert supervisor.doubtful >= 1


async def test_worker_that_fails_soon_after_its_reply_is_named() -> None:
    """As no message explains it, the reply may be an earlier one's (issue 22)."""

    async def answer(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.write(message.upper() + b"\n\0")
            await anyio.sleep(0.1)
            return 7
        return 0

    with anyio.fail_after(10):
        async with acting(planted(), answer) as supervisor:
            assert await supervisor.ask(b"a") == (b"A",)
            await anyio.sleep(0.5)
    assert supervisor.doubtful == 1
    assert isinstance(supervisor.doubt, RepliesDoubtful)
    assert re.fullmatch(
        r"stage t: worker t-1 \(pid \d+\) exited with status 7 soon after its last"
        r" reply; results of 1 message may be mismatched; see: etlstage help pairing",
        str(supervisor.doubt),
    )
    assert supervisor.doubt.story[0] == "no stderr output"


async def test_load_worker_that_answers_twice_is_doubtful() -> None:
    """Data that it has loaded can't be taken back (issue 10)."""

    async def answer(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.write(b"\0\0" if message == b"x" else b"\0")
        return 0

    stage = planted(kind=StageKind.LOAD)
    results, doubtful = await run(stage, answer, [b"a", b"x", b"b"])

    assert failed(results) == [b"x"]
    assert doubtful >= 1


@pytest.mark.parametrize("kind", [StageKind.LOAD, StageKind.TRANSFORM])
async def test_load_worker_never_has_a_part_of_a_message(kind: StageKind) -> None:
    """It might load a part if the supervisor were killed then (issue 10)."""

    async def answer(worker: ScriptedWorker) -> int:
        while data := await worker.read(99):
            whole = data.endswith(b"\n")
            while not data.endswith(b"\n"):
                data += await worker.read(99)
            await worker.reply(b"whole" if whole else b"part")
        return 0

    results, _ = await run(planted(kind=kind, window=1), answer, MANY[:20])
    parts = [r for r in results if r.outputs == (b"part",)]

    assert bool(parts) is (kind is StageKind.TRANSFORM)


BATCHES = MarkerDialect(mode=Mode.BATCH_SUPERVISOR)


class Batches:
    """
    A worker that reads byte by byte, and knows the contents of its batch.

    Args:
        full: Whether it answers at its fourth message, as its batch is full.
        asks: Whether it asks for more after all others.

    """

    def __init__(self, *, full: bool = True, asks: bool = False) -> None:
        self._full, self._asks = full, asks

    async def __call__(self, worker: ScriptedWorker) -> int:
        """Work until the end of the input."""
        batch, data = list[bytes](), b""
        while byte := await worker.read(1):
            if byte == b"\n":
                batch.append(data)
                data = b""
                if self._full and len(batch) == 4:
                    await self._answer(worker, batch)
                elif self._asks:
                    await worker.write(b"\x05")
            elif byte == b"\x17":
                await self._answer(worker, batch)
            else:
                data += byte
        return 0

    async def _answer(self, worker: ScriptedWorker, batch: list[bytes]) -> None:
        outputs = b"".join(message.upper() + b"\n" for message in batch)
        await worker.write(outputs + b"\0" * (1 + (b"m-7!" in batch)))
        batch.clear()


async def test_worker_that_answers_a_full_batch_and_its_end() -> None:
    """Extra replies go to no other batch; smaller ones are right (issue 10)."""
    stage = planted(dialect=BATCHES, batch=BatchPolicy(size=4, seconds=0.01))
    results, doubtful = await run(stage, Batches(), MANY[:40])

    assert (failed(results), doubtful) == ([], 0)
    assert [o.lower() for r in results for o in r.outputs] == MANY[:40]


async def test_worker_that_closes_full_batches_by_itself() -> None:
    """No EOB is sent after full batches (issue 10)."""
    dialect = MarkerDialect(mode=Mode.BATCH_SUPERVISOR, eob_after_full=False)
    stage = planted(dialect=dialect, batch=BatchPolicy(size=4, seconds=0.01))
    results, doubtful = await run(stage, Batches(), MANY[:42])

    assert (failed(results), doubtful) == ([], 0)
    replies = [r.outputs for r in results if r.outputs]
    assert replies[:2] == [
        (b"M-0", b"M-1", b"M-2", b"M-3"),
        (b"M-4", b"M-5", b"M-6", b"M-7"),
    ]
    assert len(replies) == 11


@pytest.mark.parametrize("mode", [Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER])
async def test_batch_with_a_reply_too_many(mode: Mode) -> None:
    """The batch is halved until the message is found (issue 10)."""
    driven = mode is Mode.BATCH_WORKER
    messages = [m.replace(b"m-7", b"m-7!") for m in MANY[:40]]
    stage = planted(
        dialect=MarkerDialect(mode=mode), batch=BatchPolicy(size=4, seconds=0.01)
    )
    results, doubtful = await run(stage, Batches(full=driven, asks=driven), messages)

    assert (failed(results), doubtful) == ([b"m-7!"], 0)
    outputs = [o for r in results for o in r.outputs]
    assert outputs == [m.upper() for m in messages if m != b"m-7!"]


async def test_extractor_that_greets() -> None:
    """Its greeting is not a row (issue 10)."""

    async def greet(worker: ScriptedWorker) -> int:
        await worker.write(b"hello\n")
        async for _ in worker.messages():
            await worker.reply(b"row")
        return 0

    dialect = MarkerDialect(mode=Mode.CYCLIC)
    stage = planted(kind=StageKind.EXTRACT, dialect=dialect)
    rows: list[bytes] = []
    with anyio.fail_after(1000):
        async with acting(stage, greet) as supervisor:
            with pytest.raises((StageFailed, RemoteProtocolError)):
                rows += [row async for row in supervisor.extract()]
    assert rows == []


@pytest.mark.parametrize("window", [1, 8, None])
async def test_worker_that_passes_on_byte_by_byte_is_no_fault(
    window: int | None,
) -> None:
    """It echoes the byte that is written in advance."""

    async def pass_on(worker: ScriptedWorker) -> int:
        while data := await worker.read(3):
            await worker.write(data)
        return 0

    dialect = MarkerDialect(markers=Markers(eop=b"\n"))
    results, doubtful = await run(
        planted(dialect=dialect, window=window), pass_on, MANY
    )

    assert [r.outputs for r in results] == [(m,) for m in MANY]
    assert doubtful == 0


async def test_fault_sends_the_stage_into_lock_step_once() -> None:
    """The log and the events show why (issue 10)."""
    causes: list[str] = []
    with structlog.testing.capture_logs() as logs:
        async with acting(planted(window=8), single(twice(0))) as supervisor:
            with supervisor.events() as events, anyio.fail_after(20):
                await supervisor.submit(MANY)
                while len(causes) < 2:
                    event = await events.receive()
                    if isinstance(event, WorkerFailed):
                        causes.append(event.cause)
    assert set(causes) == {"pairing"}
    told = [log["event"] for log in logs].count("stage continues one message at a time")
    assert told == 1
