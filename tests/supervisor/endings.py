"""
Programs of asyncio that end while a background task holds a supervisor.

At its end ``asyncio.run()`` cancels all tasks, those of the supervisor included. The
program then prints what was raised, and the processes that are left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, TypeAlias

from etlstage.messages import StageKind
from etlstage.protocol.events import Assignment
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.supervisor.pool import CommitRequest
from etlstage.transport.watchdog import WATCHDOG
from tests.supervisor import orphans
from tests.supervisor.workers import ends, plain, stage

_COMMITTER: Final = """
from etlstage.worker import kcl

class Processor(kcl.Processor):
    def process_records(self, records, checkpointer):
        checkpointer.checkpoint()

kcl.run(Processor())
"""

PIDS: Final[list[int]] = []

# --- what a supervisor does ----------------------------------------------------------


async def idle(begun: asyncio.Event) -> None:
    """Hold a worker with two children; all ignore SIGTERM."""
    command = (sys.executable, "-S", orphans.__file__, "worker")
    async with AsyncSupervisor(Stage(name="t", worker=command)) as supervisor:
        (reply,) = await supervisor.ask(b"")
        PIDS.extend(map(int, reply.split()))
        begun.set()
        await asyncio.Event().wait()


async def submit(begun: asyncio.Event) -> None:
    """Wait for a reply that does not come."""
    async with AsyncSupervisor(stage("sleeps_at", 2)) as supervisor:
        await supervisor.submit([b"a"])
        begun.set()
        await supervisor.submit([b"b"])


async def stream(begun: asyncio.Event) -> None:
    """Iterate over the results of an endless input."""

    async def endless() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.Event().wait()

    async with AsyncSupervisor(stage("echo", workers=2)) as supervisor:
        async for _ in supervisor.stream(endless()):
            begun.set()


async def extract(begun: asyncio.Event) -> None:
    """Iterate over an endless round."""
    async with (
        AsyncSupervisor(plain("ranges")) as supervisor,
        aclosing(supervisor.extract()) as messages,
    ):
        async for _ in messages:
            begun.set()
            await asyncio.sleep(0)


async def listen(begun: asyncio.Event) -> None:
    """Iterate over the events."""
    async with (
        AsyncSupervisor(stage("echo")) as supervisor,
        supervisor.events() as all_,
    ):
        async for _ in all_:
            begun.set()


async def closing(begun: asyncio.Event) -> None:
    """Wait for a worker that ignores the end of its input."""
    async with AsyncSupervisor(stage("deaf_to_sigterm")) as supervisor:
        await supervisor.submit([b"a"])
        begun.set()


async def failing(begun: asyncio.Event) -> None:
    """Wait for a worker that ignores SIGTERM."""
    async with AsyncSupervisor(stage("deaf_to_sigterm")) as supervisor:
        await supervisor.submit([b"a"])
        begun.set()
        raise ValueError("the body fails")


# --- how a program ends --------------------------------------------------------------


async def returns() -> None:
    """Return."""


async def raises() -> None:
    """Fail."""
    raise ValueError("main fails")


async def exits() -> None:
    """Exit with a status."""
    sys.exit(3)


async def interrupted() -> None:
    """Be interrupted from the terminal."""
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.Event().wait()


Use: TypeAlias = Callable[[asyncio.Event], Awaitable[None]]
Way: TypeAlias = Callable[[], Awaitable[None]]
USES: Final[dict[str, Use]] = {
    use.__name__: use
    for use in (idle, submit, stream, extract, listen, closing, failing)
}
WAYS: Final[dict[str, Way]] = {
    way.__name__: way for way in (returns, raises, exits, interrupted)
}


async def end(use: str, way: str) -> None:
    """End while a background task uses a supervisor."""
    begun = asyncio.Event()
    task = asyncio.ensure_future(USES[use](begun))
    await begun.wait()
    assert not task.done()
    await WAYS[way]()


async def end_early(turns: int) -> None:
    """Return some turns of the event loop after a task enters a supervisor."""

    async def enter() -> None:
        async with AsyncSupervisor(stage("echo", workers=2)) as supervisor:
            async for _ in supervisor.stream([b"a"]):
                await asyncio.Event().wait()

    task = asyncio.ensure_future(enter())
    for _ in range(turns):
        await asyncio.sleep(0)
    assert not task.done()


async def end_in_commit(error: str) -> None:
    """Raise, while a worker commits, what ends a program."""

    async def commit(_request: CommitRequest) -> None:
        raise {"exit": SystemExit, "interrupt": KeyboardInterrupt}[error](3)

    command = (sys.executable, "-c", _COMMITTER)
    dialect = KclDialect()
    loading = Stage(name="t", kind=StageKind.LOAD, worker=command, dialect=dialect)
    share = Assignment("shard-1")
    async with AsyncSupervisor(loading, commit=commit, assignment=share) as supervisor:
        await supervisor.submit([b"a"])


def children() -> set[str]:
    """Return the child processes, zombies included."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


def run(program: Coroutine[Any, Any, None]) -> None:
    """Run a program; print what it raises, then the processes that are left."""
    before, raised = children(), "nothing"
    try:
        asyncio.run(program)
    except BaseException as error:
        raised = repr(error)
    left = [*(children() - before), *(pid for pid in PIDS if not ends(pid))]
    sys.stdout.write(f"{raised}\n{left}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    WATCHDOG.start()
    match sys.argv[1:]:
        case ["end", use, way]:
            run(end(use, way))
        case ["commit", error]:
            run(end_in_commit(error))
        case ["early"]:
            for turns in range(8):
                run(end_early(turns))
