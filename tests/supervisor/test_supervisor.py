from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from etlstage import errors as faults
from etlstage.messages import Result
from etlstage.stage import Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor
from tests.supervisor.acts import acting
from tests.supervisor.workers import (
    collect,
    errors,
    numbers,
    outputs,
    plain,
    stage,
)

pytestmark = [pytest.mark.core, pytest.mark.virtual]

# --- submit ------------------------------------------------------------------------


async def test_each_message_has_its_outputs() -> None:
    """Zero, one and many outputs, and those of an empty message, stay apart."""
    async with acting(stage("words")) as supervisor:
        results = await supervisor.submit([b"one", b"", b"two three four", b" ", b"5"])

    assert results == [
        Result(b"one", (b"one",), None),
        Result(b"", (), None),
        Result(b"two three four", (b"two", b"three", b"four"), None),
        Result(b" ", (), None),
        Result(b"5", (b"5",), None),
    ]


async def test_empty_message_can_be_an_output() -> None:
    """An empty output is not the same as no output."""
    async with acting(stage("echo")) as supervisor:
        assert outputs(await supervisor.submit([b"", b"x", b""])) == [
            (b"",),
            (b"x",),
            (b"",),
        ]


async def test_nothing_to_submit_gives_nothing() -> None:
    """No message, no result, and no wait."""
    async with acting(stage("echo")) as supervisor:
        assert await supervisor.submit([]) == []
        assert await supervisor.submit(iter([])) == []


async def test_any_iterable_can_be_submitted() -> None:
    """A generator works as well as a list."""
    async with acting(stage("echo")) as supervisor:
        results = await supervisor.submit(b"%d" % n for n in range(3))

    assert [r.message for r in results] == numbers(3)


async def test_three_workers_keep_the_order() -> None:
    """Workers of random speed share the messages; results are in input order."""
    messages = numbers(300)
    async with acting(stage("uneven", 1, workers=3, window=2)) as supervisor:
        results = await supervisor.submit(messages)

    assert [r.message for r in results] == messages
    assert [o[0] for o in outputs(results)] == messages
    assert len({o[1] for o in outputs(results)}) == 3


async def test_idle_workers_take_messages_first() -> None:
    """Three messages for three workers: one each."""
    async with acting(stage("signed", workers=3)) as supervisor:
        results = await supervisor.submit(numbers(3))

    assert len({o[1] for o in outputs(results)}) == 3


async def test_two_hundred_tasks_submit_at_once() -> None:
    """Each gets the results of its own messages."""
    answers: dict[int, list[tuple[bytes, ...]]] = {}

    async def submit(number: int) -> None:
        messages = [b"%d-%d" % (number, n) for n in range(number % 7)]
        answers[number] = outputs(await supervisor.submit(messages))

    async with (
        acting(stage("echo", workers=2)) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        for number in range(200):
            tasks.start_soon(submit, number)

    assert answers == {
        number: [(b"%d-%d" % (number, n),) for n in range(number % 7)]
        for number in range(200)
    }


# --- stream ------------------------------------------------------------------------


async def test_stream_takes_a_plain_iterable() -> None:
    """A plain generator is read as far as there is room."""
    async with acting(stage("echo")) as supervisor:
        stream = supervisor.stream(b"%d" % n for n in range(5000))
        results = [result async for result in stream]

    assert outputs(results) == [(b"%d" % n,) for n in range(5000)]


async def test_stream_takes_an_async_iterable() -> None:
    """Messages that come one by one are answered one by one."""
    answered = anyio.Event()

    async def messages() -> AsyncIterator[bytes]:
        yield b"first"
        await answered.wait()
        yield b"second"

    seen = []
    async with acting(stage("echo")) as supervisor:
        with anyio.fail_after(10):
            async for result in supervisor.stream(messages()):
                seen.append(result.message)
                answered.set()

    assert seen == [b"first", b"second"]


async def test_stream_takes_what_is_no_generator() -> None:
    """Such as the end of a channel; it stays open."""
    send, receive = anyio.create_memory_object_stream[bytes](9)
    with send, receive:
        for message in numbers(3):
            send.send_nowait(message)
        send.close()
        async with acting(stage("echo")) as supervisor:
            results = [r async for r in supervisor.stream(receive)]
        assert receive.statistics().open_receive_streams == 1

    assert [r.message for r in results] == numbers(3)


async def test_stream_of_nothing_ends() -> None:
    """Empty input of either kind gives no results."""

    async def nothing() -> AsyncIterator[bytes]:
        for message in list[bytes]():
            yield message

    async with acting(stage("echo")) as supervisor:
        assert [r async for r in supervisor.stream([])] == []
        assert [r async for r in supervisor.stream(nothing())] == []


async def test_error_of_the_input_comes_behind_the_results_before_it() -> None:
    """The input's error is raised unchanged, after earlier results."""

    async def messages() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"
        raise LookupError("no three")

    seen: list[Result] = []
    async with acting(stage("echo")) as supervisor:
        with pytest.raises(LookupError, match="no three"):
            await collect(seen, supervisor.stream(messages()))
        again = await supervisor.submit([b"four"])

    assert [r.message for r in seen] == [b"one", b"two"]
    assert outputs(again) == [(b"four",)]


async def test_error_of_a_plain_iterable_is_raised_too() -> None:
    """After the results of all messages before it."""

    def messages() -> Iterator[bytes]:
        yield from numbers(1500)
        raise LookupError("no more")

    seen: list[Result] = []
    async with acting(stage("fast")) as supervisor:
        with pytest.raises(LookupError, match="no more"):
            await collect(seen, supervisor.stream(messages()))

    assert [r.message for r in seen] == numbers(1500)


@pytest.mark.parametrize("plainly", [True, False], ids=["plain", "async"])
async def test_consumer_may_break_off(plainly: bool) -> None:
    """Endless input is read no further, and others continue."""
    closed = []

    def endless() -> Iterator[bytes]:
        try:
            while True:
                yield b"message"
        finally:
            closed.append(True)

    async def endless_too() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"message"
        finally:
            closed.append(True)

    async with acting(stage("fast"), max_messages=100) as supervisor:
        messages = endless() if plainly else endless_too()
        async with aclosing(supervisor.stream(messages)) as stream:
            async for result in stream:
                assert result.error is None
                break
        assert outputs(await supervisor.submit([b"other"])) == [(b"other",)]
        if not plainly:
            assert closed == [True]


async def test_input_is_left_alone_once_the_stream_is_closed() -> None:
    """After closing the stream, a caller may close the input at once."""

    async def endless() -> AsyncGenerator[bytes, None]:
        yield b"one"
        await anyio.sleep_forever()

    async with (
        acting(stage("echo")) as supervisor,
        aclosing(endless()) as messages,
        aclosing(supervisor.stream(messages)) as stream,
    ):
        async for _ in stream:
            break


async def test_consumer_may_be_cancelled() -> None:
    """A cancelled stream closes its input, and others continue."""
    ended = anyio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            yield b"one"
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with acting(stage("echo")) as supervisor:
        with anyio.CancelScope() as scope:
            async with aclosing(supervisor.stream(endless())) as stream:
                async for _ in stream:
                    scope.cancel()
        with anyio.fail_after(10):
            await ended.wait()
        assert outputs(await supervisor.submit([b"other"])) == [(b"other",)]


async def test_submit_may_be_cancelled() -> None:
    """Results for a caller that has left are dropped."""
    async with acting(stage("ahead", 2, window=1)) as supervisor:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(supervisor.submit, numbers(9))
                await anyio.lowlevel.checkpoint()
                scope.cancel()
        # The worker has the first of the cancelled messages, and wants two.
    assert scope.cancelled_caught


async def test_stream_may_be_left_open_at_the_end_of_the_block() -> None:
    """Endless input does not keep the supervisor from ending."""

    async def endless() -> AsyncIterator[bytes]:
        yield b"one"
        await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with acting(stage("echo")) as supervisor:
            stream = supervisor.stream(endless())
            first = await anext(stream)
        with pytest.raises(
            faults.WorkerLost, match="stage t: the supervisor is closed"
        ):
            await anext(stream)

    assert first.message == b"one"


async def test_error_in_a_loop_over_a_stream_passes() -> None:
    """A body that raises leaves the generator open; the block still ends."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"one"

    async def body() -> None:
        async with acting(stage("echo"), max_messages=10) as supervisor:
            streams.append(supervisor.stream(endless()))
            async for _ in streams[0]:
                raise LookupError("body")

    streams: list[AsyncGenerator[Result, None]] = []
    with anyio.fail_after(10), pytest.raises(LookupError, match=r"^body$"):
        await body()
    await streams[0].aclose()


# --- what can't be sent --------------------------------------------------------------


async def test_message_with_a_marker_fails_alone() -> None:
    """The error shows which marker, and where; the others pass."""
    messages = [b"good", b"ba\0d", b"better", b"worse\n", b"\x17", b"\x05", b"best"]
    async with acting(stage("echo")) as supervisor:
        with anyio.fail_after(10):
            results = await supervisor.submit(messages)

    assert [r.message for r in results] == messages
    assert [r.outputs for r in results] == [
        (b"good",),
        (),
        (b"better",),
        (),
        (),
        (),
        (b"best",),
    ]
    remedy = "choose other markers, or encode the message"
    assert errors(results) == [
        "",
        (
            rf"stage t: message contains marker eop '\000' at offset 2; {remedy}"
            " (message 2 of its input)"
        ),
        "",
        (
            rf"stage t: message contains marker eom '\012' at offset 5; {remedy}"
            " (message 4 of its input)"
        ),
        (
            rf"stage t: message contains marker eob '\027' at offset 0; {remedy}"
            " (message 5 of its input)"
        ),
        (
            rf"stage t: message contains marker bnc '\005' at offset 0; {remedy}"
            " (message 6 of its input)"
        ),
        "",
    ]
    assert all(isinstance(r.error, faults.InvalidMessage) for r in results if r.error)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("workers", [1, 2])
async def test_bad_messages_anywhere_stop_nothing(
    window: int | None, workers: int
) -> None:
    """However many come in a row, messages after them pass."""
    messages = [b"bad\n"] * 3 + [b"good", b"bad\n"] * 50 + [b"bad\n"] * 3000 + [b"end"]
    run = stage("echo", window=window, workers=workers)
    async with acting(run) as supervisor:
        with anyio.fail_after(10):
            results = await supervisor.submit(messages)

    assert [bool(r.error) for r in results] == [m == b"bad\n" for m in messages]


async def test_message_that_is_too_long_fails_alone() -> None:
    """The error has the size, the limit and the setting."""
    run = stage("echo", max_message=10)
    async with acting(run) as supervisor:
        results = await supervisor.submit([b"x" * 10, b"x" * 11, b"x"])

    assert errors(results) == [
        "",
        (
            "stage t: message is 11 bytes long, expected no more than 10 bytes;"
            " see max_message (message 2 of its input)"
        ),
        "",
    ]


# --- how it is used ------------------------------------------------------------------


async def test_supervisor_can_be_entered_only_once() -> None:
    """Its workers are gone after the first time."""
    supervisor = acting(stage("echo"))
    async with supervisor:
        with pytest.raises(faults.InvalidState, match="was entered already"):
            await supervisor.__aenter__()
    with pytest.raises(faults.InvalidState, match="was entered already"):
        await supervisor.__aenter__()


@pytest.mark.parametrize("wrong", ["python w.py", ["python", "w.py"], None])
def test_stage_is_expected_first(wrong: object) -> None:
    """The error shows what was given, and how to make a stage (issue 22)."""
    with pytest.raises(TypeError, match=r"expected a Stage, got .*; make one with"):
        AsyncSupervisor(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "error", "text"),
    [
        ({"max_messages": 0}, ValueError, "max_messages is 0, expected 1 or more"),
        ({"max_messages": -1}, ValueError, "max_messages is -1, expected 1 or more"),
        ({"max_bytes": 0}, ValueError, "max_bytes is 0, expected 1 or more"),
        ({"max_bytes": -5}, ValueError, "max_bytes is -5, expected 1 or more"),
        ({"max_pending": -1}, ValueError, "max_pending is -1, expected 0 or more"),
        (
            {"max_messages": None},
            TypeError,
            "max_messages: expected a whole number, got None",
        ),
        (
            {"max_messages": True},
            TypeError,
            "max_messages: expected a whole number, got True",
        ),
        (
            {"max_bytes": 1e6},
            TypeError,
            "max_bytes: expected a whole number, got 1000000.0",
        ),
        (
            {"max_pending": "9"},
            TypeError,
            "max_pending: expected a whole number, got '9'",
        ),
    ],
)
def test_limits_are_validated(
    limits: dict[str, Any], error: type[Exception], text: str
) -> None:
    """A wrong one is refused before a stream could wait forever (issue 22)."""
    with pytest.raises(error) as caught:
        AsyncSupervisor(stage("echo"), **limits)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"commit": 3}, "commit: expected an async function, got int"),
        ({"launch": None}, "launch: expected a function, got NoneType"),
        (
            {"meter": 3},
            "meter: expected a Meter, got int without counter(); see etlstage.telemetry",
        ),
        (
            {"meter": Stage},
            "meter: expected a Meter, got type without counter(); see etlstage.telemetry",
        ),
    ],
)
def test_what_is_called_later_is_validated(settings: dict[str, Any], text: str) -> None:
    """A wrong one is refused at once (issue 22)."""
    with pytest.raises(TypeError) as caught:
        AsyncSupervisor(stage("echo"), **settings)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "limits", [{"max_messages": 1}, {"max_bytes": 1}, {"max_pending": 0}]
)
async def test_stream_with_the_least_room(limits: dict[str, Any]) -> None:
    """Each message is read when there is nothing else in the way (issue 22)."""
    async with acting(stage("echo"), **limits) as supervisor:
        stream = supervisor.stream(numbers(5))
        results = [result async for result in stream]

    assert outputs(results) == [(message,) for message in numbers(5)]


async def test_supervisor_must_be_entered_first() -> None:
    """The error shows how."""
    supervisor = acting(stage("echo"))

    with pytest.raises(
        faults.InvalidState,
        match=r"<AsyncSupervisor 't' workers=0> is not running;"
        r" use it as `async with AsyncSupervisor\(...\)`",
    ):
        await supervisor.submit([b"one"])


async def test_end_before_the_block_is_a_mistake() -> None:
    """It changes nothing: the supervisor can still be entered (issue 22)."""
    supervisor = acting(stage("echo"))
    with pytest.raises(faults.InvalidState, match="is not running; use it as"):
        await supervisor.aclose()
    with pytest.raises(faults.InvalidState, match="is not running; use it as"):
        supervisor.withhold()

    async with supervisor:
        assert await supervisor.ask(b"one") == (b"one",)


async def test_end_after_the_block_has_no_effect() -> None:
    """The supervisor may be closed twice (issue 22)."""
    async with acting(stage("echo")) as supervisor:
        pass

    await supervisor.aclose()
    supervisor.withhold()
    assert supervisor.health.reason == "the supervisor is closed"


async def test_transform_stage_does_not_extract() -> None:
    """The error names the stage and its kind."""
    async with acting(stage("echo")) as supervisor:
        with pytest.raises(
            faults.LocalProtocolError,
            match="stage t is of kind transform: it can't extract",
        ):
            await anext(supervisor.extract())


async def test_extract_stage_takes_no_messages() -> None:
    """The error names the stage."""
    async with acting(plain("extract", "one")) as supervisor:
        with pytest.raises(
            faults.LocalProtocolError, match="stage e extracts: it takes no messages"
        ):
            await supervisor.submit([b"one"])


async def test_repr_shows_how_many_workers_live() -> None:
    """Before, during and after its run."""
    supervisor = acting(stage("echo", workers=2))
    seen = [repr(supervisor)]
    async with supervisor:
        seen.append(repr(supervisor))
    seen.append(repr(supervisor))

    assert seen == [f"<AsyncSupervisor 't' workers={n}>" for n in (0, 2, 0)]


async def test_answers_may_take_for_ever() -> None:
    """Without a limit no deadline is set."""
    run = stage("echo", timeout=Timeouts(message=None))
    async with acting(run) as supervisor:
        assert outputs(await supervisor.submit([b"one"])) == [(b"one",)]
