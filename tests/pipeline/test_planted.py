"""
Pipelines with a worker that writes too much or too little, drawn from a seed.

A run may fail, but one that says that it is done has every row once, in its place, or
a dead letter for it. Where the fault is one of certain messages, these are found.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from etlstage.pipeline.dead_letter.store import DeadLetters
from etlstage.pipeline.pipeline import Pipeline
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.testing import MemorySink, MemorySource

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

WORKER = r"""
import random, sys, time
mode, fault, every, late, slow, seed = sys.argv[1:]
every, late, slow = int(every), float(late), float(slow)
i, o = sys.stdin.buffer, sys.stdout.buffer
chance = random.Random(seed + str(time.time()) if fault == "random" else seed)
size, batch, data = 5, [], b""

def say(text):
    o.write(text)
    o.flush()

def bad(message):
    if fault == "random":
        return chance.random() < 1 / every
    return int(message[2:]) % every == every - 1

def answer(messages):
    hit = any(map(bad, messages))
    reply = b"".join(message.upper() + b"\n" for message in messages)
    if slow:
        time.sleep(slow)
    if hit and fault == "refuse":
        say(b"will not\n\x15")
    elif hit and fault == "omit":
        say(reply)
    else:
        say(reply + b"\0")
        if hit and fault in ("surplus", "random", "late"):
            time.sleep(late)
            say(b"\0")

if fault == "banner":
    say(b"hello\n" * every)
while byte := i.read(1):
    if byte == b"\x17":
        answer(batch)
        batch = []
    elif byte != b"\n":
        data += byte
    else:
        batch.append(data)
        data = b""
        if mode == "SINGLE" or (mode == "BATCH_WORKER" and len(batch) == size):
            answer(batch)
            batch = []
        elif mode == "BATCH_WORKER":
            say(b"\5")
"""
FAULTS = ("none", "surplus", "late", "random", "omit", "refuse", "banner")
FOUND = ("none", "surplus", "omit", "refuse")
"""Faults of certain messages, which are told in time."""


@dataclass(frozen=True)
class Plan:
    """One run."""

    fault: str
    stage: Stage
    messages: list[bytes]
    culprits: set[bytes]


def plan(seed: int) -> Plan:
    """Return what to run."""
    draw = random.Random(seed)  # noqa: S311 - to be drawn again
    fault = draw.choice(FAULTS)
    mode = draw.choice((Mode.SINGLE, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER))
    slow = draw.choice((0.0, 0.0, 0.0, 0.02))
    every = draw.choice((7, 40, 100))
    late = draw.choice((0.001, 0.01)) if fault == "late" else 0.0
    count = draw.choice((30, 60)) if slow else draw.choice((60, 300))
    if fault == "omit":
        every, count = 100, 150  # each takes a deadline or more
    arguments = (mode.name, fault, every, late, slow, seed)
    messages = [b"m-%d" % n for n in range(count)]
    stage = Stage(
        name="planted",
        command=(sys.executable, "-S", "-c", WORKER, *map(str, arguments)),
        dialect=MarkerDialect(mode=mode),
        batch=BatchPolicy(size=5, seconds=0.02),
        window=draw.choice((1, 8, None)),
        workers=draw.choice((1, 3)),
        timeout=Timeouts(message=1.0),
        restart=RestartPolicy(delay=0.001),
        on_error=ErrorPolicy(retries=1, budget=ErrorBudget(share=1.0)),
    )
    bad = {m for n, m in enumerate(messages) if n % every == every - 1}
    return Plan(fault, stage, messages, bad if fault in FOUND[1:] else set())


async def run(seed: int, folder: Path) -> str:
    """Run what the seed says; return how it ended, or raise an AssertionError."""
    planned = plan(seed)
    letters = DeadLetters(folder, pipeline="p")
    sink = MemorySink()
    pipeline = Pipeline(
        name="p",
        source=MemorySource([planned.messages]),
        stages=[planned.stage],
        sink=sink,
        dead_letters=letters,
    )
    with anyio.fail_after(60):
        report = await pipeline.run()
    letters.close()
    if report.status != "done":
        assert planned.fault != "none", f"a false alarm: {report.error}"
        assert planned.fault not in FOUND or report.ledger[1].doubtful, report.error
        return report.status
    dead = {letter.message for letter in letters.letters()}
    alive = [m.upper() for m in planned.messages if m not in dead]
    assert sorted(sink.messages) == sorted(alive), f"seed {seed}: a row is wrong"
    if planned.stage.pool.max == 1 or planned.stage.order.value == "total":
        assert sink.messages == alive, f"seed {seed}: a row is in a wrong place"
    if planned.fault in FOUND:
        assert dead == planned.culprits, f"seed {seed}: {planned.fault}"
    return report.status


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_row_is_wrong_in_silence(first: int, tmp_path: Path) -> None:
    """In all modes, at all windows, with one worker and with three (issue 10)."""
    for seed in range(first, first + 10):
        anyio.run(run, seed, tmp_path / str(seed))
