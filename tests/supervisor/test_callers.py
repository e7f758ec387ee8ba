"""
Whatever a caller does, others do not notice.

Any number of callers share one supervisor, here with workers in memory and on a
virtual clock.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.errors import LocalProtocolError, WorkerLost
from etlstage.messages import OVERHEAD, AnnotatedRun, Result, Run
from etlstage.protocol.base import Dialect
from etlstage.protocol.events import Ready
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, ErrorPolicy, Order, RestartPolicy, Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import ScriptedLaunch, ScriptedWorker, run_virtually
from tests.supervisor.toy import ToyDialect, ToyWorker

pytestmark = pytest.mark.core

POISON = "poison"
EOM, EOP, EOB = b"\n", b"\0", b"\x17"


def made_of(message: bytes) -> bytes:
    """Return what the workers make of a message."""
    return message[::-1]


async def single(worker: ScriptedWorker) -> int:
    """Answer message by message, each after a while; die of poison."""
    pace = Random(worker.start)  # noqa: S311 - no secret
    async for message in worker.messages():
        if POISON.encode() in message:
            return 1
        await anyio.sleep(pace.choice((0, 0, 0.01, 0.3)))
        await worker.reply(made_of(message))
    return 0


async def batches(worker: ScriptedWorker) -> int:
    """Answer batch by batch."""
    held = b""
    while data := await worker.read():
        *whole, held = (held + data).split(EOB)
        for batch in whole:
            messages = batch.split(EOM)[:-1]
            if any(POISON.encode() in message for message in messages):
                return 1
            await anyio.sleep(0.1)
            await worker.reply(*map(made_of, messages))
    return 0


async def toy(worker: ScriptedWorker) -> int:
    """Answer in a dialect that names its exchanges."""
    ours = ToyWorker(worker)
    await ours.say(Ready("toy"))
    async for message in ours.messages():
        if POISON.encode() in message:
            return 1
        await anyio.sleep(0.1)
        await ours.reply(made_of(message))
    return 0


def supervisor(
    script: Callable[[ScriptedWorker], Awaitable[int]] = single,
    **more: object,
) -> AsyncSupervisor:
    """Return a supervisor with little room, so that callers are stopped and go on."""
    dialects: dict[object, Dialect] = {
        single: MarkerDialect(),
        batches: MarkerDialect(mode=Mode.BATCH_SUPERVISOR),
        toy: ToyDialect(),
    }
    stage = Stage(
        name="t",
        command=("scripted",),
        dialect=dialects[script],
        batch=BatchPolicy(size=7, seconds=0.2),
        on_error=ErrorPolicy(retries=0),
        restart=RestartPolicy(max=1000, max_delay=1.0),
        **more,  # type: ignore[arg-type]
    )
    return AsyncSupervisor(
        stage,
        max_messages=64,
        max_bytes=2048,
        launch=ScriptedLaunch(script),  # type: ignore[arg-type]
    )


@dataclass
class Scene:
    """What a caller needs."""

    supervisor: AsyncSupervisor
    random: Random
    over: anyio.Event = field(default_factory=anyio.Event)
    """Every honest caller has got all that it waits for."""
    number: int = 0

    def messages(self, count: int, word: str = "") -> list[bytes]:
        """Return messages that nobody else has, with keys that others have, too."""
        self.number += 1
        return [
            json.dumps({"k": n % 5, "n": f"{self.number} {n} {word}"}).encode()
            for n in range(count)
        ]

    def is_answer(self, results: list[Result], messages: list[bytes]) -> None:
        """Check that these are the results of the messages, each once."""
        assert [r.error for r in results] == [None] * len(messages)
        outputs = [output for result in results for output in result.outputs]
        of_messages = [result.message for result in results]
        if self.supervisor.stage.order is not Order.TOTAL:
            outputs.sort(key=lambda output: messages.index(made_of(output)))
            of_messages.sort(key=messages.index)
        assert of_messages == messages
        assert outputs == list(map(made_of, messages))


Caller = Callable[[Scene, int], Awaitable[None]]


async def collect(stream: AsyncIterator[Result], results: list[Result]) -> None:
    """Append what comes until the stream ends or raises."""
    async for result in stream:
        results.append(result)  # noqa: PERF401 - a comprehension keeps none of them


# --- honest ones ---------------------------------------------------------------------


async def submits(scene: Scene, count: int) -> None:
    """Submit several times."""
    for _ in range(3):
        messages = scene.messages(count)
        scene.is_answer(await scene.supervisor.submit(messages), messages)


async def streams(scene: Scene, count: int) -> None:
    """Stream a list."""
    messages = scene.messages(3 * count)
    results = [result async for result in scene.supervisor.stream(messages)]
    scene.is_answer(results, messages)


async def streams_slowly(scene: Scene, count: int) -> None:
    """Stream what comes now and then, and read it now and then."""
    messages = scene.messages(count)
    results: list[Result] = []

    async def source() -> AsyncIterator[bytes]:
        for message in messages:
            await anyio.sleep(scene.random.choice((0, 0.2)))
            yield message

    async for result in scene.supervisor.stream(source()):
        await anyio.sleep(scene.random.choice((0, 0.2)))
        results.append(result)
    scene.is_answer(results, messages)


HONEST: list[Caller] = [submits, streams, streams_slowly]

# --- others --------------------------------------------------------------------------


async def submits_text(scene: Scene, count: int) -> None:
    """Submit a string among the messages, or no messages at all."""
    messages: list[object] = [*scene.messages(count)]
    wrong = scene.random.choice(("text", None, 7, ["list"]))
    messages.insert(scene.random.randint(0, count), wrong)
    with pytest.raises(TypeError):
        await scene.supervisor.submit(messages)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        await scene.supervisor.submit(b"abc")  # type: ignore[arg-type]


async def streams_text(scene: Scene, count: int) -> None:
    """Stream a string behind some messages, which are answered."""
    messages = scene.messages(count)
    results: list[Result] = []
    wrong = scene.random.choice(("text", None, 7, ["list"]))
    stream = scene.supervisor.stream([*messages, wrong, b"x"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        await collect(stream, results)
    scene.is_answer(results, messages)


async def raises(scene: Scene, count: int) -> None:
    """Stream what fails in the middle, at once or after a while."""
    messages = scene.messages(count)
    results: list[Result] = []
    error = scene.random.choice((ZeroDivisionError, asyncio.CancelledError))

    async def source() -> AsyncIterator[bytes]:
        for message in messages:
            yield message
        await anyio.sleep(0.1)
        raise error

    with pytest.raises(error):
        await collect(scene.supervisor.stream(source()), results)
    scene.is_answer(results, messages)


async def never_ends(scene: Scene, count: int) -> None:
    """Stream without end, and leave it in the middle without a word."""
    endless = itertools.cycle(scene.messages(7))
    async for _ in scene.supervisor.stream(endless):
        count -= 1
        if count < 0:
            break


async def stops_reading(scene: Scene, count: int) -> None:
    """Stream without end, and read no further until all others are done."""
    endless = itertools.cycle(scene.messages(7))
    async with aclosing(scene.supervisor.stream(endless)) as results:
        async for _ in results:
            count -= 1
            if count < 0:
                await scene.over.wait()
                break


async def is_cancelled(scene: Scene, count: int) -> None:
    """Be cancelled at some time."""
    with anyio.move_on_after(scene.random.choice((0, 0.1, 2))):
        await scene.supervisor.submit(scene.messages(5 * count))
    with anyio.move_on_after(scene.random.choice((0, 0.1, 2))):
        async for _ in scene.supervisor.stream(scene.messages(5 * count)):
            pass


async def uses_its_list_again(scene: Scene, count: int) -> None:
    """Hand over runs in one list, emptied and filled again."""

    def source() -> Iterator[Run]:
        run: list[bytes] = []
        for message in scene.messages(count):
            run.append(message)
            yield run
            run.clear()

    async for _ in scene.supervisor.answers(source()):
        pass


async def has_wrong_columns(scene: Scene, count: int) -> None:
    """Put beside the messages what has no value for each, or is no column."""
    messages = scene.messages(count + 2)
    for column in ([1], 5, None, iter(())):
        run = AnnotatedRun(messages, key=column)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await scene.supervisor.submit(run)


async def poisons(scene: Scene, count: int) -> None:
    """Have workers die."""
    poison = scene.messages(1, POISON)
    (result,) = await scene.supervisor.submit(poison)
    assert isinstance(result.error, WorkerLost)


async def asks_for_what_is_not_there(scene: Scene, count: int) -> None:
    """Extract from a stage that does not, and ask for half a worker."""
    with pytest.raises(LocalProtocolError):
        await anext(scene.supervisor.extract())
    with pytest.raises(TypeError):
        scene.supervisor.scale(1.5)  # type: ignore[arg-type]


RUDE: list[Caller] = [
    submits_text,
    streams_text,
    raises,
    never_ends,
    stops_reading,
    is_cancelled,
    uses_its_list_again,
    has_wrong_columns,
    poisons,
    asks_for_what_is_not_there,
]

# --- all together --------------------------------------------------------------------


async def play(
    subject: AsyncSupervisor,
    honest: Iterable[Caller],
    rude: Iterable[Caller],
    seed: int,
) -> None:
    """Have callers begin at different times; all of them must come to an end."""
    random = Random(seed)  # noqa: S311 - no secret

    async def begin(caller: Caller) -> None:
        await anyio.sleep(random.choice((0, 0, 0.1, 1)))
        await caller(scene, random.randint(0, 40))

    with anyio.fail_after(100_000):
        async with subject, anyio.create_task_group() as others:
            scene = Scene(subject, random)
            for caller in rude:
                others.start_soon(begin, caller)
            async with anyio.create_task_group() as tasks:
                for caller in honest:
                    tasks.start_soon(begin, caller)
            scene.over.set()


@pytest.mark.parametrize("caller", RUDE, ids=lambda caller: caller.__name__)
@pytest.mark.parametrize("script", [single, batches, toy])
def test_others_get_what_is_theirs(
    script: Callable[[ScriptedWorker], Awaitable[int]], caller: Caller
) -> None:
    """Beside each kind of caller, in each way that exchanges are made (issue 10)."""
    run_virtually(play, supervisor(script), HONEST, [caller, caller], 7)


@settings(max_examples=60, deadline=None)
@given(
    script=st.sampled_from([single, batches, toy]),
    workers=st.integers(1, 3),
    order=st.sampled_from(list(Order)),
    window=st.sampled_from([None, 1, 8]),
    honest=st.lists(st.sampled_from(HONEST), min_size=1, max_size=4),
    rude=st.lists(st.sampled_from(RUDE), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_any_callers_together(
    script: Callable[[ScriptedWorker], Awaitable[int]],
    workers: int,
    order: Order,
    window: int | None,
    honest: list[Caller],
    rude: list[Caller],
    seed: int,
) -> None:
    """Every honest caller gets exactly its results (issue 10)."""
    key = "/k" if order is Order.KEY else None
    subject = supervisor(script, workers=workers, order=order, key=key, window=window)
    run_virtually(play, subject, honest, rude, seed)


def test_a_lane_that_moves_is_not_forgotten() -> None:
    """A worker gave it to one that was not told, and had nothing to do (issue 10)."""
    subject = supervisor(workers=3, order=Order.KEY, key="/k")
    rude = [uses_its_list_again] * 2 + [poisons, streams_text, raises, raises]
    run_virtually(play, subject, [submits, streams], rude, 450519)


# --- what a caller is told -----------------------------------------------------------


def told(act: Callable[[AsyncSupervisor], Awaitable[object]]) -> str:
    """Return the TypeError of a caller, and see that another one is answered."""

    async def main() -> str:
        async with supervisor() as subject:
            with pytest.raises(TypeError) as caught:
                await act(subject)
            (result,) = await subject.submit([b"one"])
            assert result.outputs == (b"eno",)
        return str(caught.value)

    return run_virtually(main)


async def drained(results: AsyncIterator[object]) -> None:
    """Read to the end."""
    async for _ in results:
        pass


ONE = "a single message goes into a list: [message]"


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (
            lambda s: s.submit([b"a", "b"]),
            "message 2 is str, expected bytes",
        ),
        (
            lambda s: s.submit(message for message in (b"a", b"b", None)),
            "message 3 is None, expected bytes",
        ),
        (
            lambda s: s.submit(b"abc"),
            f"expected an iterable of messages, got bytes; {ONE}",
        ),
        (
            lambda s: drained(s.stream("abc")),
            f"expected an iterable of messages, got str; {ONE}",
        ),
        (
            lambda s: drained(s.stream([b"a"] * 5000 + [7])),
            "message 5001 is int, expected bytes",
        ),
        (
            lambda s: drained(s.answers([b"abc"])),
            "expected a run of messages, got bytes",
        ),
        (
            lambda s: drained(s.answers(b"abc")),
            "expected a run of messages, got int",
        ),
        (
            lambda s: s.submit(AnnotatedRun([b"a", b"b"], key=[1])),
            "column key does not hold a value for each of the messages",
        ),
    ],
)
def test_a_mistake_is_told(
    act: Callable[[AsyncSupervisor], Awaitable[object]], text: str
) -> None:
    """Which message it is, what it is, and what is wanted (issue 10)."""
    assert told(act) == text


def test_nothing_is_passed_of_what_has_a_mistake() -> None:
    """To submit is all or nothing (issue 10)."""
    seen: list[bytes] = []

    async def noting(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            seen.append(message)
            await worker.reply()
        return 0

    async def main() -> None:
        stage = Stage(name="t", command=("scripted",))
        launch = ScriptedLaunch(noting)
        async with AsyncSupervisor(stage, launch=launch) as subject:
            with pytest.raises(TypeError):
                await subject.submit([b"a", "b"])  # type: ignore[list-item]
            await subject.submit([b"c"])

    run_virtually(main)
    assert seen == [b"c"]


def test_what_is_like_bytes_is_taken_as_bytes() -> None:
    """A buffer may be filled again at once."""

    async def main() -> list[Result]:
        buffer = bytearray(b"abc")
        given: list[object] = [buffer, memoryview(b"def")]
        results: list[Result] = []

        async def submit() -> None:
            results.extend(await subject.submit(given))  # type: ignore[arg-type]

        async with supervisor() as subject, anyio.create_task_group() as tasks:
            tasks.start_soon(submit)
            await anyio.lowlevel.checkpoint()
            buffer[:] = b"xyz"
        return results

    results = run_virtually(main)
    assert [(r.message, r.outputs) for r in results] == [
        (b"abc", (b"cba",)),
        (b"def", (b"fed",)),
    ]


def test_a_caller_that_collects_for_ever_lets_others_go_on() -> None:
    """To submit what has no end is its own matter, until it is cancelled (issue 10)."""

    async def main() -> None:
        async with supervisor() as subject, anyio.create_task_group() as tasks:
            tasks.start_soon(subject.submit, itertools.repeat(b"a"))
            (result,) = await subject.submit([b"one"])
            assert result.outputs == (b"eno",)
            tasks.cancel_scope.cancel()

    run_virtually(main)


@pytest.mark.parametrize("goes_on", [True, False])
def test_worker_is_not_read_while_its_replies_are_too_many(goes_on: bool) -> None:
    """What was sent ahead may be answered without bound, but is not held (issue 10)."""
    written = 0
    messages = [b"%d" % n for n in range(20)]

    async def answers(worker: ScriptedWorker) -> int:
        nonlocal written
        async for message in worker.messages():
            await worker.reply(*[message] * 100)
            written += 100 * (len(message) + OVERHEAD)
        return 0

    async def main() -> None:
        launch = ScriptedLaunch(answers, pipe_size=100)
        stage = Stage(name="t", command=("scripted",), window=30, max_reply=20_000)
        subject = AsyncSupervisor(stage, max_bytes=10_000, launch=launch)
        async with subject, anyio.create_task_group() as tasks:
            results = subject.stream(messages)
            one = await anext(results)
            await anyio.sleep(1000)
            # One reply was taken, 30,000 bytes may lie there, one is on its way.
            assert 30_000 < written < 30_000 + 3 * 6_000
            tasks.start_soon(other, subject)
            await anyio.sleep(1)
            if goes_on:
                others = [result async for result in results]
                replies = [len(result.outputs) for result in (one, *others)]
                assert replies == [100] * len(messages)
            await results.aclose()

    async def other(subject: AsyncSupervisor) -> None:
        (result,) = await subject.submit([b"x"])
        assert len(result.outputs) == 100

    run_virtually(main)


def test_big_messages_are_read_one_by_one() -> None:
    """How far a stream reads ahead is bounded in bytes, whatever a run is (issue 10)."""
    read = 0

    def source() -> Iterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b"x" * 2_000_000

    async def main() -> None:
        async with (
            supervisor(window=1) as subject,
            aclosing(subject.stream(source())) as results,
        ):
            await anext(results)
            await anyio.sleep(100)
            # One taken, one answered behind it, one with the worker, one before it.
            assert read <= 5

    run_virtually(main)
