"""Batches: who closes them, when, and which message has the outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from etlstage.messages import AnnotatedRun, Result, Run, StageKind, joined
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, ErrorPolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import WorkerStarted
from tests.supervisor.acts import acting
from tests.supervisor.workers import errors, numbers, outputs, stage

pytestmark = [pytest.mark.core, pytest.mark.virtual]

NEVER = 3600.0  # seconds


def closed_by_us(
    behaviour: str = "batch", *arguments: object, **policy: object
) -> Stage:
    """Return a stage with supervisor-driven batches that time does not close."""
    batch = BatchPolicy(**{"seconds": NEVER} | policy)  # type: ignore[arg-type]
    return stage(
        behaviour,
        *arguments,
        dialect=MarkerDialect(mode=Mode.BATCH_SUPERVISOR),
        batch=batch,
        timeout=Timeouts(message=5, stop=0.5),
    )


def closed_by_worker(
    wanted: int,
    style: str = "",
    *,
    bnc_after_last: bool = False,
    eob_then_eom: bool = False,
    bnc_after_eob: bool = True,
    **policy: object,
) -> Stage:
    """Return a stage whose worker wants ``wanted`` messages; time closes no batch."""
    batch = BatchPolicy(**{"seconds": NEVER} | policy)  # type: ignore[arg-type]
    return stage(
        "asking",
        wanted,
        style,
        dialect=MarkerDialect(
            mode=Mode.BATCH_WORKER,
            bnc_after_last=bnc_after_last,
            eob_then_eom=eob_then_eom,
            bnc_after_eob=bnc_after_eob,
        ),
        batch=batch,
        timeout=Timeouts(message=5, stop=0.5),
    )


@pytest.mark.parametrize(
    ("mode", "policy", "warned"),
    [
        (Mode.SINGLE, BatchPolicy(size=2), 1),
        (Mode.SINGLE, BatchPolicy(), 0),
        (Mode.BATCH_SUPERVISOR, BatchPolicy(size=2), 0),
    ],
)
async def test_batch_without_effect_is_warned_of(
    mode: Mode, policy: BatchPolicy, warned: int
) -> None:
    """A worker that expects batches would wait forever for their end."""
    alone = stage("batch", dialect=MarkerDialect(mode=mode), batch=policy)
    with capture_logs() as logs:
        async with acting(alone):
            pass
    about = [x for x in logs if x["event"].startswith("batch has no effect")]
    assert [(x["log_level"], x["stage"], x["dialect"]) for x in about] == [
        ("warning", alone.name, "marker")
    ] * warned


def batches(results: list[Result]) -> list[list[bytes]]:
    """Return the batches that were answered, each with its messages joined."""
    assert [r.error for r in results if r.error is not None] == []
    seen, batch = [], []
    for result in results:
        batch.append(result.message)
        if result.outputs:
            assert result.outputs == (b" ".join(batch),)
            seen.append(batch)
            batch = []
    assert batch == []
    return seen


async def submit(run: Stage, messages: list[bytes]) -> list[Result]:
    """Return the results of a supervisor that must not hang."""
    with anyio.fail_after(1000):
        async with acting(run) as supervisor:
            results = await supervisor.submit(messages)
    assert [r.message for r in results] == messages
    return results


def sizes(run: list[list[bytes]]) -> list[int]:
    """Return the number of messages in each batch."""
    return [len(batch) for batch in run]


# --- either driver --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "count", "expected"),
    [
        (closed_by_us(size=4), 10, [4, 4, 2]),
        (closed_by_us(), 3, [3]),
        # It asks until it has enough, without BNC after the last, as PR 399 does.
        (closed_by_worker(3), 9, [3, 3, 3]),
        # It waits for more, and gets EOB at the end of the input, or at our size.
        (closed_by_worker(4), 10, [4, 4, 2]),
        (closed_by_worker(100, size=3), 7, [3, 3, 1]),
        # As the protocol page has it: the BNC after the last message asks for nothing.
        (closed_by_worker(3, "literal", size=3, bnc_after_last=True), 7, [3, 3, 1]),
        # Then it sees EOB at once, and its extra BNC is ignored.
        (closed_by_worker(100, "deaf", size=3, eob_then_eom=True), 7, [3, 3, 1]),
        # EOB and EOM are one line to it, which it does not answer (issue 22).
        (
            closed_by_worker(
                100, "lines", size=3, eob_then_eom=True, bnc_after_eob=False
            ),
            7,
            [3, 3, 1],
        ),
    ],
    ids=[
        *("by count", "by the end", "by the worker", "by the end for a worker"),
        *("by our size for a worker", "literal", "deaf", "lines"),
    ],
)
async def test_batch_is_closed(run: Stage, count: int, expected: list[int]) -> None:
    """By a count, ours or the worker's, and finally by the end of the input."""
    assert sizes(batches(await submit(run, numbers(count)))) == expected


@pytest.mark.parametrize(
    "run", [closed_by_us(bytes=5), closed_by_worker(100, bytes=5)], ids=["us", "worker"]
)
async def test_batch_is_closed_by_bytes(run: Stage) -> None:
    """A message that would exceed the limit is in the next batch; a long one, alone."""
    messages = [b"1", b"22", b"333", b"4444", b"x" * 99, b"5", b"6"]

    assert batches(await submit(run, messages)) == [
        [b"1", b"22"],
        [b"333"],
        [b"4444"],
        [b"x" * 99],
        [b"5", b"6"],
    ]


@pytest.mark.parametrize(
    "run",
    [closed_by_us(seconds=0.05), closed_by_worker(100, seconds=0.05)],
    ids=["us", "worker"],
)
async def test_batch_is_closed_by_time(run: Stage) -> None:
    """When the input stalls, the messages so far are sent."""
    answered = anyio.Event()

    async def messages() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"
        await answered.wait()
        yield b"three"

    seen = []
    with anyio.fail_after(1000):
        async with acting(run) as supervisor:
            async for result in supervisor.stream(messages()):
                seen.append(result)
                if result.message == b"two":
                    answered.set()

    assert batches(seen) == [[b"one", b"two"], [b"three"]]


@pytest.mark.parametrize(
    "run", [closed_by_us(size=3), closed_by_worker(3)], ids=["us", "worker"]
)
async def test_callers_never_share_a_batch(run: Stage) -> None:
    """Each gets the outputs of its own; the end of its input closes its batch."""
    seen: dict[int, list[list[bytes]]] = {}

    async def use(number: int) -> None:
        messages = [b"%d-%d" % (number, n) for n in range(number % 6)]
        seen[number] = batches(await supervisor.submit(messages))

    with anyio.fail_after(1000):
        async with (
            acting(run) as supervisor,
            anyio.create_task_group() as tasks,
        ):
            for number in range(24):
                tasks.start_soon(use, number)

    expected: list[list[int]] = [[], [1], [2], [3], [3, 1], [3, 2]]
    assert {n: sizes(run) for n, run in seen.items()} == {
        n: expected[n % 6] for n in range(24)
    }


@pytest.mark.parametrize(
    ("behaviour", "dialect", "size", "count"),
    [
        (("never_answers",), MarkerDialect(mode=Mode.BATCH_SUPERVISOR), 2, 2),
        # It has a message, and asks for nothing.
        (("never_answers",), MarkerDialect(mode=Mode.BATCH_WORKER), 256, 2),
        # It got what it asked for, and from then on the deadline runs again.
        (("sleeps_at", 2), MarkerDialect(mode=Mode.BATCH_WORKER), 256, 3),
        # Its last BNC asks for nothing, so the supervisor waits for the worker.
        (
            ("hangs_behind_last", 2),
            MarkerDialect(mode=Mode.BATCH_WORKER, bnc_after_last=True),
            2,
            2,
        ),
    ],
    ids=["ours", "at its first message", "after it asked", "behind its last request"],
)
async def test_batch_that_is_not_answered(
    behaviour: tuple[str, *tuple[object, ...]],
    dialect: MarkerDialect,
    size: int,
    count: int,
) -> None:
    """The error mentions a batch; all of its messages have the same error."""
    run = stage(
        *behaviour,
        dialect=dialect,
        batch=BatchPolicy(size=size),
        timeout=Timeouts(message=0.2, stop=0.2),
    )
    for text in errors(await submit(run, numbers(count)))[:2]:
        assert "did not answer a batch within 0.2 s" in text


# --- the supervisor drives -----------------------------------------------------------


@pytest.mark.parametrize("keys", [False, True])
async def test_batch_may_take_several_runs(keys: bool) -> None:
    """The messages may have columns."""

    async def given() -> AsyncIterator[Run]:
        for n in range(0, 12, 3):
            run = numbers(12)[n : n + 3]
            yield AnnotatedRun(run, key=[n] * 3) if keys else run

    stage = closed_by_us(size=12)
    found: list[bytes] = []
    with anyio.fail_after(1000):
        async with acting(stage) as supervisor:
            async for outcome in supervisor.answers(given()):
                assert [*outcome.messages] == numbers(12)
                found += joined(outcome.replies)
    assert found == [b" ".join(numbers(12))]


async def test_outputs_belong_to_the_last_message() -> None:
    """They depend on the whole batch, so none precedes its last message."""
    results = await submit(closed_by_us(size=2), numbers(3))

    assert outputs(results) == [(), (b"0 1",), (b"2",)]


async def test_batches_written_ahead_keep_their_order() -> None:
    """With several workers and windows, each reply is paired with its batch."""
    run = closed_by_us(size=7)
    run = Stage(
        name="t",
        worker=run.program.command,
        dialect=run.dialect,
        batch=run.batch,
        workers=3,
        window=4,
    )
    seen = batches(await submit(run, numbers(1000)))

    assert [m for batch in seen for m in batch] == numbers(1000)
    assert max(sizes(seen)) == 7


async def test_bad_message_is_left_out_of_its_batch() -> None:
    """It fails alone; the messages around it pass."""
    messages = [b"0", b"1", b"\n", b"2", b"\x17", b"3"]
    results = await submit(closed_by_us(size=6), messages)

    assert [bool(text) for text in errors(results)] == [
        message in (b"\n", b"\x17") for message in messages
    ]
    good = [r for r in results if r.error is None]
    assert b" ".join(o for r in good for o in r.outputs) == b"0 1 2 3"


async def test_batch_of_bad_messages_alone() -> None:
    """There is nothing to send, and nothing to wait for."""
    results = await submit(closed_by_us(size=2), [b"\n"] * 5 + [b"good"])

    assert [bool(r.error) for r in results] == [True] * 5 + [False]


async def test_dead_worker_loses_whole_batches() -> None:
    """The first batch was answered; all messages of the others are lost together."""
    results = await submit(closed_by_us("dies_at_batch", 2, size=2), numbers(6))

    assert batches(results[:2]) == [[b"0", b"1"]]
    assert all("exited with status 4" in text for text in errors(results)[2:])


async def test_load_stage_in_batches() -> None:
    """One batch at a time by default."""
    run = closed_by_us("silent", size=3)
    load = Stage(
        name="l",
        worker=run.program.command,
        kind=StageKind.LOAD,
        dialect=run.dialect,
        batch=run.batch,
    )
    assert outputs(await submit(load, numbers(8))) == [()] * 8


# --- the worker drives ---------------------------------------------------------------


async def test_waiting_for_input_is_no_fault_of_the_worker() -> None:
    """While it has asked and gets nothing, the deadline for its answer does not run."""
    more = anyio.Event()

    async def messages() -> AsyncIterator[bytes]:
        yield b"one"
        await more.wait()
        yield b"two"

    run = closed_by_worker(2)
    run = Stage(
        name="t",
        worker=run.program.command,
        dialect=run.dialect,
        batch=run.batch,
        timeout=Timeouts(message=0.6, stop=0.2),
    )
    seen = []
    with anyio.fail_after(1000):
        async with acting(run) as supervisor:
            stream = supervisor.stream(messages())
            async with anyio.create_task_group() as tasks:

                async def consume() -> None:
                    seen.extend([result async for result in stream])

                tasks.start_soon(consume)
                with supervisor.events() as events:
                    assert isinstance(await events.receive(), WorkerStarted)
                    # For twice the deadline of an answer the worker must not fail.
                    with anyio.move_on_after(1.2):
                        pytest.fail(str(await events.receive()))
                more.set()

    assert batches(seen) == [[b"one", b"two"]]


async def test_batch_that_is_tried_again_may_be_answered_in_parts() -> None:
    """Messages that the worker had not asked for when it answered are given again."""
    run = stage(
        "asks_less_again",
        4,
        dialect=MarkerDialect(mode=Mode.BATCH_WORKER),
        batch=BatchPolicy(size=4),
        restart=RestartPolicy(),
        on_error=ErrorPolicy(),
    )
    with anyio.fail_after(1000):
        results = await submit(run, numbers(4))

    assert outputs(results) == [(n,) for n in numbers(4)]


async def test_bad_message_closes_the_batch_of_a_worker() -> None:
    """It fails alone, and the worker, which waits for a message, gets EOB."""
    messages = [b"0", b"1", b"\n", b"2", b"3", b"\n"]
    results = await submit(closed_by_worker(100), messages)

    assert [bool(text) for text in errors(results)] == [m == b"\n" for m in messages]
    assert batches([r for r in results if r.error is None]) == [
        [b"0", b"1"],
        [b"2", b"3"],
    ]


async def test_bad_messages_at_the_start_of_a_batch() -> None:
    """The first good message opens the batch."""
    results = await submit(closed_by_worker(2), [b"\n", b"\n", b"0", b"1", b"\n"])

    assert [bool(text) for text in errors(results)] == [True, True, False, False, True]


async def test_caller_that_is_gone_does_not_fill_a_batch() -> None:
    """Its messages are no longer sent, and the next caller is served."""
    with anyio.fail_after(1000):
        async with acting(closed_by_worker(100, size=50)) as supervisor:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(supervisor.submit, numbers(1000))
                    for _ in range(20):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
            assert batches(await supervisor.submit(numbers(3))) == [numbers(3)]


async def test_caller_that_is_gone_does_not_hold_a_worker() -> None:
    """Its open batch is closed at once, though time would not close it."""

    async def one() -> AsyncIterator[bytes]:
        yield b"one"
        await anyio.sleep_forever()

    with anyio.fail_after(1000):
        async with acting(closed_by_worker(100)) as supervisor:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:

                    async def consume() -> None:
                        async for _ in supervisor.stream(one()):
                            pass

                    tasks.start_soon(consume)
                    for _ in range(20):
                        await anyio.wait_all_tasks_blocked()
                    scope.cancel()
            assert batches(await supervisor.submit(numbers(3))) == [numbers(3)]
