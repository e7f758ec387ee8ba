"""
Add up the numbers on stdin while they come: each line is answered by a worker.

::

    pip install 'etlstage[cocaine]'
    seq 3 | python service.py

It shows a session that is kept open: both sides send when they like.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import anyio

from etlstage import (
    AsyncSupervisor,
    CocaineDialect,
    Stage,
    WorkerRefusal,
    WorkerSession,
)

STAGE = Stage(
    name="sum",
    worker=(sys.executable, str(Path(__file__).with_name("worker.py"))),
    dialect=CocaineDialect(),
)


async def pass_on(session: WorkerSession) -> None:
    """Send each line as it comes, and then the end."""
    read = sys.stdin.buffer.readline
    while line := await anyio.to_thread.run_sync(read, abandon_on_cancel=True):
        await session.send(line)
    await session.choke()


async def main() -> None:
    """Send with one task, and receive with another."""
    async with (
        AsyncSupervisor(STAGE) as supervisor,
        supervisor.session("sum") as session,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(pass_on, session)
        try:
            async for total in session:
                print(total.decode(), flush=True)  # noqa: T201
        except WorkerRefusal as error:
            tasks.cancel_scope.cancel()
            print("refused:", error.reason, flush=True)  # noqa: T201


if __name__ == "__main__":
    status = 1
    try:
        anyio.run(main)
        status = 0
    except BaseException:
        traceback.print_exc()
    # Exit even if a thread still waits for a line.
    os._exit(status)
