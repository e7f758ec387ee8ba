"""
The supervisor with a dialect that ends exchanges when its worker commits them.

Its workers run in memory and on a virtual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from etlstage.errors import (
    ConfigError,
    EtlstageError,
    InvalidMessage,
    NotCommitted,
    StageFailed,
    WorkerLost,
)
from etlstage.messages import Position, Run, StageKind
from etlstage.pipeline import Pipeline, Report
from etlstage.pipeline.interfaces import Source
from etlstage.pipeline.worker_sink import CommittingSink
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorPolicy,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.supervisor import (
    Assignment,
    AsyncSupervisor,
    CommitRequest,
    FarewellReason,
    Outcome,
)
from etlstage.supervisor.lifecycle.events import WorkerExited
from etlstage.supervisor.pool import StoreCommit
from etlstage.testing import ScriptedLaunch, ScriptedWorker, virtual_time
from tests.shard.load import Processors
from tests.supervisor.toy_commits import SHARE, Committer, CommittingDialect, Death

pytestmark = [pytest.mark.core, pytest.mark.virtual]

RECORDS = [f"{n}".encode() for n in range(10)]


def stage(**settings: Any) -> Stage:  # noqa: ANN401 - passed on
    """Return a stage whose worker commits."""
    return Stage(name="t", worker=("toy",), dialect=CommittingDialect(), **settings)


class Store:
    """Stores positions, and keeps the requests."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        self.requests: list[CommitRequest] = []
        self._seconds = seconds

    async def __call__(self, request: CommitRequest) -> None:
        """Store a position, after ``seconds``."""
        await anyio.sleep(self._seconds)
        self.requests.append(request)

    @property
    def position(self) -> int:
        """The position stored last."""
        found = self.requests[-1].position if self.requests else 0
        assert isinstance(found, int)
        return found


async def outcomes(
    committer: Committer,
    store: StoreCommit | None = None,
    *,
    records: list[bytes] = RECORDS,
    **settings: Any,  # noqa: ANN401 - passed on
) -> list[Outcome]:
    """Return the outcomes of records for a worker that is asked to end after them."""
    supervisor = AsyncSupervisor(
        stage(**settings),
        launch=ScriptedLaunch(committer),
        commit=store or Store(),
        assignment=SHARE,
    )

    async def runs() -> AsyncIterator[Run]:
        yield records[:7]
        yield records[7:]
        supervisor.finish()

    async with supervisor:
        return [outcome async for outcome in supervisor.answers(runs())]


def ended(found: list[Outcome]) -> list[int]:
    """Return the places of messages that have ended successfully."""
    return [
        place
        for outcome in found
        if outcome.error is None
        for place in range(outcome.start, outcome.start + len(outcome.messages))
    ]


async def test_messages_end_when_they_are_committed() -> None:
    """Not when they are answered; the last ones end after the farewell."""
    done: list[tuple[int, str]] = []
    store, committer = Store(), Committer(done, every=4)
    found = await outcomes(committer, store)

    assert ended(found) == [*range(10)]
    assert [request.position for request in store.requests] == [4, 8, 10]
    assert store.requests[1] == CommitRequest("share-1", Assignment("share", 4), 10, 8)
    assert committer.partings == ["ended"]
    assert done == [(n, f"{n}") for n in range(10)]


async def test_exit_before_the_end_of_the_share_is_committed() -> None:
    """It is a failure of the worker, unless the share goes on later (issue 25)."""

    async def fail(worker: ScriptedWorker) -> int:
        await Committer([])(worker)
        await worker.complain("boom at end")
        return 7

    for why, failures in (FarewellReason.ENDED, 1), (FarewellReason.DRAIN, 0):
        async with AsyncSupervisor(
            stage(kind=StageKind.LOAD),
            launch=ScriptedLaunch(fail),
            commit=Store(),
            assignment=SHARE,
        ) as supervisor:
            supervisor.finish(why=why)
            await supervisor.aclose(why=why)
        assert (supervisor.faults.restarts, supervisor.faults.failures) == (0, failures)
        assert isinstance(supervisor.doubt, WorkerLost) == bool(failures)
        if supervisor.doubt is not None:
            assert "boom at end; worker share-1" in str(supervisor.doubt)
            assert str(supervisor.doubt).endswith("exited with status 7")


async def test_nothing_that_was_committed_is_given_again() -> None:
    """With a worker killed at each step, and a fast or slow store (issue 22)."""
    for seconds in 0.0, 1.0:
        quiet = Committer([], every=3)
        await outcomes(quiet, Store(seconds=seconds))
        for step in range(quiet.steps):
            done: list[tuple[int, str]] = []
            store = Store(seconds=seconds)
            committer = Committer(done, every=3, die_at=step)
            found = await outcomes(committer, store)
            assert [*dict.fromkeys(done)] == [(n, f"{n}") for n in range(10)], step
            assert len(done) <= 13, step
            # The next worker knows what was being stored when its predecessor died.
            positions = [request.position for request in store.requests]
            assert len(positions) == len({*positions}), step
            committed = [*range(store.position)]
            assert ended(found) == committed, step
            if store.position < 10:
                assert store.position == 9, step  # it died when asked to end
                (lost,) = {type(o.error) for o in found if o.error is not None}
                assert lost is NotCommitted, step


async def test_worker_that_never_commits_has_done_nothing() -> None:
    """Nothing that it has answered counts, but the worker is not at fault."""
    supervisor = AsyncSupervisor(stage(), launch=ScriptedLaunch(Committer([])))
    async with supervisor, anyio.create_task_group() as tasks:
        results = []

        async def submit() -> None:
            results.extend(await supervisor.submit(RECORDS))

        tasks.start_soon(submit)
        await anyio.sleep(1)
        supervisor.finish()

    assert [type(result.error) for result in results] == [NotCommitted] * 10
    assert str(results[0].error) == (
        "stage t: worker t-1 exited and had not committed 10 messages that it had"
        " answered; the next run delivers them again"
    )


async def test_worker_that_never_starts_fails_the_stage() -> None:
    """No message is at fault, even if no more will come (issue 25)."""

    async def broken(worker: ScriptedWorker) -> int:
        return 1

    supervisor = AsyncSupervisor(stage(), launch=ScriptedLaunch(broken), commit=Store())

    async def runs() -> AsyncIterator[Run]:
        yield RECORDS
        supervisor.finish()

    async with supervisor:
        (outcome,) = [outcome async for outcome in supervisor.answers(runs())]

    assert isinstance(outcome.error, StageFailed)
    assert "all workers failed" in str(outcome.error)


async def test_poison_is_found_in_order_and_stepped_over() -> None:
    """Everything before it is committed first, and later records follow."""
    done: list[tuple[int, str]] = []
    store, committer = Store(), Committer(done, every=3, poison="5")
    found = await outcomes(
        committer, store, on_error=ErrorPolicy(retries=2), batch=BatchPolicy(size=4)
    )

    (culprit,) = [outcome for outcome in found if outcome.error is not None]
    assert culprit.messages == [b"5"]
    assert isinstance(culprit.error, WorkerLost)
    assert len(culprit.error.attempts) == 3
    assert ended(found) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    order = [int(record) for _, record in done]
    assert set(order) == {0, 1, 2, 3, 4, 6, 7, 8, 9}
    # A record comes again only together with all after the last commit.
    assert all(b == a + 1 or b <= a or (a, b) == (4, 6) for a, b in pairwise(order))


async def test_worker_that_dies_idle_is_not_restarted_for_ever() -> None:
    """It has answered all, but committed nothing, which is no progress (issue 25)."""
    starts = 0

    class Idle(Committer):
        async def __call__(self, worker: ScriptedWorker) -> int:
            nonlocal starts
            starts += 1
            return await super().__call__(worker)

        async def _write(self, worker: ScriptedWorker, *said: object) -> None:
            await super()._write(worker, *said)
            if said == ("done",) and len(self.done) == 3 * starts:
                await anyio.sleep(0.1)  # so that all is read before it dies
                raise Death(3)

    supervisor = AsyncSupervisor(
        stage(restart=RestartPolicy(max=2)),
        launch=ScriptedLaunch(Idle([], every=None)),
        commit=Store(),
        assignment=SHARE,
    )
    with anyio.fail_after(100):
        async with supervisor:
            results = await supervisor.submit(RECORDS[:3])

    assert starts == 3
    for result in results:
        assert isinstance(result.error, StageFailed)
        assert "after 2 restarts without progress" in str(result.error)


async def test_silence_is_that_of_one_record() -> None:
    """Records that were answered but not committed are not missing (issue 25)."""

    class Silent(Committer):
        async def _write(self, worker: ScriptedWorker, *said: object) -> None:
            if said == ("done",) and len(self.done) > 3:
                await anyio.sleep_forever()
            await super()._write(worker, *said)

    supervisor = AsyncSupervisor(
        stage(
            timeout=Timeouts(message=2, stop=1),
            on_error=ErrorPolicy(retries=0),
            restart=RestartPolicy(policy="temporary"),
            batch=BatchPolicy(size=1),
        ),
        launch=ScriptedLaunch(Silent([], every=None)),
        commit=Store(),
        assignment=SHARE,
    )
    async with supervisor:
        results = await supervisor.submit(RECORDS[:4])

    text = str(results[-1].error)
    assert "did not answer a message within 2" in text
    assert "missing" not in text


async def test_record_that_cannot_be_sent_is_stepped_over() -> None:
    """Later records wait their turn, even while a worker is lost."""
    quiet = Committer([], every=2)
    records = [b"0", b"!", b"2", b"3", b"4"]
    await outcomes(quiet, records=records, batch=BatchPolicy(size=9))
    for step in range(quiet.steps - 2):
        done: list[tuple[int, str]] = []
        committer = Committer(done, every=2, die_at=step)
        found = await outcomes(committer, records=records, batch=BatchPolicy(size=9))

        (wrong,) = [outcome for outcome in found if outcome.error is not None]
        assert isinstance(wrong.error, InvalidMessage), step
        assert ended(found) == [0, 2, 3, 4], step
        assert [*dict.fromkeys(r for _, r in done)] == ["0", "2", "3", "4"], step


async def test_worker_ends_when_the_input_has_and_not_before() -> None:
    """Although everything so far is committed (issue 22)."""
    done: list[tuple[int, str]] = []
    store = Store()
    supervisor = AsyncSupervisor(
        stage(),
        launch=ScriptedLaunch(Committer(done, every=1)),
        commit=store,
        assignment=SHARE,
    )

    async def runs() -> AsyncIterator[Run]:
        yield [b"0"]
        await anyio.sleep(1)
        assert store.position == 1
        supervisor.finish()
        await anyio.sleep(1)
        yield [b"1"]

    async with supervisor:
        found = [outcome async for outcome in supervisor.answers(runs())]
    assert ended(found) == [0, 1]


async def test_slow_store_fails_in_time() -> None:
    """The worker gets an answer and goes on; its deadline stands still (issue 25)."""
    store = Store(seconds=100)
    committer = Committer([], every=None)
    began = anyio.current_time()
    found = await outcomes(
        committer,
        store,
        timeout=Timeouts(commit=20, farewell=60, message=10),
    )

    assert anyio.current_time() - began < 30
    assert {type(outcome.error) for outcome in found} == {NotCommitted}


async def test_store_with_a_timeout_of_its_own() -> None:
    """Its error is not taken for the stage's own timeout (issue 25)."""

    async def store(request: CommitRequest) -> None:
        await anyio.sleep(2)
        raise TimeoutError("no connection within 5 s")

    with capture_logs() as logged:
        await outcomes(Committer([], every=None), store, timeout=Timeouts(farewell=9))

    errors = [one["error"] for one in logged if one["event"] == "position not stored"]
    assert errors == ["no connection within 5 s"]


# Trio has no cancellation that is raised in another task than the cancelled one.
@pytest.mark.parametrize("anyio_backend", [virtual_time("asyncio")], ids=["asyncio"])
@pytest.mark.parametrize("text", ["", "the pool is closed"])
async def test_store_that_awaits_what_others_cancel(text: str) -> None:
    """Its error is sent to the worker; it does not end the supervisor (issue 22)."""

    async def store(request: CommitRequest) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel(text)
        await future

    with capture_logs() as logged:
        found = await outcomes(Committer([], every=None), store)

    errors = [one["error"] for one in logged if one["event"] == "position not stored"]
    assert errors == [text or "CancelledError"]
    assert {type(outcome.error) for outcome in found} == {NotCommitted}


async def test_store_that_is_cancelled_with_the_run() -> None:
    """That is no error of the store, and ends the run as ever (issue 22)."""
    committer = Committer([], every=1)
    with capture_logs() as logged, anyio.move_on_after(5) as scope:
        await outcomes(committer, Store(seconds=20))

    assert scope.cancelled_caught
    assert committer.commits == []
    assert "position not stored" not in [one["event"] for one in logged]


async def test_share_that_is_lost_is_not_committed() -> None:
    """The worker is sent the reason why it must end."""
    committer = Committer([], every=None)
    supervisor = AsyncSupervisor(
        stage(), launch=ScriptedLaunch(committer), commit=Store(), assignment=SHARE
    )
    async with supervisor:
        await anyio.sleep(1)
        await supervisor.aclose(why=FarewellReason.LOST)

    assert committer.partings == ["lost"]


async def test_share_that_is_lost_at_its_end() -> None:
    """The worker that could not commit it is sent that, and not blamed (issue 25)."""
    processors = Processors(every=9)

    async def store(request: CommitRequest) -> None:
        tasks.start_soon(partial(supervisor.aclose, why=FarewellReason.LOST))
        raise EtlstageError("ShutdownException")

    supervisor = AsyncSupervisor(
        Stage(name="t", worker=("p",), kind=StageKind.LOAD, dialect=KclDialect()),
        launch=ScriptedLaunch(processors),
        commit=store,
        assignment=Assignment("s-1"),
    )

    async def runs() -> AsyncIterator[Run]:
        yield [b'{"n": 0}']
        supervisor.finish(why=FarewellReason.ENDED)

    async with anyio.create_task_group() as tasks, supervisor:
        (outcome,) = [outcome async for outcome in supervisor.answers(runs())]

    actions = [action for _, action in processors.actions]
    assert actions == ["initialize", "processRecords", "shardEnded", "leaseLost"]
    assert processors.errors == ["ShutdownException"]
    assert isinstance(outcome.error, NotCommitted)
    assert supervisor.faults.failures == 0


async def test_share_whose_rest_is_given_up_does_not_end() -> None:
    """A position behind its end would cover what no worker was given (issue 25)."""
    committer = Committer([], every=2)
    supervisor = AsyncSupervisor(
        stage(batch=BatchPolicy(size=2)),
        launch=ScriptedLaunch(committer),
        commit=Store(),
        assignment=SHARE,
    )

    async def runs() -> AsyncIterator[Run]:
        yield RECORDS
        supervisor.finish(why=FarewellReason.ENDED)

    async with supervisor:
        async with aclosing(supervisor.answers(runs())) as answers:
            await anext(answers)
        with supervisor.events() as events:
            while not isinstance(await events.receive(), WorkerExited):
                pass

    assert committer.partings == ["drain"]


async def stop_in_action(
    processors: Processors,
    **settings: Any,  # noqa: ANN401 - passed on
) -> tuple[list[str], list[int], float]:
    """
    Stop a supervisor a second after its processor was given three of six records.

    If ``lost`` is given, the share is lost that many seconds later. Returns the
    processor's actions, the places that are loaded, and the duration.
    """
    lost = settings.pop("lost", None)
    limit, why = settings.pop("limit", None), settings.pop("why", FarewellReason.DRAIN)
    load = Stage(
        name="t",
        worker=("processor",),
        kind=StageKind.LOAD,
        dialect=KclDialect(),
        batch=BatchPolicy(size=3),
        **settings,
    )
    launch, found, took = ScriptedLaunch(processors), list[Outcome](), 0.0

    async def runs() -> AsyncIterator[Run]:
        yield [b'{"n": %d}' % n for n in range(6)]

    async with (
        AsyncSupervisor(
            load, launch=launch, commit=Store(), assignment=Assignment("s-1")
        ) as supervisor,
        anyio.create_task_group() as tasks,
    ):

        async def answers() -> None:
            found.extend([outcome async for outcome in supervisor.answers(runs())])

        async def lose(seconds: float) -> None:
            await anyio.sleep(seconds)
            await supervisor.aclose(why=FarewellReason.LOST)

        tasks.start_soon(answers)
        await anyio.sleep(1)
        began = anyio.current_time()
        if lost is not None:
            tasks.start_soon(lose, lost)
        with anyio.move_on_after(limit):
            await supervisor.aclose(why=why)
        took = anyio.current_time() - began
    return [action for _, action in processors.actions], ended(found), round(took, 1)


@pytest.mark.parametrize(
    ("why", "pause", "actions", "loaded", "seconds"),
    [
        (
            FarewellReason.DRAIN,
            3.0,
            ["processRecords", "shutdownRequested", "leaseLost"],
            [0, 1, 2],
            8.0,
        ),
        (FarewellReason.LOST, 1.0, ["processRecords", "leaseLost"], [], 2.0),
        (FarewellReason.LOST, 99.0, ["processRecords"], [], 10.0),
    ],
)
async def test_farewell_follows_an_action(
    why: FarewellReason,
    pause: float,
    actions: list[str],
    loaded: list[int],
    seconds: float,
) -> None:
    """Whatever it takes, unless the share is lost: others may need it (issue 25)."""
    found = await stop_in_action(Processors(pause=pause, every=9), why=why)

    assert found == (["initialize", *actions], loaded, seconds)


@pytest.mark.parametrize(
    ("pause", "actions", "seconds"),
    [(1.0, ["processRecords", "leaseLost"], 2.0), (99.0, ["processRecords"], 11.0)],
)
async def test_share_that_is_lost_while_an_action_defers_the_farewell(
    pause: float, actions: list[str], seconds: float
) -> None:
    """The worker is sent that instead, and has less time, as others wait (issue 25)."""
    found = await stop_in_action(Processors(pause=pause, every=9), lost=1.0)

    assert found == (["initialize", *actions], [], seconds)


@pytest.mark.parametrize("how", ["finish", "aclose", "drain"])
async def test_share_that_is_lost_does_not_end(how: str) -> None:
    """Its worker obeyed, and is not blamed when the end follows (issue 25)."""
    processors = Processors(pause=1.0, every=9)
    supervisor = AsyncSupervisor(
        Stage(name="t", worker=("p",), kind=StageKind.LOAD, dialect=KclDialect()),
        launch=ScriptedLaunch(processors),
        commit=Store(),
        assignment=Assignment("s-1"),
    )
    async with supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.submit, [b'{"n": 0}'])
        await anyio.sleep(0.5)
        tasks.start_soon(partial(supervisor.aclose, why=FarewellReason.LOST))
        await anyio.sleep(0.2)
        if how == "finish":
            supervisor.finish(why=FarewellReason.ENDED)
        elif how == "aclose":
            await supervisor.aclose(why=FarewellReason.ENDED)
        else:
            await supervisor.aclose(why=FarewellReason.DRAIN)

    actions = [action for _, action in processors.actions]
    assert actions == ["initialize", "processRecords", "leaseLost"]
    assert supervisor.faults.failures == 0


async def test_time_of_a_farewell_begins_after_the_action() -> None:
    """Then it is the limit, as it is for an idle processor (issue 25)."""

    class Stuck(Processors):
        async def _checkpoint(self, *_: object) -> None:
            await anyio.sleep_forever()

    timeout = Timeouts(farewell=7.0, stop=2.0)
    found = await stop_in_action(Stuck(pause=3.0, every=9), timeout=timeout)

    # The rest of the action, the farewell, closed stdin; then it dies of SIGTERM.
    took = 8.0 + 7.0 + 2.0
    assert found == (["initialize", "processRecords", "shutdownRequested"], [], took)


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [({"timeout": Timeouts(message=20.0)}, 19.0), ({"limit": 3.0}, 3.0)],
)
async def test_action_that_defers_the_farewell_is_cut(
    settings: dict[str, Any], seconds: float
) -> None:
    """Its own deadline still applies, and a forced stop ends it at once (issue 25)."""
    found = await stop_in_action(Processors(pause=99.0), **settings)

    assert found == (["initialize", "processRecords"], [], seconds)


class Numbers(Source):
    """Ten records, with a position after each."""

    def __init__(self, records: Sequence[bytes] = RECORDS, *, pause: float = 0) -> None:
        super().__init__("numbers")
        self.reached: list[object] = []
        self._records, self._pause = records, pause
        self._begin = 0

    def resume(self, position: object) -> None:
        """Begin after a position."""
        assert isinstance(position, int)
        self._begin = position

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the remaining records."""
        for n in range(self._begin, len(self._records)):
            yield [self._records[n]]
            yield Position(n + 1)
            await anyio.sleep(self._pause)

    async def acknowledge(self, position: Position) -> None:
        """Record the position."""
        self.reached.append(position.value)


async def test_pipeline_records_what_is_committed() -> None:
    """With a worker killed at each step, and the load repeated until it is done."""
    quiet = Committer([], every=3)
    await load(quiet, Numbers())
    for step in range(quiet.steps):
        done: list[tuple[int, str]] = []
        committer = Committer(done, every=3, die_at=step)
        source = Numbers()
        report = await load(committer, source)
        *_, reached = source.reached or [0]
        if (
            report.status != "done"
        ):  # it died when asked to end: the next run loads the rest
            assert report.ledger[-1].unprocessed == 10 - int(str(reached)), step
            source.resume(reached)
            report = await load(committer, source)

        assert report.status == "done", (step, report.error)
        assert source.reached == sorted({*map(int, map(str, source.reached))}), step
        assert source.reached[-1] == 10, step
        assert [*dict.fromkeys(r for _, r in done)] == [r.decode() for r in RECORDS]
        assert len(done) <= 13, step


async def test_record_that_ends_the_load_is_never_passed() -> None:
    """Nor is anything after it loaded that was not in flight (issue 22)."""
    done: list[tuple[int, str]] = []
    source = Numbers([b"0", b"!", *RECORDS], pause=1)
    report = await load(Committer(done, every=1), source)

    assert report.status == "failed"
    assert isinstance(report.error, InvalidMessage)
    assert source.reached in ([], [1])
    assert len(done) <= 2


@pytest.mark.parametrize("fails", [False, True])
async def test_withheld_input_may_be_cut(*, fails: bool) -> None:
    """If its supervisor is closed, it is no error; one of its own is (issue 22)."""

    async def runs() -> AsyncIterator[Run]:
        yield RECORDS
        if fails:
            raise OSError("gone")
        await anyio.sleep_forever()

    supervisor = AsyncSupervisor(
        stage(),
        launch=ScriptedLaunch(Committer([], every=None)),
        commit=Store(),
        assignment=SHARE,
    )

    async def end() -> None:
        await anyio.sleep(1)
        supervisor.withhold()
        await supervisor.aclose()

    found: list[Outcome] = []
    async with supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(end)
        with pytest.raises(OSError, match="gone") if fails else nullcontext():
            async for outcome in supervisor.answers(runs()):
                found.append(outcome)  # noqa: PERF401 - kept if the input fails
    assert ended(found) == [*range(10)]


@pytest.mark.parametrize("drained", [False, True])
async def test_cancelled_load_stops_its_worker(*, drained: bool) -> None:
    """Its worker, which may be asked to end already, never commits (issue 22)."""

    class Slow(Committer):
        async def _commit(self, *_: object) -> None:
            await anyio.sleep_forever()

    launch = ScriptedLaunch(Slow([], every=None))
    sink = CommittingSink(stage(kind=StageKind.LOAD), launch=launch)
    pipeline = Pipeline(name="p", source=Numbers(pause=1), sink=sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.run)
        await anyio.sleep(5.5 if drained else 10.5)
        pipeline.drain()
        await anyio.sleep(1.0)
        tasks.cancel_scope.cancel()

    assert launch.running == []
    account = pipeline.ledger[-1]
    assert account.busy > 1.0
    assert account.done == 0
    assert account.unprocessed == account.received > 0


async def load(committer: Committer, source: Numbers) -> Report:
    """Return the report of a load of the numbers."""
    sink = CommittingSink(stage(kind=StageKind.LOAD), launch=ScriptedLaunch(committer))
    return await Pipeline(name="p", source=source, sink=sink).run()


def test_one_worker_has_a_share() -> None:
    """Two would each commit positions that the other has not reached."""
    with pytest.raises(ConfigError, match="one worker gets its whole share"):
        stage(workers=2)
    several = Stage(name="t", worker=("toy",), workers=2)
    with pytest.raises(ValueError, match="expected one worker, found workers: 2"):
        AsyncSupervisor(several, assignment=SHARE)
