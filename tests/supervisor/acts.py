"""
Workers for the tests without processes, by their names in ``workers``.

``acting(stage)`` is a supervisor whose workers run in memory and in virtual time, to
test what the supervisor decides. ``AsyncSupervisor(stage)`` starts programs, to test
what an operating system does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from random import Random
from signal import SIGTERM
from typing import Any, Final, Self, TypeVar

import anyio
import pytest

from etlstage.stage import Stage
from etlstage.supervisor import AsyncSupervisor
from etlstage.testing import FaultPlan, ScriptedLaunch, ScriptedWorker
from etlstage.testing.scripted import Script, SimulatedWorker, Work
from tests.supervisor.workers import PROGRAM

__all__ = ("LAUNCHES", "acting", "in_memory", "script_of")

Test = TypeVar("Test", bound=Callable[..., Coroutine[Any, Any, None]])

LAUNCHES: Final[list[ScriptedLaunch]] = []
"""The launches of the current test."""
EOM, EOP, EOB, BNC = b"\n", b"\0", b"\x17", b"\x05"


def in_memory(test: Test) -> Test:
    """Mark a test that starts no process, and runs in virtual time."""
    for mark in (pytest.mark.core, pytest.mark.virtual):
        test = mark(test)
    return test


def acting(
    stage: Stage,
    script: Script | None = None,
    **settings: Any,  # noqa: ANN401 - passed on
) -> AsyncSupervisor:
    """Return a supervisor whose workers are scripts that behave like its programs."""
    launch = ScriptedLaunch(script or script_of(stage))
    LAUNCHES.append(launch)
    return AsyncSupervisor(stage, launch=launch, **settings)


def script_of(stage: Stage) -> Script:
    """Return a script that does what the program of a stage does."""
    words = stage.program.command
    if words[2] == str(PROGRAM):
        return lambda worker: ACTS[words[3]](worker, *words[4:])
    *_, driver, size, transform, plan = words
    faults = FaultPlan.from_json(plan)
    numbers = int(size) if driver in ("plain", "cyclic") else None
    work: Work = (lambda _: ()) if transform == "nothing" else (lambda one: (one,))
    return lambda worker: SimulatedWorker(
        worker, stage, work, faults, numbers=numbers
    ).run()


class _Batches:
    """The batches on stdin; not a generator, which would have to be closed."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker
        self._whole: list[list[bytes]] = []
        self._rest = b""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[bytes]:
        while not self._whole:
            if not (data := await self._worker.read()):
                raise StopAsyncIteration
            *whole, self._rest = (self._rest + data).split(EOB)
            self._whole = [batch.split(EOM)[:-1] for batch in whole]
        return self._whole.pop(0)


async def echo(worker: ScriptedWorker) -> None:
    """Answer each message with itself."""
    worker.show_life()
    async for message in worker.messages():
        await worker.reply(message)


async def fast(worker: ScriptedWorker) -> None:
    """Do the same as ``echo``, chunk by chunk."""
    rest = b""
    while chunk := await worker.read():
        *whole, rest = (rest + chunk).split(EOM)
        await worker.write(b"".join(message + EOM + EOP for message in whole))


async def words(worker: ScriptedWorker) -> None:
    """Answer each message with its words: none, one or many."""
    async for message in worker.messages():
        await worker.reply(*message.split())


async def signed(worker: ScriptedWorker) -> None:
    """Answer each message with itself and the worker's pid."""
    async for message in worker.messages():
        await worker.reply(message, str(worker.pid).encode())


async def uneven(worker: ScriptedWorker, seed: str) -> None:
    """Answer at once or after a moment, with the message and the worker's pid."""
    dice = Random(int(seed) + worker.pid)  # noqa: S311 - no secret
    async for message in worker.messages():
        await anyio.sleep(dice.randrange(4) / 1000)
        await worker.reply(message, str(worker.pid).encode())


async def lock_step(worker: ScriptedWorker) -> None:
    """Answer each message with how many bytes follow before it is answered."""
    while data := await worker.read():
        while EOM not in data:
            data += await worker.read()
        _, _, rest = data.partition(EOM)
        with anyio.move_on_after(1):
            rest += await worker.read()
        await worker.reply(b"%d" % len(rest))


async def ahead(worker: ScriptedWorker, count: str) -> None:
    """Answer once ``count`` messages have come, with the number that has."""
    held = 0
    while data := await worker.read():
        held += data.count(EOM)
        if held < int(count):
            continue
        with anyio.move_on_after(1):
            held += (await worker.read()).count(EOM)
        for answer in [b"%d" % held] * held:
            await worker.reply(answer)
        held = 0


async def answers_too_late(worker: ScriptedWorker) -> None:
    """Answer all messages only when asked to stop."""
    worker.ignored.add(SIGTERM)
    held = [message async for message in worker.messages()]
    while SIGTERM not in worker.signals:  # noqa: ASYNC110 - there is no event for it
        await anyio.sleep(0.01)
    for message in held:
        await worker.reply(message)


async def batch(worker: ScriptedWorker) -> None:
    """Answer each batch with its messages, joined."""
    async for messages in _Batches(worker):
        await worker.reply(b" ".join(messages))


async def dies_at_batch(worker: ScriptedWorker, number: str) -> int:
    """Exit at the end of batch ``number``, without a reply."""
    count = 0
    async for messages in _Batches(worker):
        count += 1
        if count == int(number):
            return 4
        await worker.reply(b" ".join(messages))
    return 0


async def asks_less_again(worker: ScriptedWorker, size: str) -> int:
    """Die at a full batch; from the second start on fill batches with one message."""
    wanted, count = int(size) if worker.start == 1 else 1, 0
    async for message in worker.messages():
        count += 1
        if count < wanted:
            await worker.write(BNC)
        elif wanted > 1:
            return 4
        else:
            await worker.reply(message)
    return 0


async def asking(worker: ScriptedWorker, size: str, style: str = "") -> None:
    """
    Fill batches with BNC; answer each with its messages, joined.

    Styles: ``literal`` writes BNC also after the last message, as the protocol page has
    it; ``deaf`` sees EOB only when an EOM follows, and answers that with BNC; ``lines``
    sees it only so, too, and answers nothing.
    """
    buffer, held = b"", list[bytes]()
    end = EOB + EOM if style in ("deaf", "lines") else EOB
    while data := await worker.read():
        buffer += data
        while buffer:
            if buffer.startswith(EOB):
                if not buffer.startswith(end):
                    break
                # To a deaf worker the EOM after EOB is an empty message.
                buffer = buffer[len(end) :]
                await worker.reply(b" ".join(held))
                held = []
                if style == "deaf":
                    await worker.write(BNC)
                continue
            message, found, rest = buffer.partition(EOM)
            if not found:
                break
            buffer = rest
            held.append(message)
            full = len(held) == int(size)
            if not full or style == "literal":
                await worker.write(BNC)
            if full:
                await worker.reply(b" ".join(held))
                held = []


async def extract(worker: ScriptedWorker, *outputs: str) -> None:
    """Write the arguments, each with EOM."""
    await worker.write(b"".join(text.encode() + EOM for text in outputs))


async def extract_tail(
    worker: ScriptedWorker, status: str, tail: str, *outputs: str
) -> int:
    """Write messages, a tail without EOM, and exit."""
    await extract(worker, *outputs)
    await worker.write(tail.encode())
    await worker.complain("that was all")
    return int(status)


async def rounds(worker: ScriptedWorker, *outputs: str) -> None:
    """Answer request number n with the n-th argument's words; then with nothing."""
    rest = list(outputs)
    async for _ in worker.messages():
        await worker.reply(*(rest.pop(0).encode().split() if rest else ()))


async def log(worker: ScriptedWorker, *ends: str, gap: int = 0) -> None:
    """
    Answer a request for a range with its numbers, up to the last end.

    There are no numbers below ``gap``. The latest offset is the first end and, with
    each request for it, the next one. The initial offset is 3.
    """
    latest = list(map(int, ends))
    last = max(latest)
    async for message in worker.messages():
        asked = json.loads(message)
        if "offsets" not in asked:
            numbers = range(max(asked["start"], gap), min(asked["end"], last))
            await worker.reply(*(b"%d" % n for n in numbers))
        elif asked["offsets"] == "initial":
            await worker.reply(b"3")
        else:
            await worker.reply(b"%d" % latest[0])
            del latest[: len(latest) > 1]


async def gap(worker: ScriptedWorker, below: str, end: str) -> None:
    """Do the same as ``log``, without numbers below ``below``."""
    await log(worker, end, gap=int(below))


async def requests(worker: ScriptedWorker) -> None:
    """Answer each request with itself, and with the worker's pid."""
    async for message in worker.messages():
        await worker.reply(b"<" + message + b">", str(worker.pid).encode())


async def slow_round(worker: ScriptedWorker) -> None:
    """Write a message, wait, and write another."""
    async for _ in worker.messages():
        await worker.write(b"first" + EOM)
        await anyio.sleep(1)
        await worker.reply(b"second")


async def dies_after_pid(worker: ScriptedWorker) -> int:
    """Answer a request with the worker's pid, and die before the end of the reply."""
    async for _ in worker.messages():
        await worker.write(b"%d" % worker.pid + EOM)
        break
    return 1


async def ends_after_round(worker: ScriptedWorker) -> None:
    """Answer one request with the worker's pid, and exit."""
    async for _ in worker.messages():
        await worker.reply(str(worker.pid).encode())
        break


async def talks_between_rounds(worker: ScriptedWorker) -> None:
    """Write something after EOP, some time before the next request."""
    async for message in worker.messages():
        await worker.reply(message)
        if worker.start == 1:
            await anyio.sleep(1)
            await worker.write(b"by the way" + EOM)


ACTS: Final[Mapping[str, Callable[..., Coroutine[Any, Any, int | None]]]] = {
    act.__name__: act
    for act in (
        *(echo, fast, words, signed, uneven, lock_step, ahead, answers_too_late),
        *(batch, dies_at_batch, asks_less_again, asking, extract, extract_tail),
        *(rounds, log, gap, requests, slow_round, dies_after_pid, ends_after_round),
        talks_between_rounds,
    )
}
