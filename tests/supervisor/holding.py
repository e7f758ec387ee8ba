"""
A program that has a worker do something, and prints how much memory that took.

It is a separate program because a process seldom returns memory that it has taken.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from itertools import count, repeat
from pathlib import Path

import anyio

from etlstage import AsyncSupervisor, Stage
from etlstage.errors import InvalidMessage
from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import ErrorPolicy

MiB = 1024 * 1024

ECHO = """
while data := stdin.readline():
    stdout.write(data + b"\\0")
    stdout.flush()
"""
DEVOUR = """
from time import sleep
while stdin.readline():
    sleep(0.005)
    stdout.write(b"\\0")
    stdout.flush()
"""
FLOOD = """
def flood(piece, size, end):
    stdin.readline()
    block = piece * (65536 // len(piece))
    for _ in range(size // len(block)):
        stdout.write(block)
    stdout.write(end)
    stdout.flush()
    stdin.read()
"""
MILLION = """
while stdin.readline():
    stdout.write(b"1234567\\n" * 1_000_000 + b"\\0")
    stdout.flush()
"""


def stage(code: str, **more: object) -> Stage:
    """Return a stage whose worker runs some code."""
    start = "from sys import stdin, stdout\nstdin, stdout = stdin.buffer, stdout.buffer"
    command = (sys.executable, "-S", "-c", f"{start}\n{code}")
    once = ErrorPolicy(retries=0)
    return Stage(name="t", worker=command, on_error=once, **more)  # type: ignore[arg-type]


async def one_reply(piece: bytes, size: int, end: bytes) -> None:
    """Ask for a reply of that many bytes, which may be too big."""
    run = stage(f"{FLOOD}\nflood({piece!r}, {size}, {end!r})")
    async with AsyncSupervisor(run) as supervisor:
        (result,) = await supervisor.submit([b"go"])
    if len(piece) > 1000:
        assert len(result.outputs[0]) == len(piece) - 1, result.error
        return
    assert "bytes of memory, with no EOP yet" in str(result.error)


async def short_messages() -> None:
    """A reply of 255 MiB, in messages of two bytes."""
    await one_reply(b"ab\n", 255 * MiB, b"\0")


async def no_end() -> None:
    """An endless reply, in messages of eight bytes."""
    await one_reply(b"12345678\n", 1024 * MiB, b"")


async def big_reply() -> None:
    """A reply of nearly the maximum size, in messages of 32 KiB."""
    await one_reply(b"x" * 32767 + b"\n", 250 * MiB, b"\0")


async def big_messages() -> None:
    """Messages of 60 MB from a generator, echoed."""

    def messages() -> Iterator[bytes]:
        for n in range(8):
            yield b"%d" % n + b"x" * 60_000_000

    async with AsyncSupervisor(stage(ECHO)) as supervisor:
        async for result in supervisor.stream(messages()):
            assert result.error is None
            assert len(result.outputs[0]) == len(result.message)


async def empty_messages() -> None:
    """A million empty messages, echoed."""
    arrived = 0
    async with AsyncSupervisor(stage(ECHO)) as supervisor:
        async for result in supervisor.stream(repeat(b"", 1_000_000)):
            arrived += len(result.outputs)
    assert arrived == 1_000_000


async def empty_outputs() -> None:
    """A million empty messages of an extraction, read late."""
    dialect = MarkerDialect(mode=Mode.PLAIN)
    code = 'stdout.write(b"\\n" * 1_000_000)\nstdout.flush()'
    run = stage(code, kind=StageKind.EXTRACT, dialect=dialect)
    arrived = 0
    async with (
        AsyncSupervisor(run) as supervisor,
        aclosing(supervisor.extract_runs()) as runs,
    ):
        async for messages in runs:
            await anyio.sleep(0.01)
            arrived += len(messages)
    assert arrived == 1_000_000


async def one_to_a_million() -> None:
    """A million outputs for each message, and a slow consumer."""
    async with AsyncSupervisor(stage(MILLION)) as supervisor:
        async for result in supervisor.stream([b"go"] * 20):
            assert len(result.outputs) == 1_000_000, result.error
            await anyio.sleep(0.2)


async def slow_load() -> None:
    """Much to load, and a slow worker."""
    loaded = 0
    async with (
        AsyncSupervisor(stage(DEVOUR, kind=StageKind.LOAD)) as supervisor,
        aclosing(
            supervisor.stream(b"%d" % n + b"x" * 10_000 for n in count())
        ) as results,
    ):
        async for _ in results:
            loaded += 1
            if loaded == 500:
                break


async def too_long_messages() -> None:
    """Messages that are too long are refused, without being copied."""
    async with AsyncSupervisor(stage(ECHO)) as supervisor:
        async for result in supervisor.stream(b"x" * 70_000_000 for _ in range(12)):
            assert isinstance(result.error, InvalidMessage)


SCENES: dict[str, tuple[Callable[[], Awaitable[None]], int]] = {
    "short_messages": (short_messages, 100),
    "no_end": (no_end, 150),
    "big_reply": (big_reply, 1300),
    "big_messages": (big_messages, 600),
    "empty_messages": (empty_messages, 150),
    "empty_outputs": (empty_outputs, 100),
    "one_to_a_million": (one_to_a_million, 500),
    "slow_load": (slow_load, 200),
    "too_long_messages": (too_long_messages, 500),
}
"""What to do, and the MiB that it may take beyond an idle supervisor's."""


def peak() -> int:
    """Return the peak of the process's memory in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


async def main(name: str) -> None:
    """Run one of the scenes."""
    async with AsyncSupervisor(stage(ECHO)) as supervisor:
        await supervisor.submit([b"warm"])
    before = peak()
    await SCENES[name][0]()
    print((peak() - before) // MiB, flush=True)  # noqa: T201 - read by the parent process


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
    os._exit(0)
