"""
The supervisor with a dialect for which no code above ``protocol`` was written.

Its workers run in memory and on a virtual clock.
"""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from functools import partial
from signal import SIGKILL, SIGTERM
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream

from etlstage.errors import RemoteProtocolError, WorkerLost, WorkerRefusal
from etlstage.messages import AnnotatedRun, StageKind
from etlstage.protocol.base import Side
from etlstage.protocol.events import (
    Added,
    Alive,
    Cancelled,
    CommitAnswered,
    CommitAsked,
    Ended,
    Farewell,
    Opened,
    Ready,
)
from etlstage.stage import (
    ErrorPolicy,
    Order,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.supervisor import (
    AsyncSupervisor,
    CommitRequest,
    Outcome,
    SupervisorEvent,
    WorkerFailed,
)
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from tests.supervisor.toy import ToyDialect, ToySession, ToyWorker

pytestmark = [pytest.mark.core, pytest.mark.virtual]


def stage(**settings: Any) -> Stage:  # noqa: ANN401 - passed on
    """Return a stage whose workers speak the toy dialect."""
    return Stage(name="t", worker=("toy",), dialect=ToyDialect(), **settings)


async def capitals(worker: ScriptedWorker) -> int:
    """Answer each message in capitals."""
    toy = ToyWorker(worker)
    await toy.say(Ready("capitals"))
    async for message in toy.messages():
        await toy.reply(message.upper())
    return 0


async def backwards(worker: ScriptedWorker) -> int:
    """Answer messages in threes, the last first, and the rest at the end."""
    toy = ToyWorker(worker)
    await toy.say(Ready())
    held: list[tuple[int, bytes]] = []
    async for event in toy.events():
        if isinstance(event, Opened):
            held.append((event.first, event.messages[0]))
            if len(held) == 3 or event.messages[0].endswith(b"!"):
                while held:
                    id_, message = held.pop()
                    await toy.say(Added(id_, [b"<" + message]))
                    await toy.say(Ended(id_, [(message + b">",)]))
    return 0


async def test_results_come_in_input_order_although_workers_answer_in_any() -> None:
    """Outputs that were passed on early come first."""
    messages = [b"%d" % n for n in range(29)] + [b"30!"]
    async with AsyncSupervisor(stage(), launch=ScriptedLaunch(backwards)) as supervisor:
        results = await supervisor.submit(messages)

    assert [r.message for r in results] == messages
    assert [r.outputs for r in results] == [(b"<" + m, m + b">") for m in messages]


async def test_exchanges_of_one_key_are_not_open_at_once() -> None:
    """A worker with several exchanges may end them in any order (issue 22)."""
    count = 60
    open_, most = Counter[int](), Counter[int]()
    run = AnnotatedRun(
        [b"%d" % n for n in range(count)], key=[n // 3 % 5 for n in range(count)]
    )

    async def several(worker: ScriptedWorker) -> int:
        toy = ToyWorker(worker)
        await toy.say(Ready())

        async def answer(event: Opened, key: int) -> None:
            await anyio.sleep(0.1)
            open_[key] -= 1
            await toy.say(Ended(event.first, [()]))

        async with anyio.create_task_group() as tasks:
            async for event in toy.events():
                if isinstance(event, Opened):
                    key = int(event.messages[0]) // 3 % 5
                    open_[key] += 1
                    most[key] = max(most[key], open_[key])
                    most[-1] = max(most[-1], open_.total())
                    tasks.start_soon(answer, event, key)
        return 0

    settings = stage(order=Order.KEY)
    async with (
        AsyncSupervisor(settings, launch=ScriptedLaunch(several)) as supervisor,
        aclosing(supervisor.answers([run])) as outcomes,
    ):
        ended = [o async for o in outcomes if isinstance(o, Outcome)]

    assert sum(len(outcome.messages) for outcome in ended) == count
    assert most.pop(-1) > 1
    assert most == dict.fromkeys(range(5), 1)


async def test_worker_refuses_one_message_and_lives_on() -> None:
    """The error has the worker's own reason, and no restart is needed."""

    async def choosy(worker: ScriptedWorker) -> int:
        toy = ToyWorker(worker)
        await toy.say(Ready())
        async for event in toy.events():
            if isinstance(event, Opened):
                if event.messages[0] == b"bad":
                    await toy.say(Ended.refused(event.first, 7, "has no date"))
                else:
                    await toy.say(Ended(event.first, [(b"ok",)]))
        return 0

    scripted = ScriptedLaunch(choosy)
    async with AsyncSupervisor(stage(), launch=scripted) as supervisor:
        good, bad, last = await supervisor.submit([b"good", b"bad", b"good"])

    assert (good.outputs, last.outputs) == ((b"ok",), (b"ok",))
    assert isinstance(bad.error, WorkerRefusal)
    assert (bad.error.code, bad.error.reason) == (7, "has no date")
    assert "refused the message: has no date" in str(bad.error)
    assert len(scripted.workers) == 1


async def test_question_in_the_middle_of_an_exchange_is_answered() -> None:
    """By the embedding program; its error is an answer, too."""
    answers: list[CommitAnswered] = []
    stored: list[object] = []

    async def asks(worker: ScriptedWorker) -> int:
        toy = ToyWorker(worker)
        await toy.say(Ready())
        current = 0
        async for event in toy.events():
            if isinstance(event, Opened):
                current = event.first
                await toy.say(CommitAsked(current, event.messages[0].decode()))
            elif isinstance(event, CommitAnswered):
                answers.append(event)
                await toy.say(Ended(current, [()]))
        return 0

    async def commit(request: CommitRequest) -> None:
        await anyio.sleep(1)
        if request.position == "two":
            raise OSError("disk full")
        stored.append(request)

    async with AsyncSupervisor(
        stage(window=1), launch=ScriptedLaunch(asks), commit=commit
    ) as supervisor:
        await supervisor.submit([b"one"])
        await supervisor.submit([b"two"])
    async with AsyncSupervisor(stage(), launch=ScriptedLaunch(asks)) as supervisor:
        await supervisor.submit([b"three"])

    assert stored == [CommitRequest("t-1", None, 1, "one")]
    assert answers == [
        CommitAnswered("one"),
        CommitAnswered("two", "disk full"),
        CommitAnswered("three", "no checkpoint store configured for stage t"),
    ]


async def test_question_behind_the_farewell_is_answered() -> None:
    """A worker may store a last position when it is asked to end (issue 22)."""
    heard: list[object] = []

    async def asks_last(worker: ScriptedWorker) -> int:
        toy = ToyWorker(worker)
        await toy.say(Ready())
        async for _ in toy.events():
            pass
        await toy.say(CommitAsked(0, "last"))
        heard.append(await anext(toy.events()))
        return 0

    async def commit(_request: CommitRequest) -> None:
        await anyio.sleep(1)

    async with AsyncSupervisor(
        stage(), launch=ScriptedLaunch(asks_last), commit=commit
    ):
        await anyio.sleep(1)

    assert heard == [CommitAnswered("last")]


async def ask_while_it_stores(*, hangs: bool) -> tuple[tuple[bytes, ...], float]:
    """Return outputs and duration of a message whose worker has a position stored."""

    async def asks(worker: ScriptedWorker) -> int:
        toy, current = ToyWorker(worker), 0
        await toy.say(Ready())

        async def beat() -> None:
            while True:
                await anyio.sleep(4)
                await toy.say(Alive())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat)
            async for event in toy.events():
                if isinstance(event, Opened):
                    current = event.first
                    await anyio.sleep(20)
                    await toy.say(CommitAsked(current, "here"))
                elif isinstance(event, CommitAnswered):
                    await anyio.sleep(5)
                    if not hangs:
                        await toy.say(Ended(current, [(b"ok",)]))
            tasks.cancel_scope.cancel()
        return 0

    async def commit(_request: CommitRequest) -> None:
        await anyio.sleep(100)

    run = stage(
        timeout=Timeouts(message=30, commit=200), on_error=ErrorPolicy(retries=0)
    )
    async with AsyncSupervisor(
        run, launch=ScriptedLaunch(asks), commit=commit
    ) as supervisor:
        began = anyio.current_time()
        (result,) = await supervisor.submit([b"one"])
        took = anyio.current_time() - began

    return result.outputs, took


async def test_no_deadline_runs_while_a_position_is_stored() -> None:
    """The delay is the supervisor's then (issue 22)."""
    outputs, took = await ask_while_it_stores(hangs=False)
    assert outputs == (b"ok",)
    assert took == pytest.approx(125, abs=0.1)


async def test_deadline_runs_on_behind_a_position_that_was_stored() -> None:
    """It continues with what was left before."""
    outputs, took = await ask_while_it_stores(hangs=True)
    assert not outputs
    assert took == pytest.approx(130, abs=0.1)


async def test_idle_heartbeat_is_answered_at_once() -> None:
    """Within one turn of the loop, and before any data."""
    times: list[float] = []

    async def beats(worker: ScriptedWorker) -> int:
        toy = ToyWorker(worker)
        await toy.say(Ready())
        for _ in range(5):
            await anyio.sleep(3)
            before = anyio.current_time()
            await toy.say(Alive())
            assert isinstance(await anext(toy.events()), Alive)
            times.append(anyio.current_time() - before)
        return await rest(toy)

    async def rest(toy: ToyWorker) -> int:
        async for _ in toy.events():
            pass
        return 0

    async with AsyncSupervisor(stage(), launch=ScriptedLaunch(beats)):
        await anyio.sleep(20)

    assert times == [0.0] * 5


async def test_worker_without_heartbeat_is_replaced_while_it_is_busy() -> None:
    """The session has its own timer; messages that the worker held are tried again."""
    events: list[SupervisorEvent] = []

    async def falls_silent(worker: ScriptedWorker) -> int:
        if worker.start > 1:
            return await capitals(worker)
        toy = ToyWorker(worker)
        await toy.say(Ready())
        await anyio.sleep_forever()
        return 0

    async with AsyncSupervisor(
        stage(), launch=ScriptedLaunch(falls_silent)
    ) as supervisor:
        with supervisor.events() as told:
            (result,) = await supervisor.submit([b"a"])
            events += _all(told)

    assert result.outputs == (b"A",)
    (failed,) = [e for e in events if isinstance(e, WorkerFailed)]
    assert isinstance(failed.error, RemoteProtocolError)
    assert "broke the protocol: no heartbeat for 10 s" in str(failed.error)


async def test_exchange_that_takes_too_long_is_cancelled_alone() -> None:
    """The worker is notified and lives on; only that message fails."""
    cancelled: list[Cancelled] = []

    async def slow_at_one(worker: ScriptedWorker) -> int:
        toy = ToyWorker(worker)
        await toy.say(Ready())

        async def beat() -> None:
            while True:
                await anyio.sleep(4)
                await toy.say(Alive())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat)
            async for event in toy.events():
                if isinstance(event, Cancelled):
                    cancelled.append(event)
                elif isinstance(event, Opened) and event.messages != [b"stuck"]:
                    await toy.say(Ended(event.first, [(b"ok",)]))
            tasks.cancel_scope.cancel()
        return 0

    scripted = ScriptedLaunch(slow_at_one)
    run = stage(
        timeout=Timeouts(message=30, commit=200), on_error=ErrorPolicy(retries=0)
    )
    async with AsyncSupervisor(run, launch=scripted) as supervisor:
        results = await supervisor.submit([b"a", b"stuck", b"b"])

    assert [r.outputs for r in results] == [(b"ok",), (), (b"ok",)]
    assert isinstance(results[1].error, WorkerLost)
    assert "did not answer a message within 30" in str(results[1].error)
    assert [event.reason[:27] for event in cancelled] == ["did not answer a message wi"]
    assert len(scripted.workers) == 1


async def test_all_that_was_open_when_a_worker_died_is_suspected() -> None:
    """Each is tried alone, so only the message at fault fails."""

    async def dies(worker: ScriptedWorker) -> int:
        toy = ToyWorker(worker)
        await toy.say(Ready())
        held: list[int] = []
        async for event in toy.events():
            if isinstance(event, Opened):
                if event.messages[0] == b"poison":
                    return -SIGKILL
                held.append(event.first)
                await anyio.sleep(1)
                await toy.say(Ended(held.pop(), [(b"ok",)]))
        return 0

    scripted = ScriptedLaunch(dies)
    run = stage(on_error=ErrorPolicy(retries=1), restart=RestartPolicy(max=1))
    messages = [b"a", b"b", b"poison", b"c", b"d"]
    async with AsyncSupervisor(run, launch=scripted) as supervisor:
        results = await supervisor.submit(messages)

    assert [r.outputs for r in results] == [(b"ok",)] * 2 + [()] + [(b"ok",)] * 2
    assert isinstance(results[2].error, WorkerLost)
    assert len(results[2].error.attempts) >= 2


async def test_stop_ladder_begins_with_the_farewell() -> None:
    """A worker that exits then gets no signal; one that does not gets all of them."""

    async def stays(worker: ScriptedWorker) -> int:
        worker.ignored.add(SIGTERM)
        await ToyWorker(worker).say(Ready())
        await anyio.sleep_forever()
        return 0

    polite, stubborn = ScriptedLaunch(capitals), ScriptedLaunch(stays)
    async with AsyncSupervisor(stage(), launch=polite) as supervisor:
        await supervisor.submit([b"a"])
    before = anyio.current_time()
    async with AsyncSupervisor(stage(timeout=Timeouts(stop=2.0)), launch=stubborn):
        await anyio.lowlevel.checkpoint()
    took = anyio.current_time() - before

    assert (polite.workers[0].signals, polite.workers[0].returncode) == ([], 0)
    assert stubborn.workers[0].signals == [SIGTERM, SIGKILL]
    # Farewell, closed stdin, and SIGTERM: each was given its time.
    assert took == pytest.approx(6.0)


async def test_worker_that_sends_farewell_gets_no_more() -> None:
    """It ends what it has, and another one does the rest."""

    async def leaves(worker: ScriptedWorker) -> int:
        toy = ToyWorker(worker)
        await toy.say(Ready())
        async for message in toy.messages():
            if worker.start == 1:
                await toy.say(Farewell(0, "enough"))
                await anyio.sleep(1)
                await toy.reply(message.upper())
                return 0
            await toy.reply(message.upper())
        return 0

    scripted = ScriptedLaunch(leaves)
    run = stage(on_error=ErrorPolicy(retries=0))
    async with AsyncSupervisor(run, launch=scripted) as supervisor:
        first = await supervisor.submit([b"a"])
        second = await supervisor.submit([b"b", b"c"])

    assert [r.outputs for r in first + second] == [(b"A",), (b"B",), (b"C",)]
    assert len(scripted.workers) == 2


async def test_reply_without_end_is_refused() -> None:
    """Its parts are held until it is complete, within limits (issue 10)."""

    async def floods(worker: ScriptedWorker) -> int:
        toy = ToyWorker(worker)
        await toy.say(Ready())
        async for message in toy.messages():
            while message == b"flood":
                await toy.say(Added(toy.current, [b"x" * 100]))
            await toy.reply(message)
        return 0

    run = stage(max_reply=10_000, on_error=ErrorPolicy(retries=0))
    async with AsyncSupervisor(run, launch=ScriptedLaunch(floods)) as supervisor:
        flood, other = await supervisor.submit([b"flood", b"a"])

    assert "reply takes more than 10000 bytes of memory" in str(flood.error)
    assert other.outputs == (b"a",)


async def test_extraction_passes_outputs_on_as_they_come() -> None:
    """A round that is no longer wanted is cancelled, and its worker stays."""
    cancelled: list[int] = []

    async def counts(worker: ScriptedWorker) -> int:
        toy = ToyWorker(worker)
        await toy.say(Ready())
        async for event in toy.events():
            if isinstance(event, Cancelled):
                cancelled.append(event.id)
            elif isinstance(event, Opened):
                assert event.event == "extract"
                for n in range(3):
                    await toy.say(Added(event.first, [b"%d" % n]))
                if event.messages[0] != b"for ever":
                    await toy.say(Ended(event.first, [(b"end",)]))
        return 0

    scripted = ScriptedLaunch(counts)
    async with AsyncSupervisor(
        stage(kind=StageKind.EXTRACT), launch=scripted
    ) as supervisor:
        first = [m async for m in supervisor.extract()]
        async with aclosing(supervisor.extract_runs(template="for ever")) as runs:
            assert await anext(runs) == [b"0"]
        last = [m async for m in supervisor.extract()]

    assert first == last == [b"0", b"1", b"2", b"end"]
    assert cancelled == [2]
    assert len(scripted.workers) == 1


# --- changing numbers of workers ------------------------------------------------------


async def takes_a_second(worker: ScriptedWorker) -> int:
    """Answer one message a second."""
    toy = ToyWorker(worker)
    await toy.say(Ready())
    async for message in toy.messages():
        await anyio.sleep(1)
        await toy.reply(message)
    return 0


def _all(events: MemoryObjectReceiveStream[SupervisorEvent]) -> list[SupervisorEvent]:
    found = []
    while True:
        try:
            found.append(events.receive_nowait())
        except (anyio.WouldBlock, anyio.EndOfStream):
            return found


async def test_scale_starts_and_stops_workers() -> None:
    """A surplus worker finishes what it has."""
    scripted = ScriptedLaunch(takes_a_second)
    async with AsyncSupervisor(stage(), launch=scripted) as supervisor:
        results: list[object] = []

        async def submit() -> None:
            results.extend(await supervisor.submit([b"%d" % n for n in range(30)]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(submit)
            await anyio.sleep(1.5)
            supervisor.scale(3)
            await anyio.sleep(2)
            assert len(scripted.running) == 3
            supervisor.scale(1)
            await anyio.sleep(5)
            assert len(scripted.running) == 1
        assert len(results) == 30
        assert all(getattr(r, "error", 1) is None for r in results)
        with pytest.raises(ValueError, match="can't have 0 workers"):
            supervisor.scale(0)


def test_toy_session_is_what_it_seems() -> None:
    """What one side sends is what the other receives, however it is cut."""
    ours, theirs = ToySession(Side.SUPERVISOR), ToySession(Side.WORKER)
    theirs.send(Ready("toy"))
    for byte in b"".join(theirs.data_to_send()):
        ours.receive_data(bytes([byte]), 0.0)
    ours.send(Opened(1, [b"\0\n"], each=False))
    theirs.receive_data(b"".join(ours.data_to_send()), 0.0)

    assert ours.events_received() == [Ready("toy")]
    assert theirs.events_received() == [Opened(1, [b"\0\n"], each=False)]
    assert (ours.owed, ours.room) == (1, 2)
    assert partial(ours.get_timer)() == 10.0
