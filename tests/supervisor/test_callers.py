"""
Whatever a caller does, other callers are not affected.

Any number of callers share one supervisor, here with workers in memory and on a virtual
clock.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
)
from contextlib import aclosing
from random import Random

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etlstage.errors import LocalProtocolError
from etlstage.messages import OVERHEAD, AnnotatedRun, Result, StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import Order, Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import ScriptedLaunch, ScriptedWorker, run_virtually
from tests.supervisor.callers import (
    HONEST,
    RUDE,
    Caller,
    Scene,
    batches,
    poisons,
    raises,
    single,
    streams,
    streams_text,
    submits,
    supervisor,
    toy,
    uses_its_list_again,
)

pytestmark = pytest.mark.core

# --- all together --------------------------------------------------------------------


async def play(
    subject: AsyncSupervisor,
    honest: Iterable[Caller],
    rude: Iterable[Caller],
    seed: int,
) -> None:
    """Have callers begin at different times; all of them must finish."""
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
    """With each kind of rude caller, and in each way of making exchanges (issue 10)."""
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
    """Its new owner must be notified, or it stays idle (issue 10)."""
    subject = supervisor(workers=3, order=Order.KEY, key="/k")
    rude = [uses_its_list_again] * 2 + [poisons, streams_text, raises, raises]
    run_virtually(play, subject, [submits, streams], rude, 450519)


# --- extraction ----------------------------------------------------------------------


async def ranges(worker: ScriptedWorker) -> int:
    """Write the numbers of each requested range."""
    async for request in worker.messages():
        asked = json.loads(request)
        for n in range(asked["start"], asked["end"]):
            await worker.write(b"%d\n" % n)
            await anyio.sleep(0.01)
        await worker.reply()
    return 0


async def extracts(subject: AsyncSupervisor, start: int) -> None:
    """Read a range to its end."""
    found = [m async for m in subject.extract(start=start, end=start + 20)]
    assert found == [b"%d" % n for n in range(start, start + 20)]


async def leaves(subject: AsyncSupervisor, start: int) -> None:
    """Read only the beginning of a range."""
    async for _ in subject.extract(start=start, end=start + 1000):
        break


async def is_called_off(subject: AsyncSupervisor, start: int) -> None:
    """Be cancelled within a range."""
    with anyio.move_on_after(0.1):
        async for _ in subject.extract(start=start, end=start + 1000):
            pass


async def asks_for_nonsense(subject: AsyncSupervisor, start: int) -> None:
    """Ask for a range that is not JSON, and submit messages, which is not allowed."""
    with pytest.raises(TypeError):
        await anext(subject.extract(start=object()))
    with pytest.raises(LocalProtocolError):
        await subject.submit([b"a"])


EXTRACTING = [extracts, leaves, is_called_off, asks_for_nonsense]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(EXTRACTING), min_size=2, max_size=8))
def test_any_extractions_together(
    callers: list[Callable[[AsyncSupervisor, int], Coroutine[object, object, None]]],
) -> None:
    """Every honest caller gets exactly its range (issue 10)."""

    async def main() -> None:
        stage = Stage(
            name="t",
            worker=("scripted",),
            kind=StageKind.EXTRACT,
            dialect=MarkerDialect(mode=Mode.CYCLIC),
        )
        launch = ScriptedLaunch(ranges)
        with anyio.fail_after(1000):
            async with (
                AsyncSupervisor(stage, launch=launch) as subject,
                anyio.create_task_group() as tasks,
            ):
                for number, caller in enumerate((*callers, extracts)):
                    tasks.start_soon(caller, subject, 100 * number)

    run_virtually(main)


# --- what callers submit --------------------------------------------------------------


def told(act: Callable[[AsyncSupervisor], Awaitable[object]]) -> str:
    """Return the text of a caller's TypeError; check that another is answered."""

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


ONE = "put a single message in a list: [message]"


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
def test_a_mistake_is_reported(
    act: Callable[[AsyncSupervisor], Awaitable[object]], text: str
) -> None:
    """Which message it is, what it is, and what was expected (issue 10)."""
    assert told(act) == text


def test_nothing_is_passed_of_what_has_a_mistake() -> None:
    """Submitting is all or nothing (issue 10)."""
    seen: list[bytes] = []

    async def noting(worker: ScriptedWorker) -> int:
        async for message in worker.messages():
            seen.append(message)
            await worker.reply()
        return 0

    async def main() -> None:
        stage = Stage(name="t", worker=("scripted",))
        launch = ScriptedLaunch(noting)
        async with AsyncSupervisor(stage, launch=launch) as subject:
            with pytest.raises(TypeError):
                await subject.submit([b"a", "b"])  # type: ignore[list-item]
            await subject.submit([b"c"])

    run_virtually(main)
    assert seen == [b"c"]


def test_what_is_like_bytes_is_taken_as_bytes() -> None:
    """The caller may reuse its buffer at once."""

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
    """Endless input affects only its caller, until it is cancelled (issue 10)."""

    async def main() -> None:
        async with supervisor() as subject, anyio.create_task_group() as tasks:
            tasks.start_soon(subject.submit, itertools.repeat(b"a"))
            (result,) = await subject.submit([b"one"])
            assert result.outputs == (b"eno",)
            tasks.cancel_scope.cancel()

    anyio.run(main)  # a virtual clock stands still while the caller collects


@pytest.mark.parametrize("goes_on", [True, False])
def test_worker_is_not_read_while_its_replies_are_too_many(goes_on: bool) -> None:
    """Replies to messages in flight are not limited, but are not held (issue 10)."""
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
        stage = Stage(name="t", worker=("scripted",), window=30, max_reply=20_000)
        subject = AsyncSupervisor(stage, max_bytes=10_000, launch=launch)
        async with subject, anyio.create_task_group() as tasks:
            results = subject.stream(messages)
            one = await anext(results)
            await anyio.sleep(1000)
            # One reply was taken, 30,000 bytes may be held, one reply is in transit.
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
    """A stream's read-ahead is limited in bytes, whatever the runs (issue 10)."""
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
            # One taken, one answered after it, one with the worker, one before it.
            assert read <= 5

    run_virtually(main)
