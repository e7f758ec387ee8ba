"""
Processes to be killed, which a server with all imports done forks off quickly.

They write, read, or relay, and continue where the last process of their name was
killed. A process that makes messages makes some in each of its lives, and ends in the
first life that finds a file: so the speed of the machine decides the number of
messages, not the number of kills.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NoReturn

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
from etlstage.testing import ScriptedLaunch, ScriptedWorker

__all__ = (
    "Victims",
    "append",
    "count_of",
    "divide",
    "follow",
    "pipe",
    "relay",
    "served",
)


class Victims:
    """Starts processes, and kills them."""

    def __init__(self, seed: int, kills: int, enough: Path) -> None:
        self.kills: int = 0
        self.wanted: Final = kills
        self.chance = random.Random(seed)  # noqa: S311
        self._enough: Final = enough
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def start(self, work: Callable[..., None], *arguments: object) -> BaseProcess:
        """Start a process."""
        child = self._context.Process(target=work, args=arguments, daemon=True)
        child.start()
        return child

    def kill(self, child: BaseProcess, after: float) -> bool:
        """Kill a process after some seconds; return whether it ended well before."""
        # After enough kills the processes may run to their end.
        child.join(60 if self._enough.exists() else after)
        child.kill()
        child.join()
        assert child.exitcode in {0, -signal.SIGKILL}
        self.kills += bool(child.exitcode)
        if self.kills >= self.wanted:
            self._enough.touch()
        return not child.exitcode


@contextmanager
def served(seed: int, kills: int, path: Path) -> Iterator[Victims]:
    """Yield a server of processes, which write files beside path; end it at exit."""
    from multiprocessing import forkserver, resource_tracker

    try:
        yield Victims(seed, kills, Path(f"{path}-enough"))
    finally:
        with suppress(AttributeError):
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
            resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def count_of(path: Path, name: str) -> int:
    """Return the number of messages of a process that has ended well."""
    return int(Path(f"{path}-{name}-count").read_text())


def _write_count(path: str, name: str, count: int) -> None:
    Path(f"{path}-{name}-count").write_text(str(count))


def append(path: str, name: str) -> None:
    """Write in transactions of ten, like an application that stores its state."""
    # The number of committed messages, and the acknowledgements of the last of them.
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
    enough = Path(f"{path}-enough")
    last = done + 200
    while done < last or not enough.exists():
        if done == last:
            time.sleep(0.01)
            continue
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
    _write_count(path, name, done)


def follow(path: str, name: str) -> None:
    """Read, and write each message to a file, storing a position for each message."""
    journals = Journals.open(path)
    with Path(f"{path}-read-{name}").open("a") as out:
        for envelope in journals.read_committed(
            name, follow=True, ring=16, commit_every=0
        ):
            out.write(f"{envelope.message['w']} {envelope.message['n']}\n")  # type: ignore[index]
            out.flush()


class _Numbers(Source):
    """Source of a name with numbers, with a position after each run of them."""

    def __init__(self, path: str, name: str, each: int) -> None:
        super().__init__("numbers")
        self._path: Final = path
        self._word: Final = name
        self._each: Final = each
        self._first: int = 0

    def resume(self, position: object) -> None:
        """Begin with the number at the position."""
        assert isinstance(position, int)
        self._first = position

    async def runs(self) -> AsyncGenerator[Run | Position, None]:
        """Yield the messages of one life, letting other tasks run in between."""
        name = self._word.encode()
        last = self._first + self._each
        for first in range(self._first, last, 50):
            yield [b"%s %d" % (name, n) for n in range(first, first + 50)]
            yield Position(first + 50)
            await anyio.lowlevel.checkpoint()
        enough = anyio.Path(f"{self._path}-enough")
        while not await enough.exists():  # noqa: ASYNC110
            await anyio.sleep(0.01)
        _write_count(self._path, self._word, last)


class _Random(JournalSink):
    """Appends a random number to each message, so no output comes twice."""

    async def write(self, run: Run) -> None:
        """Write the messages, each with its random number."""
        await super().write([b"%s %d" % (m, random.randrange(10**9)) for m in run])  # noqa: S311


def pipe(path: str, name: str) -> None:
    """Run a pipeline that appends numbers to the set, exactly once."""
    _run(f"{path}-{name}", _Numbers(path, name, 1000), JournalSink(Path(path)))


def relay(path: str, name: str) -> None:
    """Run a pipeline that reads the set, and appends to a set of its own."""
    source = JournalSource(Path(path), reader=name, cut=(200, 1 << 20))
    _run(f"{path}-{name}", source, _Random(Path(f"{path}-out-{name}"), partitions=2))


def divide(path: str) -> None:
    """Run a pipeline with two durable edges, whose stages' replies never repeat."""
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
        source=_Numbers(path, "a", 500),
        stages=stages,
        sink=JournalSink(Path(path)),
        durable={"one": {}, "two": {"partitions": 2}},
        bounds=Bounds(messages=100, seconds=3600),
        edge_bounds=Bounds(messages=100, seconds=3600),
        launch=ScriptedLaunch(_salt),
    )
    _complete(made)


async def _salt(worker: ScriptedWorker) -> int:
    """Add a random number to a message, or refuse it (one message in a hundred)."""
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
    """Run a pipeline to its end, and exit as soon as its load is settled."""
    report = anyio.run(partial(made.run, settle=False))
    if report.error is not None:
        raise report.error
    made.settle()
    os._exit(0)
