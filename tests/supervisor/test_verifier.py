"""Workers that write too much or too little: never is a reply given to another."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import anyio
import pytest
import structlog.testing

from etlstage.errors import RemoteProtocolError, StageFailed, WorkerLost
from etlstage.messages import Result, StageKind
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor, WorkerFailed

HEAD = """
import sys, time
i, o = sys.stdin.buffer, sys.stdout.buffer
def say(data):
    o.write(data)
    o.flush()
"""
MANY = [b"m-%d" % n for n in range(150)]


def planted(code: str, **settings: object) -> Stage:
    """Return a stage whose worker runs some code."""
    command = (sys.executable, "-S", "-c", HEAD + code)
    restart = RestartPolicy(delay=0.001)
    return Stage(name="t", worker=command, restart=restart, **settings)  # type: ignore[arg-type]


def single(fault: str, *, before: str = "pass", every: int = 50) -> str:
    """Return the code of a worker with a fault at every so many messages."""
    return f"""
{before}
for line in i:
    fault = int(line.rpartition(b"-")[2]) % {every} == {every - 1}
    reply = line.upper() + b"\\0"
    {fault}
"""


async def run(stage: Stage, messages: Sequence[bytes]) -> tuple[list[Result], int]:
    """Return the results, and how many were doubtful."""
    with anyio.fail_after(30):
        async with AsyncSupervisor(stage) as supervisor:
            results = await supervisor.submit(messages)
    return results, supervisor.doubtful


def wrong(results: Sequence[Result]) -> list[Result]:
    """Return the results that are another message's."""
    return [r for r in results if not r.error and r.outputs != (r.message.upper(),)]


def failed(results: Sequence[Result]) -> list[bytes]:
    """Return the messages that have an error."""
    return [r.message for r in results if r.error is not None]


WAYS = pytest.mark.parametrize(
    ("window", "workers"), [(1, 1), (8, 1), (None, 1), (None, 3)]
)


@WAYS
@pytest.mark.parametrize("late", [0.0, 0.001, 0.01])
async def test_reply_too_many(window: int | None, workers: int, late: float) -> None:
    """Its message is found, however late it comes; all others are right (issue 10)."""
    say = f"say(reply); fault and (time.sleep({late}), say(b'\\0'))"
    stage = planted(single(say), window=window, workers=workers)
    results, doubtful = await run(stage, MANY)

    assert wrong(results) == []
    culprits = {b"m-49", b"m-99", b"m-149"}
    # What comes behind the last reply of all is told another way.
    assert set(failed(results)) == culprits or doubtful
    assert set(failed(results)) <= culprits
    for error in filter(None, (r.error for r in results)):
        assert "wrote 1 reply too many: <EOP>" in str(error)


@WAYS
async def test_reply_too_few(window: int | None, workers: int) -> None:
    """It is missed at the end of its block, and its message found (issue 10)."""
    say = "say(reply[:-1] if fault else reply)"
    stage = planted(
        single(say, every=120),
        window=window,
        workers=workers,
        timeout=Timeouts(message=0.5),
    )
    results, doubtful = await run(stage, MANY)

    assert (wrong(results), failed(results), doubtful) == ([], [b"m-119"], 0)
    (error,) = (r.error for r in results if r.error is not None)
    assert isinstance(error, WorkerLost)


@WAYS
@pytest.mark.parametrize("lines", [1, 100])
async def test_worker_that_greets(window: int | None, workers: int, lines: int) -> None:
    """No message is blamed, and no restart helps: the stage fails (issue 10)."""
    stage = planted(
        single("say(reply)", before=f"say(b'hello\\n' * {lines})"),
        window=window,
        workers=workers,
    )
    results, _ = await run(stage, MANY)

    assert {type(r.error) for r in results} == {StageFailed}
    text = str(results[0].error)
    assert "without progress" in text
    assert "wrote unsolicited output: hello<EOM>" in text
    assert "diagnostics belong on stderr" in text


async def test_reply_too_many_behind_the_last_is_doubtful() -> None:
    """It was returned already; the supervisor says so when it ends (issue 10)."""
    say = "say(reply); fault and (time.sleep(0.2), say(b'\\0'))"
    stage = planted(single(say, every=10), window=1)
    with anyio.fail_after(10):
        async with AsyncSupervisor(stage) as supervisor:
            for n in range(10):
                results = await supervisor.submit([b"m-%d" % n])
                assert wrong(results) == []
            assert supervisor.doubtful == 0

    assert supervisor.doubtful >= 1


async def test_load_worker_that_answers_twice_is_doubtful() -> None:
    """What it has loaded can't be taken back (issue 10)."""
    stage = planted(
        "for line in i: say(b'\\0\\0' if line == b'x\\n' else b'\\0')",
        kind=StageKind.LOAD,
    )
    results, doubtful = await run(stage, [b"a", b"x", b"b"])

    assert failed(results) == [b"x"]
    assert doubtful >= 1


@pytest.mark.parametrize("kind", [StageKind.LOAD, StageKind.TRANSFORM])
async def test_load_worker_never_has_a_part_of_a_message(kind: StageKind) -> None:
    """Were we killed then, it might load that (issue 10)."""
    code = """
import os
while data := os.read(0, 99):
    part = 0 if data.endswith(b"\\n") else 1
    while not data.endswith(b"\\n"):
        data += os.read(0, 99)
    os.write(1, (b"part\\n" if part else b"whole\\n") + b"\\0")
"""
    results, _ = await run(planted(code, kind=kind, window=1), MANY[:20])
    parts = [r for r in results if r.outputs == (b"part",)]

    assert bool(parts) is (kind is StageKind.TRANSFORM)


BATCHES = MarkerDialect(mode=Mode.BATCH_SUPERVISOR)
COUNTS = """
batch, data = [], b""
while True:
    byte = i.read(1)
    if not byte:
        break
    if byte == b"\\n":
        batch.append(data)
        data = b""
        if len(batch) == 4:
            say(b"+".join(batch) + b"\\n\\0")
            batch = []
    elif byte == b"\\x17":
        ANSWER
    else:
        data += byte
"""


async def test_worker_that_answers_a_full_batch_and_its_end() -> None:
    """Nothing of it is taken for anything else; smaller ones are right (issue 10)."""
    code = COUNTS.replace("ANSWER", 'say(b"+".join(batch) + b"\\n\\0"); batch = []')
    stage = planted(code, dialect=BATCHES, batch=BatchPolicy(size=4, seconds=0.01))
    results, doubtful = await run(stage, MANY[:40])

    assert (failed(results), doubtful) == ([], 0)
    outputs = [o for r in results for o in r.outputs]
    assert b"+".join(outputs).split(b"+") == MANY[:40]


async def test_worker_that_closes_full_batches_by_itself() -> None:
    """It is not told that they are full (issue 10)."""
    code = COUNTS.replace("ANSWER", 'say(b"+".join(batch) + b"\\n\\0"); batch = []')
    dialect = MarkerDialect(mode=Mode.BATCH_SUPERVISOR, eob_after_full=False)
    stage = planted(code, dialect=dialect, batch=BatchPolicy(size=4, seconds=0.01))
    results, doubtful = await run(stage, MANY[:42])

    assert (failed(results), doubtful) == ([], 0)
    replies = [r.outputs for r in results if r.outputs]
    assert replies[:2] == [(b"m-0+m-1+m-2+m-3",), (b"m-4+m-5+m-6+m-7",)]
    assert len(replies) == 11


@pytest.mark.parametrize("mode", [Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER])
async def test_batch_with_a_reply_too_many(mode: Mode) -> None:
    """The batch is halved until the message is found (issue 10)."""
    ask = "say(b'\\x05')" if mode is Mode.BATCH_WORKER else "pass"
    code = f"""
batch, data = [], b""
def answer():
    global batch
    say(b"".join(m.upper() + b"\\n" for m in batch) + b"\\0" * (1 + (b"m-7" in batch)))
    batch = []
while byte := i.read(1):
    if byte == b"\\n":
        batch.append(data)
        data = b""
        if len(batch) == 4 and "{mode.name}" == "BATCH_WORKER":
            answer()
        else:
            {ask}
    elif byte == b"\\x17":
        answer()
    else:
        data += byte
"""
    stage = planted(
        code, dialect=MarkerDialect(mode=mode), batch=BatchPolicy(size=4, seconds=0.01)
    )
    results, doubtful = await run(stage, MANY[:40])

    assert (failed(results), doubtful) == ([b"m-7"], 0)
    outputs = [o for r in results for o in r.outputs]
    assert outputs == [m.upper() for m in MANY[:40] if m != b"m-7"]


async def test_extractor_that_greets() -> None:
    """Its greeting is no row (issue 10)."""
    stage = planted(
        "say(b'hello\\n')\nfor line in i: say(b'row\\n\\0')",
        kind=StageKind.EXTRACT,
        dialect=MarkerDialect(mode=Mode.CYCLIC),
    )
    rows: list[bytes] = []
    with anyio.fail_after(10):
        async with AsyncSupervisor(stage) as supervisor:
            with pytest.raises((StageFailed, RemoteProtocolError)):
                rows += [row async for row in supervisor.extract()]
    assert rows == []


@pytest.mark.parametrize("window", [1, 8, None])
async def test_worker_that_passes_on_byte_by_byte_is_no_fault(
    window: int | None,
) -> None:
    """It echoes the byte that is written ahead."""
    code = "import os\nwhile b := os.read(0, 3): os.write(1, b)"
    stage = planted(
        code, dialect=MarkerDialect(markers=Markers(eop=b"\n")), window=window
    )
    results, doubtful = await run(stage, MANY)

    assert [r.outputs for r in results] == [(m,) for m in MANY]
    assert doubtful == 0


async def test_fault_sends_the_stage_into_lock_step_once() -> None:
    """The log and the events say why (issue 10)."""
    say = "say(reply); fault and say(b'\\0')"
    causes: list[str] = []
    with structlog.testing.capture_logs() as logs:
        async with AsyncSupervisor(planted(single(say), window=8)) as supervisor:
            with supervisor.events() as events, anyio.fail_after(20):
                await supervisor.submit(MANY)
                while len(causes) < 2:
                    event = await events.receive()
                    if isinstance(event, WorkerFailed):
                        causes.append(event.cause)
    assert set(causes) == {"pairing"}
    told = [log["event"] for log in logs].count("stage goes on one message at a time")
    assert told == 1
