"""
How fast do runs of messages pass through a journal, compared to a plain file?

Runs of 100-byte messages, in transactions of eight, are published and read back as
committed; and the same blocks are written to a file and read. Both are forced to the
disk once. And a pipeline of two stages is cut in two, with journals between them,
exactly once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import anyio
import pyarrow as pa

from benchmarks.harness import (
    Job,
    Row,
    echo_stage,
    in_turn,
    messages,
    paired,
    processor_time,
)
from etlstage.block import Blocks, block_of
from etlstage.columns import Column
from etlstage.journal import Journals, Publisher, RunMessage
from etlstage.messages import Position, Run
from etlstage.pipeline import Pipeline
from etlstage.pipeline.delivery.delivery import Bounds, Delivery
from etlstage.pipeline.divided import DividedPipeline
from etlstage.pipeline.edge import DurableEdge
from etlstage.pipeline.interfaces import Sink, Source
from etlstage.testing import MemoryEpochs, MemoryEpochSink, MemorySource

MESSAGES = 8192
"""Messages of a run, which has a little less than a megabyte."""
RUNS = 200
COUNT = RUNS * MESSAGES
_CONTENT_TYPE = "application/x-etlstage-run"
PASSING = 600_000
"""Messages of a pipeline, in epochs of a sixth."""


class Spent(NamedTuple):
    """Seconds of processor time."""

    write: float
    read: float


def measure() -> list[Row]:
    """Return messages per second of processor time."""
    runs = _runs()
    lists: list[Run] = [list(run) for run in runs]
    jobs = {
        "ours": lambda: _measured(_ours, runs),
        "bare": lambda: _measured(_bare, runs),
        "lists": lambda: _measured(_ours, lists),
    }
    found = in_turn(jobs, rounds=7)
    wanted = [1_000_000.0] * 7
    return [
        Row(
            "runs appended to a journal and read back",
            [COUNT / sum(spent) for spent in found["ours"]],
            "the same blocks in a file",
            [COUNT / sum(spent) for spent in found["bare"]],
            "msg/s",
            0.9,
        ),
        Row(
            "lists of messages appended to a journal",
            [COUNT / spent.write for spent in found["lists"]],
            "wanted",
            wanted,
            "msg/s",
            1,
        ),
        Row(
            "and read back as such",
            [COUNT / spent.read for spent in found["lists"]],
            "wanted",
            wanted,
            "msg/s",
            1,
        ),
        *_pipelines(),
    ]


def _pipelines() -> list[Row]:
    """Return wall and processor time of a pipeline with journals in its middle."""
    run = messages(PASSING)
    items: list[Run | Position] = []
    for first in range(0, PASSING, MESSAGES):
        items += run[first : first + MESSAGES], Position(first)
    spent: dict[bool, list[float]] = {True: [], False: []}

    def measured(cut: bool) -> float:
        with TemporaryDirectory() as folder:
            began, used = time.perf_counter(), processor_time()
            anyio.run(_cut if cut else _whole, Path(folder), items)
            spent[cut].append(processor_time() - used)
            return PASSING / (time.perf_counter() - began)

    ours, theirs = paired(lambda: measured(cut=True), lambda: measured(cut=False))
    what, against = "two stages with a durable edge, exactly once", "without"
    return [
        Row(what, ours, against, theirs, "msg/s", 0.6),
        Row(what, spent[True][1:], against, spent[False][1:], "s", 1.4, at_most=True),
    ]


def _pipeline(
    folder: Path, name: str, source: Source, stages: str, sink: Sink
) -> Pipeline:
    delivery = Delivery(
        folder / name, exactly_once=True, bounds=Bounds(messages=PASSING // 6)
    )
    made = [replace(echo_stage(), name=stage) for stage in stages]
    return Pipeline(name=name, source=source, stages=made, sink=sink, delivery=delivery)


async def _whole(folder: Path, items: list[Run | Position]) -> None:
    sink = MemoryEpochSink(MemoryEpochs())
    await _pipeline(folder, "whole", MemorySource(items), "ab", sink).run()
    assert sink.account.done == PASSING


async def _cut(folder: Path, items: list[Run | Position]) -> None:
    edge = DurableEdge("a", folder, folder / "behind")
    first = _pipeline(folder, "", MemorySource(items), "a", edge.sink())
    sink = MemoryEpochSink(MemoryEpochs())
    second = _pipeline(folder, "behind", edge.source(), "b", sink)
    await DividedPipeline("cut", [first, second], [edge]).run()
    assert sink.account.done == PASSING


def _runs() -> list[Run]:
    """Return some runs, to be used in turn."""
    return [
        Column(pa.array([b"%0100d" % n for n in range(first, first + MESSAGES)]))
        for first in range(0, 4 * MESSAGES, MESSAGES)
    ]


def _measured(
    job: Callable[[Path, list[Run]], Iterator[None]], runs: list[Run]
) -> Spent:
    with TemporaryDirectory() as folder:
        steps, began = job(Path(folder, "it"), runs), time.process_time()
        next(steps)
        written = time.process_time()
        next(steps, None)
        return Spent(written - began, time.process_time() - written)


def _ours(path: Path, runs: list[Run]) -> Iterator[None]:
    with Journals.open(path, content_type=_CONTENT_TYPE) as journals:
        (spec,) = journals.partitions()
        publisher = Publisher(journals, mapping=lambda _: (spec.name, _CONTENT_TYPE))
        for number in range(RUNS):
            publisher.publish_uncommitted(RunMessage(runs[number % len(runs)]))
            if number % 8 == 7:
                for journal, intent in publisher.build_ack_intents():
                    journals.append(journal, intent)
    yield
    with Journals.open(path) as journals:
        found = (envelope.message.run for envelope in journals.read_committed())  # type: ignore[attr-defined]
        _check(found, runs)


def _bare(path: Path, runs: list[Run]) -> Iterator[None]:
    with path.open("wb", buffering=0) as file:
        for number in range(RUNS):
            for part in block_of(runs[number % len(runs)], number * MESSAGES):
                file.write(part)
        os.fsync(file.fileno())
    yield
    with path.open("rb") as file:
        _check((block.messages for block in Blocks(file.read, name="it")), runs)


def _check(found: Iterator[Run], runs: list[Run]) -> None:
    """Assert that all messages are there, as objects where they were objects."""
    as_objects = isinstance(runs[0], list)
    count = sum(len(list(run) if as_objects else run) for run in found)
    assert count == COUNT


def _job() -> Iterator[Callable[[], object]]:
    runs = _runs()
    yield lambda: _measured(_ours, runs)


JOBS = {"journal": Job(COUNT, _job)}
