"""
What is killed: a server that has all imported forks each of them off, at once.

They write, read, or relay, and go on where the last of their name was killed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import anyio

from etlstage.journal import Journals, Publisher
from etlstage.messages import Position, Run
from etlstage.pipeline.delivery.delivery import Bounds, Delivery
from etlstage.pipeline.divided import DividedPipeline
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.pipeline.journal_sink import JournalSink
from etlstage.pipeline.journal_source import JournalSource
from etlstage.pipeline.pipeline import Pipeline
from etlstage.pipeline.runner import Runner
from etlstage.stage import ErrorBudget, ErrorPolicy, Order, Stage, WorkerProgram
from etlstage.testing import MemorySource, ScriptedLaunch, ScriptedWorker

__all__ = ("Victims", "append", "divide", "follow", "pipe", "relay", "served")


class Victims:
    """Starts processes, and kills them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311
        self.kills: int = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def start(self, work: Callable[..., None], *arguments: object) -> BaseProcess:
        """Start one."""
        child = self._context.Process(target=work, args=arguments, daemon=True)
        child.start()
        return child

    def kill(self, child: BaseProcess, after: float) -> bool:
        """Kill one after so many seconds; return whether it had ended well by then."""
        child.join(after)
        child.kill()
        child.join()
        assert child.exitcode in {0, -signal.SIGKILL}
        self.kills += bool(child.exitcode)
        return not child.exitcode


@contextmanager
def served(seed: int) -> Iterator[Victims]:
    """Have a server, which ends with the block."""
    from multiprocessing import forkserver, resource_tracker

    try:
        yield Victims(seed)
    finally:
        with suppress(AttributeError):
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
            resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def append(path: str, name: str, count: int) -> None:
    """Write in transactions of ten, as an application does that has a state."""
    # How many messages are committed, and what acknowledges the last of them.
    state = Path(f"{path}-{name}")
    done, intents = json.loads(state.read_text()) if state.exists() else (0, [])
    journals = Journals.open(path)
    for journal, intent in intents:
        journals.append(journal, bytes.fromhex(intent))
    specs = journals.partitions()
    publisher = Publisher(
        journals,
        mapping=lambda m: (
            specs[m.value["n"] % len(specs)].name,
            specs[0].content_type,
        ),
    )
    while done < count:
        for n in range(done, done + 10):
            publisher.publish_uncommitted({"w": name, "n": n})
        done += 10
        built = publisher.build_ack_intents()
        aside = state.with_suffix(".new")
        aside.write_text(
            json.dumps([done, [[i.journal, i.intent.hex()] for i in built]])
        )
        aside.replace(state)
        for intent in built:
            journals.append(intent.journal, intent.intent)


def follow(path: str, name: str) -> None:
    """Read, and write down what came, with a position for each message."""
    journals = Journals.open(path)
    with Path(f"{path}-read-{name}").open("a") as out:
        for envelope in journals.read_committed(
            name, follow=True, ring=16, commit_every=0
        ):
            out.write(f"{envelope.message['w']} {envelope.message['n']}\n")  # type: ignore[index]
            out.flush()


class _Numbers(MemorySource):
    """Numbers behind a name, with a position behind each run of them."""

    def __init__(self, name: str, count: int) -> None:
        items: list[Run | Position] = []
        for first in range(0, count, 50):
            last = min(first + 50, count)
            items += [b"%s %d" % (name.encode(), n) for n in range(first, last)], Position(last)  # fmt: skip
        super().__init__(items)

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield them, and let others have their turn."""
        async for item in super().runs():
            yield item
            await anyio.lowlevel.checkpoint()


class _Random(JournalSink):
    """Appends to each message what never comes again."""

    async def write(self, run: Run) -> None:
        """Append it."""
        await super().write([b"%s %d" % (m, random.randrange(10**9)) for m in run])  # noqa: S311


def pipe(path: str, name: str, count: int) -> None:
    """Run a pipeline that appends, exactly once."""
    _run(f"{path}-{name}", _Numbers(name, count), JournalSink(Path(path)))


def relay(path: str, name: str) -> None:
    """Run one that reads what is there, and appends to a set of its own."""
    source = JournalSource(Path(path), reader=name, cut=(200, 1 << 20))
    _run(f"{path}-{name}", source, _Random(Path(f"{path}-out-{name}"), partitions=2))


def divide(path: str, count: int) -> None:
    """Run one with two durable edges, and stages whose replies are never the same."""
    refused = ErrorPolicy(budget=ErrorBudget())
    stages = [
        Stage(
            name=name,
            worker=WorkerProgram(command=("none",)),
            order=Order.NONE,
            on_error=refused,
        )
        for name in ("one", "two", "three")
    ]
    made = DividedPipeline.cut(
        "p",
        state=Path(f"{path}-state"),
        source=_Numbers("a", count),
        stages=stages,
        sink=JournalSink(Path(path)),
        durable={"one": {}, "two": {"partitions": 2}},
        bounds=Bounds(messages=500, seconds=3600),
        launch=ScriptedLaunch(_salt),
    )
    _complete(made)


async def _salt(worker: ScriptedWorker) -> int:
    """Add to a message what never comes again, or, of one in a hundred, refuse it."""
    async for message in worker.messages():
        number = int(message.split()[1])
        if number % 100 == 7 and message.count(b" ") == 1 + number // 100 % 3:
            await worker.refuse("no seven")
        else:
            await worker.reply(b"%s %d" % (message, random.randrange(10**9)))  # noqa: S311
    return 0


def _run(state: str, source: Source, sink: Sink) -> None:
    delivery = Delivery(
        Path(state), exactly_once=True, bounds=Bounds(messages=500, seconds=3600)
    )
    made = Pipeline(name="p", source=source, sink=sink, delivery=delivery)
    _complete(made)


def _complete(made: Runner) -> NoReturn:
    """Run it to its end, and exit in the moment in which its load is over."""
    report = anyio.run(partial(made.run, settle=False))
    if report.error is not None:
        raise report.error
    made.settle()
    os._exit(0)
