"""Workers in memory that answer: a sound one, and others with one planted bug each."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

import anyio

from etlstage.testing import ScriptedWorker
from etlstage.testing.scripted import Script, Stream
from etlstage.worker.marking import find_markers

__all__ = (
    "asks_until",
    "batched",
    "each",
    "echo",
    "ends_with",
    "lines",
    "makes",
    "reads",
)

Batch: TypeAlias = Sequence[bytes]


def each(answer: Callable[[ScriptedWorker, bytes], Awaitable[object]]) -> Script:
    """Return a worker that calls ``answer`` for each message."""

    async def work(worker: ScriptedWorker) -> None:
        async for message in worker.messages():
            await answer(worker, message)

    return work


def makes(outputs: Callable[[bytes], Iterable[bytes]]) -> Script:
    """Return a worker that replies with what a function returns."""
    return each(lambda worker, message: worker.reply(*outputs(message)))


def lines(answer: Callable[[bytes], Iterable[bytes]]) -> Script:
    """Return a worker for the default markers alone; it writes ``answer(line)``."""

    async def work(worker: ScriptedWorker) -> None:
        async for whole in reads(worker, b"\n"):
            for part in (part for line in whole for part in answer(line)):
                await worker.write(part)

    return work


def batched(*answers: Callable[[Batch], Batch | None]) -> Script:
    """Return a worker that replies to a batch with each of ``answers``, unless None."""

    async def work(worker: ScriptedWorker) -> None:
        async for whole in reads(worker, b"\x17"):
            for batch in whole:
                for answer in answers:
                    outputs = answer(batch.split(b"\n")[:-1])
                    if outputs is not None:
                        await worker.reply(*outputs)

    return work


def asks_until(size: int, before: bytes) -> Script:
    """Return a worker that fills batches; ``before`` precedes the outputs of a full one."""

    async def work(worker: ScriptedWorker) -> None:
        held, batch = b"", b""
        while data := await worker.read():
            held += data
            while end := re.search(rb"[\n\x17]", held):
                batch += held[: end.end()]
                held = held[end.end() :]
                full = batch.count(b"\n") == size
                if full or batch.endswith(b"\x17"):
                    batch = batch.removesuffix(b"\x17")
                    await worker.write(before * full + batch + b"\0")
                    batch = b""
                else:
                    await worker.write(b"\x05")

    return work


def reads(
    worker: ScriptedWorker, end: bytes | None = None
) -> AsyncIterator[list[bytes]]:
    """Yield the messages that each read completes; they end in EOM, or in ``end``."""
    mark, rest = end or find_markers((), worker.request.env).eom, b""

    async def get() -> list[bytes] | None:
        nonlocal rest
        if not (data := await worker.read()):
            return None
        *whole, rest = (rest + data).split(mark)
        return whole

    return Stream(get)


echo = each(ScriptedWorker.reply)


async def has_no_eop(worker: ScriptedWorker, message: bytes) -> None:
    """Forget the end of the reply."""
    await worker.write(message + b"\n")


async def greets(worker: ScriptedWorker) -> int | None:
    """Write a line before the first message."""
    await worker.write(b"ready\n")
    return await echo(worker)


async def has_no_eop_without_output(worker: ScriptedWorker, message: bytes) -> None:
    """Answer only if there is something to send."""
    if message:
        await worker.reply(message)


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
        for message in data.removesuffix(b"\n").split(b"\n"):
            await worker.reply(message)


async def takes_the_first_of_a_read(worker: ScriptedWorker) -> None:
    """Believe that a read has one message."""
    while data := await worker.read():
        if data.endswith(b"\n"):
            await worker.reply(data.split(b"\n")[0])


async def answers_the_last_first(worker: ScriptedWorker) -> None:
    """Answer the messages of a read in reverse order."""
    async for whole in reads(worker):
        for message in reversed(whole):
            await worker.reply(message)


async def loses_the_last_of_a_read(worker: ScriptedWorker) -> None:
    """Take the last of many messages in one read for an incomplete one."""
    async for whole in reads(worker):
        for message in whole if len(whole) == 1 else whole[:-1]:
            await worker.reply(message)


async def cuts_markers(worker: ScriptedWorker) -> None:
    """Look for EOM in each read by itself."""
    eom, rest = find_markers((), worker.request.env).eom, b""
    while data := await worker.read():
        *ends, more = data.split(eom)
        for end in ends:
            await worker.reply(rest + end)
            rest = b""
        rest += more


async def dies_at_the_100th(worker: ScriptedWorker) -> int:
    """Run out of something."""
    number = 0
    async for message in worker.messages():
        number += 1
        if number == 100:
            return 3
        await worker.reply(message)
    return 0


async def buffers(worker: ScriptedWorker) -> None:
    """Forget to flush."""
    held = [message async for message in worker.messages()]
    for message in held:
        await worker.reply(message)


async def ignores_the_end(worker: ScriptedWorker) -> None:
    """Keep running after the end of the input."""
    await echo(worker)
    await anyio.sleep_forever()


def ends_with(status: int) -> Script:
    """Return a worker that exits with ``status`` in the end; negative: by a signal."""

    async def work(worker: ScriptedWorker) -> int:
        await echo(worker)
        return status

    return work


async def keeps_state(worker: ScriptedWorker) -> None:
    """Number the messages."""
    number = 0
    async for message in worker.messages():
        await worker.reply(b"%d %s" % (number, message))
        number += 1


async def counts(worker: ScriptedWorker) -> None:
    """Reply with the number of messages so far that are not empty."""
    count = 0
    async for message in worker.messages():
        count += bool(message)
        await worker.reply(b"%d" % count)


async def drops_repeated(worker: ScriptedWorker) -> None:
    """Take a message that equals the one before for a duplicate."""
    before = None
    async for message in worker.messages():
        await worker.reply(*([message] if message != before else []))
        before = message


async def has_two_bugs(worker: ScriptedWorker, message: bytes) -> None:
    """Die of a byte 0x80; reply twice to a message with a double y."""
    if b"\x80" in message:
        raise ValueError(message)
    for _ in range(1 + (b"yy" in message)):
        await worker.reply(message)


async def refuses(worker: ScriptedWorker, message: bytes) -> None:
    """Refuse each message that is not empty."""
    await (worker.refuse("no") if message else worker.reply())


async def reads_a_pipe_full(worker: ScriptedWorker, message: bytes) -> None:
    """Fail on a message that is longer than a pipe's buffer."""
    if len(message) > 65536:
        raise SystemExit(4)
    await worker.reply(message)


takes_text = makes(lambda message: [message.decode().encode()])
takes_ascii = makes(lambda message: [message.decode("ascii").encode()])
takes_numbers = makes(lambda message: [b"%d" % json.loads(message)])
dies_when_empty = makes(lambda message: [message] if message[0] >= 0 else [])
# An unescaped newline is a marker.
decodes = makes(lambda message: [message.replace(rb"\n", b"\n")])
brackets = makes(lambda message: [b"<" + message + b">"])
# It writes Python literals in place of JSON.
writes_python = makes(lambda message: [str(json.loads(message)).encode()])
forgets_x = makes(lambda message: [message if b"x" in message else message.upper()])
echo_batches = batched(lambda batch: batch)
loses_end_of_batch = batched(lambda batch: batch[:2] if len(batch) == 3 else batch)
# It answers a full batch when it is full, and again at its EOB.
answers_three_twice = batched(
    lambda batch: batch, lambda batch: batch if len(batch) == 3 else None
)
