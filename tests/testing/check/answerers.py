"""Workers that answer, in memory: a sound one, and others with a planted bug each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from signal import SIGSEGV

import anyio

from etlstage.testing import ScriptedWorker
from etlstage.testing.scripted import Script

__all__ = ("each", "echo", "lines")


def each(answer: Callable[[ScriptedWorker, bytes], Awaitable[object]]) -> Script:
    """Return a worker that does that for each message."""

    async def work(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            await answer(worker, message)

    return work


def lines(answer: Callable[[bytes], Iterable[bytes]]) -> Script:
    """Return a worker that knows the default markers only, and answers lines so."""

    async def work(worker: ScriptedWorker) -> None:
        rest = b""
        while data := await worker.read():
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                for part in answer(line):
                    await worker.write(part)

    return work


echo = each(ScriptedWorker.reply)


async def has_no_eop(worker: ScriptedWorker, message: bytes) -> None:
    """Forget the end of the reply."""
    await worker.write(message + b"\n")


async def greets(worker: ScriptedWorker) -> int | None:
    """Report that it is there."""
    await worker.write(b"ready\n")
    return await echo(worker)


async def has_no_eop_without_output(worker: ScriptedWorker, message: bytes) -> None:
    """Answer only if there is something to send."""
    if message:
        await worker.reply(message)


async def takes_text(worker: ScriptedWorker, message: bytes) -> None:
    """Take everything for UTF-8."""
    await worker.reply(message.decode().encode())


async def has_a_short_buffer(worker: ScriptedWorker) -> None:
    """Believe that messages are short."""
    rest = b""
    while data := await worker.read():
        rest += data
        assert len(rest) < 100_000
        *whole, rest = rest.split(b"\n")
        for message in whole:
            await worker.reply(message)


async def takes_reads_for_messages(worker: ScriptedWorker) -> None:
    """Believe that a read ends where a message does."""
    while data := await worker.read():
        await worker.reply(data.rstrip(b"\n"))


async def takes_the_first_of_a_read(worker: ScriptedWorker) -> None:
    """Believe that a read has one message."""
    while data := await worker.read():
        if data.endswith(b"\n"):
            await worker.reply(data.split(b"\n")[0])


async def answers_the_last_first(worker: ScriptedWorker) -> None:
    """Take the messages of a read from behind."""
    rest = b""
    while data := await worker.read():
        *whole, rest = (rest + data).split(b"\n")
        for message in reversed(whole):
            await worker.reply(message)


async def dies_at_the_100th(worker: ScriptedWorker) -> int:
    """Run out of something."""
    number = 0
    async for message in worker.messages():
        number += 1
        if number == 100:
            return 3
        await worker.reply(message)
    return 0


async def ignores_the_end(worker: ScriptedWorker) -> None:
    """Wait for more behind the end of the input."""
    await echo(worker)
    await anyio.sleep_forever()


async def dies_at_the_end(worker: ScriptedWorker) -> int:
    """Fail when all is done."""
    await echo(worker)
    return -SIGSEGV
