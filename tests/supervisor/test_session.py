"""
Sessions that a caller keeps open, with workers in memory and on a virtual clock.

The workers speak a dialect that has sessions; nothing above it knows which.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from signal import SIGKILL, SIGTERM
from typing import Any

import anyio
import pytest

from etlstage.errors import (
    InvalidMessage,
    LocalProtocolError,
    Overloaded,
    RemoteProtocolError,
    StageFailed,
    WorkerLost,
    WorkerRefusal,
)
from etlstage.messages import Result, StageKind
from etlstage.protocol.cocaine.settings import CocaineDialect
from etlstage.protocol.events import (
    Added,
    Cancelled,
    Ended,
    Event,
    Opened,
)
from etlstage.stage import BatchPolicy, RestartPolicy, Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor, WorkerSession
from etlstage.testing import ScriptedLaunch, ScriptedWorker
from etlstage.transport import Child, LaunchRequest, Wire
from etlstage.transport.memory import memory_wire
from tests.protocol.cocaine.scripted import CocaineWorker
from tests.protocol.cocaine.test_stage import stage

pytestmark = [pytest.mark.core, pytest.mark.virtual]

Act = Callable[[CocaineWorker, Event], Awaitable[int | None]]


class Workers(ScriptedLaunch):
    """
    Workers that act on each event of a session.

    Args:
        act: Handles an event; returns a status if the worker is to exit.
        obeys: Whether they exit when they are asked to terminate.

    Attributes:
        told: The events that each worker received, by its name.

    """

    def __init__(self, act: Act, *, obeys: bool = True) -> None:
        super().__init__(self._run)
        self._act = act
        self._obeys = obeys
        self.told: dict[str, list[Event]] = {}

    def heard(self, kind: type[Event]) -> list[Any]:
        """Return all received events of a type."""
        told = self.told.values()
        return [event for heard in told for event in heard if isinstance(event, kind)]

    async def _run(self, worker: ScriptedWorker) -> int:
        of_sessions = (Opened, Added, Ended, Cancelled)
        # A worker that is busy here does not hear the answers to its heartbeats.
        talk = CocaineWorker(worker, disown=3600, obeys=self._obeys)
        async with talk as cocaine:
            while (event := await cocaine.hear()) is not None:
                if isinstance(event, of_sessions):
                    self.told.setdefault(worker.name, []).append(event)
                    status = await self._act(cocaine, event)
                    if status is not None:
                        return status
        return 0


async def echo(worker: CocaineWorker, event: Event) -> None:
    """Send each message back at once, and end when the other side does."""
    match event:
        case Added(id_, messages, ended):
            await worker.say(Added(id_, [m.upper() for m in messages]))
            if ended:
                await worker.say(Ended(id_, [()]))


async def ignore(_worker: CocaineWorker, _event: Event) -> None:
    """Write nothing."""


async def rest(session: WorkerSession) -> list[bytes]:
    """Return the remaining chunks from the worker."""
    return [chunk async for chunk in session]


async def read_until_cancelled(session: WorkerSession) -> None:
    """Expect the error of a session that its caller has cancelled."""
    with pytest.raises(LocalProtocolError, match="the session was cancelled"):
        await rest(session)


async def test_both_sides_speak_when_they_like() -> None:
    """Each chunk is answered before the next is sent; the event's name is passed on."""
    workers = Workers(echo)
    dialect = CocaineDialect(event="clean")
    async with AsyncSupervisor(stage(dialect), launch=workers) as supervisor:
        async with supervisor.session("chat") as session:
            for word in (b"one", b"two"):
                await session.send(word)
                assert await anext(session) == word.upper()
            await session.choke()
            await session.choke()
            assert await rest(session) == []
        async with supervisor.session() as session:
            await session.choke()
            assert await rest(session) == []
    assert [e.event for e in workers.heard(Opened)] == ["chat", "clean"]
    assert sum(e.ended for e in workers.heard(Added)) == 2
    assert workers.heard(Cancelled) == []


async def test_worker_may_speak_first() -> None:
    """A session begins before anything is sent in it."""

    async def greet(worker: CocaineWorker, event: Event) -> None:
        if isinstance(event, Opened):
            await worker.say(Ended(event.first, [(b"hello", b"")]))

    async with (
        AsyncSupervisor(stage(), launch=Workers(greet)) as supervisor,
        supervisor.session("greet") as session,
    ):
        assert await rest(session) == [b"hello", b""]
        await session.send(b"too late")  # is dropped
        await session.choke()


async def test_sessions_go_to_the_worker_with_the_fewest() -> None:
    """No worker has more than its limit; further callers wait."""
    workers = Workers(echo)
    small = stage(CocaineDialect(concurrency=2), workers=3)
    done = 0

    async def talk(supervisor: AsyncSupervisor) -> None:
        nonlocal done
        async with supervisor.session() as session:
            await session.send(b"x")
            assert await anext(session) == b"X"
            await anyio.sleep(10)
            done += 1

    async with AsyncSupervisor(small, launch=workers) as supervisor:
        await anyio.sleep(1)  # for all to be ready
        async with anyio.create_task_group() as tasks:
            for _ in range(7):
                tasks.start_soon(talk, supervisor)
            await anyio.sleep(5)
            opened = [
                sum(isinstance(event, Opened) for event in told)
                for told in workers.told.values()
            ]
            assert opened == [2, 2, 2]
    assert done == 7


async def test_messages_and_sessions_share_a_worker() -> None:
    """Both are exchanges."""
    run = stage(CocaineDialect(concurrency=2))
    async with AsyncSupervisor(run, launch=Workers(echo)) as supervisor:
        async with supervisor.session() as session:
            await session.send(b"a")
            results = await supervisor.submit([b"m%d" % n for n in range(20)])
            assert await anext(session) == b"A"
        assert [r.outputs for r in results] == [(b"M%d" % n,) for n in range(20)]
    assert supervisor.faults.failures == 0


@pytest.mark.parametrize("slots", [1, 2])
async def test_input_that_waits_is_written_once_the_session_begins(slots: int) -> None:
    """With its opening, also if a message takes the last slot (issue 22)."""

    async def answer(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker) as cocaine:
            while None not in (asked := [await cocaine.next() for _ in range(slots)]):
                await anyio.sleep(1)
                await cocaine.say(*[Ended(r.id, [r.messages]) for r in asked if r])
        return 0

    run = stage(CocaineDialect(concurrency=slots))
    async with (
        AsyncSupervisor(run, launch=ScriptedLaunch(answer)) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(slots):
            tasks.start_soon(supervisor.ask, b"busy")
        await anyio.sleep(0.5)
        async with supervisor.session() as session:
            tasks.start_soon(supervisor.ask, b"later")
            await session.send(b"a")
            await session.choke()
            with anyio.fail_after(5):
                assert await rest(session) == [b"a"]


async def test_session_does_not_wait_for_a_batch() -> None:
    """Nor is it ever part of one."""
    run = stage(CocaineDialect(batches=True), batch=BatchPolicy(size=3, seconds=60))
    async with (
        AsyncSupervisor(run, launch=Workers(echo)) as supervisor,
        supervisor.session() as session,
    ):
        await session.send(b"a")
        assert await anext(session) == b"A"
        assert anyio.current_time() < 60


async def test_worker_rejects() -> None:
    """With code and reason; the worker lives on, and takes nothing more from us."""

    async def refuse(worker: CocaineWorker, event: Event) -> None:
        if isinstance(event, Added):
            await worker.say(Ended.refused(event.id, -13, "no such table", 42))

    workers = Workers(refuse)
    async with AsyncSupervisor(stage(), launch=workers) as supervisor:
        async with supervisor.session() as session:
            await session.send(b"x")
            for _ in range(2):
                with pytest.raises(WorkerRefusal) as raised:
                    await anext(session)
                error = raised.value
                assert (error.code, error.reason) == (-13, "no such table")
            with pytest.raises(WorkerRefusal):
                await session.send(b"y")
        assert supervisor.faults.failures == 0
    assert len(workers.workers) == 1


async def test_session_that_takes_too_long_is_cancelled() -> None:
    """The worker is notified, and lives on; no other is asked."""
    workers = Workers(ignore)
    slow = stage(timeout=Timeouts(message=5))
    async with AsyncSupervisor(slow, launch=workers) as supervisor:
        async with supervisor.session() as session:
            with pytest.raises(TimeoutError, match="did not end within 5"):
                await anext(session)
        await anyio.sleep(1)
        assert supervisor.faults.failures == 0
    assert len(workers.heard(Opened)) == 1
    assert len(workers.heard(Cancelled)) == 1


async def test_deadlines_rest_while_a_caller_does_not_read() -> None:
    """Another message, given meanwhile, has its time once reading goes on (issue 22)."""

    async def flood(worker: CocaineWorker, event: Event) -> None:
        if isinstance(event, Added) and event.messages == [b"much"]:
            await worker.say(Added(event.id, [b"x" * 500_000]))
        else:
            await echo(worker, event)

    slow = stage(timeout=Timeouts(message=5))
    async with AsyncSupervisor(slow, launch=Workers(flood)) as supervisor:
        results: list[Result] = []

        async def submit() -> None:
            results.extend(await supervisor.submit([b"a"]))

        async with (
            anyio.create_task_group() as tasks,
            supervisor.session() as session,
        ):
            await session.send(b"much")
            await anyio.sleep(1)
            tasks.start_soon(submit)
            await anyio.sleep(1)
            assert supervisor._pool is not None
            (running,) = supervisor._pool._running.values()
            assert running.link.deadlines.asked_at is None
            await anyio.sleep(10)
            await session.choke()
            assert len(await anext(session)) == 500_000
        assert [result.outputs for result in results] == [(b"A",)]
        assert supervisor.faults.failures == 0


async def test_worker_that_hangs_while_a_caller_does_not_read_is_replaced() -> None:
    """It has to beat once reading goes on, though nothing is there (issue 22)."""

    async def hang(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker, beat=None) as cocaine:
            while (event := await cocaine.hear()) is not None:
                if isinstance(event, Added):
                    await cocaine.say(Added(event.id, [b"x" * 500_000]))
        return 0

    patient = stage(CocaineDialect(heartbeat=5.0), timeout=Timeouts(message=None))
    async with (
        AsyncSupervisor(patient, launch=ScriptedLaunch(hang)) as supervisor,
        supervisor.session() as session,
    ):
        await session.send(b"much")
        await anyio.sleep(20)
        assert len(await anext(session)) == 500_000
        with (
            anyio.fail_after(60),
            pytest.raises(RemoteProtocolError, match="there was no heartbeat within 5"),
        ):
            await anext(session)


async def test_worker_dies_in_the_middle() -> None:
    """What was sent is lost, so no other worker is asked; later sessions work."""

    async def die(worker: CocaineWorker, event: Event) -> int | None:
        await echo(worker, event)
        fatal = isinstance(event, Added) and b"die" in event.messages
        return -SIGKILL if fatal else None

    workers = Workers(die)
    async with AsyncSupervisor(stage(), launch=workers) as supervisor:
        async with supervisor.session() as session:
            await session.send(b"die")
            assert await anext(session) == b"DIE"
            with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
                await anext(session)
            with pytest.raises(WorkerLost):
                await session.send(b"more")
        async with supervisor.session() as session:
            await session.send(b"again")
            assert await anext(session) == b"AGAIN"
    assert len(workers.workers) == 2


async def test_session_in_which_nothing_has_passed_is_opened_again() -> None:
    """With another worker, after the first has died."""
    deaths = 0

    async def die_once(worker: CocaineWorker, event: Event) -> int | None:
        nonlocal deaths
        if isinstance(event, Opened) and not deaths:
            deaths += 1
            return 1
        await echo(worker, event)
        return None

    async with (
        AsyncSupervisor(stage(), launch=Workers(die_once)) as supervisor,
        supervisor.session() as session,
    ):
        await anyio.sleep(30)
        await session.send(b"a")
        assert await anext(session) == b"A"


@pytest.mark.parametrize("fate", ["closed", "failed", "exited"])
async def test_input_for_a_worker_that_can_not_read_it_goes_to_another(
    fate: str,
) -> None:
    """Its end may take time, in which the caller begins to send (issue 22)."""
    leaving = anyio.Event()

    async def leave(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker) as cocaine:
            while (event := await cocaine.hear()) is not None:
                if worker.start > 1:
                    await echo(cocaine, event)
                elif isinstance(event, Opened):
                    leaving.set()
                    if fate == "exited":
                        return 0
                    if fate == "closed":
                        worker.close_stdout()
                    else:
                        worker.ignored.add(SIGTERM)
                        await cocaine.write(b"\xc1")
                    await anyio.sleep(1)
                    return 1
        return 0

    scripted = ScriptedLaunch(leave)

    def launch(request: LaunchRequest) -> tuple[Wire, Child]:
        wire, child = scripted(request)
        if fate == "exited" and request.start == 1:
            # A process that it has started holds its connection open.
            child._wire = memory_wire()[1]  # type: ignore[attr-defined]
        return wire, child

    lasting = stage(timeout=Timeouts(stop=3))
    async with (
        AsyncSupervisor(lasting, launch=launch) as supervisor,
        supervisor.session() as session,
    ):
        await leaving.wait()
        await anyio.sleep(0.5)
        assert len(scripted.workers) == 1
        await session.send(b"one")
        await session.choke()
        assert await rest(session) == [b"ONE"]


async def test_no_one_is_left() -> None:
    """The caller gets an error, and does not wait forever."""

    async def leave(worker: ScriptedWorker) -> int:
        async with CocaineWorker(worker):
            return 1

    dead = stage(restart=RestartPolicy(max=0))
    async with (
        AsyncSupervisor(dead, launch=ScriptedLaunch(leave)) as supervisor,
        supervisor.session() as session,
    ):
        with pytest.raises(StageFailed, match="all workers failed"):
            await anext(session)


async def test_caller_cancels_with_a_code_and_a_reason() -> None:
    """The worker receives both, and iteration ends with an error."""
    workers = Workers(echo)
    async with AsyncSupervisor(stage(), launch=workers) as supervisor:
        async with supervisor.session() as session, anyio.create_task_group() as tasks:
            tasks.start_soon(read_until_cancelled, session)
            await session.send(b"x")
            await anyio.sleep(1)
            await session.error(7, "client gone")
            await session.send(b"dropped")
        await anyio.sleep(1)
        (cancelled,) = workers.heard(Cancelled)
        assert cancelled[1:] == (7, "client gone")
        assert await supervisor.ask(b"y") == (b"Y",)


@pytest.mark.parametrize(
    ("code", "reason", "error", "text"),
    [
        ("7", "", TypeError, "code is str, expected int"),
        (True, "", TypeError, "code is bool, expected int"),
        (2**63, "", ValueError, "code is out of range, expected -2\\*\\*63 to 2"),
        (7, None, TypeError, "reason is None, expected str"),
        (7, "\ud800", ValueError, "reason has a surrogate, expected text"),
        (7, "x" * 65537, ValueError, "reason is 65537 bytes long, expected no more"),
    ],
)
async def test_code_or_reason_that_can_not_be_sent_is_refused(
    code: int, reason: str, error: type[Exception], text: str
) -> None:
    """The session goes on, and may be cancelled by another call (issue 22)."""
    workers = Workers(echo)
    async with AsyncSupervisor(stage(), launch=workers) as supervisor:
        async with supervisor.session() as session:
            with pytest.raises(error, match=text):
                await session.error(code, reason)
            await session.send(b"a")
            assert await anext(session) == b"A"
            await session.error(-(2**63), "")
        await anyio.sleep(1)
    (cancelled,) = workers.heard(Cancelled)
    assert cancelled[1:] == (-(2**63), "")


async def test_reader_of_a_session_whose_caller_leaves_gets_an_error() -> None:
    """It would take a part of the reply for all of it (issue 22)."""
    async with (
        AsyncSupervisor(stage(), launch=Workers(echo)) as supervisor,
        anyio.create_task_group() as tasks,
        supervisor.session() as session,
    ):
        tasks.start_soon(read_until_cancelled, session)
        await session.send(b"a")
        await anyio.sleep(1)


async def test_reply_that_ended_can_be_read_after_the_block() -> None:
    """Also if nothing of it was read inside (issue 22)."""
    async with AsyncSupervisor(stage(), launch=Workers(echo)) as supervisor:
        async with supervisor.session() as session:
            await session.send(b"a")
            await session.choke()
            await anyio.sleep(1)
        assert await rest(session) == [b"A"]


async def test_caller_that_leaves_has_its_session_cancelled() -> None:
    """Even if the caller is cancelled; a session that only waited is never sent."""
    workers = Workers(echo)
    one = stage(CocaineDialect(concurrency=1))
    async with AsyncSupervisor(one, launch=workers) as supervisor:
        async with supervisor.session() as session:
            await session.send(b"x")
            assert await anext(session) == b"X"
            with anyio.move_on_after(5):
                async with supervisor.session() as waiting:
                    await anext(waiting)
        with anyio.move_on_after(5):
            async with supervisor.session() as session:
                await anext(session)
        await anyio.sleep(1)
    assert len(workers.heard(Opened)) == 2
    assert len(workers.heard(Cancelled)) == 2


async def test_worker_that_does_not_read_stops_the_sender() -> None:
    """Waiting input is limited; sending goes on with the worker."""
    going_on = anyio.Event()
    sent = 0

    async def stuck(worker: CocaineWorker, event: Event) -> None:
        if isinstance(event, Added):
            await going_on.wait()
        await echo(worker, event)

    async def send_all(session: WorkerSession) -> None:
        nonlocal sent
        for _ in range(200):
            await session.send(bytes(64 * 1024))
            sent += 1
        await session.choke()

    async with (
        AsyncSupervisor(stage(), launch=Workers(stuck)) as supervisor,
        supervisor.session() as session,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(send_all, session)
        await anyio.sleep(5)
        assert sent < 20
        going_on.set()
        assert sum(map(len, await rest(session))) == 200 * 64 * 1024


async def test_caller_that_does_not_read_stops_the_worker() -> None:
    """That time does not count for the worker, nor are its heartbeats missed."""
    said = 0

    async def pour(worker: CocaineWorker, event: Event) -> None:
        nonlocal said
        if isinstance(event, Opened):
            for _ in range(100):
                await worker.say(Added(event.first, [bytes(64 * 1024)]))
                said += 1
            await worker.say(Ended(event.first, [()]))

    run = stage(timeout=Timeouts(message=30))
    async with AsyncSupervisor(run, launch=Workers(pour)) as supervisor:
        async with supervisor.session() as session:
            await anyio.sleep(100)
            assert said < 20
            assert sum(map(len, await rest(session))) == 100 * 64 * 1024
            assert anyio.current_time() == pytest.approx(100)
        assert supervisor.faults.failures == 0


async def test_session_may_end_while_the_supervisor_drains() -> None:
    """A session opened after that fails."""
    async with (
        AsyncSupervisor(stage(), launch=Workers(echo)) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        async with supervisor.session() as session:
            await session.send(b"a")
            tasks.start_soon(partial(supervisor.aclose, drain=10))
            await anyio.sleep(5)
            await session.send(b"b")
            await session.choke()
            assert await rest(session) == [b"A", b"B"]
        async with supervisor.session() as late:
            with pytest.raises(WorkerLost, match="the supervisor is closed"):
                await anext(late)


async def test_supervisor_that_is_closed_twice_drains_once() -> None:
    """Both calls return once a late caller is gone, too (issue 22)."""

    async def slow(worker: CocaineWorker, event: Event) -> None:
        if isinstance(event, Opened):
            await anyio.sleep(5)
        await echo(worker, event)

    async with AsyncSupervisor(stage(), launch=Workers(slow)) as supervisor:

        async def ask_again() -> None:
            assert await supervisor.ask(b"a") == (b"A",)
            async with supervisor.session() as session:
                await anyio.sleep(5)
                with pytest.raises(WorkerLost, match="the supervisor is closed"):
                    await anext(session)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_again)
            await anyio.sleep(1)
            with anyio.fail_after(60):
                async with anyio.create_task_group() as closing:
                    for _ in range(2):
                        closing.start_soon(partial(supervisor.aclose, drain=1000))


async def test_session_that_outlives_the_supervisor_is_lost() -> None:
    """Messages to a worker that was asked to terminate are dropped."""
    lasting = stage(CocaineDialect(seal=1.0), timeout=Timeouts(stop=3))
    workers = Workers(ignore, obeys=False)
    async with (
        AsyncSupervisor(lasting, launch=workers) as supervisor,
        supervisor.session() as session,
        anyio.create_task_group() as tasks,
    ):
        await session.send(b"a")
        await anyio.sleep(1)
        tasks.start_soon(supervisor.aclose)
        for _ in range(2):  # before terminate is sent, and after that
            await anyio.sleep(0.8)
            await session.send(b"b")
        with pytest.raises(WorkerLost, match="was stopped while it held 1 message"):
            await anext(session)
    assert [e.messages for e in workers.heard(Added)] == [[b"a"], [b"b"]]


async def test_worker_that_terminates_gets_what_is_added_to_its_sessions() -> None:
    """With ``terminate: drain``, until they have ended (issue 22)."""

    async def leave(worker: CocaineWorker, event: Event) -> int | None:
        await echo(worker, event)
        match event:
            case Added(messages=[b"one"]):
                await worker.write(b"\x93\x01\x01\x92\x01\xa6enough")
            case Added(ended=True):
                return 0
        return None

    dialect = CocaineDialect(terminate="drain", seal=3.0)
    async with (
        AsyncSupervisor(stage(dialect), launch=Workers(leave)) as supervisor,
        supervisor.session() as session,
    ):
        for word in (b"one", b"two"):
            await session.send(word)
            assert await anext(session) == word.upper()
            await anyio.sleep(1)
        await session.choke()
        assert await rest(session) == []


async def test_worker_that_terminates_has_its_sessions_cancelled() -> None:
    """With ``terminate: drain``, if a caller leaves or waits too long (issue 22)."""

    async def leave(worker: CocaineWorker, event: Event) -> int | None:
        match event:
            case Added():
                await worker.write(b"\x93\x01\x01\x92\x01\xa6enough")
            case Cancelled():
                return 0
        return None

    dialect, brief = CocaineDialect(terminate="drain", seal=20.0), Timeouts(message=5)
    workers = Workers(leave)
    async with AsyncSupervisor(
        stage(dialect, timeout=brief), launch=workers
    ) as supervisor:
        async with supervisor.session() as session:
            await session.send(b"leaves")
            await anyio.sleep(1)
        await anyio.sleep(10)
        async with supervisor.session() as session:
            await session.send(b"waits")
            with pytest.raises(TimeoutError):
                await anext(session)
        await anyio.sleep(10)
        assert [worker.returncode for worker in workers.workers[:2]] == [0, 0]


async def test_worker_that_terminates_waits_for_a_caller_that_reads_slowly() -> None:
    """With ``terminate: drain``, its reply is not late because of that (issue 22)."""

    async def leave(worker: CocaineWorker, event: Event) -> int | None:
        if not isinstance(event, Added):
            return None
        await worker.write(b"\x93\x01\x01\x92\x01\xa6enough")
        for _ in range(3):
            await worker.say(Added(event.id, [b"x" * 400_000]))
        await worker.say(Ended(event.id, [(b"end",)]))
        return 0

    dialect, workers = CocaineDialect(terminate="drain", seal=1.0), Workers(leave)
    async with (
        AsyncSupervisor(stage(dialect), launch=workers) as supervisor,
        supervisor.session() as session,
    ):
        await session.choke()
        for _ in range(3):
            await anyio.sleep(30)
            assert len(await anext(session)) == 400_000
        assert await rest(session) == [b"end"]
        assert workers.workers[0].returncode == 0


async def test_reply_without_all_input_is_an_error() -> None:
    """A worker may still end its session after it was asked to terminate (issue 22)."""

    async def end_late(worker: CocaineWorker, event: Event) -> None:
        match event:
            case Added(id_):
                await anyio.sleep(2)
                await worker.say(Ended(id_, [(b"total",)]))

    brief = stage(CocaineDialect(seal=1.0), timeout=Timeouts(stop=3))
    workers = Workers(end_late, obeys=False)
    async with (
        AsyncSupervisor(brief, launch=workers) as supervisor,
        supervisor.session() as session,
        anyio.create_task_group() as tasks,
    ):
        await session.send(b"a")
        await anyio.sleep(0.5)
        tasks.start_soon(supervisor.aclose)
        await anyio.sleep(1.2)
        await session.send(b"b")
        assert await anext(session) == b"total"
        with pytest.raises(WorkerLost, match="ended before it had all input"):
            await anext(session)
    assert all(e.messages != [b"b"] for e in workers.heard(Added))


async def test_what_can_not_be_a_session_is_reported() -> None:
    """Because of the dialect, the kind of the stage, or the pending messages."""
    marker = Stage(name="m", worker=("w",))
    extract = stage(kind=StageKind.EXTRACT)
    for run, text in (
        (marker, "stage m can't have sessions: a worker of dialect marker answers one"),
        (extract, "stage t extracts: it takes no sessions"),
    ):
        async with AsyncSupervisor(run, launch=Workers(ignore)) as supervisor:
            with pytest.raises(LocalProtocolError, match=text):
                async with supervisor.session():
                    pass
    full = AsyncSupervisor(stage(), launch=Workers(ignore), max_pending=1)
    async with full, full.session():
        with pytest.raises(Overloaded):
            async with full.session():
                pass


@pytest.mark.parametrize(
    ("event", "error", "text"),
    [
        (b"echo", TypeError, "event is bytes, expected str"),
        (None, TypeError, "event is None, expected str"),
        ("\ud800", ValueError, "event has a surrogate"),
        ("é" * 40_000, ValueError, "event is 80000 bytes long, expected no more than"),
    ],
)
async def test_event_that_can_not_be_sent_concerns_its_caller_alone(
    event: object,
    error: type[Exception],
    text: str,
) -> None:
    """No session is opened, and those of others go on (issue 22)."""
    workers = Workers(echo)
    async with AsyncSupervisor(stage(), launch=workers) as supervisor:
        async with supervisor.session() as session:
            with pytest.raises(error, match=text):
                supervisor.session(event)  # type: ignore[arg-type]
            await session.send(b"a")
            assert await anext(session) == b"A"
        assert supervisor.faults.failures == 0
    assert len(workers.heard(Opened)) == 1


async def test_what_can_not_be_sent_is_the_callers_mistake() -> None:
    """The session goes on."""
    small = stage(max_message=10)
    async with (
        AsyncSupervisor(small, launch=Workers(echo)) as supervisor,
        supervisor.session() as session,
    ):
        with pytest.raises(TypeError):
            await session.send("text")  # type: ignore[arg-type]
        with pytest.raises(InvalidMessage, match="11 bytes long, expected no more"):
            await session.send(b"x" * 11)
        await session.send(b"x")
        assert await anext(session) == b"X"
        await session.choke()
        with pytest.raises(LocalProtocolError, match="the input of the session was"):
            await session.send(b"y")
