"""Workers that die with nothing outstanding: their last replies may be extra ones."""

from __future__ import annotations

from signal import SIGKILL, SIGSEGV

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.errors import WorkerLost
from etlstage.messages import Result
from etlstage.stage import RestartPolicy, Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from etlstage.testing.scripted import Script
from tests.supervisor.workers import numbers, outputs

pytestmark = [pytest.mark.core, pytest.mark.virtual]


OFTEN = RestartPolicy(max=1000, delay=0.01, max_delay=0.01)
LETTERS = [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"]


async def served(
    script: Script, *batches: list[bytes], **settings: object
) -> tuple[list[Result], int, AsyncSupervisor]:
    """Return the results of all submissions, the starts, and the supervisor."""
    stage = Stage(name="t", worker=("no-such-program",), **settings)  # type: ignore[arg-type]
    launch, results = ScriptedLaunch(script), list[Result]()
    with capture_logs(), anyio.fail_after(60):
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            for batch in batches:
                results += await supervisor.submit(batch)
    return results, len(launch.workers), supervisor


def one_by_one(messages: list[bytes]) -> list[list[bytes]]:
    """Return batches of one."""
    return [[message] for message in messages]


async def read_line(worker: ScriptedWorker) -> bytes | None:
    """Return the next message, leaving the rest unread; None at the end."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := await worker.read(1)):
            return None
        line += byte
    return line[:-1]


@pytest.mark.parametrize("window", [2, 4])
async def test_second_reply_is_not_that_of_the_next_message(window: int) -> None:
    """Although the worker dies after as many replies as messages (issue 12)."""

    async def answer_twice(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.reply(message.upper())
            if message == b"a" and worker.start == 1:
                await worker.reply(message.upper())
                return 1
        return 0

    results, starts, _ = await served(answer_twice, [b"a", b"b"], window=window)

    assert (outputs(results), starts) == ([(b"A",), (b"B",)], 2)


@pytest.mark.parametrize("status", [0, 1])
async def test_who_answers_and_exits_is_restarted(status: int) -> None:
    """Each message is answered, however often that happens (issue 12)."""

    async def answer_two(worker: ScriptedWorker) -> int:
        left = 2
        async for message in worker.messages():
            await worker.reply(message.upper())
            left -= 1
            if not left:
                return status
        return 0

    results, *_ = await served(answer_two, numbers(20), window=2)

    assert outputs(results) == [(message,) for message in numbers(20)]


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("window", [1, 2, 4, 8])
async def test_block_before_an_exit_with_a_probe_is_not_redone_for_ever(
    window: int, status: int
) -> None:
    """A worker that exits with the probe unread makes progress (issue 22)."""

    async def answer_block(worker: ScriptedWorker) -> int:
        for _ in range(window):
            if (message := await read_line(worker)) is None:
                return 0
            await worker.reply(message.upper())
        await anyio.sleep(0.001)  # the probe has been written
        return status

    results, starts, _ = await served(
        answer_block, numbers(20), window=window, restart=OFTEN
    )

    assert outputs(results) == [(message,) for message in numbers(20)]
    assert starts <= 40


@pytest.mark.parametrize("status", [0, 1])
async def test_late_second_reply_of_a_dying_worker_is_not_the_next_ones(
    status: int,
) -> None:
    """Although the reply before it was released without proof (issue 22)."""

    async def answer_late_again(worker: ScriptedWorker) -> int:
        while (message := await read_line(worker)) is not None:
            await worker.reply(message.upper())
            if message == b"g" and worker.start == 1:
                await anyio.sleep(0.01)
                await worker.reply(message.upper())
                return status
        return 0

    results, starts, _ = await served(answer_late_again, *one_by_one(LETTERS))

    assert outputs(results) == [(letter.upper(),) for letter in LETTERS]
    assert starts == 2


@pytest.mark.parametrize("window", [1, 4])
async def test_late_second_reply_is_none_to_what_could_not_be_written(
    window: int,
) -> None:
    """The worker exits cleanly after it has closed its stdin (issue 22)."""

    async def answer_late_again(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.reply(message.upper())
            if message == b"c" and worker.start == 1:
                worker.close_stdin()
                await anyio.sleep(0.02)
                await worker.reply(message.upper())
                return 0
        return 0

    results, starts, _ = await served(
        answer_late_again, *one_by_one(LETTERS[:6]), window=window
    )

    assert outputs(results) == [(letter.upper(),) for letter in LETTERS[:6]]
    assert starts == 2


async def test_late_second_reply_in_lock_step_is_its_messages_own_fault() -> None:
    """Nothing else counts as answered, so the message can be blamed (issue 22)."""

    async def answer_late_again(worker: ScriptedWorker) -> int:
        while (message := await read_line(worker)) is not None:
            await worker.reply(message.upper())
            if message == b"b":
                await anyio.sleep(0.01)
                await worker.reply(message.upper())
                return 1
        return 0

    results, starts, _ = await served(answer_late_again, LETTERS[:4], restart=OFTEN)

    assert [r.message for r in results if r.error] == [b"b"]
    assert outputs(r for r in results if not r.error) == [(b"A",), (b"C",), (b"D",)]
    assert starts < 10


@pytest.mark.parametrize(
    ("end", "rest", "doubtful"),
    [
        ("exits", 0.0, 4),
        ("crashes", 0.0, 4),
        ("hangs", 0.0, 4),
        # It is unknown what it was doing, but its end came from outside.
        ("is killed", 0.0, 0),
        # An extra reply would have shown by then.
        ("exits", 1.5, 0),
    ],
)
async def test_replies_released_before_an_end_that_nothing_explains_are_doubtful(
    end: str, rest: float, doubtful: int
) -> None:
    """A duplicate may have counted as the reply to a message in work (issue 22)."""

    async def answer_late_again(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            second = message == b"h" and worker.start == 1
            await worker.reply(b"G" if second else message.upper())
            if second:
                await anyio.sleep(1000 if end == "hangs" else rest)
                return {"exits": 1, "crashes": -SIGSEGV}.get(end, -SIGKILL)
        return 0

    stage = Stage(
        name="t", worker=("no-such-program",), timeout=Timeouts(message=5, stop=0.1)
    )
    launch = ScriptedLaunch(answer_late_again)
    with capture_logs(), anyio.fail_after(60):
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            for letter in LETTERS:
                await supervisor.submit([letter])
            await anyio.sleep(rest + 0.1 if end != "hangs" else 0)
            assert outputs(await supervisor.submit([b"i"])) == [(b"I",)]

    assert len(launch.workers) == 2
    assert supervisor.doubtful == doubtful


@pytest.mark.parametrize(
    ("status", "rest", "doubtful"),
    [
        (-SIGSEGV, 0.02, 4),
        # An extra reply would have shown by then.
        (-SIGSEGV, 1.5, 0),
        (-SIGKILL, 0.02, 0),
        # At the end of its input a transform worker may exit with any status.
        (1, 0.02, 0),
    ],
)
async def test_crash_after_the_end_of_input_makes_replies_doubtful(
    status: int, rest: float, doubtful: int
) -> None:
    """A surplus reply may hide the message that the worker died of (issue 22)."""

    async def die_of_h(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.reply(b"G" if message == b"h" else message.upper())
            if message == b"h":
                await anyio.sleep(rest)
        return status

    _, _, supervisor = await served(die_of_h, *one_by_one(LETTERS))

    assert supervisor.doubtful == doubtful


async def test_replies_held_at_a_crash_after_the_end_of_input_do_not_count() -> None:
    """One may be too many, and one missing: the last message killed it (issue 22)."""

    async def answer_twice(worker: ScriptedWorker) -> int:
        await worker.read()
        await anyio.sleep(0.5)
        await worker.reply(b"A")
        await worker.reply(b"A")
        return -SIGSEGV

    stage = Stage(name="t", worker=("no-such-program",), window=2)
    results: list[Result] = []
    with capture_logs():
        async with (
            AsyncSupervisor(stage, launch=ScriptedLaunch(answer_twice)) as supervisor,
            anyio.create_task_group() as tasks,
        ):

            async def submit() -> None:
                results.extend(await supervisor.submit([b"a", b"b"]))

            tasks.start_soon(submit)
            await anyio.sleep(0.2)
            await supervisor.aclose()

    assert [type(result.error) for result in results] == [WorkerLost] * 2


@pytest.mark.parametrize("closed", [False, True])
async def test_replies_before_the_end_of_stdout_are_doubtful(closed: bool) -> None:
    """Whether or not the worker is stopped before it is killed for it (issue 22)."""

    async def close_at_h(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            await worker.reply(b"G" if message == b"h" else message.upper())
            if message == b"h":
                worker.close_stdout()
                await anyio.sleep_forever()
        return 0

    stage = Stage(name="t", worker=("no-such-program",), timeout=Timeouts(stop=5))
    launch = ScriptedLaunch(close_at_h)
    with capture_logs(), anyio.fail_after(60):
        async with AsyncSupervisor(stage, launch=launch) as supervisor:
            for letter in LETTERS:
                await supervisor.submit([letter])
            await anyio.sleep(0.1 if closed else 10)

    assert supervisor.doubtful == 4
    assert "closed its stdout" in str(supervisor.doubt)


@pytest.mark.parametrize("status", [1, -SIGSEGV])
async def test_replies_before_a_message_that_kills_are_not_doubtful(
    status: int,
) -> None:
    """A message that was read and not answered explains the end (issue 22)."""

    async def die_of_h(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            if message == b"h":
                return status
            await worker.reply(message.upper())
        return 0

    _, _, supervisor = await served(die_of_h, *one_by_one(LETTERS))

    assert supervisor.doubtful == 0


@pytest.mark.parametrize("window", [1, 4])
async def test_what_is_answered_while_the_worker_is_stopped_counts(
    window: int,
) -> None:
    """Even to messages that were unread when the worker's input ended (issue 22)."""

    async def begin_late(worker: ScriptedWorker) -> int:
        await worker.read(1)
        await anyio.sleep(0.5)
        await worker.reply(b"done")
        async for _ in worker.messages():
            await worker.reply(b"done")
        return 0

    stage = Stage(name="t", worker=("no-such-program",), window=window)
    made = []
    with capture_logs():
        async with (
            AsyncSupervisor(stage, launch=ScriptedLaunch(begin_late)) as supervisor,
            anyio.create_task_group() as tasks,
        ):

            async def submit() -> None:
                messages = [b"" for _ in range(window)]
                made.extend(outputs(await supervisor.submit(messages)))

            tasks.start_soon(submit)
            await anyio.sleep(0.2)
            await supervisor.aclose()

    assert made == [(b"done",)] * window
