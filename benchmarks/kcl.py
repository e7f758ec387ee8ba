"""
How many records per second pass through one record processor?

``AsyncSupervisor.answers`` against the barest driver that gives the same records to the
same processor: streams of asyncio, ``json`` and ``base64``. It checks nothing, keeps no
deadline, and stores each position in a variable. The processor looks at no record, and
checkpoints each action.

Also measured is the cost of making the line of an action, against ``base64`` and
``json`` alone, for a list and for Arrow columns.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping

import anyio
import pyarrow as pa

from benchmarks.harness import Job, Row, paired
from etlstage import AsyncSupervisor, BatchPolicy, Stage
from etlstage.columns import Column
from etlstage.messages import AnnotatedRun, Run, StageKind
from etlstage.protocol.events import Assignment
from etlstage.protocol.kcl.lines import ROWS, Version, records_line
from etlstage.protocol.kcl.settings import KclDialect
from etlstage.supervisor import CommitRequest

SHAPES = (
    (1000, 10_000, 5, 0.8),
    (100, 500, 400, 0.7),
    (100, 1, 5_000, 0.6),
)
"""Bytes of a record, records of an action, actions, and the ratio wanted."""

PROCESSOR = r"""
import sys
out = sys.stdout.buffer
for line in sys.stdin.buffer:
    name = line[11:22]
    if name == b"processReco":
        out.write(b'\n{"action":"checkpoint","sequenceNumber":null}\n')
        out.flush()
        sys.stdin.buffer.readline()
        name = b"processRecords"
    else:
        if name == b"shardEnded\"":
            out.write(b'\n{"action":"checkpoint","sequenceNumber":null}\n')
            out.flush()
            sys.stdin.buffer.readline()
        name = name.partition(b'"')[0]
    out.write(b'\n{"action":"status","responseFor":"%b"}\n' % name)
    out.flush()
"""
COMMAND = (sys.executable, "-S", "-c", PROCESSOR)


def measure() -> list[Row]:
    """Return records per second of both, and what a line costs."""
    rows = []
    for size, batch, actions, target in SHAPES:
        run = records(size, batch)
        ours, theirs = paired(
            lambda run=run, actions=actions: anyio.run(supervised, run, actions),  # type: ignore[misc]
            lambda run=run, actions=actions: asyncio.run(bare(run, actions)),  # type: ignore[misc]
        )
        what = f"kcl, {batch:,} records of {size:,} bytes an action"
        rows.append(Row(what, ours, "bare asyncio", theirs, "records/s", target))
    return [*rows, *_encoder()]


def records(size: int, count: int) -> list[bytes]:
    """Return ``count`` records of ``size`` bytes."""
    return [b"%0*d" % (size, number) for number in range(count)]


async def supervised(run: list[bytes], actions: int) -> float:
    """Return records per second through a supervisor."""
    stage = Stage(
        name="load",
        kind=StageKind.LOAD,
        worker=COMMAND,
        dialect=KclDialect(),
        batch=BatchPolicy(size=len(run)),
    )

    async def store(request: CommitRequest) -> None:
        pass

    supervisor = AsyncSupervisor(stage, commit=store, assignment=Assignment("s"))
    done = 0

    def runs() -> Iterator[Run]:
        for _ in range(actions):
            yield run

    async with supervisor:
        async for outcome in supervisor.answers([run]):
            assert outcome.error is None
        began = time.perf_counter()
        async for outcome in supervisor.answers(runs()):
            assert outcome.error is None
            done += len(outcome.messages)
        seconds = time.perf_counter() - began
        supervisor.finish()
    assert done == actions * len(run)
    return done / seconds


async def bare(run: list[bytes], actions: int) -> float:
    """Return records per second through a loop over the streams of asyncio."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *COMMAND, stdin=pipe, stdout=pipe, limit=2**26
    )
    assert child.stdin is not None
    assert child.stdout is not None
    into, out = child.stdin, child.stdout
    into.write(_line({"action": "initialize", "shardId": "s", "sequenceNumber": "0"}))
    await _hear(out)
    number = 0
    for action in range(actions + 1):
        into.write(plain_line(run, number))
        await into.drain()
        into.write(_line({**await _hear(out), "error": None}))
        await _hear(out)
        number += len(run)
        if not action:
            began = time.perf_counter()
    seconds = time.perf_counter() - began
    into.close()
    await child.wait()
    return actions * len(run) / seconds


def plain_line(run: list[bytes], number: int) -> bytes:
    """Return the line of an action by ``json`` and ``base64`` alone."""
    made = [
        {
            "data": b64encode(message).decode(),
            "partitionKey": "key",
            "sequenceNumber": str(number + place),
            "approximateArrivalTimestamp": 0,
            "subSequenceNumber": 0,
            "action": "record",
        }
        for place, message in enumerate(run, 1)
    ]
    said = {"action": "processRecords", "records": made, "millisBehindLatest": None}
    return _line(said)


def _line(said: Mapping[str, object]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


async def _hear(out: asyncio.StreamReader) -> dict[str, object]:
    while not (line := (await out.readline()).strip()):
        pass
    said: dict[str, object] = json.loads(line)
    return said


def _encoder() -> list[Row]:
    rows = []
    for size, batch in ((1000, 10_000), (100, 500)):
        run = records(size, batch)
        keys = ["key"] * batch
        block = Column(pa.array(run, pa.binary()))
        times = max(3, 2_000_000 // (size * batch))
        for name, given in (
            ("a list", AnnotatedRun(run, partition=keys)),
            ("Arrow", AnnotatedRun(block, partition=keys)),
        ):
            ours, theirs = paired(
                lambda given=given, times=times: _encode(given, times),  # type: ignore[misc]
                lambda run=run, times=times: _plainly(run, times),  # type: ignore[misc]
            )
            what = f"kcl, the line of {batch:,} records of {size:,} bytes, {name}"
            rows.append(
                Row(what, ours, "base64, json", theirs, "s/line", 1.3, at_most=True)
            )
    return rows


def _encode(run: Run, times: int) -> float:
    positions = [(number, 0) for number in range(len(run))]
    began = time.process_time()
    for _ in range(times):
        records_line(ROWS[Version.V2], run, positions)
    return (time.process_time() - began) / times


def _plainly(run: list[bytes], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        plain_line(run, 0)
    return (time.process_time() - began) / times


def _job(
    size: int, batch: int, actions: int
) -> Callable[[], Iterator[Callable[[], object]]]:
    def make() -> Iterator[Callable[[], object]]:
        run = records(size, batch)
        yield lambda: anyio.run(supervised, run, actions)

    return make


JOBS = {
    f"kcl, {batch:,} records of {size:,} bytes an action": Job(
        batch * actions, _job(size, batch, actions)
    )
    for size, batch, actions, _ in SHAPES
}
