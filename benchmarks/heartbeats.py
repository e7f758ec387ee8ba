"""
How soon are heartbeats answered while 64 sessions stream chunks of 1 MB?

One worker echoes what 64 open sessions send. It sends fifty heartbeats a second, and
measures the time from each until its answer is read, including the data before it.
"""

from __future__ import annotations

import json
import statistics
import sys

import anyio

from benchmarks.harness import Row
from etlstage import AsyncSupervisor, CocaineDialect, Stage

SESSIONS = 64
CHUNK = 1024 * 1024
CHUNKS = 30
ROUNDS = 5
MOST = 100.0
"""Milliseconds."""

WORKER = r"""
import json, select, socket, sys
from collections import deque
from time import monotonic
import msgpack

told = dict(zip(sys.argv[1::2], sys.argv[2::2]))
wire = socket.socket(socket.AF_UNIX)
wire.connect(told["--endpoint"])
pack = msgpack.Packer(use_bin_type=False).pack
beat = pack([1, 0, []])
wire.sendall(pack([1, 0, [told["--uuid"]]]) + beat)
wire.setblocking(False)
unpacker, out, events = msgpack.Unpacker(raw=True), deque(), {}
asked, taken, last = deque([monotonic()]), [], monotonic()
part = memoryview(b"")

def answer(session, kind, args):
    if session not in events:
        events[session] = args[0]
    elif kind == 0:
        out.append(pack([session, 0, args]))
    else:
        if events[session] == b"report":
            out.append(pack([session, 0, [json.dumps(taken[1:])]]))
        out.append(pack([session, 2, []]))

while True:
    now = monotonic()
    if now - last > 0.02:
        last = now
        asked.append(now)
        out.appendleft(beat)
    wait = [wire] if out or part else []
    ready, room, _ = select.select([wire], wait, [], 0.02)
    if room:
        part = part or memoryview(out.popleft())
        part = part[wire.send(part):]
    if ready:
        data = wire.recv(1 << 18)
        unpacker.feed(data)
        for session, kind, args in unpacker:
            if session != 1:
                answer(session, kind, args)
            elif kind == 0:
                taken.append(monotonic() - asked.popleft())
            else:
                sys.exit()
        if not data:
            sys.exit(1)
"""


def measure() -> list[Row]:
    """Return the median and the longest of each round, beside the limit."""
    rounds = [anyio.run(_beats) for _ in range(ROUNDS)]
    what = f"heartbeat answered, {SESSIONS} sessions with chunks of 1 MB"
    limit = [MOST] * ROUNDS
    return [
        Row(f"{what}: {name}", ours, "limit", limit, "ms", 1.0, at_most=True)
        for name, ours in (
            ("median", [statistics.median(taken) for taken in rounds]),
            ("longest", [max(taken) for taken in rounds]),
        )
    ]


async def _beats() -> list[float]:
    stage = Stage(
        name="echo",
        worker=(sys.executable, "-c", WORKER),
        dialect=CocaineDialect(concurrency=SESSIONS + 1),
    )
    async with AsyncSupervisor(stage) as supervisor:
        async with anyio.create_task_group() as tasks:
            for _ in range(SESSIONS):
                tasks.start_soon(_stream, supervisor)
        async with supervisor.session("report") as session:
            await session.choke()
            taken = json.loads(await anext(session))
    assert len(taken) > 10, "too few beats to say anything"
    return [seconds * 1000 for seconds in taken]


async def _stream(supervisor: AsyncSupervisor) -> None:
    chunk = bytes(CHUNK)
    async with supervisor.session("echo") as session:
        for _ in range(CHUNKS):
            await session.send(chunk)
            assert len(await anext(session)) == CHUNK
