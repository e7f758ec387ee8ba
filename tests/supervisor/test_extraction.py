from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage import errors as faults
from etlstage.messages import Run
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import ErrorPolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor, WorkerFailed, WorkerRestarting
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from etlstage.transport import Child, LaunchRequest, Wire
from tests.supervisor.acts import acting
from tests.supervisor.workers import (
    QUICK,
    collect,
    cyclic,
    ends,
    numbers,
    plain,
    told,
)

pytestmark = [pytest.mark.core, pytest.mark.virtual]


async def take(messages: AsyncIterator[bytes]) -> list[bytes]:
    """Return all messages of a round that must not hang."""
    with anyio.fail_after(10_000):
        return [message async for message in messages]


async def broken(run: Stage) -> tuple[list[bytes], str]:
    """Return the messages of a round, and the error in which it ended."""
    seen: list[bytes] = []
    async with acting(run) as supervisor:
        with anyio.fail_after(10_000), pytest.raises(faults.EtlstageError) as caught:
            await collect(seen, supervisor.extract())
    return seen, told(caught.value)


# --- plain ---------------------------------------------------------------------------


async def test_plain_round_is_one_run_of_the_program() -> None:
    """With all its messages, even empty ones; the next round is the next run."""
    async with acting(plain("extract", "one", "", "two")) as supervisor:
        for _ in range(2):
            assert await take(supervisor.extract()) == [b"one", b"", b"two"]


async def test_plain_round_may_be_empty() -> None:
    """A program that writes nothing has extracted nothing."""
    async with acting(plain("extract")) as supervisor:
        assert await take(supervisor.extract()) == []


async def test_last_message_may_lack_its_end_when_all_went_well() -> None:
    """The last line of a file often has no line end."""
    run = plain("extract_tail", 0, "two", "one")
    async with acting(run) as supervisor:
        assert await take(supervisor.extract()) == [b"one", b"two"]


async def test_last_message_without_end_is_dropped_when_it_failed() -> None:
    """It may be incomplete; earlier messages are valid, and the error has the story."""
    seen, error = await broken(plain("extract_tail", 7, "tw", "one"))

    assert seen == [b"one"]
    assert re.fullmatch(
        r"stage e: that was all; worker e-1 \(pid \d+\) exited with status 7"
        r"\nstderr: that was all\n(?s:.*) extract_tail 7 tw one",
        error,
    )


async def test_runs_are_lists_of_messages() -> None:
    """Consumers of many messages take them as they come; no run is empty."""
    async with (
        acting(plain("ranges")) as supervisor,
        aclosing(supervisor.extract_runs()) as runs,
    ):
        seen = [run async for run, _ in zip_async(runs, 20)]

    messages = [message for run in seen for message in run]
    assert messages == [b"%d" % n for n in range(len(messages))]
    assert all(seen)


async def zip_async(
    runs: AsyncIterator[Run], count: int
) -> AsyncIterator[tuple[Run, int]]:
    """Yield the first ``count`` runs, numbered."""
    number = 0
    async for run in runs:
        yield run, number
        number += 1
        if number == count:
            return


# --- cyclic --------------------------------------------------------------------------


async def test_worker_keeps_the_offsets() -> None:
    """One worker answers round after round, with an empty message as the request."""
    run = cyclic("rounds", "a b", "", "c")
    async with acting(run) as supervisor:
        rounds = [await take(supervisor.extract()) for _ in range(4)]

    assert rounds == [[b"a", b"b"], [], [b"c"], []]


async def test_supervisor_keeps_the_offsets() -> None:
    """Each request carries a range as JSON."""
    async with acting(cyclic("ranges", 12)) as supervisor:
        first = await take(supervisor.extract(start=0, end=3))
        second = await take(supervisor.extract(start=10, end=20))

    assert first == [b"0", b"1", b"2"]
    assert second == [b"10", b"11"]


@pytest.mark.parametrize(
    ("arguments", "request_"),
    [
        ({}, b""),
        ({"start": 1, "end": 2}, b'{"start": 1, "end": 2}'),
        ({"start": "2020-01-01"}, b'{"start": "2020-01-01", "end": null}'),
        ({"end": 0}, b'{"start": null, "end": 0}'),
        ({"start": 1, "end": 2, "template": "{start}-{end}|{x}"}, b"1-2|{x}"),
        ({"template": "more"}, b"more"),
    ],
)
async def test_request(arguments: dict[str, object], request_: bytes) -> None:
    """Empty without offsets, a JSON object with them, or made by the template."""
    async with acting(cyclic("requests")) as supervisor:
        with anyio.fail_after(10_000):
            runs = [
                run
                async for run in supervisor.extract_runs(**arguments)  # type: ignore[arg-type]
            ]

    assert runs[0][0] == b"<" + request_ + b">"


async def test_round_with_a_marker_in_its_request_is_refused() -> None:
    """Nothing is sent, and the next round works."""
    async with acting(cyclic("requests")) as supervisor:
        with pytest.raises(faults.InvalidMessage, match="contains marker eom"):
            await take(
                m async for run in supervisor.extract_runs(template="a\nb") for m in run
            )
        assert (await take(supervisor.extract()))[0] == b"<>"


async def test_rounds_of_one_message_where_eop_is_eom() -> None:
    """Each request has exactly one message as its reply."""
    run = cyclic(
        "echo",
        dialect=MarkerDialect(mode=Mode.CYCLIC, markers=Markers(eop=b"\n")),
    )
    async with acting(run) as supervisor:
        assert await take(supervisor.extract(start=1, end=2)) == [
            b'{"start": 1, "end": 2}'
        ]
        assert await take(supervisor.extract()) == [b""]


async def test_cyclic_worker_that_closes_its_stdin() -> None:
    """It can't be asked, and so does not answer, any more."""
    run = cyclic("closes_stdin", timeout=Timeouts(message=1.0, stop=0.2))
    async with acting(run) as supervisor:
        assert await take(supervisor.extract()) == numbers(100)
        with pytest.raises(faults.StageError, match="closed its stdin, but did not"):
            await take(supervisor.extract())


async def test_rounds_wait_for_each_other() -> None:
    """Two tasks extract from one worker, one after the other."""
    rounds: list[list[bytes]] = []

    async def extract(start: int) -> None:
        rounds.append(await take(supervisor.extract(start=start, end=start + 2)))

    async with (
        acting(cyclic("ranges")) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        for start in 0, 2, 4:
            tasks.start_soon(extract, start)

    assert sorted(rounds) == [[b"0", b"1"], [b"2", b"3"], [b"4", b"5"]]


async def test_round_may_be_broken_off() -> None:
    """Its later output belongs to no round: another worker takes over."""
    async with acting(cyclic("slow_round")) as supervisor:
        async with aclosing(supervisor.extract()) as messages:
            assert await anext(messages) == b"first"
        assert await take(supervisor.extract()) == [b"first", b"second"]


async def test_round_that_is_left_open_does_not_block_the_next() -> None:
    """Without ``aclosing`` the event loop closes the generator, in its own task."""
    async with acting(cyclic("ranges")) as supervisor:
        messages = supervisor.extract(start=0, end=1_000_000)
        assert await anext(messages) == b"0"

        async def close() -> None:
            await messages.aclose()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
        assert await take(supervisor.extract(start=7, end=8)) == [b"7"]


async def test_worker_that_dies_in_every_round() -> None:
    """Its messages are valid, and the error has its story."""
    stage = cyclic("dies_in_round", 2, restart=RestartPolicy(max=2, delay=0.01))
    seen, error = await broken(stage)

    assert seen == [b"0"] * 3
    assert re.fullmatch(
        r"stage e: worker e-1 \(pid \d+\) was killed by SIGKILL while it held 1"
        r" message, after 3 tries\nstderr: out of luck\nevent: (?s:.*)start 3\)(?s:.*)"
        r"\ncommand: .*",
        error,
    )


async def test_round_survives_its_worker() -> None:
    """If the worker keeps the offsets, it may give the same again (issue 10)."""
    stage = cyclic("killed_in_range", 2, restart=RestartPolicy(max=1))
    async with acting(stage) as supervisor:
        assert await take(supervisor.extract()) == [b"0", b"1", *numbers(100)]
        assert await take(supervisor.extract()) == []


async def test_range_survives_workers_that_are_killed() -> None:
    """As long as each gets further, none is missing or repeated (issue 10)."""
    policy = RestartPolicy(max=1, delay=0.01)
    stage = cyclic("killed_in_range", 1, 8, 9, 19, 21, 26, restart=policy)
    with capture_logs() as logs:
        async with acting(stage) as supervisor:
            for start in 0, 20:
                expected = [b"%d" % n for n in range(start, start + 20)]
                seen = await take(supervisor.extract(start=start, end=start + 20))
                assert seen == expected
    # Otherwise an outage that was survived would stay unnoticed.
    told = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [entry["in_flight"] for entry in told] == [0] * 6


async def test_range_that_kills_its_worker_each_time() -> None:
    """Restarts without progress are counted, so it does not go on forever."""
    policy = RestartPolicy(max=2, delay=0.01)
    stage = cyclic("killed_before", 8, restart=policy)
    seen: list[bytes] = []
    async with acting(stage) as supervisor:
        with anyio.fail_after(10_000), pytest.raises(faults.WorkerLost) as caught:
            await collect(seen, supervisor.extract(start=0, end=20))
    assert seen == [b"%d" % n for n in range(8)]
    assert "killed by SIGKILL while it held 1 message, after 3 tr" in str(caught.value)


async def test_range_that_gives_other_messages_when_it_is_asked_again() -> None:
    """This is an error; no message is left out in place of another (issue 10)."""
    seen: list[bytes] = []
    stage = cyclic("dies_after_pid", restart=RestartPolicy(delay=0.01))
    async with acting(stage) as supervisor:
        with anyio.fail_after(10_000), pytest.raises(faults.SourceFailed) as caught:
            await collect(seen, supervisor.extract(start=0, end=20))
    assert len(seen) == 1
    assert "had given 1 message of a range; when the range was" in str(caught.value)


async def test_worker_that_exits_between_rounds() -> None:
    """It answered everything it was asked, so a new one is started."""
    async with acting(cyclic("ends_after_round")) as supervisor:
        with supervisor.events() as events:
            first = await take(supervisor.extract())
            assert ends(int(first[0]))
            second = await take(supervisor.extract())
            assert events.statistics().current_buffer_used >= 2

    assert len(first) == len(second) == 1
    assert first != second


async def test_worker_that_talks_between_rounds() -> None:
    """Its output would be taken for a reply, so another one answers the next round."""
    run = cyclic("talks_between_rounds", timeout=Timeouts(stop=0.2))
    async with acting(run) as supervisor:
        with supervisor.events() as events, anyio.fail_after(10_000):
            assert await take(supervisor.extract()) == [b""]
            failed = await events.receive()
            while not isinstance(failed, WorkerFailed):
                failed = await events.receive()
            assert await take(supervisor.extract()) == [b""]
    assert (
        "wrote unsolicited output: by the way<EOM>;"
        " diagnostics belong on stderr" in str(failed.error)
    )


# --- what a worker does wrong ---------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "given", "fault"),
    [
        (
            plain("closes_stdout_later", timeout=QUICK),
            [b"0"],
            "closed its stdout, but did not exit",
        ),
        (
            cyclic("closes_stdout_later", timeout=QUICK),
            [b"0"],
            "closed its stdout, but did not exit",
        ),
        (
            plain("writes_eop"),
            [b"0"],
            (
                "broke the protocol: can't handle EOP in state STREAMING: the worker works"
                " in cycles; set dialect.mode: cyclic (offset 2, found 00"
            ),
        ),
        (
            cyclic("asks_for_more"),
            [],
            "can't handle BNC in state BUSY: an extract stage has no batches",
        ),
        (
            plain("extract", "1", "12345", max_message=4),
            [b"1"],
            "message is 5 bytes long, expected no more than 4 bytes; see max_message",
        ),
        (
            cyclic("never_answers", timeout=Timeouts(message=0.2, stop=0.2)),
            [],
            (
                "did not answer a request within 0.2 s (timeout.message): it wrote"
                " nothing; does it flush its output after each reply? see: etlstage"
                " help write-a-worker\n"
            ),
        ),
    ],
    ids=[
        *("plain closes stdout", "cyclic closes stdout", "plain writes EOP"),
        *("cyclic writes BNC", "too long a message", "no answer"),
    ],
)
async def test_round_of_a_worker_at_fault(
    run: Stage, given: list[bytes], fault: str
) -> None:
    """Earlier messages are delivered; the error names the fault, and the setting."""
    seen, error = await broken(run)

    assert seen == given
    assert fault in error


# --- stop ----------------------------------------------------------------------------


# A worker within a round has nothing to finish, so no step of stopping takes long.
LONG = Timeouts(stop=3600)


@pytest.mark.parametrize(
    "run",
    [plain("ranges", timeout=LONG), cyclic("ranges", timeout=LONG)],
)
async def test_supervisor_closed_in_the_middle_of_a_round(run: Stage) -> None:
    """The reader gets an error, not half a round that looks complete."""
    async with acting(run) as supervisor:
        messages = supervisor.extract_runs()
        assert await anext(messages)
        with anyio.fail_after(10_000):
            await supervisor.aclose()
            with pytest.raises(faults.WorkerLost, match=r"was stopped") as caught:
                async for _ in messages:
                    pass
            assert caught.value.story[0] == "no stderr output"


async def test_supervisor_closed_while_a_round_waits() -> None:
    """The waiting caller is woken, and gets an error."""
    texts: list[str] = []

    async def extract() -> None:
        with pytest.raises(faults.WorkerLost) as caught:
            await take(supervisor.extract())
        texts.append(str(caught.value))

    async with (
        anyio.create_task_group() as tasks,
        acting(plain("sleeps", timeout=QUICK)) as supervisor,
    ):
        tasks.start_soon(extract)
        await anyio.wait_all_tasks_blocked()

    assert "was stopped" in texts[0]


@pytest.mark.parametrize("run", [plain("ranges"), cyclic("ranges")])
async def test_host_cancelled_in_the_middle_of_a_round(run: Stage) -> None:
    """The worker is stopped when the block ends."""
    with anyio.CancelScope() as scope:
        async with acting(run) as supervisor:
            async for _ in supervisor.extract():
                scope.cancel()

    assert scope.cancelled_caught


async def test_round_that_failed_is_tried_again() -> None:
    """Unless outputs were passed on; failures before a successful round don't count."""

    async def fail_at_first(worker: ScriptedWorker) -> int:
        if worker.start % 2:
            return 1
        await worker.write(b"%d\n" % worker.start)
        return 0

    run = plain("extract", restart=RestartPolicy(max=1))
    async with acting(run, fail_at_first) as supervisor:
        rounds = [await take(supervisor.extract()) for _ in range(4)]

    assert rounds == [[b"2"], [b"4"], [b"6"], [b"8"]]


async def test_program_is_not_restarted_once_its_round_is_dropped() -> None:
    """What it would write is for the next round, which starts it (issue 22)."""
    refused = 2  # starts

    class Launch(ScriptedLaunch):
        def __call__(self, request: LaunchRequest, /) -> tuple[Wire, Child]:
            nonlocal refused
            if refused:
                refused -= 1
                raise OSError("refused")
            return super().__call__(request)

    async def extract(worker: ScriptedWorker) -> int:
        await worker.write(b"%d\n" % worker.start)
        return 0

    run = plain("extract", restart=RestartPolicy(max=9, delay=1.0))
    launch = Launch(extract)
    async with AsyncSupervisor(run, launch=launch) as supervisor:
        with anyio.move_on_after(0.1):
            await take(supervisor.extract())
        await anyio.sleep(10)
        assert refused == 0
        assert launch.workers == []
        assert await take(supervisor.extract()) == [b"3"]


async def test_nothing_is_started_once_the_supervisor_is_closed() -> None:
    """Rounds end that wait for their turn, or for a restart."""
    run = replace(
        plain("exits", 3), restart=RestartPolicy(delay=30.0), on_error=ErrorPolicy()
    )
    with anyio.fail_after(10_000):
        async with acting(run) as supervisor:
            with supervisor.events() as events:
                async with anyio.create_task_group() as tasks:

                    async def extract() -> None:
                        with pytest.raises(faults.WorkerLost):
                            await take(supervisor.extract())

                    tasks.start_soon(extract)
                    tasks.start_soon(extract)
                    delay = 0.0
                    while not delay:
                        event = await events.receive()
                        if isinstance(event, WorkerRestarting):
                            delay = event.delay
                    await supervisor.aclose()
                    with pytest.raises(faults.WorkerLost, match="supervisor is closed"):
                        await take(supervisor.extract())
                    tasks.cancel_scope.cancel()
