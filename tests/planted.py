"""
Stages with a worker that writes too much or too little, drawn from a seed.

A run may fail, but one that is reported as done has every row once, in its place, or a
dead letter for it. If only certain messages have the fault, exactly these are found.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    Order,
    RestartPolicy,
    Stage,
    Timeouts,
)

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
    elif hit and fault == "surplus":
        say(reply + b"\0\0")  # in one: a pause between them is what "late" has
    else:
        say(reply + b"\0")
        if hit and fault in ("random", "late"):
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
AGAIN = (
    sys.executable,
    "-c",
    "import sys\nfor m in sys.stdin: print(end='\\0', flush=True)\nprint('\\0')",
)
"""A worker that writes one more reply at its end, when its last one was passed on."""
FAULTS = ("none", "surplus", "late", "random", "omit", "refuse", "banner")
FOUND = ("none", "surplus", "omit", "refuse")
"""Faults of certain messages, which are reported in time."""


@dataclass(frozen=True)
class Plan:
    """One run, and its expected dead letters."""

    seed: int
    fault: str
    stage: Stage
    messages: list[bytes]
    culprits: set[bytes]
    """Messages that a completed run must dead-letter, if they can be known."""

    @property
    def ordered(self) -> bool:
        """Whether its rows keep their order."""
        return self.stage.pool.max == 1 or self.stage.order is Order.TOTAL

    def check_failure(self, error: Exception | None, doubtful: int) -> None:
        """Assert that a run may fail: its fault is intermittent, or came too late."""
        assert self.fault != "none", f"seed {self.seed}: a false alarm: {error}"
        assert self.fault not in FOUND or doubtful, f"seed {self.seed}: {error}"

    def check(
        self, made: Sequence[bytes], dead: Collection[bytes], *, ordered: bool
    ) -> None:
        """Assert that each row of a completed run is there once, or dead-lettered."""
        about = f"seed {self.seed}: {self.fault}"
        alive = [m.upper() for m in self.messages if m not in dead]
        assert sorted(made) == sorted(alive), f"{about}: a row is wrong"
        assert not ordered or list(made) == alive, f"{about}: a row is in a wrong place"
        assert self.fault not in FOUND or set(dead) == self.culprits, about


def plan(seed: int) -> Plan:
    """Return the run of a seed."""
    draw = random.Random(seed)  # noqa: S311 - to be drawn again
    fault = draw.choice(FAULTS)
    mode = draw.choice((Mode.SINGLE, Mode.BATCH_SUPERVISOR, Mode.BATCH_WORKER))
    slow = draw.choice((0.0, 0.0, 0.0, 0.02))
    every = draw.choice((7, 40, 100))
    late = draw.choice((0.0, 0.001, 0.01)) if fault == "late" else 0.0
    count = draw.choice((30, 60)) if slow else draw.choice((60, 300))
    if fault == "omit":
        every, count = 100, 150  # each takes a deadline or more
    arguments = (mode.name, fault, every, late, slow, seed)
    messages = [b"m-%d" % n for n in range(count)]
    stage = Stage(
        name="planted",
        worker=(sys.executable, "-S", "-c", WORKER, *map(str, arguments)),
        dialect=MarkerDialect(mode=mode),
        batch=BatchPolicy(size=5, seconds=0.02),
        window=draw.choice((1, 8, None)),
        workers=draw.choice((1, 3)),
        timeout=Timeouts(message=1.0),
        restart=RestartPolicy(delay=0.001),
        on_error=ErrorPolicy(retries=1, budget=ErrorBudget(share=1.0)),
    )
    bad = {m for n, m in enumerate(messages) if n % every == every - 1}
    return Plan(seed, fault, stage, messages, bad if fault in FOUND[1:] else set())
