"""
Pipelines of three stages, and what goes wrong in them: what is drawn by default.

A message is a list in JSON: its key, and a number to which each stage adds a letter,
so that none is like another. What the workers of a stage make of it is none, one or
two messages, by its number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, Literal

from etlstage.messages import StageKind
from etlstage.protocol.marker import Mode
from etlstage.protocol.marker.settings import MarkerDialect
from etlstage.stage import (
    BatchPolicy,
    ErrorBudget,
    ErrorPolicy,
    Order,
    PoolPolicy,
    RecyclePolicy,
    RestartPolicy,
    Stage,
    Timeouts,
)
from etlstage.testing.fault import Fault, FaultKind, FaultPlan, Moment
from etlstage.testing.simulate.scenario import Scenario
from etlstage.testing.simulate.worker import Work

__all__ = ("three_stages",)

_DEADLY: Final = (
    FaultKind.KILL,
    FaultKind.SEGFAULT,
    FaultKind.ABORT,
    FaultKind.EXIT,
    FaultKind.PARTIAL,
    FaultKind.STALL,
    FaultKind.STOP,
    FaultKind.CLOSE_STDOUT,
)
"""Of these the message is lost that a worker has."""
_WRONG: Final = (FaultKind.TWICE, FaultKind.SKIP)
"""These show in the replies that follow."""
_SILENT: Final = {FaultKind.STALL, FaultKind.STOP}
_ENDS: Final[tuple[Literal["", "drained", "cancelled"], ...]] = (
    "",
    "drained",
    "cancelled",
)
_MANY: Final = 1000  # restarts
_LONG: Final = 300.0  # virtual seconds


def three_stages(draw: random.Random) -> Scenario:
    """Draw a pipeline of three stages of workers, with faults."""
    count = draw.randint(1, 10)
    messages = [b'[%d,"%d"]' % (draw.randrange(3), n) for n in range(count)]
    names = ("a", "b", "c")
    kinds = [StageKind.TRANSFORM] * 3
    ends = draw.random()
    if ends < 0.2:
        kinds[0] = StageKind.EXTRACT
    elif ends < 0.4:
        kinds[2] = StageKind.LOAD
    work: dict[str, Work] = {
        name: partial(_work, name, draw.randrange(9), draw.randrange(9))
        for name in names
    }
    plans: dict[str, FaultPlan] = {}
    fatal: dict[str, set[bytes]] = {}
    known, may_fail, stages = True, False, []
    given = messages
    for name, kind in zip(names, kinds, strict=True):
        stage = _stage(draw, name, kind)
        stages.append(stage)
        faults, culprits, wrong = _faults(draw, stage, given)
        plans[name] = FaultPlan(tuple(faults), draw.randrange(2**32))
        fatal[name] = culprits or set()
        known = known and culprits is not None
        may_fail = may_fail or wrong
        if kind is StageKind.TRANSFORM:
            given = [out for m in given for out in work[name](m)]
    (ended,) = draw.choices(_ENDS, (8, 1, 1))
    # Who drains does not wait for workers that have never answered, nor tries again
    # what they lost.
    known = known and ended != "drained"
    silent = any(f.kind in _SILENT for plan in plans.values() for f in plan.faults)
    may_fail = may_fail or (ended == "drained" and silent)
    return Scenario(
        messages=messages,
        stages=stages,
        work=work,
        faults=plans,
        fatal=fatal if known else None,
        may_fail=may_fail,
        position_every=draw.randint(1, 5),
        flushes=draw.random() < 0.5,
        flush_every=draw.choice((0.02, 60.0)),
        seconds=_LONG,
        ended=ended,
        ended_at=draw.choice((0.0, 0.01, 0.1, 1.0)) if ended else 0.0,
    )


def _work(name: str, none: int, two: int, message: bytes) -> Iterable[bytes]:
    key, text = json.loads(message)
    number = int("".join(c for c in text if c.isdigit())) % 9
    if number == none:
        return []
    made = [text + name]
    if number == two:
        made = [text + name, text + name.upper()]
    return [b'[%d,"%s"]' % (key, said.encode()) for said in made]


def _stage(draw: random.Random, name: str, kind: StageKind) -> Stage:
    mode = draw.choice(
        (
            Mode.SINGLE,
            Mode.SINGLE,
            Mode.SINGLE,
            Mode.BATCH_SUPERVISOR,
            Mode.BATCH_WORKER,
        )
    )
    given: dict[str, Any] = {}
    if kind is StageKind.EXTRACT:
        mode = Mode.CYCLIC
    else:
        order = draw.choice((Order.TOTAL, Order.TOTAL, Order.KEY, Order.NONE))
        pool: int | PoolPolicy = draw.choice((1, 1, 1, 2, 3))
        if draw.random() < 0.1:
            pool = PoolPolicy(min=draw.randint(0, 1), max=3, idle=0.05)
        given = {
            "order": order,
            "key": "/0" if order is Order.KEY else None,
            "workers": pool,
            "window": draw.choice((None, 1, 4)),
            "batch": BatchPolicy(size=draw.randint(1, 4), seconds=0.02),
            "on_error": ErrorPolicy(
                retries=draw.randint(1, 2), budget=ErrorBudget(share=1.0)
            ),
        }
        if draw.random() < 0.1:
            given["recycle"] = RecyclePolicy(max_messages=draw.randint(1, 5))
    heartbeat = 0.3 if kind is not StageKind.EXTRACT and draw.random() < 0.1 else None
    return Stage(
        name=name,
        command=("simulated",),
        kind=kind,
        dialect=MarkerDialect(mode=mode),
        timeout=Timeouts(message=1.0, stop=0.1, heartbeat=heartbeat),
        ready=draw.random() < 0.2,
        restart=RestartPolicy(max=_MANY, delay=0.01, max_delay=0.05),
        **given,
    )


def _faults(
    draw: random.Random, stage: Stage, given: list[bytes]
) -> tuple[list[Fault], set[bytes] | None, bool]:
    """Draw faults; return them, whom they condemn, if that is known, and if it may fail."""
    faults, fatal, doubtful = [], set[bytes](), False
    known = True
    # Two faults that make up for each other can't be told from none.
    kinds = ["slow", "wrong"]
    if draw.random() < 0.8:
        kinds = ["slow", "crash", "crash", "chance", "culprit"]
    for what in draw.choices(kinds, k=draw.choice((0, 1, 1, 2))):
        if doubtful:
            continue
        if what == "slow":
            seconds = draw.choice((0.001, 0.05, 0.5))
            faults.append(Fault(FaultKind.PAUSE, probability=0.3, seconds=seconds))
        elif what == "crash":
            # Behind its first message, which may be one that is tried again.
            at = draw.randint(2, 6)
            faults.append(Fault(draw.choice(_DEADLY), message=at, start=1))
        elif what == "chance":
            faults.append(Fault(draw.choice(_DEADLY), probability=0.1))
            known = False
        elif stage.kind is StageKind.TRANSFORM and given:
            message = draw.choice(given)
            if what == "wrong":
                faults.append(Fault(draw.choice(_WRONG), equals=message))
                doubtful = True
            else:
                kind = draw.choice((*_DEADLY, FaultKind.REFUSE))
                faults.append(Fault(kind, equals=message))
            fatal.add(message)
    if draw.random() < 0.1:
        faults.append(Fault(FaultKind.STDERR, at=Moment.START, size=200))
    return faults, fatal if known else None, doubtful
