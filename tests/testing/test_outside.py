"""
Faults from outside, in memory and in virtual time.

What a worker has already written, or does in the meantime, must not be seen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from signal import SIGKILL, SIGTERM
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from etlstage.messages import StageKind
from etlstage.protocol.marker import Markers, Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import RestartPolicy, Stage, Timeouts
from etlstage.supervisor import AsyncSupervisor
from etlstage.supervisor.process import spawn
from etlstage.testing import (
    Fault,
    FaultKind,
    FaultPlan,
    Moment,
    ScriptedLaunch,
    ScriptedWorker,
    virtual_time,
)
from etlstage.testing.faulty.wire import FaultyLaunch, Occurrence
from etlstage.testing.scripted import Script
from etlstage.transport import Child, Wire
from tests.staged import staged
from tests.testing.check.answerers import echo

pytestmark = pytest.mark.core

LONG = 1000.0  # seconds


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run in virtual time."""
    return virtual_time()


def stage(**settings: Any) -> Stage:  # noqa: ANN401
    """Return a stage whose workers are scripts."""
    return staged(("no-such-program",), **settings)


class Talk:
    """A worker with faults, and what a supervisor sees of it."""

    def __init__(
        self, wire: Wire, child: Child, worker: ScriptedWorker, launch: FaultyLaunch
    ) -> None:
        self.wire = wire
        self.child = child
        self.worker = worker
        self.happened: list[Occurrence] = launch.happened
        self.status: int | None = None

    async def wait(self) -> None:
        """Wait for its end."""
        self.status = await self.child.wait()

    async def hear(self, seconds: float = 1.0) -> tuple[bytes, bool]:
        """Return what it writes within that time, and whether that was all."""
        heard = b""
        with anyio.move_on_after(seconds):
            while (data := self.wire.read(65536)) != b"":
                heard += data or b""
                await anyio.lowlevel.checkpoint()
                if data is None:
                    await self.wire.readable()
            return heard, True
        return heard, False


@asynccontextmanager
async def suffering(
    script: Script,
    *faults: Fault,
    **settings: Any,  # noqa: ANN401
) -> AsyncIterator[Talk]:
    """Start a worker with faults; kill it after the block."""
    inner = ScriptedLaunch(script)
    launch = FaultyLaunch(inner, {"t": FaultPlan.of(*faults)})
    wire, child = spawn(stage(**settings), "t-1", launch)
    talk = Talk(wire, child, inner.workers[0], launch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(talk.wait)
        yield talk
        child.kill()
        tasks.cancel_scope.cancel()


async def silent(worker: ScriptedWorker) -> None:
    """Read, and write nothing."""
    while await worker.read():
        pass


async def leave(worker: ScriptedWorker) -> None:
    """Exit a moment after the first message."""
    await worker.read()
    await anyio.sleep(0.5)


async def test_what_was_sent_before_a_death_does_not_count() -> None:
    """The worker is killed at the message, so it has not replied (issue 12)."""
    async with suffering(echo, Fault(FaultKind.KILL)) as talk:
        talk.wire.write(b"one\n")
        await anyio.sleep(1)  # the reply waits to be read
        assert await talk.hear() == (b"", True)
        assert talk.status == -SIGKILL


async def test_half_a_reply_that_was_to_be_spoiled_is_not_heard() -> None:
    """It was written together with the reply before it (issue 12)."""

    async def write(worker: ScriptedWorker) -> None:
        await worker.read()
        await worker.write(b"one\n\0tw")

    faults = (Fault(kind, message=2) for kind in (FaultKind.TWICE, FaultKind.KILL))
    async with suffering(write, *faults) as talk:
        talk.wire.write(b"one\ntwo\n")
        assert await talk.hear() == (b"one\n\0", True)


async def test_death_is_seen_although_the_worker_is_silent() -> None:
    """Waiting for its reply ends (issue 12)."""
    heard: list[tuple[bytes, bool]] = []
    async with suffering(silent, Fault(FaultKind.KILL)) as talk:

        async def hear() -> None:
            heard.append(await talk.hear(LONG))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hear)
            await anyio.sleep(1)
            talk.wire.write(b"one\n")
        assert heard == [(b"", True)]
        assert anyio.current_time() < 2


async def test_worker_that_stalls_is_sent_nothing_more() -> None:
    """Writing succeeds, as if the bytes were in its pipe (issue 12)."""
    seen: list[bytes] = []

    async def note(worker: ScriptedWorker) -> None:
        while data := await worker.read():
            seen.append(data)

    async with suffering(note, Fault(FaultKind.STALL)) as talk:
        talk.wire.write(b"one\n")
        assert await talk.hear() == (b"", False)
        assert talk.wire.write(b"two\n") == 4
        assert await talk.hear() == (b"", False)
        assert seen == [b"one\n"]
        assert len(talk.happened) == 1


@pytest.mark.parametrize("number", [SIGTERM, SIGKILL])
async def test_worker_that_stalls_does_not_end_by_itself(number: Any) -> None:  # noqa: ANN401
    """It ends with a signal, even if the process has exited before (issue 12)."""
    async with suffering(leave, Fault(FaultKind.STALL)) as talk:
        talk.wire.write(b"one\n")
        talk.wire.close_write()
        assert await talk.hear(LONG) == (b"", False)
        assert (talk.worker.returncode, talk.child.returncode) == (0, None)
        talk.child.signal(number)
        await anyio.sleep(1)
        assert (talk.status, talk.child.returncode) == (-number, -number)
        assert await talk.hear() == (b"", True)


async def test_pause_is_over_when_the_worker_is_killed() -> None:
    """A supervisor need not wait for the rest of the pause (issue 12)."""
    async with suffering(echo, Fault(FaultKind.PAUSE, seconds=LONG)) as talk:
        talk.wire.write(b"one\n")
        assert await talk.hear() == (b"", False)
        talk.child.signal(SIGKILL)
        _, over = await talk.hear()
        assert over
        assert talk.status == -SIGKILL


async def test_pause_delays_the_reply_and_no_heartbeat_comes() -> None:
    """After the pause the worker goes on (issue 12)."""

    async def beat(worker: ScriptedWorker) -> None:
        await worker.read()
        worker.show_life()
        await worker.reply(b"ONE")
        await anyio.sleep_forever()

    async with suffering(beat, Fault(FaultKind.PAUSE, seconds=5)) as talk:
        talk.wire.write(b"one\n")
        assert await talk.hear(4) == (b"", False)
        assert talk.child.status is not None
        assert talk.child.status.read(9) is None
        assert await talk.hear(2) == (b"ONE\n\0", False)
        assert talk.child.status.read(9) == b"\n"


async def test_only_the_reply_that_it_is_about_is_spoiled() -> None:
    """Messages may have been sent ahead (issue 12)."""
    async with suffering(echo, Fault(FaultKind.TWICE, message=2)) as talk:
        talk.wire.write(b"a\nb\nc\n")
        assert await talk.hear() == (b"a\n\0b\n\0b\n\0c\n\0", False)
        (told,) = talk.happened
        assert told.message == 3  # all three had been written


async def test_worker_that_works_is_not_idle() -> None:
    """It is idle only when no reply is outstanding (issue 12)."""

    async def work(worker: ScriptedWorker) -> None:
        await worker.read()
        await anyio.sleep(LONG)
        await worker.reply(b"done")
        await anyio.sleep_forever()

    fault = Fault(FaultKind.EXIT, at=Moment.IDLE, status=4)
    async with suffering(work, fault) as talk:
        talk.wire.write(b"one\n")
        assert await talk.hear(LONG + 1) == (b"done\n\0", True)
        assert talk.status == 4


async def test_end_happens_once() -> None:
    """It does so however often stdin is closed (issue 12)."""
    fault = Fault(FaultKind.GARBAGE, at=Moment.END)
    async with suffering(echo, fault) as talk:
        talk.wire.close_write()
        talk.wire.close_write()
        assert await talk.hear() == (b"stray print\n", True)
        talk.wire.close_write()
        assert await talk.hear() == (b"", True)
        assert (len(talk.happened), talk.status) == (1, 0)


@pytest.mark.parametrize("kind", [FaultKind.CLOSE_STDOUT, FaultKind.CLOSE_STDIN])
async def test_worker_that_has_closed_a_pipe_does_not_end_with_its_input(
    kind: FaultKind,
) -> None:
    """It lives on until it is asked to end (issue 12)."""
    async with suffering(echo, Fault(kind)) as talk:
        talk.wire.write(b"one\n")
        said = await talk.hear()
        if kind is FaultKind.CLOSE_STDOUT:
            assert said == (b"", True)
        else:
            assert said == (b"one\n\0", False)
            with pytest.raises(BrokenPipeError):
                talk.wire.write(b"two\n")
        talk.wire.close_write()
        await anyio.sleep(LONG)
        assert talk.status is None


async def test_signal_that_comes_too_late_is_none() -> None:
    """The account has the exit status that came first (issue 12)."""
    fault = Fault(FaultKind.EXIT, status=3)
    async with suffering(silent, fault, Fault(FaultKind.STDERR, size=10)) as talk:
        talk.wire.write(b"one\n")
        assert await talk.hear() == (b"", True)
        talk.child.signal(SIGTERM)
        await anyio.sleep(1)
        talk.child.close()
        assert (talk.status, talk.child.returncode) == (3, 3)
        assert [told.fate for told in talk.happened] == ["exited with status 3"]


async def test_flood_of_stderr_comes_in_parts() -> None:
    """A read returns as much as it asks for, and no line is torn (issue 12)."""
    fault = Fault(FaultKind.STDERR, at=Moment.START, size=8, data=b"abc")
    async with suffering(silent, fault) as talk:
        await talk.hear()
        pipe = talk.child.stderr
        await pipe.readable()
        assert [pipe.read(3), pipe.read(99), pipe.read(9)] == [b"abc", b"\nabc\n", None]


async def test_batch_that_is_asked_for_is_counted_at_its_end() -> None:
    """Before that no reply is outstanding that a fault could change (issue 12)."""
    dialect = MarkerDialect(
        mode=Mode.BATCH_SUPERVISOR, markers=Markers(b"<m>", b"<p>", b"<b>", b"<n>")
    )

    async def answer(worker: ScriptedWorker) -> None:
        rest = b""
        while data := await worker.read():
            *whole, rest = (rest + data).split(b"<b>")
            for batch in whole:
                await worker.write(batch + b"<p>")

    fault = Fault(FaultKind.TWICE, equals=b"c")
    async with suffering(answer, fault, dialect=dialect) as talk:
        for piece in (b"a<m>b<m", b"><", b"b>c<m><b", b">d<m><b>"):
            talk.wire.write(piece)
            await anyio.sleep(1)
        said = b"a<m>b<m><p>" + b"c<m><p>" * 2 + b"d<m><p>"
        assert await talk.hear() == (said, False)


@pytest.mark.parametrize("kind", [FaultKind.TWICE, FaultKind.CUT])
async def test_wish_for_more_is_no_reply(kind: FaultKind) -> None:
    """A fault of the batch's reply does not change the BNC before it (issue 12)."""

    async def ask(worker: ScriptedWorker) -> None:
        await worker.read()
        await worker.write(b"\x05")
        await worker.read()
        await worker.write(b"a\n\0")
        await worker.read()

    dialect = MarkerDialect(mode=Mode.BATCH_WORKER)
    async with suffering(ask, Fault(kind, message=1), dialect=dialect) as talk:
        talk.wire.write(b"a\n")
        assert await talk.hear() == (b"\x05", False)
        talk.wire.write(b"b\n")
        times = 2 if kind is FaultKind.TWICE else 1
        assert await talk.hear() == (b"a\n\0" * times, False)
        assert len(talk.happened) == 1


async def test_refusal_is_not_spoiled() -> None:
    """A fault of replies leaves it as it is (issue 12)."""

    async def refuse(worker: ScriptedWorker) -> None:
        async for _ in worker.messages():
            await worker.refuse("no")

    async with suffering(refuse, Fault(FaultKind.TWICE)) as talk:
        talk.wire.write(b"a\nb\n")
        assert await talk.hear() == (b"no\x15no\x15", False)


async def test_reason_is_what_would_have_been_replied() -> None:
    """It is one line, without markers (issue 12)."""

    async def answer(worker: ScriptedWorker) -> None:
        async for _ in worker.messages():
            await worker.reply(b"one", b"two")

    async with suffering(answer, Fault(FaultKind.REFUSE)) as talk:
        talk.wire.write(b"a\n")
        assert await talk.hear() == (b"one two\x15", False)


async def test_huge_reply_is_one_message() -> None:
    """It replaces the worker's own outputs (issue 12)."""
    async with suffering(echo, Fault(FaultKind.HUGE, size=7)) as talk:
        talk.wire.write(b"a\n")
        assert await talk.hear() == (b"xxxxxxx\n\0", False)


async def test_dead_extractor_has_given_what_came_before() -> None:
    """It may have written everything, and exited, long before (issue 12)."""

    async def write(worker: ScriptedWorker) -> None:
        await worker.write(b"a\nb\nc\n")

    plain: dict[str, Any] = {
        "kind": StageKind.EXTRACT,
        "dialect": MarkerDialect(mode=Mode.PLAIN),
    }
    async with suffering(write, Fault(FaultKind.EXIT, message=2), **plain) as talk:
        await anyio.sleep(1)
        assert talk.status is None  # which status it has is not decided yet
        assert await talk.hear() == (b"a\n", True)
        await anyio.sleep(1)
        assert talk.status == 1
    async with suffering(write, Fault(FaultKind.HUGE, message=2, size=3), **plain) as t:
        assert await t.hear() == (b"a\nxxx\nc\n", True)
        await anyio.sleep(1)
        assert t.status == 0


async def test_worker_that_is_never_ready_shows_no_life() -> None:
    """Nor does one that hangs; a supervisor replaces both (issue 12)."""

    async def beat(worker: ScriptedWorker) -> None:
        async with anyio.create_task_group() as tasks:

            async def show() -> None:
                while True:
                    worker.show_life()
                    await anyio.sleep(1)

            tasks.start_soon(show)
            await echo(worker)
            tasks.cancel_scope.cancel()

    plan = FaultPlan.of(
        Fault(FaultKind.NEVER_READY, start=1),
        Fault(FaultKind.STALL, start=2, at=Moment.IDLE),
    )
    made = stage(
        ready=True,
        timeout=Timeouts(start=10, heartbeat=20),
        restart=RestartPolicy(delay=0.1),
    )
    inner = ScriptedLaunch(beat)
    launch = FaultyLaunch(inner, {"t": plan})
    async with AsyncSupervisor(made, launch=launch) as supervisor:
        assert await supervisor.ask(b"a") == (b"a",)
        await anyio.sleep(100)
        assert await supervisor.ask(b"b") == (b"b",)
    assert [told.start for told in launch.happened] == [1, 2]
    assert [len(inner.workers), inner.workers[1].returncode] == [3, -SIGTERM]
