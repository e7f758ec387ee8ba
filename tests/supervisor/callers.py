"""Callers of all kinds, and the supervisors that they call."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random

import anyio
import anyio.lowlevel
import pytest

from etlstage.errors import LocalProtocolError, WorkerLost
from etlstage.messages import AnnotatedRun, Result, Run
from etlstage.protocol.base import Dialect
from etlstage.protocol.events import Ready
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import BatchPolicy, ErrorPolicy, Order, RestartPolicy, Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from tests.supervisor.toy import ToyDialect, ToyWorker

POISON = "poison"
EOM, EOP, EOB = b"\n", b"\0", b"\x17"


def made_of(message: bytes) -> bytes:
    """Return the workers' output for a message."""
    return message[::-1]


async def single(worker: ScriptedWorker) -> int:
    """Answer message by message, after varying delays; die of poison."""
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
    """Answer in a dialect that numbers its exchanges."""
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
    """Return a supervisor with so little room that callers are blocked and resume."""
    dialects: dict[object, Dialect] = {
        single: MarkerDialect(),
        batches: MarkerDialect(mode=Mode.BATCH_SUPERVISOR),
        toy: ToyDialect(),
    }
    stage = Stage(
        name="t",
        worker=("scripted",),
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
    """What a caller needs to run."""

    supervisor: AsyncSupervisor
    random: Random
    over: anyio.Event = field(default_factory=anyio.Event)
    """Set once every honest caller has all its results."""
    number: int = 0

    def messages(self, count: int, word: str = "") -> list[bytes]:
        """Return messages that are unique, with keys that are not."""
        self.number += 1
        return [
            json.dumps({"k": n % 5, "n": f"{self.number} {n} {word}"}).encode()
            for n in range(count)
        ]

    def is_answer(self, results: list[Result], messages: list[bytes]) -> None:
        """Check that these are the results of the messages, each exactly once."""
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
    """Append results until the stream ends or raises."""
    async for result in stream:
        results.append(result)  # noqa: PERF401 - a comprehension keeps none of them


# --- honest callers ------------------------------------------------------------------


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
    """Stream messages that come now and then, and read the results now and then."""
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

# --- rude callers --------------------------------------------------------------------


async def submits_text(scene: Scene, count: int) -> None:
    """Submit a value that is not bytes among messages, or no list of messages."""
    messages: list[object] = [*scene.messages(count)]
    wrong = scene.random.choice(("text", None, 7, ["list"]))
    messages.insert(scene.random.randint(0, count), wrong)
    with pytest.raises(TypeError):
        await scene.supervisor.submit(messages)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        await scene.supervisor.submit(b"abc")  # type: ignore[arg-type]


async def streams_text(scene: Scene, count: int) -> None:
    """Stream a value that is not bytes after some messages, which are answered."""
    messages = scene.messages(count)
    results: list[Result] = []
    wrong = scene.random.choice(("text", None, 7, ["list"]))
    stream = scene.supervisor.stream([*messages, wrong, b"x"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        await collect(stream, results)
    scene.is_answer(results, messages)


async def raises(scene: Scene, count: int) -> None:
    """Stream from a source that fails after its messages."""
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
    """Stream without end, and leave without closing the stream."""
    endless = itertools.cycle(scene.messages(7))
    async for _ in scene.supervisor.stream(endless):
        count -= 1
        if count < 0:
            break


async def stops_reading(scene: Scene, count: int) -> None:
    """Stream without end, and stop reading until all others are done."""
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
    """Hand over runs in one list, which is cleared and filled again."""

    def source() -> Iterator[Run]:
        run: list[bytes] = []
        for message in scene.messages(count):
            run.append(message)
            yield run
            run.clear()

    async for _ in scene.supervisor.answers(source()):
        pass


async def has_wrong_columns(scene: Scene, count: int) -> None:
    """Annotate messages with too few values, or with no column."""
    messages = scene.messages(count + 2)
    for column in ([1], 5, None, iter(())):
        run = AnnotatedRun(messages, key=column)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await scene.supervisor.submit(run)


async def poisons(scene: Scene, count: int) -> None:
    """Make a worker die."""
    poison = scene.messages(1, POISON)
    (result,) = await scene.supervisor.submit(poison)
    assert isinstance(result.error, WorkerLost)


async def asks_for_what_is_not_there(scene: Scene, count: int) -> None:
    """Extract from a stage that can't, and ask for half a worker."""
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
