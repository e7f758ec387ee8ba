"""
How many sessions, and chunks, per second pass through one Cocaine worker?

``AsyncSupervisor.answers`` with ten sessions at once, and with batches of a hundred
messages, against the barest program that does the same: an asyncio protocol that packs
and unpacks the same frames over the same kind of socket. It checks nothing, keeps no
deadline, and only counts results.

The comparison with another commit adds sessions that end in another order than they
began, ten and five hundred at once.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import msgpack

from benchmarks.harness import Job, Row, messages, paired
from etlstage import AsyncSupervisor, BatchPolicy, Stage
from etlstage.protocol.registry import dialect_from_plain
from etlstage.supervisor.exchange.exchange import Outcome

COUNT = 20_000
CHUNKS = 200_000
CONCURRENCY = 10
BATCH = 100
TARGET = 0.6

WORKER = r"""
import random, socket, sys
import msgpack
told = dict(zip(sys.argv[1::2], sys.argv[2::2]))
wire = socket.socket(socket.AF_UNIX)
wire.connect(told["--endpoint"])
pack = msgpack.Packer(use_bin_type=False).pack
wire.sendall(pack([1, 0, [told["--uuid"]]]) + pack([1, 0, []]))
unpacker, seen = msgpack.Unpacker(raw=True), 1
while data := wire.recv(1 << 18):
    unpacker.feed(data)
    out, ends = [], []
    for frame in unpacker:
        if frame[0] == 1:
            if frame[1] == 1:
                wire.sendall(b"".join(out) + pack(frame))
                sys.exit()
        elif frame[0] > seen:
            seen = frame[0]
        else:
            (ends if frame[1] == 2 else out).append(pack(frame))
    if "--shuffle" in told:
        random.shuffle(ends)
    wire.sendall(b"".join(out + ends))
"""
"""Sends back everything that it gets of a session, except the event."""
ECHO = (sys.executable, "-c", WORKER)
SHUFFLED = (*ECHO, "--shuffle", "ends")


def measure() -> list[Row]:
    """Return sessions and chunks per second of both."""
    rows = []
    for what, count, batch in (("sessions", COUNT, 1), ("chunks", CHUNKS, BATCH)):
        run = messages(count)
        ours, theirs = paired(
            lambda run=run, batch=batch: anyio.run(supervised, ECHO, run, batch),  # type: ignore[misc]
            lambda run=run, batch=batch: asyncio.run(_bare(run, batch)),  # type: ignore[misc]
        )
        said = f"cocaine, {what}, {CONCURRENCY} sessions at once"
        rows.append(Row(said, ours, "bare asyncio", theirs, f"{what}/s", TARGET))
    return rows


async def supervised(
    command: tuple[str, ...],
    run: list[bytes],
    batch: int,
    concurrency: int = CONCURRENCY,
) -> float:
    """Return the messages per second that pass through a worker."""
    settings = {"name": "cocaine", "concurrency": concurrency, "batches": batch > 1}
    stage = Stage(
        name="echo",
        worker=command,
        dialect=dialect_from_plain(settings),
        batch=BatchPolicy(size=batch),
    )
    async with AsyncSupervisor(stage) as supervisor:
        await supervisor.submit([b"ready"])
        began, done = time.perf_counter(), 0
        async for outcome in supervisor.answers([run]):
            assert isinstance(outcome, Outcome)
            assert not outcome.failed
            done += len(outcome.messages)
        assert done == len(run)
        return len(run) / (time.perf_counter() - began)


class _Bare(asyncio.Protocol):
    def __init__(self, batches: Iterator[list[bytes]], count: int) -> None:
        self.ended = asyncio.Event()
        self.began = 0.0
        self._batches = batches
        self._left = count
        self._last = 1
        self._pack = msgpack.Packer(use_bin_type=False).pack
        self._unpacker = msgpack.Unpacker(raw=True)
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unpacker.feed(data)
        out: list[bytes] = []
        for number, kind, arguments in self._unpacker:
            if number == 1:
                if not arguments:  # its first heartbeat
                    self.began = time.perf_counter()
                    out.append(self._pack([1, 0, []]))
                    for _ in range(CONCURRENCY):
                        self._open(out)
            elif kind == 0:
                self._left -= 1
            else:
                self._open(out)
        self._transport.write(b"".join(out))
        if not self._left:
            self.ended.set()

    def _open(self, out: list[bytes]) -> None:
        batch = next(self._batches, None)
        if batch is None:
            return
        self._last = number = self._last + 1
        out.append(self._pack([number, 0, [b"transform"]]))
        out += [self._pack([number, 0, [message]]) for message in batch]
        out.append(self._pack([number, 2, []]))


async def _bare(run: list[bytes], size: int) -> float:
    batches = (run[at : at + size] for at in range(0, len(run), size))
    protocol = _Bare(batches, len(run))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "socket"))
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: protocol, path)
        told = ("--endpoint", path, "--uuid", "u")
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, *told
        )
        await protocol.ended.wait()
        rate = len(run) / (time.perf_counter() - protocol.began)
        worker.kill()
        await worker.wait()
        server.close()
    return rate


def _job(
    command: tuple[str, ...], count: int, batch: int, concurrency: int
) -> Callable[[], Iterator[Callable[[], object]]]:
    def make() -> Iterator[Callable[[], object]]:
        run = messages(count)
        yield lambda: anyio.run(supervised, command, run, batch, concurrency)

    return make


JOBS = {
    f"cocaine, {what}": Job(count, _job(command, count, batch, concurrency))
    for what, command, count, batch, concurrency in (
        ("10 sessions, ends in order", ECHO, COUNT, 1, 10),
        ("10 sessions, ends shuffled", SHUFFLED, COUNT, 1, 10),
        ("500 sessions, ends shuffled", SHUFFLED, COUNT, 1, 500),
        ("chunks", ECHO, CHUNKS, BATCH, 10),
    )
}
