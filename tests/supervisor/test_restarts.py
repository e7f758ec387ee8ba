"""
A thousand lives of stages whose workers fail in every way, in virtual time.

Each is drawn from its number, which a failure names: `await live(Scenario(714))`.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from signal import SIGKILL, SIGSEGV, SIGTERM
from typing import Final, Literal, Protocol

import anyio
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream
from structlog.testing import capture_logs

from etlstage.errors import EtlstageError
from etlstage.messages import Result
from etlstage.protocol.base import Dialect
from etlstage.protocol.events import Ready
from etlstage.protocol.registry import default_dialect
from etlstage.stage import (
    ErrorPolicy,
    Order,
    RecyclePolicy,
    RestartPolicy,
    Stage,
    Timeouts,
    WorkerProgram,
)
from etlstage.supervisor import AsyncSupervisor
from etlstage.supervisor.lifecycle.events import (
    StartFailed,
    SupervisorEvent,
    WorkerExited,
    WorkerFailed,
    WorkerFailedPermanently,
    WorkerRestarting,
    WorkerStarted,
    WorkerWorn,
)
from etlstage.testing import ScriptedLaunch, ScriptedWorker, run_virtually
from etlstage.testing.clock import Backend
from etlstage.transport import Child, LaunchRequest, Wire
from tests.supervisor.toy import ToyDialect, ToyWorker

# Smaller tests cover the same code; measured, these take three times as long.
pytestmark = [pytest.mark.core, pytest.mark.no_cover]

SCENARIOS: Final = 1000
NEVER: Final = 78
"""The status by which a worker reports that a restart is of no use."""
FATES: Final = {
    "good": 12,
    "slow": 2,
    "end at start": 3,
    "never ready": 1,
    "mute": 1,
    "crash unread": 2,
    "crash reading": 3,
    "crash replying": 2,
    "end after": 3,
    "leave": 1,
    "exit for good": 1,
    "stall": 1,
    "stubborn": 1,
    "not started": 2,
}
"""What happens to a worker's start, with its relative frequency."""
_SILENT: Final = ("never ready", "mute")


@dataclass
class Scenario:
    """Everything that is decided before a stage runs."""

    number: int
    dialect: Dialect = field(default_factory=default_dialect)
    stage: Stage = field(init=False)
    rounds: list[list[bytes]] = field(init=False)
    """The runs that are submitted, one after the other."""
    pause: float = field(init=False)
    """Idle seconds between two rounds."""
    stops_at: float | None = field(init=False)

    def __post_init__(self) -> None:
        dice = Random(self.number)  # noqa: S311 - no secret
        choice = dice.choice
        self.stage = Stage(
            name="t",
            worker=WorkerProgram(command=("scripted",), ready=choice([False, True])),
            dialect=self.dialect,
            workers=choice([1] * 8 + [2, 3]),
            window=choice([None, 1, 3]),
            order=choice([Order.TOTAL, Order.NONE]),
            restart=RestartPolicy(
                policy=_policy(dice),
                max=choice([0, 1, 3, 5]),
                within=choice([1.0, 10.0, 60.0]),
                delay=choice([0.1, 0.5, 4.0]),
                max_delay=choice([0.5, 30.0]),
                never_on=frozenset({NEVER}),
            ),
            on_error=ErrorPolicy(retries=choice([0, 1, 2])),
            timeout=Timeouts(
                start=3, message=10, heartbeat=choice([None, 4.0]), stop=0.5
            ),
            recycle=RecyclePolicy(
                max_messages=choice([None] * 7 + [3]),
                max_age=choice([None] * 7 + [7.0]),
            ),
        )
        self.rounds = [
            [b"%d.%d" % (turn, n) for n in range(dice.randint(1, 6))]
            for turn in range(choice([1, 1, 2, 3]))
        ]
        self.pause = choice([0.0, 1.0, 9.0])
        self.stops_at = choice([None, None, None, dice.uniform(0, 20)])

    async def script(self, worker: ScriptedWorker) -> int:
        """Behave according to the fate of this start."""
        dice = self._dice(worker.name, worker.start)
        fate = _fate(dice)
        if fate == "end at start":
            return dice.choice([0, 1, -SIGSEGV])
        if fate == "stubborn":
            worker.ignored.add(SIGTERM)
        async with _beating(worker, fate):
            await anyio.sleep(dice.choice([0, 0, 0.2, 1]))
            if not isinstance(self.dialect, ToyDialect):
                return await _serve(worker, worker, fate, dice)
            toy = ToyWorker(worker)
            if fate != "never ready":
                await toy.say(Ready())
            return await _serve(worker, toy, fate, dice)

    def launch(self, scripted: ScriptedLaunch, request: LaunchRequest, /) -> Started:
        """Start a worker, unless its program is missing."""
        fate = _fate(self._dice(request.worker, request.start))
        if fate == "not started" and request.start > 1:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return scripted(request)

    def _dice(self, worker: str, start: int) -> Random:
        return Random(f"{self.number}/{worker}/{start}")  # noqa: S311 - no secret


Started = tuple[Wire, Child]
Policy = Literal["permanent", "transient", "temporary"]


def _policy(dice: Random) -> Policy:
    policies: list[Policy] = ["permanent", "transient", "temporary"]
    return dice.choices(policies, [4, 1, 1])[0]


def _fate(dice: Random) -> str:
    return dice.choices(list(FATES), list(FATES.values()))[0]


@asynccontextmanager
async def _beating(worker: ScriptedWorker, fate: str) -> AsyncIterator[None]:
    """Report readiness, and give signs of life in the meantime."""
    if fate != "never ready":
        worker.show_life()
    if "ETLSTAGE_HEARTBEAT" not in worker.request.env or fate in _SILENT:
        yield
        return

    async def beat() -> None:
        while True:
            await anyio.sleep(2)
            worker.show_life()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        yield
        tasks.cancel_scope.cancel()


class Talker(Protocol):
    """A worker that takes messages and answers them, in any dialect."""

    def messages(self) -> AsyncIterator[bytes]:
        """Yield messages, one by one."""
        ...

    async def reply(self, *outputs: bytes) -> None:
        """Answer the last message."""
        ...


async def _serve(
    worker: ScriptedWorker, talker: Talker, fate: str, dice: Random
) -> int:
    """Answer messages, until the worker's fate is due."""
    due = dice.randint(1, 4)
    if fate == "crash unread":
        await anyio.sleep(dice.random())
        return -SIGKILL
    number = 0
    async for message in talker.messages():
        number += 1
        if number == due:
            match fate:
                case "crash reading":
                    return dice.choice([1, -SIGSEGV])
                case "crash replying":
                    await worker.write(message + b"\n" + message)
                    return -SIGKILL
                case "exit for good":
                    return NEVER
                case "leave":
                    return 0
                case "stall" | "stubborn":
                    await anyio.sleep_forever()
        if fate == "slow":
            await anyio.sleep(dice.choice([0.1, 3, 11]))
        await talker.reply(message.upper())
        if number == due and fate == "end after":
            return dice.choice([0, 1])
    return 0


# --- what must hold -------------------------------------------------------------------


@dataclass
class Record:
    """What happened to a stage, and when."""

    scenario: Scenario
    started: list[ScriptedWorker]
    events: list[tuple[float, SupervisorEvent]] = field(default_factory=list)
    results: list[list[Result]] = field(default_factory=list)
    stopped_at: float = 0.0

    def check(self) -> None:
        """Fail if anything is not as it should be."""
        self._check_results()
        assert all(worker.returncode is not None for worker in self.started)
        for name in [f"t-{n + 1}" for n in range(self.scenario.stage.pool.max)]:
            self._check_worker([e for e in self.events if e[1].worker == name])

    def _check_results(self) -> None:
        """Check that each message has exactly one outcome."""
        rounds = zip(self.scenario.rounds, self.results, strict=True)
        for messages, results in rounds:
            assert [result.message for result in results] == messages
            for message, outputs, error in results:
                if error is None:
                    assert outputs == (message.upper(),)
                else:
                    assert isinstance(error, EtlstageError)
                    assert outputs == ()

    def _check_worker(self, events: list[tuple[float, SupervisorEvent]]) -> None:
        """Check that the starts of one worker follow the policy."""
        starts = Starts(self.scenario.stage.restart)
        for now, event in events:
            starts.take(event, now)
        if starts.due is not None:
            assert starts.due >= self.stopped_at
        elif starts.ended_at is not None and starts.ended_at < self.stopped_at:
            # It was not restarted, and the stage went on.
            assert starts.exhausted(starts.ended_at) or not starts.wanted


@dataclass
class Starts:
    """What a policy allows for one worker, given its events so far."""

    policy: RestartPolicy
    count: int = 0
    useless: deque[float] = field(default_factory=deque)
    """The times of its restarts since it was last useful, without back-offs."""
    waited: float = 0.0
    """The sum of its back-offs."""
    due: float | None = None
    """The time of its next start."""
    ended_at: float | None = None
    wanted: bool = False
    """Whether the policy wants a restart after its last exit."""
    forgiven: bool = False
    """Whether it died of a message."""
    retired: bool = False
    at_fault: bool = False

    def take(self, event: SupervisorEvent, now: float) -> None:
        """Check an event against the earlier ones."""
        match event:
            case WorkerStarted(start=start):
                self._start(now)
                assert start == self.count
            case StartFailed():
                self._start(now)
                # Its predecessor's restart was wanted, whatever the policy is.
                self._end(now, wanted=True)
            case WorkerWorn():
                self.retired = True
            case WorkerFailed():
                self.at_fault = True
            case WorkerExited():
                self._exit(event, now)
            case WorkerRestarting(delay=delay):
                self._restart(delay, now)
            case WorkerFailedPermanently():
                assert self.ended_at == now

    def exhausted(self, now: float) -> bool:
        """Return whether all restarts have been used."""
        ran = now - self.waited
        within = [at for at in self.useless if ran - at <= self.policy.within]
        return len(within) >= self.policy.max

    def _start(self, now: float) -> None:
        assert self.count == 0 or self.due == pytest.approx(now)
        self.count += 1
        self.due = self.ended_at = None
        self.retired = self.at_fault = False

    def _exit(self, event: WorkerExited, now: float) -> None:
        failed = self.at_fault or (not event.stopped and (event.status or event.lost))
        retired = self.retired and not failed
        wanted = {"permanent": True, "transient": failed, "temporary": False}
        again = wanted[self.policy.policy] and event.status != NEVER
        self.forgiven = event.lost > 0 and not event.untouched
        if event.answered or retired or self.forgiven:
            self.useless.clear()
        self._end(now, wanted=retired or bool(again))

    def _end(self, now: float, *, wanted: bool) -> None:
        assert self.ended_at is None
        self.ended_at, self.wanted = now, wanted

    def _restart(self, delay: float, now: float) -> None:
        assert self.ended_at == now
        assert self.wanted
        self.due, ran = now + delay, now - self.waited
        self.waited += delay
        if self.forgiven:
            assert 0 <= delay <= self.policy.max_delay
            self.forgiven = False
            return
        while self.useless and ran - self.useless[0] > self.policy.within:
            self.useless.popleft()
        # The first is immediate; later delays grow, with jitter of up to half.
        longest = min(
            self.policy.max_delay, self.policy.delay * 2 ** (len(self.useless) - 1)
        )
        longest *= bool(self.useless)
        assert longest / 2 <= delay <= longest
        self.useless.append(ran)
        assert len(self.useless) <= self.policy.max


async def live(scenario: Scenario) -> Record:
    """Let a stage run; return what happened."""
    scripted = ScriptedLaunch(scenario.script)
    record = Record(scenario, scripted.workers)
    supervisor = AsyncSupervisor(
        scenario.stage, launch=partial(scenario.launch, scripted)
    )

    async def submit() -> None:
        for messages in scenario.rounds:
            record.results.append(await supervisor.submit(messages))
            await anyio.sleep(scenario.pause)

    async def listen(events: MemoryObjectReceiveStream[SupervisorEvent]) -> None:
        with events:
            async for event in events:
                record.events.append((anyio.current_time(), event))

    async with anyio.create_task_group() as tasks:
        async with supervisor:
            tasks.start_soon(listen, supervisor.events())
            async with anyio.create_task_group() as host:
                host.start_soon(submit)
                if scenario.stops_at is not None:
                    await anyio.sleep(scenario.stops_at)
                    record.stopped_at = anyio.current_time()
                    await supervisor.aclose()
            record.stopped_at = record.stopped_at or anyio.current_time()
        assert scripted.running == []
    return record


@pytest.mark.parametrize(
    "dialect", [default_dialect(), ToyDialect()], ids=["marker", "toy"]
)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_every_message_has_one_outcome_whatever_workers_do(
    backend: Backend, dialect: Dialect
) -> None:
    """Restarts follow the policy, and nothing is left running."""

    async def live_all() -> None:
        # Decisions are the same on both loops, so each runs every other scenario.
        for number in range(backend == "trio", SCENARIOS, 2):
            try:
                with anyio.fail_after(3600):
                    record = await live(Scenario(number, dialect))
                record.check()
                if backend == "asyncio":
                    assert len(asyncio.all_tasks()) == 1
            except BaseException as error:
                error.add_note(f"in scenario {number}")
                raise

    with capture_logs():
        run_virtually(live_all, backend=backend)
