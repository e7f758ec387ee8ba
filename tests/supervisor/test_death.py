"""Workers that die, or misbehave: no message is dropped, and nothing hangs."""

from __future__ import annotations

import json
import re
import shlex
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage import errors as faults
from etlstage.messages import Result
from etlstage.stage import RestartPolicy, Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor, WorkerExited, WorkerFailed
from etlstage.testing import ScriptedWorker
from tests.patience import HANG
from tests.supervisor.acts import acting, in_memory
from tests.supervisor.workers import (
    QUICK,
    ends,
    errors,
    numbers,
    outputs,
    stage,
    told,
)

SHORT = Timeouts(message=0.2, stop=0.2)
ONE = Timeouts(message=1.0, stop=0.2)
"""For workers that must start, and answer something, before they fail."""


def story(fate: str, run: Stage, stderr: str = "no stderr output") -> str:
    """Return the pattern of an error: stage, worker, pid, fate, command, stderr."""
    return (
        rf"stage t: (.*; )?worker t-1 \(pid \d+\) {fate}\n{stderr}\nevent: started"
        r" \(pid \d+, start 1\) \d\.\d\d s ago(?s:.*)\ncommand:"
        rf" {re.escape(shlex.join(run.program.command))}$"
    )


async def submit(
    run: Stage,
    messages: list[bytes],
    supervised: Callable[[Stage], AsyncSupervisor] = AsyncSupervisor,
) -> list[Result]:
    """Return the results, one for each message; the supervisor must not hang."""
    with anyio.fail_after(HANG):
        async with supervised(run) as supervisor:
            results = await supervisor.submit(messages)
            assert [r.message for r in results] == messages
            again = await supervisor.submit([b"later"])
            if results[-1].error is not None:
                # All workers are gone, and later messages fail with the same error.
                assert again[0].error is not None
                assert [r.error async for r in supervisor.stream([b"later"])] == [
                    again[0].error
                ]
    return results


@pytest.mark.parametrize(
    ("run", "fate"),
    [
        (
            stage("exits_at", 3, 0, window=1),
            "exited with status 0 while it held 2 messages",
        ),
        (
            stage("exits_at", 3, 1, window=1),
            "exited with status 1 while it held 2 messages",
        ),
        (
            stage("killed_at", 3, window=1),
            "was killed by SIGKILL while it held 2 messages",
        ),
    ],
    ids=["exits with 0", "exits with 1", "is killed"],
)
@in_memory
async def test_what_a_dead_worker_held_is_lost(run: Stage, fate: str) -> None:
    """Proven replies count; messages that it held fail with its story."""
    results = await submit(run, numbers(5), acting)

    assert outputs(results[:1]) == [(b"0",)]
    words = (
        "stderr: can't go on at message 3" if "exited" in fate else "no stderr output"
    )
    for text in errors(results[1:]):
        assert re.match(
            r"stage t: (.*; )?all workers failed: worker t-1 \(pid \d+\) ", text
        )
        assert re.search(story(fate, run, words), text)
    assert {type(r.error) for r in results[1:]} == {faults.StageFailed}


@in_memory
async def test_lone_message_of_a_dead_worker_is_blamed() -> None:
    """It was all that the process was ever given."""
    results = await submit(stage("exits_at", 1, 1, window=1), numbers(2), acting)

    assert [type(r.error) for r in results] == [faults.WorkerLost, faults.StageFailed]
    assert errors(results)[0].startswith(
        "stage t: can't go on at message 1; worker t-1 (pid "
    )


@in_memory
async def test_what_was_sent_ahead_is_not_blamed() -> None:
    """If a worker held several, it is unknown which of them it died of."""
    results = await submit(stage("exits_at", 3, 1, window=5), numbers(5), acting)

    assert {type(r.error) for r in results} == {faults.StageFailed}
    assert "exited with status 1 while it held 5 messages" in errors(results)[4]


@in_memory
async def test_other_workers_go_on() -> None:
    """If one of two dies of a message, only that one is lost."""
    messages = [b"x", b"end", *numbers(500)]
    with anyio.fail_after(HANG):
        run = stage(
            "exits_at_word", "end", workers=2, window=2, restart=RestartPolicy()
        )
        async with acting(run) as supervisor:
            results = await supervisor.submit(messages)
            again = await supervisor.submit([b"later"])

    assert [r.message for r in results] == messages
    lost = [r for r in results if r.error is not None]
    assert [r.message for r in lost] == [b"end"]
    assert "exited with status 3 while it held 1 message" in str(lost[0].error)
    assert outputs(again) == [(b"later",)]


@in_memory
async def test_worker_that_exits_at_once() -> None:
    """This is noticed although nothing was asked."""
    run = stage("exits", 5)
    results = await submit(run, [b"one"], acting)

    assert re.search(
        story("exited with status 5(?: while it held 1 message)?", run),
        errors(results)[0],
    )


def dying(*lines: str) -> Callable[[Stage], AsyncSupervisor]:
    """Return supervisors of workers that write lines to stderr, and die."""

    async def die(worker: ScriptedWorker) -> int:
        await worker.read()
        for line in lines:
            await worker.complain(line)
        return 1

    return partial(acting, script=die)


@in_memory
async def test_last_lines_of_stderr_are_reported() -> None:
    """The last ten, in order."""
    said = *map(str, range(12)), "gone"
    results = await submit(stage("echo"), [b"one"], dying(*said))

    lines = "\n".join(f"stderr: {word}" for word in said[3:])
    assert f"{lines}\nevent: started" in errors(results)[0]
    # Its last line comes first (issue 22).
    assert errors(results)[0].startswith("stage t: gone; ")
    assert len(errors(results)[0].splitlines()[0]) < 200


@in_memory
async def test_long_last_words_are_reported_below() -> None:
    """In one piece: a part of a secret could not be found and concealed (issue 22)."""
    (text,) = errors(await submit(stage("echo"), [b"one"], dying("x" * 161)))
    first, *story = text.splitlines()
    assert "xx" not in first.partition("command")[0]
    assert f"stderr: {'x' * 161}" in story


async def test_worker_that_closes_its_stdout_and_lives() -> None:
    """As it can't answer any more, it is stopped, and the error tells why."""
    run = stage("closes_stdout", timeout=QUICK)
    results = await submit(run, [b"one"])

    assert re.search(
        story(
            "closed its stdout, but did not exit, and was stopped"
            " while it held 1 message",
            run,
        ),
        errors(results)[0],
    )


async def test_worker_that_closes_its_stdin_and_lives() -> None:
    """Its earlier reply counts; the closed pipe is noticed with the next message."""
    run = stage("closes_stdin", timeout=QUICK, window=1)
    results = await submit(run, numbers(3))

    assert outputs(results[:1]) == [(b"0",)]
    for text in errors(results[1:]):
        assert re.search(
            story(
                "closed its stdin, but did not exit, and was stopped"
                " while it held 1 message",
                run,
            ),
            text,
        )


@in_memory
async def test_worker_that_never_answers() -> None:
    """The error has the deadline, and what may be wrong."""
    # A worker that has not started would have read nothing.
    run = stage("never_answers", window=1, timeout=SHORT, ready=True)
    results = await submit(run, numbers(3), acting)

    for text in errors(results):
        assert re.search(
            story(
                r"did not answer a message within 0.2 s \(timeout.message\): it wrote"
                r" nothing; does it flush its output after each reply\?"
                r" see: etlstage help write-a-worker",
                run,
            ),
            text,
        )
    assert [type(r.error) for r in results] == [
        faults.WorkerLost,
        faults.StageFailed,
        faults.StageFailed,
    ]


@in_memory
async def test_worker_that_writes_no_eop() -> None:
    """The error has the number of bytes, and the missing marker."""
    run = stage("writes_no_eop_at", 2, timeout=ONE, window=1)
    results = await submit(run, [b"123456789", b"12345"], acting)

    assert outputs(results[:1]) == [(b"123456789",)]
    assert re.search(
        story(
            r"did not answer a message within 1 s \(timeout.message\): it wrote 6 bytes"
            r" without the marker eop '\\000' after its reply; if it answers each message"
            r" with one, set eop to '\\012'",
            run,
        ),
        errors(results)[1],
    )


@in_memory
async def test_answers_that_come_too_late_are_not_taken() -> None:
    """The messages already have an outcome, and get no second one."""
    run = stage("answers_too_late", timeout=SHORT, window=3)
    results = await submit(run, numbers(3), acting)

    assert "did not answer a message within 0.2 s" in errors(results)[0]
    assert all(errors(results))


@in_memory
async def test_slow_answers_in_a_row_are_not_late() -> None:
    """The deadline runs for the oldest message, not for those after it."""
    run = stage("uneven", 1, window=500, timeout=Timeouts(message=0.6))
    async with acting(run) as supervisor:
        results = await supervisor.submit(numbers(500))

    assert len(outputs(results)) == 500


def breaking(behaviour: str, *arguments: object) -> Stage:
    """Return a stage whose worker breaks the protocol at its first message."""
    return stage(behaviour, *arguments, max_message=99, window=1)


@in_memory
@pytest.mark.parametrize(
    ("run", "fault"),
    [
        (
            breaking("answers_twice"),
            ("wrote 1 reply too many: one<EOM><EOP>"),
        ),
        (
            breaking("prints_first"),
            (
                "wrote unsolicited output: Hello, I am ready<EOM>;"
                " diagnostics belong on stderr"
            ),
        ),
        (
            breaking("asks_for_more"),
            (
                r"can't handle BNC in state BUSY: the worker fills batches;"
                r" set dialect.driver: worker \(offset 0, found 05\)"
            ),
        ),
        (
            breaking("long_answer", 100),
            (
                "message is (?:100 bytes long, expected no more than 99 bytes|more than"
                " 99 bytes long, with no EOM yet at offset 100); see max_message"
            ),
        ),
    ],
    ids=["answers twice", "prints first", "asks for more", "long answer"],
)
async def test_worker_that_breaks_the_protocol(run: Stage, fault: str) -> None:
    """It is stopped; the error tells what it did, and where."""
    with anyio.fail_after(HANG):
        async with acting(run) as supervisor:
            with supervisor.events() as events:
                await events.receive()
                if "Hello" in fault:
                    assert isinstance(await events.receive(), WorkerFailed)
                results = await supervisor.submit([b"one"])
                results += await supervisor.submit([b"two"])

    assert [r.message for r in results] == [b"one", b"two"]
    error = next(r.error for r in results if r.error is not None)
    assert error is not None
    if "Hello" not in fault:
        # That worker held nothing when it did so.
        assert isinstance(error, faults.RemoteProtocolError)
    assert re.search(story(f"broke the protocol: {fault}", run), told(error))


@pytest.mark.parametrize("own_session", ["", "yes"])
async def test_grandchild_that_holds_the_pipes(own_session: str) -> None:
    """Once the worker has exited, its pipes are of no use, whoever holds them."""
    with anyio.fail_after(HANG):
        run = stage("has_child", "end", own_session, window=1, timeout=QUICK)
        async with AsyncSupervisor(run) as supervisor:
            results = await supervisor.submit([b"one", b"end", b"lost"])

    assert outputs(results[:1])[0][0] == b"one"
    pid = int(results[0].outputs[1])
    for text in errors(results[1:]):
        assert "exited with status 0 while it held 1 message" in text
    assert ends(pid)


async def test_flood_on_stderr_holds_up_nothing() -> None:
    """After ten megabytes the reply still comes, and each line is accounted for."""
    with anyio.fail_after(HANG), capture_logs() as logs:
        async with AsyncSupervisor(stage("complains_at_length")) as supervisor:
            assert len(outputs(await supervisor.submit([b"one"]))) == 1

    lines = [entry["line"] for entry in logs if "line" in entry]
    assert len(lines) >= 1000
    left_out = sum(entry.get("dropped_lines", 0) for entry in logs)
    assert len(lines) + left_out == 100_000


async def test_worker_that_writes_to_stderr_for_ever() -> None:
    """Other tasks run, the deadline is kept, and the supervisor closes."""
    run = stage("floods_stderr", timeout=Timeouts(message=1, stop=0.2))
    with anyio.fail_after(HANG), capture_logs():
        async with AsyncSupervisor(run) as supervisor:
            results = await supervisor.submit([b"one"])

    assert "did not answer a message within 1 s" in errors(results)[0]
    assert "stderr: still alive\nstderr: still alive" in errors(results)[0]


async def test_partial_message_in_a_full_pipe_is_lost_with_the_worker(
    tmp_path: Path,
) -> None:
    """The worker dies while ten megabytes wait to be written to it."""
    run = stage("exits_at", 1, 1, window=4)
    results = await submit(run, [b"x", *[b"y" * 5_000_000] * 2])

    assert ["exited with status 1" in text for text in errors(results)] == [True] * 3


@in_memory
async def test_cause_leads_the_error() -> None:
    """The problem to fix comes first, wherever it is reported (issue 11)."""

    async def parse(worker: ScriptedWorker) -> None:
        json.loads(await worker.read())

    supervisor = acting(Stage(name="t", worker=("python", "clean.py")), parse)
    with supervisor.events() as events:
        async with supervisor:
            (result,) = await supervisor.submit([b"x"])
        exits = [e async for e in events if isinstance(e, WorkerExited)]
    cause = "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert str(result.error).startswith(f"stage t: {cause}; worker t-1 (pid ")
    assert isinstance(result.error, faults.WorkerLost)
    assert [attempt.error for attempt in result.error.attempts] == [
        f"{cause}; exited with status 1"
    ] * len(result.error.attempts)
    assert {event.cause for event in exits if event.status} == {cause}


async def test_replies_before_a_crash_at_the_end_of_input_are_doubtful() -> None:
    """A surplus reply may hide the message that the worker died of (issue 22)."""
    with anyio.fail_after(HANG):
        async with AsyncSupervisor(stage("crashes_at_the_end")) as supervisor:
            results = await supervisor.submit(numbers(1))
            assert outputs(results) == [(b"0",)]

    assert supervisor.doubtful == 1
    assert "was killed by SIGSEGV soon after its last reply" in str(supervisor.doubt)


@in_memory
async def test_exception_that_was_survived_is_no_cause() -> None:
    """It is still among the last lines, but did not cause the death (issue 11)."""

    async def survive(worker: ScriptedWorker) -> int:
        await worker.read()
        try:
            return {"": 7}["key"]
        except KeyError:
            await worker.complain(traceback.format_exc())
        return 7

    run = Stage(name="t", worker=("python", "clean.py"))
    async with acting(run, survive) as supervisor:
        (result,) = await supervisor.submit([b"x"])
    assert str(result.error).startswith("stage t: worker t-1 (pid ")
    assert result.error is not None
    assert "stderr: KeyError: 'key'" in told(result.error)
